"""Visit orders: launch orders, the orders that the triton backend offers, and results in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_dispatch.backends import triton
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.triton.blocks import BlockConfig
from attn_dispatch.kernels.triton.launch_order import (
    L2Cache,
    heads_together,
    launch_order_bytes,
    launch_order_of,
    offered_orders,
)
from attn_dispatch.kernels.triton.work_list import Side, work_list_of
from attn_dispatch.spec import orders as token_orders
from attn_dispatch.spec.orders import GROUPED, HILBERT_VISITS, NATURAL, SAWTOOTH, VISIT_ORDERS
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from tests.kernels.test_triton import SIDES, interpreted, problem_of, problems
from tests.support.cases import gate
from tests.support.pairwise import crossed, thinned

MIB = 2**20
CUDA = problem_of(Dense(is_causal=True), (1, 2**17, 16, 128), torch.bfloat16, "cuda:0")
HEAD = 2 * 2**17 * 128 * 2  #: bytes of K and V of one head of it


@pytest.mark.parametrize("order", VISIT_ORDERS)
def test_visit_orders_permute_no_tokens(order: str) -> None:
    assert token_orders.check(order) == order
    assert token_orders.permutation(order, Dense(), 100) is None
    assert not token_orders.serves(order, Dense())


# --- launch orders ----------------------------------------------------------------------------------------------------


def listed(problem: Problem, side: Side, order: str, cache: L2Cache, rows: int = 8, warps: int = 8) -> Tensor:
    return launch_order_of(problem, side, work_list_of(problem, side, rows), order, cache, warps)


@settings(max_examples=60)
@given(problems(), st.sampled_from(SIDES), st.sampled_from(VISIT_ORDERS), st.integers(0, 2**14), st.integers(1, 9))
def test_every_tile_of_every_head_is_launched_once(
    problem: Problem, side: Side, order: str, l2_bytes: int, multiprocessors: int
) -> None:
    launches = listed(problem, side, order, L2Cache(l2_bytes, multiprocessors))
    work = work_list_of(problem, side, 8)
    edges = work.first_tile.tolist()
    expected = {
        (head, tile) for head, kind in enumerate(work.kind_of.tolist()) for tile in range(edges[kind], edges[kind + 1])
    }
    assert launches.dtype == torch.int32
    assert len(launches) == len(expected)
    assert {(head, tile) for head, tile, _ in launches.tolist()} == expected
    assert launches.nbytes <= launch_order_bytes(problem, side, 8)


@pytest.mark.parametrize(("warps", "at_once"), [(8, 3), (4, 6), (2, 12), (16, 3)])
@pytest.mark.parametrize("order", VISIT_ORDERS)
def test_every_other_round_is_reversed(order: str, warps: int, at_once: int) -> None:
    launches = listed(problem_of(Dense(), (1, 80, 4, 16)), "queries", order, L2Cache(2**14, 3), warps=warps)
    assert launches[:, 2].tolist() == [place // at_once % 2 for place in range(40)]


def test_sawtooth_order_is_by_head() -> None:
    launches = listed(problem_of(Dense(), (1, 80, 4, 16)), "queries", SAWTOOTH, L2Cache(2**14, 3))
    assert launches[:, :2].tolist() == [[head, tile] for head in range(4) for tile in range(10)]


@pytest.mark.parametrize("order", [GROUPED, HILBERT_VISITS])
def test_grouped_order_is_by_group_of_heads(order: str) -> None:
    launches = listed(problem_of(Dense(), (1, 64, 5, 16)), "queries", order, L2Cache(2 * 64 * 16 * 4 * 2 + 1, 3))
    groups = [launches[first : first + 16] for first in (0, 16, 32)]
    assert [set(group[:, 0].tolist()) for group in groups] == [{0, 1}, {2, 3}, {4}]
    # Heads alternate: half of a group's launches hold equally many tiles of each head.
    assert [sorted(group[:8, 0].tolist()) for group in groups] == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4, [4] * 8]


def test_hilbert_order_has_square_groups_of_heads_and_tiles() -> None:
    """16 consecutive launches have 4 heads and 4 tiles; in GROUPED order they have 8 heads and 2 tiles."""
    problem = problem_of(Dense(), (1, 128, 8, 16))
    curved, rows = (listed(problem, "queries", order, L2Cache(MIB, 3)) for order in (HILBERT_VISITS, GROUPED))
    for first in range(0, 128, 16):
        assert [len(set(each.tolist())) for each in curved[first : first + 16, :2].unbind(1)] == [4, 4]
        assert [len(set(each.tolist())) for each in rows[first : first + 16, :2].unbind(1)] == [8, 2]


@pytest.mark.parametrize(
    ("side", "l2_bytes", "together"),
    [
        ("queries", HEAD - 1, 4),  # at least the heads that share a key head
        ("queries", 2 * HEAD - 1, 4),
        ("queries", 2 * HEAD, 8),
        ("queries", 100 * HEAD, 16),
        ("keys", 4 * HEAD - 1, 1),
        ("keys", 8 * HEAD, 2),
        ("keys", 100 * HEAD, 4),
    ],
)
def test_heads_together_fit_the_cache(side: Side, l2_bytes: int, together: int) -> None:
    problem = replace(CUDA, kv_heads=4)
    assert heads_together(problem, side, GROUPED, L2Cache(l2_bytes, 132)) == together
    assert heads_together(problem, side, SAWTOOTH, L2Cache(l2_bytes, 132)) == 1


# --- offered orders ---------------------------------------------------------------------------------------------------

EVERY = (NATURAL, *VISIT_ORDERS)


@pytest.mark.parametrize(
    ("change", "l2_bytes", "orders"),
    [
        ({}, 16 * HEAD, (NATURAL,)),
        ({}, 16 * HEAD - 1, EVERY),
        ({"batch": 2}, 16 * HEAD, EVERY),
        ({"kv_heads": 4, "needs_grad": False}, 4 * HEAD, (NATURAL,)),
        ({"kv_heads": 4}, 4 * HEAD, EVERY),
        ({}, 2 * HEAD - 1, (NATURAL, SAWTOOTH)),
        ({"kv_heads": 4}, HEAD // 2, EVERY),
        ({"pattern": Window(1023, 0)}, HEAD // 8 - 1, EVERY),
        ({"pattern": Window(1023, 0)}, HEAD // 8, (NATURAL,)),
        ({"pattern": Window(None, 0)}, HEAD // 8, (NATURAL, SAWTOOTH)),
        ({"pattern": Dilated((64, 1024), (1, 2))}, HEAD // 8, (NATURAL,)),
    ],
)
def test_orders_are_offered_where_the_cache_is_too_small(
    change: dict[str, Any], l2_bytes: int, orders: tuple[str, ...]
) -> None:
    assert offered_orders(replace(CUDA, **change), L2Cache(l2_bytes, 132), 1024) == orders


def test_no_orders_where_all_tiles_run_at_once() -> None:
    assert offered_orders(CUDA, L2Cache(MIB, 16 * 8), 8) == (NATURAL,)
    assert offered_orders(CUDA, L2Cache(MIB, 16 * 8 - 1), 8) == (NATURAL, SAWTOOTH)


def test_orders_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**facts: int) -> tuple[str, ...]:
        properties = SimpleNamespace(shared_memory_per_block_optin=227 * 2**10, **facts)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
        triton.block_configs.cache_clear()
        return triton.orders(CUDA)

    assert found(L2_cache_size=50 * MIB, multi_processor_count=132) == (NATURAL, SAWTOOTH)
    assert found(L2_cache_size=16 * HEAD, multi_processor_count=132) == (NATURAL,)
    assert found(L2_cache_size=50 * MIB, multi_processor_count=16 * 1024) == (NATURAL,)
    assert found(multi_processor_count=132) == (NATURAL, SAWTOOTH)
    assert set(EVERY) == set(triton.all_orders)


# --- results ----------------------------------------------------------------------------------------------------------

SMALL = BlockConfig(32, 16, 4, 1)
CASES = (
    Case("dense", Dense(), (2, 50, 2, 16)),
    Case("causal", Dense(is_causal=True), (1, 70, 2, 16), kv_heads=1),
    Case("causal-ahead", Dense(is_causal=True), (1, 40, 2, 16), k_len=70),
    Case("window", Window(20, 9), (1, 70, 2, 16), kv_heads=1, key_mask=True),
    Case("window-rows-without-keys", Window(2, 0), (1, 40, 2, 16), k_len=20),
    Case(
        "longnet", Dilated((32, 64), (1, 2), is_causal=True), (1, 50, 4, 16), kv_heads=2, key_mask=True, seq_lens=True
    ),
    Case("uncovered-rows", Dilated((40,), (2,), offsets="block"), (1, 70, 2, 16)),
)


@pytest.fixture
def small_blocks(triton_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks so small that a tile has several blocks, and a head several tiles."""
    monkeypatch.setattr(triton, "INTERPRETED", SMALL)
    triton.block_configs.cache_clear()
    yield
    triton.block_configs.cache_clear()


