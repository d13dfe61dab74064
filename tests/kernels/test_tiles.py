"""Tiles: the tables against the definition, and attention over them in every order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend
from attn_dispatch.backends import tiles as backend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.contract import Backend, Result
from attn_dispatch.kernels.tiles import pairs as pair_math
from attn_dispatch.kernels.tiles import run as tile_math
from attn_dispatch.kernels.tiles import tables
from attn_dispatch.kernels.tiles.estimates import tile_table_bytes
from attn_dispatch.kernels.tiles.tables import FULL, TileTable, tables_of
from attn_dispatch.spec.orders import ORDERS, Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import CASES, Case
from attn_dispatch.tuning.example import make
from tests.support.calls import threads
from tests.support.cases import failures
from tests.support.pairwise import by_turns

HEADS = 5
PATTERNS: tuple[tuple[Pattern, int, int], ...] = (
    (Dense(), 37, 37),
    (Dense(), 30, 50),
    (Dense(True), 37, 50),
    (Dense(True), 50, 37),
    (Window(5, 3), 70, 70),
    (Window(3, None), 70, 40),
    (Window(None, 2), 40, 70),
    (Window(9, 0, 5), 70, 70),
    (Window(2, 3, 20), 40, 70),
    (Neighborhood((60,), (9,), (2,)), 60, 60),
    (Neighborhood((61,), (9,), (3,), (True,), "shift"), 61, 61),
    (Neighborhood((9, 7), (3, 5)), 63, 63),
    (Neighborhood((9, 8), (3, 3), (2, 1), (True, False), "shift"), 72, 72),
    (Neighborhood((17, 16), (5, 3), (3, 5), edges="shift"), 272, 272),
    (Neighborhood((17, 16), (4, 6), (3, 1), (False, True), "shift", (3, 4)), 272, 272),
    (Neighborhood((61,), (10,), (3,), edges="shift", stride=(7,)), 61, 61),
    (Neighborhood((4, 3, 5), (3, 3, 3)), 60, 60),
    (Neighborhood((6, 7, 5), (3, 3, 1), (2, 1, 3), (True, False, False)), 210, 210),
    (Dilated((16, 32, 64), (1, 2, 4)), 150, 150),
    (Dilated((16, 32), (2, 2), True), 101, 101),
    (Dilated((16, 16), (2, 2)), 64, 64),
    (Dilated((10, 35), (3, 4)), 101, 101),
    (Dilated((32, 64), (2, 4), offsets="block"), 150, 150),
    (Dilated((16, 32, 64), (1, 2, 4), True, heads="split"), 70, 70),
)
NEIGHBORS = Neighborhood((64, 64), (13, 13))
LONGNET = Dilated((256, 512, 1024), (1, 2, 4))


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    tables.tables_of.cache_clear()


def problem_of(pattern: Pattern, q_len: int, k_len: int, heads: int = HEADS) -> Problem:
    return Case("", pattern, (1, q_len, heads, 8), k_len=k_len).problem(torch.float32, needs_grad=False)


def table_multiplicity(table: TileTable, q_len: int, k_len: int) -> Tensor:
    """How many times each query sees each key, as one tensor."""
    queries, keys, tile = table.queries(), table.keys, table.tile
    pairs = table.counts(queries, keys) if table.masks is None else table.masks[table.mask]
    found = torch.zeros(len(table.q_pos) * tile, len(table.k_pos) * tile, dtype=torch.int32)
    for query, key, pair in zip(queries.tolist(), keys.tolist(), pairs):
        found[query * tile : (query + 1) * tile, key * tile : (key + 1) * tile] += pair
    assert not found[:, k_len:].any()  # repeated keys
    by_position = torch.zeros(q_len, k_len, dtype=torch.int32)
    by_position[table.q_pos.flatten()[:q_len, None], table.k_pos.flatten()[:k_len]] = found[:q_len, :k_len]
    return by_position


# --- tables -----------------------------------------------------------------------------------------------------------


@by_turns(("pattern", "q_len", "k_len", "order"), PATTERNS, ORDERS, str)
def test_tables_match_the_multiplicity(pattern: Pattern, q_len: int, k_len: int, order: str) -> None:
    expected = pattern.multiplicity(q_len, k_len, HEADS)
    for tile in (4, 8, 16):
        found = tables_of(replace(problem_of(pattern, q_len, k_len), pattern=pattern), order, tile)
        assert sorted(head for table in found for head in table.heads) == list(range(HEADS))
        for table in found:
            sums = table_multiplicity(table, q_len, k_len)
            assert all(torch.equal(sums, expected[head]) for head in table.heads)
            assert table.covered == bool(sums.any(1).all())


@pytest.mark.parametrize("pattern", [NEIGHBORS, LONGNET, Dense(True), Window(100, 7)], ids=str)
def test_tables_hold_nothing_redundant(pattern: Pattern) -> None:
    """No pair without visible keys, no equal masks, no own masks of full pairs; key tiles in order."""
    for order in ORDERS:
        table = tables_of(problem_of(pattern, 4096, 4096), order, 64)[0]
        assert table.masks is not None
        flat = table.masks.flatten(1)
        assert flat.any(1).all()
        assert len(torch.unique(flat, dim=0)) == len(flat)
        assert (flat == 1).all(1).nonzero().flatten().tolist() == [FULL]
        assert (table.keys.diff()[table.queries().diff() == 0] > 0).all()
        assert table.bias is not None
        assert torch.equal(table.bias, table.masks.float().log())


def test_useful_orders_have_fewer_tile_pairs() -> None:
    for pattern, order, share in ((NEIGHBORS, "hilbert", 2 / 3), (LONGNET, "residue", 1 / 2)):
        natural, other = (tables_of(problem_of(pattern, 4096, 4096), each, 64)[0] for each in ("natural", order))
        assert other.pairs < natural.pairs * share


@pytest.mark.parametrize("pattern", [NEIGHBORS, LONGNET, Dense(), Window(100, 7)], ids=str)
def test_boxes_compared_in_groups(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tables_of(problem_of(pattern, 4096, 4096), "hilbert", 64)
    tables.tables_of.cache_clear()
    monkeypatch.setattr(pair_math, "BOXES", 2 * pair_math.GROUP**2)
    for one, other in zip(plain, tables_of(problem_of(pattern, 4096, 4096), "hilbert", 64), strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.first, other.first)


def test_tables_are_cached_until_forgotten() -> None:
    problem = problem_of(NEIGHBORS, 4096, 4096)
    first, alike = tables_of(problem, "natural", 64), replace(problem, batch=3, head_dim=32)
    assert tables_of(alike, "natural", 64) is first
    backend.forget(problem)
    assert tables_of.peek(problem, "natural", 64) is first  # another problem's too
    backend.forget(alike)
    assert tables_of.peek(problem, "natural", 64) is None


# --- attention --------------------------------------------------------------------------------------------------------

IDS = (
    *("dense-grouped", "causal", "causal-both-masks", "causal-rows-without-keys", "window-ahead", "window-key-mask"),
    *("longnet-ragged-causal", "longnet-grouped-uneven", "longnet-split", "longnet-both-masks", "uncovered-rows"),
    *("same-branch-twice", "neighborhood-2d-shift", "neighborhood-2d-mixed", "neighborhood-stride-mixed"),
    *("neighborhood-1d-stride-causal", "neighborhood-3d", "neighborhood-key-mask"),
)
IN_ORDERS = pytest.mark.parametrize("case", [case for case in CASES if case.id in IDS], ids=lambda case: case.id)


class Tiled(Backend):
    """A backend in one order, with tiles of one size."""

    def __init__(self, order: str, tile: int, module: Any = backend) -> None:
        self.name, self.order, self.tile, self.module = module.name, order, tile, module

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        found: Result = self.module.run(q, k, v, problem, order=self.order, tile=self.tile, **tensors)
        return found


def wrong(case: Case, order: str, tile: int, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    return failures(Tiled(order, tile), case.problem(dtype, needs_grad=True))


@IN_ORDERS
def test_results_in_every_order(case: Case) -> None:
    for order, tile in zip(ORDERS, (32, 8, 16), strict=True):
        assert wrong(case, order, tile) == (), (order, tile)
    assert wrong(case, "hilbert", 16, torch.bfloat16) == ()


@IN_ORDERS
def test_reordered_tokens(case: Case) -> None:
    """Nothing is permuted, whatever the requested order; masks go by place in the tensors."""
    if case.k_len is not None and case.k_len != case.shape[1]:
        pytest.skip("an order is one of queries and keys alike")
    for stored, order in (("hilbert", "natural"), ("residue", "hilbert")):
        moved = replace(case, pattern=Reordered(case.pattern, stored))
        problem = moved.problem(torch.float32, needs_grad=True)
        assert backend.refusals(problem) == []
        assert backend.orders(problem) == ("natural",) or problem.pattern == case.pattern
        assert wrong(moved, order, 16) == (), (stored, order)


@IN_ORDERS
def test_masks_computed_in_every_call(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MASK_BYTES", 0)
    monkeypatch.setattr(tile_math, "CHUNK_BYTES", 0)  # one query tile per call
    assert wrong(case, "hilbert", 8) == ()


@pytest.mark.parametrize("pattern", [NEIGHBORS, LONGNET], ids=str)
def test_threads_are_deterministic(pattern: Pattern) -> None:
    """Bitwise equal in every run, and equal to one thread."""
    problem = replace(problem_of(pattern, 4096, 4096), needs_grad=True)
    example = make(problem)
    inputs = (example.q, example.k, example.v)
    found = []
    for number in (1, 3, 3):
        with threads(number):
            out, lse = backend.run(*inputs, problem, tile=64)
            found.append((out, lse, *torch.autograd.grad((out.square().sum(), lse.sum()), inputs)))
    for one, two, three in zip(*found):
        assert torch.equal(one, two)
        assert torch.equal(two, three)


def test_unknown_orders() -> None:
    example = make(problem_of(Dense(), 8, 8))
    with pytest.raises(InvalidInput, match="order must be None or one of"):
        backend.run(example.q, example.k, example.v, example.problem, order="peano")


# --- estimates --------------------------------------------------------------------------------------------------------

ESTIMATED = (
    (NEIGHBORS, 4096),
    (Neighborhood((64, 64), (9, 9), (2, 4)), 4096),
    (Neighborhood((64, 64), (3, 25), is_causal=(True, False), edges="shift"), 4096),
    (Neighborhood((64, 64), (24, 25), is_causal=(True, True), edges="shift"), 4096),
    (Neighborhood((64, 64), (8, 12), (2, 1), edges="shift", stride=(8, 3)), 4096),
    (Neighborhood((64, 64), (16, 9), is_causal=(True, False), edges="shift", stride=(16, 4)), 4096),
    (Neighborhood((4096,), (31,), (4,), edges="shift", stride=(31,)), 4096),
    (Neighborhood((16, 16, 16), (7, 3, 5)), 4096),
    (Neighborhood((16, 16, 16), (6, 6, 6), is_causal=(True,), edges="shift", stride=(2,)), 4096),
    (Neighborhood((4096,), (31,), (4,)), 4096),
    (LONGNET, 4096),
    (Dilated((512, 1024), (2, 2), True), 4096),
    (Window(100, 0), 4096),
    (Dense(True), 1024),
)


@pytest.mark.parametrize(("pattern", "length"), ESTIMATED, ids=str)
def test_tables_fit_their_declared_bytes(pattern: Pattern, length: int) -> None:
    problem = problem_of(pattern, length, length)
    assert "natural" in backend.orders(problem)
    for order in backend.orders(problem):
        tile = backend.tile_size(problem, order)
        found = tables_of(problem, order, tile)
        assert max(table.pairs for table in found) <= 2 * backend._pairs(problem, order)
        tensors = [getattr(table, name) for table in found for name in ("keys", "mask", "masks", "bias", "first")]
        assert sum(x.nbytes for x in tensors) <= tile_table_bytes(problem, order, tile)


def test_offered_orders() -> None:
    assert backend.orders(problem_of(NEIGHBORS, 4096, 4096)) == ("natural", "hilbert")
    assert backend.orders(problem_of(LONGNET, 4096, 4096)) == ("natural", "residue")
    assert backend.orders(problem_of(Window(3, 0), 4096, 4096)) == ("natural",)


def test_too_many_pairs() -> None:
    long = problem_of(Dense(), 2**20, 2**20)
    assert [refusal.code for refusal in backend.refusals(long)] == ["pattern"]
    assert "pairs of tiles, over 16777216" in str(backend.refusals(long)[0])
    assert backend.refusals(problem_of(Window(1000, 0), 2**20, 2**20)) == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pattern", [Dense(), Dense(is_causal=True), Window(5, 0)], ids=str)
def test_any_token_order_can_be_forced(pattern: Pattern, order: str) -> None:
    """Sequences without a grid too, though not faster."""
    q, k, v = (torch.randn(1, 50, 2, 8, dtype=torch.float64) for _ in range(3))
    found = attend(q, k, v, pattern, backend="tiles", order=order)
    torch.testing.assert_close(found, attend(q, k, v, pattern, backend="manual"))


def test_different_lengths_stay_in_natural_order() -> None:
    q, (k, v) = torch.randn(1, 20, 2, 8), torch.randn(2, 1, 70, 2, 8)
    found = attend(q, k, v, Dense(is_causal=True), backend="tiles", order="hilbert")
    torch.testing.assert_close(found, attend(q, k, v, Dense(is_causal=True), backend="manual"))
