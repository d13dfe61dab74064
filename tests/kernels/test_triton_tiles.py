"""The triton_tiles backend beyond conformance: lists, small blocks, orders, refusals, compiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.backends import triton_tiles
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.tiles import tables
from attn_dispatch.kernels.tiles.estimates import most_pairs, tile_lists_bytes
from attn_dispatch.kernels.tiles.tables import TileLists, tile_lists_of
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.blocks import BlockConfig
from attn_dispatch.spec.orders import ORDERS, Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from tests.kernels.test_tiles import ESTIMATED, PATTERNS, Tiled
from tests.kernels.test_triton import CUDA as DENSE_ON_CUDA
from tests.kernels.test_triton import TERMS, fake_gpu, interpreted, problem_of
from tests.support.cases import failures
from tests.support.pairwise import by_turns

NEIGHBORS = Neighborhood((64, 64), (13, 13))
CUDA = replace(DENSE_ON_CUDA, pattern=NEIGHBORS)
SQUARE: tuple[tuple[Pattern, int], ...] = (
    *((pattern, length) for pattern, length, _ in PATTERNS if isinstance(pattern, triton_tiles.PATTERNS)),
    (Reordered(Neighborhood((9, 8), (3, 3), (2, 1), (True, False), "shift"), "hilbert"), 72),
    (Reordered(Dilated((16, 32), (2, 2), True), "residue"), 101),
    (Reordered(Dilated((10, 35), (3, 4)), "hilbert"), 101),
)
HEADS = 5


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    for clear in (cached := (tile_lists_of, tables.tables_of, triton_tiles.block_configs)):
        clear.cache_clear()
    yield
    for clear in cached:
        clear.cache_clear()


# --- lists ------------------------------------------------------------------------------------------------------------


def listed_multiplicity(lists: TileLists, problem: Problem, tile: int, by: str) -> Tensor:
    """How many times the lists pair each query of each head with each key, [heads, q_len, k_len]."""
    side = lists.queries if by == "queries" else lists.keys
    assert side is not None
    places = lists.q_pos.view(-1, tile), lists.k_pos.view(-1, tile)
    found = torch.zeros(problem.heads, len(lists.q_pos), len(lists.k_pos), dtype=torch.int32)
    for head, kind in enumerate(lists.kind_of.tolist()):
        for row, (start, whole, end) in enumerate(side.spans[kind].tolist()):
            for number, (column, mask) in enumerate(side.pairs[start:end].tolist(), start):
                query, key = (row, column) if by == "queries" else (column, row)
                times = torch.ones(tile, tile, dtype=torch.int32)
                if number < whole:
                    times = pair_multiplicity(lists, kind, query, key, mask, tile)
                found[head, query * tile : (query + 1) * tile, key * tile : (key + 1) * tile] += times
    assert not found[:, :, problem.k_len :].any()  # repeated keys
    q_pos, k_pos = (x.flatten()[:n].long() for x, n in zip(places, (problem.q_len, problem.k_len)))
    by_position = torch.zeros(problem.heads, problem.q_len, problem.k_len, dtype=torch.int32)
    by_position[:, q_pos[:, None], k_pos] = found[:, : problem.q_len, : problem.k_len]
    return by_position


def pair_multiplicity(lists: TileLists, kind: int, query: int, key: int, mask: int, tile: int) -> Tensor:
    if lists.masks is not None:
        return lists.masks[mask].int()
    assert lists.reach is not None
    places = [len(lists.q_pos), len(lists.q_pos), len(lists.k_pos)]
    first, last, at = torch.split(lists.reach[kind], places, dim=2)  # [branches, axes, places]
    queries, keys = slice(query * tile, (query + 1) * tile), slice(key * tile, (key + 1) * tile)
    at = at[:, :, None, keys]
    sees = (at >= first[:, :, queries, None]) & (at <= last[:, :, queries, None])
    found = sees.all(1).sum(0).int()
    if lists.counts is None or lists.block_at is None:
        return found
    q_at, k_at = torch.split(lists.block_at[kind], [len(lists.q_pos), len(lists.k_pos)])
    return found * lists.counts[q_at[queries, None] + k_at[keys]].int()


@by_turns(("pattern", "length", "stored"), SQUARE, (True, False), str)
def test_lists_match_the_multiplicity(
    pattern: Pattern, length: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MASK_BYTES", tables.MASK_BYTES if stored else 0)
    problem = problem_of(pattern, (1, length, HEADS, 8))
    problem = replace(problem, pattern=pattern)
    expected = pattern.multiplicity(length, length, HEADS)
    for order in ORDERS:
        lists = tile_lists_of(problem, order, 16)
        assert (lists.masks is None) == (lists.reach is not None)
        for by in ("queries", "keys"):
            assert torch.equal(listed_multiplicity(lists, problem, 16, by), expected), (order, by)


@pytest.mark.parametrize(("pattern", "length"), [e for e in ESTIMATED if not isinstance(e[0], Dense | Window)], ids=str)
def test_lists_fit_their_declared_bytes(pattern: Pattern, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(pattern, (1, length, HEADS, 8))
    for limit in (tables.MASK_BYTES, 0):
        monkeypatch.setattr(tables, "MASK_BYTES", limit)
        for order in triton_tiles.orders(problem):
            for tile in triton_tiles.TILES:
                triton_tiles.forget(problem)
                lists = tile_lists_of(problem, order, tile)
                assert lists.keys is not None
                assert len(lists.queries.pairs) <= len(lists.queries.spans) * most_pairs(problem, order, tile)
                sides = [x for side in (lists.queries, lists.keys) for x in (side.spans, side.pairs)]
                rest = [lists.q_pos, lists.k_pos, lists.kind_of, lists.masks, lists.reach]
                taken = sum(x.nbytes for x in (*sides, *rest) if x is not None)
                assert taken <= tile_lists_bytes(problem, order, tile)


# --- results ----------------------------------------------------------------------------------------------------------


GRID = Neighborhood((9, 11), (5, 3), (2, 1), (False, True))
BRANCHES = Dilated((16, 32), (2, 2))
SMALL = (
    (Case("grid-grouped", GRID, (1, 99, 2, 7), kv_heads=1, strides=("bhnd", "bndh", "bnhd+gaps")), "hilbert"),
    (Case("grid-hidden", GRID, (2, 99, 1, 8), seq_lens=True, key_mask=True), "hilbert"),
    (Case("grid-shift", Neighborhood((7, 9), (3, 5), edges="shift"), (1, 63, 2, 16), scale=-1.3), "natural"),
    (Case("kept-in-order", Reordered(GRID, "hilbert"), (1, 99, 2, 8), key_mask=True), "natural"),
    (Case("row", Neighborhood((70,), (9,), (3,)), (1, 70, 2, 16)), "residue"),
    (Case("branches", BRANCHES, (1, 90, 4, 16), kv_heads=2), "residue"),
    (Case("branches-hidden", BRANCHES, (2, 70, 2, 8), seq_lens=True, key_mask=True), "natural"),
    (Case("split", Dilated((16, 32, 64), (1, 2, 4), True, heads="split"), (1, 70, 4, 16), kv_heads=2), "residue"),
    (Case("uncovered", Dilated((16,), (4,)), (1, 40, 2, 16), scale=0.0), "natural"),
)


@pytest.mark.full
@interpreted
@pytest.mark.parametrize(
    ("case", "order", "stored"),
    [*((*each, True) for each in SMALL[1::2]), *((*each, False) for each in SMALL[::3])],
    ids=lambda x: {True: "masks", False: "reach"}[x] if isinstance(x, bool) else getattr(x, "id", x),
)
def test_blocks_smaller_than_tiles(case: Case, order: str, stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows and 16 columns in tiles of 32, forward and backward, lse included."""
    monkeypatch.setattr(support, "INTERPRETED_BLOCK", BlockConfig(16, 16, 4, 1))
    monkeypatch.setattr(tables, "MASK_BYTES", tables.MASK_BYTES if stored else 0)
    dtype, terms = (torch.float32, "softcap") if stored else (torch.float16, "bias")
    problem = replace(case.problem(dtype, needs_grad=True), **TERMS[terms])
    assert failures(Tiled(order, 32, triton_tiles), problem) == ()