@interpreted
@pytest.mark.usefixtures("small_blocks")
@crossed(
    lambda case, order: {"order": order},
    lambda case, order: case not in CASES[::2],
    case=CASES,
    order=VISIT_ORDERS,
)
def test_results_in_any_order(case: Case, order: str) -> None:
    expected = gate(case.problem(torch.float32, needs_grad=True))
    assert expected.check(expected.run(registry.load("triton"), order)).failures == ()


@interpreted
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("order", ["hilbert", "residue", "backwards"])
def test_other_orders_are_refused(order: str) -> None:
    x = torch.zeros(1, 20, 2, 16)
    with pytest.raises(InvalidInput, match=f"not '{order}'"):
        triton.run(x, x, x, problem_of(Dense(), (1, 20, 2, 16)), order=order)


LENGTH = 96
LARGE = 2.0**26
PLACES = range(0, LENGTH, 17)  #: no two in one block, nor in one run of every other position


def probe(heads: int, seed: int) -> Tensor:
    """Tokens [1, LENGTH, heads, 16] whose float32 sums depend on the order of summation.

    Per head and entry two large values cancel; small values added between them are lost to rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(len(PLACES), heads, 16, generator=generator).argsort(0)
    found = torch.zeros(1, LENGTH, heads, 16)
    found[0, PLACES] = torch.where(places == 0, LARGE, torch.where(places == 1, -LARGE, 1.0))
    return found


def listed_sums(problem: Problem, side: Side, order: str, probed: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the sum of its columns' values in listed order, and the number of columns."""
    work = work_list_of(problem, side, SMALL.rows)
    heads = len(work.kind_of)
    found, count = torch.zeros(1, LENGTH, heads, 16), torch.zeros(1, LENGTH, heads, 1)
    group = probed.shape[2] / heads
    for head, tile, backwards in launches_in_order(problem, side, order):
        start, step, rows, first_run, end_run = work.tiles[tile].tolist()
        row = torch.arange(rows) * step + start
        runs = work.runs[first_run:end_run].tolist()
        for run_start, run_step, length, member in reversed(runs) if backwards else runs:
            columns = range(run_start, run_start + length * run_step, run_step)
            for column in reversed(columns) if backwards else columns:
                visible = torch.ones_like(row, dtype=torch.bool)
                if work.low is not None:
                    visible &= column - row >= work.low
                if work.high is not None:
                    visible &= column - row <= work.high
                found[0, row[visible], head] += probed[0, column, int(head * group) + member]
                count[0, row[visible], head] += 1
    return found, count


