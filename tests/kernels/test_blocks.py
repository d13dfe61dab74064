"""A pattern's multiplicity as a function, and its blocks, against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_dispatch.kernels.flex.data import _overlap, blocks_of_ranges, blocks_of_table
from attn_dispatch.kernels.flex.mask import Blocks, blocks_of, counts_above_one, distinct_heads, multiplicity_function
from attn_dispatch.spec import data
from attn_dispatch.spec.orders import permutation
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.testing.cases import CASES, Case
from tests.support.cases import factors_of
from tests.support.definition import patterns
from tests.support.pairwise import crossed


def function_multiplicity(pattern: Pattern, q_len: int, k_len: int, heads: int) -> Tensor:
    count = multiplicity_function(pattern, q_len, k_len, heads)
    if count is None:
        return torch.ones(heads, q_len, k_len, dtype=torch.int32)
    head, query = torch.arange(heads)[:, None, None], torch.arange(q_len)[:, None]
    return count(head, query, torch.arange(k_len)).to(torch.int32).expand(heads, q_len, k_len)


def exact_blocks(counts: Tensor, size: int) -> Blocks:
    heads, q_len, k_len = counts.shape
    q_blocks, k_blocks = -(-q_len // size), -(-k_len // size)
    padded = torch.zeros(heads, q_blocks * size, k_blocks * size, dtype=torch.bool)
    padded[:, :q_len, :k_len] = counts > 0
    tiles = padded.view(heads, q_blocks, size, k_blocks, size)
    return Blocks(tiles.any(4).any(2), tiles.all(4).all(2))


def check(pattern: Pattern, q_len: int, k_len: int, heads: int, size: int) -> None:
    counts = pattern.multiplicity(q_len, k_len, heads).expand(heads, q_len, k_len)
    assert torch.equal(function_multiplicity(pattern, q_len, k_len, heads), counts)
    assert counts_above_one(pattern) or int(counts.max()) <= 1
    found, exact = blocks_of(pattern, q_len, k_len, heads, size), exact_blocks(counts, size)
    assert len(found.nonempty) == len(found.full) == distinct_heads(pattern, heads, size)
    assert not (exact.nonempty & ~found.nonempty).any(), "a visible pair is in no nonempty block"
    assert not (found.full & ~exact.full).any(), "a block marked full is not full"
    if isinstance(pattern, Dense | Window) and not getattr(pattern, "sinks", 0):
        assert torch.equal(found.nonempty[0], exact.nonempty[0])
        assert torch.equal(found.full[0], exact.full[0])


def taken(pattern: Pattern, q_len: int, k_len: int) -> bool:
    return q_len == k_len or isinstance(pattern, Dense | Window)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Pattern, int, int]:
    q_len = draw(st.integers(1, 90))
    k_len = draw(st.just(q_len) | st.integers(1, 90))
    return draw(patterns(q_len, k_len).filter(lambda pattern: taken(pattern, q_len, k_len))), q_len, k_len


@given(layouts(), st.integers(1, 5), st.sampled_from([1, 2, 4, 8, 16]))
def test_random_patterns(drawn: tuple[Pattern, int, int], heads: int, size: int) -> None:
    pattern, q_len, k_len = drawn
    for each in (pattern, pattern.simplify(q_len, k_len, heads)):
        check(each, q_len, k_len, heads, size)


def test_sparse_patterns_have_few_blocks() -> None:
    """Also for long sequences, for which a mask of every pair would not fit into memory."""
    segments = blocks_of(Dilated((2048, 8192), (1, 4), True), 2**17, 2**17, 8, 128)
    # 16 segments of 64 x 64 blocks, the half of them and the diagonal.
    assert int(segments.nonempty.sum()) == 16 * (64 * 65 // 2)
    assert int(segments.full.sum()) == 64 * (16 * 15 // 2)
    rows = blocks_of(Neighborhood((256, 256), (13, 13)), 2**16, 2**16, 8, 128)
    assert float(rows.nonempty.float().mean()) < 0.06


@crossed(
    lambda case, order: {**factors_of(case), "order": order},
    case=[case for case in CASES if case.k_len is None],
    order=("hilbert", "residue"),
)
def test_blocks_in_another_order(case: Case, order: str) -> None:
    _, length, heads, _ = case.shape
    pattern = case.pattern.simplify(length, length, heads)
    positions = permutation(order, pattern, length)
    if positions is None:
        pytest.skip("it is the natural order")
    counts = pattern.multiplicity(length, length, heads, q_pos=positions, k_pos=positions).expand(heads, -1, -1)
    found, exact = blocks_of(pattern, length, length, heads, 8, positions=positions), exact_blocks(counts, 8)
    assert not (exact.nonempty & ~found.nonempty).any(), "a visible pair is in no nonempty block"
    assert not (found.full & ~exact.full).any(), "a block marked full is not full"


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 3), st.sampled_from([1, 4, 16]), st.integers(0, 2**20))
def test_blocks_of_intervals(q_len: int, k_len: int, intervals: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(-9, k_len + 9, (2, intervals, q_len), generator=generator)
    first = torch.where(torch.rand(2, 1, 1, generator=generator) < 0.5, first, first[..., :1])
    pattern = data.Ranges(first, first + torch.randint(-9, 2 * k_len, (2, intervals, q_len), generator=generator))
    found = blocks_of_ranges(pattern, q_len, k_len, size)
    counts = pattern.multiplicity(q_len, k_len)
    assert _overlap(pattern, k_len) == bool((counts > 1).any())
    for row, seen in enumerate(counts):
        exact = exact_blocks(seen, size)
        assert torch.equal(found.nonempty[row], exact.nonempty)
        assert not (found.full[row] & ~exact.full).any(), "a block marked full is not full"
        if intervals == 1:
            assert torch.equal(found.full[row], exact.full)


@given(
    st.integers(1, 90), st.integers(1, 90), st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([1, 4, 16]), st.booleans(), st.integers(0, 2**20),
)  # fmt: skip
def test_blocks_of_tables(q_len: int, k_len: int, side: tuple[int, int], size: int, listed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = 2, 3, -(-q_len // side[0]), -(-k_len // side[1])
    table = torch.rand(shape, generator=generator) < torch.rand((2, 1, 1, 1), generator=generator)
    if listed:
        table = torch.randint(-1, shape[3], (*shape[:3], 4), generator=generator)
    pattern = data.Blocks(table, side)
    found = blocks_of_table(pattern, q_len, k_len, size)
    for row, seen in enumerate(pattern.multiplicity(q_len, k_len, 3)):
        exact = exact_blocks(seen, size)
        assert torch.equal(found.nonempty[row], exact.nonempty)
        assert torch.equal(found.full[row], exact.full)


def test_distinct_heads() -> None:
    """With a rate above the block size, or with heads="split", heads have different empty blocks."""
    assert distinct_heads(Dilated((1024,), (128,)), 8, 128) == 1
    assert distinct_heads(Dilated((1024,), (256,)), 8, 128) == 8
    assert distinct_heads(Dilated((64, 1024), (1, 2), heads="split"), 8, 128) == 8
    assert distinct_heads(Window(3, 0), 8, 128) == 1


def test_other_patterns() -> None:
    class Own(Pattern):
        def _counts(self, *arguments: object, **options: object) -> Tensor:
            raise AssertionError

    with pytest.raises(TypeError, match="no arithmetic for"):
        multiplicity_function(Own(), 4, 4, 1)
    with pytest.raises(TypeError, match="no normal form of"):
        blocks_of(Own(), 4, 4, 1, 2)