def test_invalid_arguments_of_run() -> None:
    x = torch.randn(1, 63, 2, 16)
    problem = problem_of(Neighborhood((9, 7), (3, 5)), (1, 63, 2, 16))
    with pytest.raises(InvalidInput, match="order must be one of 'natural', 'hilbert', 'residue', got 'backwards'"):
        triton_tiles.run(x, x, x, problem, order="backwards")
    with pytest.raises(InvalidInput, match="tile must be a power of two, 16 or more, got 24"):
        triton_tiles.run(x, x, x, problem, tile=24)


# --- arguments and refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"head_dim": 257}, "takes a head_dim up to 256, not 257"),
        ({"pattern": Dense()}, "computes Dilated, Neighborhood, not Dense()"),
        ({"pattern": Reordered(Dense(True), "hilbert")}, "computes Dilated, Neighborhood, not Dense(causal)"),
        ({"q_len": 2**30}, "counts up to 536870912 queries and keys, not"),
        ({"pattern": Dilated((1,) * 256, (1,) * 256)}, "takes 255 branches, not 256"),
        (
            {"pattern": Dilated((2**15,) * 2, (1, 16)), "q_len": 2**22, "k_len": 2**22},
            "Dilated((32768, 32768), (1, 16)) makes about 142606336 pairs of tiles for all heads, over 134217728",
        ),
        (
            {"pattern": Neighborhood((2**10, 2**10), (1023, 1023)), "q_len": 2**20, "k_len": 2**20},
            "Neighborhood(grid=(1024, 1024), window=(1023, 1023)) makes about ",
        ),
    ],
)
def test_refusals(change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    found = [refusal.text for refusal in triton_tiles.refusals(replace(CUDA, **change))]
    assert len(found) == 1
    assert found[0].startswith(text)


def test_offered_orders_and_their_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square tiles have fewer pairs; with wider windows larger tiles are chosen."""
    fake_gpu(monkeypatch, (9, 0))
    assert triton_tiles.refusals(CUDA) == []
    assert triton_tiles.orders(CUDA) == ("natural", "hilbert")
    assert triton_tiles.flops(CUDA, "hilbert") < triton_tiles.flops(CUDA, "natural")
    assert triton_tiles.tile_size(CUDA, "hilbert") == 64
    wide = replace(CUDA, pattern=Neighborhood((64, 64), (49, 49)))
    assert triton_tiles.tile_size(wide, "hilbert") == 128
    assert triton_tiles.flops(replace(CUDA, needs_grad=False)) * 9 == triton_tiles.flops(CUDA) * 2