def launches_in_order(problem: Problem, side: Side, order: str) -> list[list[int]]:
    """Head, tile and direction of each launch."""
    if order == NATURAL:
        return [[head, tile, 0] for head, tile, _ in launches_in_order(problem, side, SAWTOOTH)]
    found: list[list[int]] = listed(problem, side, order, triton.INTERPRETED_CACHE, SMALL.rows, SMALL.warps).tolist()
    return found


def probed_problem(pattern: Pattern) -> Problem:
    case = Case("probed", pattern, (1, LENGTH, 2, 16), kv_heads=1, scale=1.0)
    return case.problem(torch.float32, needs_grad=False)


@pytest.mark.full
@interpreted
@pytest.mark.usefixtures("small_blocks")
@thinned(
    ("pattern", "order"),
    [
        (Dense(), NATURAL),
        (Dense(), SAWTOOTH),
        (Dense(is_causal=True), SAWTOOTH),
        (Window(60, 40), SAWTOOTH),
        (Dilated((48, 96), (1, 2), is_causal=True), HILBERT_VISITS),
    ],
    2,
    str,
)
def test_kernels_process_columns_in_listed_order(pattern: Pattern, order: str) -> None:
    """With all weights 1, the kernels' results are plain sums of v, k, q and the gradient of out."""
    problem = probed_problem(pattern)
    q, k, v, grad = probe(2, 0), probe(1, 1), probe(1, 2), probe(2, 3)
    q[..., 8:], k[..., :8] = 0, 0  # scores are 0
    lse = torch.zeros(1, 2, LENGTH)
    zero = torch.zeros_like(q)

    out, _ = triton.run(q, k, v, problem, order=order)
    total, count = listed_sums(problem, "queries", order, v)
    assert torch.equal(out, total / count)
    # dS = v * grad - out * grad + the gradient of lse, which is 1.
    call = triton._TritonPasses(problem, order, None, None)
    dq, dk, dv = call.backward(grad, lse + 1, (q, k, zero[:, :, :1], zero, lse))
    assert torch.equal(dq, listed_sums(problem, "queries", order, k)[0])
    assert torch.equal(dk, listed_sums(problem, "keys", order, q)[0])
    assert torch.equal(dv, listed_sums(problem, "keys", order, grad)[0])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pattern", [Dense(), Window(60, 40)], ids=str)
def test_float32_sums_depend_on_the_order(pattern: Pattern, side: Side) -> None:
    """Otherwise the test above could not fail."""
    problem = probed_problem(pattern)
    heads = 1 if side == "keys" else 2
    probed = probe(3 - heads, 0)
    natural, sawtooth = (listed_sums(problem, side, order, probed)[0] for order in (NATURAL, SAWTOOTH))
    reversed_rows = torch.zeros(LENGTH, heads, dtype=torch.bool)
    for head, tile, backwards in launches_in_order(problem, side, SAWTOOTH):
        reversed_rows[tile * 32 : tile * 32 + 32, head] = bool(backwards)
    assert 0 < int(reversed_rows.sum()) < reversed_rows.numel()
    assert torch.equal((natural != sawtooth).any(-1)[0], reversed_rows)
