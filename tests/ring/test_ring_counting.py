"""Rows and pairs counted by arithmetic, against the listed rows and the pattern's definition."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring.plan.counts import MAX_CELLS, count_layout
from attn_dispatch.ring.rows.layout import KINDS, Layout, deal
from attn_dispatch.ring.rows.traffic import traffic_of
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tests.support.pairwise import thinned

CPU = torch.device("cpu")
HEADS = ((1, 1), (4, 4), (4, 2), (6, 2), (6, 1))
sides = st.none() | st.integers(0, 70)
branches = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1, max_size=3)


@st.composite
def dilated(draw: st.DrawFn) -> Dilated:
    lengths, rates = zip(*draw(branches))
    offsets: Literal["mod", "block"] = draw(st.sampled_from(["mod", "block"]))
    heads: Literal["all", "split"] = draw(st.sampled_from(["all", "split"]))
    return Dilated(lengths, rates, draw(st.booleans()), offsets, heads)


@st.composite
def neighborhoods(draw: st.DrawFn) -> Neighborhood:
    grid = draw(st.sampled_from([(60,), (7, 9), (8, 8), (3, 5, 4)]))
    causal = tuple(draw(st.booleans()) for _ in grid)
    shift = draw(st.booleans())
    dilation = tuple(draw(st.integers(1, 3)) for _ in grid)
    if not shift:
        return Neighborhood(grid, tuple(draw(st.sampled_from([1, 3, 5])) for _ in grid), dilation, causal)
    window = tuple(draw(st.integers(1, min(6, size // step))) for size, step in zip(grid, dilation))
    stride = tuple(draw(st.integers(1, width)) for width in window)
    return Neighborhood(grid, window, dilation, causal, "shift", stride)


patterns = (
    st.builds(Dense, st.booleans()) | st.builds(Window, sides, sides, st.integers(0, 60)) | dilated() | neighborhoods()
)


@st.composite
def layouts(draw: st.DrawFn, tokens: int) -> Layout:
    ranks = draw(st.integers(1, 5))
    weights = draw(st.none() | st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    return Layout(deal(tokens, ranks, weights), draw(st.sampled_from(KINDS)))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Pattern, Layout, int, int]:
    pattern = draw(patterns)
    tokens = draw(st.integers(45, 130))
    if isinstance(pattern, Neighborhood):
        tokens = int(torch.tensor(pattern.grid).prod())
    return pattern, draw(layouts(tokens)), *draw(st.sampled_from(HEADS))


@given(problems())
def test_counted_rows_are_the_listed_rows(problem: tuple[Pattern, Layout, int, int]) -> None:
    pattern, layout, heads, kv_heads = problem
    counts = count_layout(pattern, layout, heads, kv_heads)
    for rank in range(layout.ranks):
        traffic = traffic_of(pattern, layout, heads, kv_heads, rank, CPU)
        received = {peer: sum(rows.count for rows in each) for peer, each in traffic.receives.items()}
        sent = {peer: sum(rows.count for rows in each) for peer, each in traffic.sends.items()}
        assert received == {peer: rows for peer, rows in enumerate(counts.rows[rank]) if rows}
        assert sent == {peer: row[rank] for peer, row in enumerate(counts.rows) if row[rank]}
        assert (counts.received(rank), counts.sent(rank)) == (sum(received.values()), sum(sent.values()))


@given(problems())
def test_pairs_are_those_of_the_definition(problem: tuple[Pattern, Layout, int, int]) -> None:
    pattern, layout, heads, kv_heads = problem
    seen = pattern.multiplicity(layout.tokens, heads=heads).expand(heads, -1, -1).sum(0)
    at = [torch.cat([torch.arange(c.start, c.stop) for c in chunks]) for chunks in layout.chunks]
    found = count_layout(pattern, layout, heads, kv_heads).pairs
    assert found == tuple(tuple(int(seen[q][:, k].sum()) for k in at) for q in at)


LONGNET = Dilated(tuple(2048 * 8**n for n in range(7)), tuple(4**n for n in range(7)), is_causal=True)
COPRIME = Dilated((2**29,) * 5, (3, 5, 7, 11, 13))


@thinned(("pattern", "heads"), [(Dense(True), (8, 8)), (LONGNET, (64, 8)), (COPRIME, (16, 4))], 2)
def test_half_a_billion_tokens_over_64_ranks(pattern: Pattern, heads: tuple[int, int]) -> None:
    """Seconds: at one entry per token this would take minutes, or all memory."""
    tokens, ranks = 2**29, 64
    counts = count_layout(pattern, Layout(deal(tokens, ranks), "zigzag"), *heads)
    whole = count_layout(pattern, Layout((tokens,)), *heads)
    assert sum(map(sum, counts.pairs)) == whole.pairs[0][0]
    if isinstance(pattern, Dense):
        assert whole.pairs[0][0] == heads[0] * tokens * (tokens + 1) // 2
        # Zigzag: rank 0 has the last chunk, whose queries see all keys.
        assert counts.received(0) == heads[1] * (tokens - tokens // ranks)
    else:
        assert 0 < max(map(counts.received, range(ranks))) < heads[1] * tokens


def test_patterns_that_cannot_be_counted() -> None:
    grid = Neighborhood((MAX_CELLS + 1,), (3,))
    with pytest.raises(InvalidInput, match="grid must have at most"):
        count_layout(grid, Layout(deal(MAX_CELLS + 1, 2)), 1, 1)
    with pytest.raises(InvalidInput, match="natural order"):
        count_layout(Reordered(Neighborhood((8, 8), (3,)), "hilbert"), Layout((32, 32)), 1, 1)
