"""Patterns that hold tensors over real processes: against float64, and only rows that some query sees are sent."""

from __future__ import annotations

import copy
import gc
import math
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Blocks, Ranges, Sharded, attend, explain, shard
from attn_dispatch.errors import GroupMismatch, InvalidInput, NoBackend
from attn_dispatch.ring.rows.data import Held
from attn_dispatch.ring.rows.layout import CONTIGUOUS, KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.ring.shards import spread_of
from attn_dispatch.spec.orders import GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tests.support import ring_ranks
from tests.support.calls import close, formula
from tests.support.pairwise import crossed, parameters, thinned
from tests.support.ring_calls import attended, part, shards, tensors, whole
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("little_time", "no_trials")

Data = Ranges | Blocks
RANDOM = 96  #: random cases, of which every run takes each eighth


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_ranges(tokens: int, rows: int = 1, intervals: int = 3, seed: int = 0) -> Ranges:
    """Intervals that reach beyond the keys, cross, or are empty; the last query sees none."""
    shape, generator = (rows, intervals, tokens), drawn(seed)
    first = torch.randint(-5, tokens + 3, shape, generator=generator)
    last = first + torch.randint(-4, max(2, tokens // 3), shape, generator=generator)
    last[..., -1] = first[..., -1] - 1
    return Ranges(first, last)


def a_table(
    tokens: int, size: tuple[int, int], tables: int, rows: int = 1, share: float = 0.4, seed: int = 0
) -> Tensor:
    """Bools; in the first table the first queries see none, and no query sees the third block of keys."""
    shape = rows, tables, -(-tokens // size[0]), -(-tokens // size[1])
    found = torch.rand(shape, generator=drawn(seed)) < share
    found[:, 0, 0] = False
    found[..., 2:3] = False
    return found


def a_list(tokens: int, size: tuple[int, int], tables: int, most: int = 4) -> Tensor:
    """Entries stand twice, and there are some of none."""
    shape = 1, tables, -(-tokens // size[0]), most
    return torch.randint(-1, -(-tokens // size[1]), shape, generator=drawn(3)).int()


def spans(tokens: int, **options: Any) -> Ranges:
    ids = torch.full((2, tokens), -1)
    ids[0, 5:17], ids[0, tokens // 2 - 3 : tokens // 2 + 6], ids[1, tokens // 3 : tokens - 4] = 0, 1, 0
    return Ranges.spans(ids, **options)


#: A pattern of two rows of a batch, with heads and key heads.
PATTERNS: dict[str, tuple[Data, int, int, int]] = {
    "spans": (spans(50), 50, 4, 2),
    "spans-window": (spans(61, left=9), 61, 2, 2),
    "spans-both-ways": (spans(47, is_causal=False, left=4), 47, 4, 4),
    "a-window": (Ranges(torch.arange(50)[None] - 9, torch.arange(50)[None] + 2), 50, 4, 2),
    "ranges": (some_ranges(53), 53, 4, 4),
    "ranges-by-row": (some_ranges(44, rows=2), 44, 4, 1),
    "blocks-shared": (Blocks(a_table(50, (8, 4), 1), (8, 4)), 50, 4, 2),
    "blocks-causal": (Blocks(a_table(64, (7, 9), 1, share=0.7), (7, 9), Dense(True)), 64, 4, 4),
    "blocks-by-kv-head": (Blocks(a_table(52, (5, 5), 2), 5), 52, 4, 2),
    "blocks-by-head": (Blocks(a_table(48, (6, 10), 4, share=0.3), (6, 10), Window(20, 5)), 48, 4, 2),
    "blocks-sinks": (Blocks(a_table(48, (6, 4), 1, share=0.6), (6, 4), Window(11, 0, sinks=3)), 48, 2, 2),
    "blocks-by-row": (Blocks(a_table(50, (8, 8), 4, rows=2), 8), 50, 4, 4),
    "blocks-list": (Blocks(a_list(45, (4, 6), 2), (4, 6)), 45, 4, 2),
    "blocks-one-query": (Blocks(a_table(33, (1, 2), 1, share=0.2), (1, 2)), 33, 2, 1),
}  # fmt: skip
SOME_MASKED = ("ranges-by-row", "blocks-by-kv-head")


def oracle_of(pattern: Data, tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, **more: Any) -> Oracle:
    """The expected results of random tensors, by float64 on one device."""
    form = pattern.form(tokens, heads, kv_heads)
    q, k = torch.empty(2, tokens, heads, 8, dtype=dtype), torch.empty(2, tokens, kv_heads, 8, dtype=dtype)
    problem = replace(Problem.of(q, k, k), pattern=form, needs_grad=True, return_lse=True, **more)
    example = make(problem)
    return Oracle.of(replace(example, masks={**example.masks, "pattern_data": pattern.data}))


def usable(pattern: Data, layout: Layout, heads: int, kv_heads: int) -> list[str]:
    shared = not Held.of(pattern, heads, kv_heads).head_offsets(0, heads)
    return [RING, GATHER, *[ULYSSES] * (shared and not heads % layout.ranks and not kv_heads % layout.ranks)]


def run(ranks: Ranks, oracle: Oracle, pattern: Data, layout: Layout, exchange: str | None) -> dict[str, Tensor]:
    options = {"pattern": pattern, "order": exchange}
    args = [(each, layout.kind, ("bnhd",) * 3, options) for each in shards(oracle, layout)]
    return whole(ranks.each(attended, args), layout)


# --- what is computed -------------------------------------------------------------------------------------------------


def uneven(tokens: int, size: int, kind: str) -> Layout:
    return Layout(deal(tokens, size, (1.0, 2.0, 1.5, 3.0)[:size]), kind)


def every_way() -> Iterator[tuple[str, int, str, str]]:
    for name, size, kind in product(PATTERNS, (2, 4), KINDS):
        pattern, tokens, heads, kv_heads = PATTERNS[name]
        for exchange in usable(pattern, uneven(tokens, size, kind), heads, kv_heads):
            yield name, size, kind, exchange


def factors_of(name: str, *way: object) -> dict[str, object]:
    return {"pattern": name.partition("-")[0], **dict(zip(("size", "kind", "exchange"), way))}


@pytest.mark.parametrize(("name", "size", "kind", "exchange"), parameters(every_way(), factors_of))
def test_conformance(ranks: Ranks, name: str, size: int, kind: str, exchange: str) -> None:
    """Out, lse and gradients through both."""
    pattern, tokens, heads, kv_heads = PATTERNS[name]
    masks = {"has_seq_lens": True, "has_key_mask": True} if name in SOME_MASKED else {}
    oracle = oracle_of(pattern, tokens, heads, kv_heads, torch.float32, **masks)
    assert oracle.check(run(ranks, oracle, pattern, uneven(tokens, size, kind), exchange)).failures == ()


@crossed(
    lambda name, dtype: {"dtype": dtype},
    name=("ranges", "ranges-by-row", "blocks-by-head", "blocks-list"),
    dtype=(torch.float64, torch.bfloat16),
)
def test_conformance_in_other_dtypes(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    """Of float64 in tiles, which no native kernel computes."""
    pattern, tokens, heads, kv_heads = PATTERNS[name]
    oracle = oracle_of(pattern, tokens, heads, kv_heads, dtype)
    assert oracle.check(run(ranks, oracle, pattern, Layout(deal(tokens, 3), ZIGZAG), GATHER)).failures == ()


def random_case(seed: int) -> tuple[Data, int, int, int]:
    draw = random.Random(seed)
    tokens, kv_heads, group = draw.randint(8, 90), draw.choice((1, 2)), draw.choice((1, 2))
    heads, rows = kv_heads * group, draw.choice((1, 1, 2))
    if draw.random() < 0.4:
        return some_ranges(tokens, rows, draw.randint(1, 4), seed), tokens, heads, kv_heads
    size, tables = (draw.randint(1, 20), draw.randint(1, 20)), draw.choice((1, kv_heads, heads))
    within = draw.choice((Dense(), Dense(True), Window(draw.randint(0, 30), draw.randint(0, 9)), Window(8, 0, 3)))
    table = a_table(tokens, size, tables, rows, draw.random(), seed)
    if draw.random() < 0.3:
        entries = torch.arange(table.shape[-1]).where(table, -1).int()
        table = torch.cat([entries, entries[..., : draw.randint(0, 2)]], -1)
    return Blocks(table, size, within), tokens, heads, kv_heads


@thinned("seed", range(RANDOM), 8)
def test_random_patterns(ranks: Ranks, seed: int) -> None:
    pattern, tokens, heads, kv_heads = random_case(seed)
    draw, size = random.Random(seed), 2 + 2 * (seed // 8 % 2)
    masks = {"has_seq_lens": draw.random() < 0.2, "has_key_mask": draw.random() < 0.2}
    oracle = oracle_of(pattern, tokens, heads, kv_heads, torch.float32, **masks)
    layout = Layout(deal(tokens, size, [draw.uniform(1, 3) for _ in range(size)]), draw.choice(KINDS))
    exchange = draw.choice(usable(pattern, layout, heads, kv_heads))
    if not any(needed(pattern, layout, heads, kv_heads)):
        exchange = LOCAL
    assert oracle.check(run(ranks, oracle, pattern, layout, exchange)).failures == (), exchange


@crossed(
    lambda name, dtype: {"dtype": dtype},
    name=("blocks-shared", "blocks-by-row", "blocks-by-head"),
    dtype=(torch.float32, torch.float64),
)
def test_what_no_query_sees_reaches_nothing(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    pattern, tokens, heads, kv_heads = PATTERNS[name]
    example = oracle_of(pattern, tokens, heads, kv_heads, dtype).example
    counts = pattern.multiplicity(tokens, heads=heads).expand(2, heads, tokens, tokens)
    unseen = ~torch.unflatten((counts > 0).any(2), 1, (kv_heads, -1)).any(2).transpose(1, 2)[..., None]
    assert unseen.any()
    k, v = (x.detach().masked_fill(unseen, math.nan).requires_grad_() for x in (example.k, example.v))
    oracle = Oracle.of(replace(example, k=k, v=v))
    found = run(ranks, oracle, pattern, Layout(deal(tokens, 2), ZIGZAG), RING)
    assert oracle.check(found).failures == ()


# --- bytes sent -------------------------------------------------------------------------------------------------------


def needed(pattern: Data, layout: Layout, heads: int, kv_heads: int) -> list[int]:
    """Rows of other ranks that a query of each rank sees in any row of the batch, of all key heads."""
    counts = pattern.multiplicity(layout.tokens, heads=heads)
    seen = (counts > 0).any(0) if counts.ndim == 4 else counts > 0
    seen = seen.expand(heads, -1, -1)
    found = []
    for rank in range(layout.ranks):
        at = positions_of(layout, rank)
        own = torch.unflatten(seen[:, at].any(1), 0, (kv_heads, -1)).any(1)
        own[:, at] = False
        found.append(int(own.sum()))
    return found


def sent(pattern: Data | Dense, tokens: int, heads: int, kv_heads: int, kind: str, order: str) -> tuple[int, int]:
    """A job: bytes that this rank sent in one call of two rows of a batch, and with the backward pass."""
    mesh = Sharded(ring_ranks.group(), kind)
    link, _ = spread_of(mesh)
    q, k = torch.ones(2, tokens, heads, 8), torch.ones(2, tokens, kv_heads, 8)
    q, k, v = (shard(x, mesh).requires_grad_() for x in (q, k, k))
    link.transport.bytes_sent = 0
    out = attend(q, k, v, pattern=pattern, mesh=mesh, order=order)
    forward = link.transport.bytes_sent
    out.sum().backward()
    return forward, link.transport.bytes_sent


@crossed(lambda name, how: {"how": how}, name=PATTERNS, how=tuple(zip(KINDS, (GATHER, RING))))
def test_only_rows_that_are_seen_are_sent(ranks: Ranks, name: str, how: tuple[str, str]) -> None:
    """Each once: forward rows of k and v, backward these again and their gradients."""
    pattern, tokens, heads, kv_heads = PATTERNS[name]
    rows = sum(needed(pattern, Layout(deal(tokens, 4), how[0]), heads, kv_heads)) * 2 * 2 * 8 * 4
    assert rows
    found = ranks.everywhere(sent, pattern, tokens, heads, kv_heads, *how, ranks=4)
    assert tuple(map(sum, zip(*found))) == (rows, 3 * rows)


def test_a_local_table_sends_a_part_of_a_dense_ring(ranks: Ranks) -> None:
    """A tenth of the blocks, near the diagonal as of top-k in videos, on 4 ranks."""
    blocks = torch.arange(64)
    near = (blocks[:, None] - blocks).abs() <= 3
    near &= torch.rand(64, 64, generator=drawn(0)) < 0.92
    pattern = Blocks(near[None, None], 8)
    assert 0.08 < near.float().mean() < 0.12
    patterns, how = (pattern, Dense()), (512, 4, 2, CONTIGUOUS, RING)
    sparse, dense = (sum(both for _, both in ranks.everywhere(sent, each, *how, ranks=4)) for each in patterns)
    assert sparse <= 0.2 * dense


# --- decisions --------------------------------------------------------------------------------------------------------


def with_pattern(pattern: Data, options: dict[str, Any], given: dict[str, Any] | None = None) -> tuple[int, ...]:
    """A job."""
    mesh = Sharded(ring_ranks.group(), CONTIGUOUS)
    return tuple(attend(*part(mesh), pattern=pattern, mesh=mesh, **options).shape)


def explained(pattern: Data) -> str:
    """A job."""
    mesh = Sharded(ring_ranks.group(), CONTIGUOUS)
    attend(*part(mesh), pattern=pattern, mesh=mesh)
    return explain(*part(mesh), pattern=pattern, mesh=mesh).problem


def test_tensors_that_say_what_a_window_says(ranks: Ranks) -> None:
    """Each rank is told that pattern, by the shared tensors."""
    at = torch.arange(48)[None]
    for pattern, plain in ((Ranges(at - 9, at), "Window(left=9, right=0)"), (some_ranges(48), "Ranges(")):
        assert all(plain in each for each in ranks.everywhere(explained, pattern, ranks=2))
    wrong = Ranges(at[:, :40] - 9, at[:, :40])
    for error in ranks.outcomes(with_pattern, [(wrong, {})] * 2):
        assert isinstance(error, InvalidInput)
        assert "first and last of Ranges must have shape" in str(error)


def test_ranks_with_different_tensors(ranks: Ranks) -> None:
    other = some_ranges(48, seed=1)
    found = ranks.outcomes(with_pattern, [(each, {}) for each in (some_ranges(48), other, some_ranges(48))])
    for error in found:
        assert isinstance(error, GroupMismatch)
        assert "the pattern's tensors: [2, 1, 3, 48] " in str(error)
        assert "on ranks 0, 2, [2, 1, 3, 48] " in str(error)


@pytest.mark.parametrize(
    ("pattern", "options", "kind", "message"),
    [
        (some_ranges(40), {}, InvalidInput, "first and last of Ranges must have shape"),
        (Blocks(a_table(48, (8, 8), 1), 8, Dilated((8,), (2,))), {}, InvalidInput, "within of Blocks must be Dense or"),
        (Blocks(a_table(40, (8, 8), 1), 8), {}, InvalidInput, "table of Blocks must have shape [.., 6, 6] for 48"),
        (Blocks(a_table(48, (8, 8), 3), 8), {}, InvalidInput, "table of Blocks must have shape [1 or 2, 1 or 4, ..]"),
        (Blocks(a_table(48, (8, 8), 4), 8), {"order": ULYSSES}, NoBackend, "would begin at other offsets"),
        (some_ranges(48), {"order": LOCAL}, NoBackend, "key rows of other ranks"),
        (some_ranges(48), {"dropout_p": 0.5}, NoBackend, "has no dropout"),
        (some_ranges(48), {"documents": torch.zeros(2, 48, dtype=torch.int64)}, NoBackend, "documents and cu_seqlens"),
        (some_ranges(48), {"key_lens": torch.tensor([3, 4])}, InvalidInput, "key_lens cannot be given with mesh"),
    ],
)  # fmt: skip
def test_no_rank_can_run(
    ranks: Ranks, pattern: Data, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    for error in ranks.outcomes(with_pattern, [(pattern, options)] * 2):
        assert type(error) is kind
        assert message in str(error)


def other_tensors() -> tuple[bool, bool, int]:
    """A job: of two patterns with one form, of which only the second needs others' rows, whether results are
    right; and how many decisions are made for two more.
    """
    mesh = Sharded(ring_ranks.group(), CONTIGUOUS)
    link, _ = spread_of(mesh)
    own = torch.arange(48)[None] // 16 * 16
    right = []
    for first in (own, own // 32 * 16 + 8):
        pattern = Ranges(first, first + 15)
        found = attend(*part(mesh), pattern=pattern, mesh=mesh)
        expected = formula(*tensors(), pattern)[0]
        right.append(close(found, shard(expected, mesh)))
    before = len(link.decisions)
    for first in (own + 1, own + 2):
        attend(*part(mesh), pattern=Ranges(first, first + 15), mesh=mesh)
    return right[0], right[1], len(link.decisions) - before


def test_a_decision_serves_other_tensors(ranks: Ranks) -> None:
    assert ranks.everywhere(other_tensors, ranks=3) == [(True, True, 0)] * 3


def measured(name: str) -> tuple[str, str, list[str]]:
    """A job: the order and source of a decision, and what became of the candidates."""
    pattern, tokens, heads, kv_heads = PATTERNS[name]
    mesh = Sharded(ring_ranks.group(), ZIGZAG)
    q, k = torch.ones(2, tokens, heads, 8), torch.ones(2, tokens, kv_heads, 8)
    q, k, v = (shard(x, mesh).requires_grad_() for x in (q, k, k))
    attend(q, k, v, pattern=pattern, mesh=mesh)
    found = explain(q, k, v, pattern=pattern, mesh=mesh)
    return str(found.order), found.source, [row.status for row in found.candidates]


@thinned("name", ["ranges-by-row", "blocks-shared", "blocks-by-head"], 2)
def test_exchanges_are_compared_with_float64_and_measured(
    ranks: Ranks, name: str, set_mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode("tune")
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")
    order, source, statuses = (found := ranks.everywhere(measured, name, ranks=2))[0]
    assert found == [found[0]] * 2
    assert (source, order in (RING, GATHER, ULYSSES), "failed" in statuses) == ("measured", True, False)


def without_caller_modes(name: str) -> bool:
    """A job: whether what is made in inference mode and with another default device serves training."""
    pattern, tokens, heads, kv_heads = PATTERNS[name]
    mesh, pattern = Sharded(ring_ranks.group(), ZIGZAG), copy.deepcopy(pattern)
    whole = torch.randn(2, tokens, heads, 8, generator=drawn(1))
    few = whole[:, :, :kv_heads]
    q, k = shard(whole, mesh), shard(few, mesh)
    with torch.inference_mode(), torch.device("meta"):
        found = attend(q, k, k, pattern=pattern, mesh=mesh)
    out = attend(q.requires_grad_(), k.requires_grad_(), k, pattern=pattern, mesh=mesh)
    out.sum().backward()
    expected = formula(whole, few, few, pattern)[0]
    return torch.equal(found, out) and close(out, shard(expected, mesh))


@pytest.mark.parametrize("name", ["ranges", "blocks-list", "blocks-by-head"])
def test_modes_of_the_first_call(ranks: Ranks, name: str) -> None:
    assert ranks.everywhere(without_caller_modes, name, ranks=2) == [True] * 2


def freed() -> bool:
    """A job: whether what is made of a pattern lives no longer than it."""
    mesh = Sharded(ring_ranks.group(), CONTIGUOUS)
    pattern = some_ranges(48)
    found = attend(*part(mesh, grads="qkv"), pattern=pattern, mesh=mesh)
    made = weakref.ref(Held.of(pattern, 4, 4))
    assert made() is not None
    gc.disable()
    del pattern, found
    try:
        return made() is None
    finally:
        gc.enable()


def test_what_is_made_of_a_pattern_is_freed_with_it(ranks: Ranks) -> None:
    assert ranks.everywhere(freed, ranks=2) == [True] * 2
