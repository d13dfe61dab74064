"""attend() over real processes: every way of exchanging rows against float64, and every way of naming the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attn_dispatch import Sharded, attend, explain, shard, unshard
from attn_dispatch.order import GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.problem import Problem
from attn_dispatch.reorder import Reordered
from attn_dispatch.ring import ulysses
from attn_dispatch.ring.layout import CONTIGUOUS, KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.traffic import traffic_of
from tests import ring_ranks
from tests.cases import CASES, Case, gate
from tests.ring_calls import attended, cut, shards, whole
from tests.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("little_time")

BY_ID = {case.id: case for case in CASES}
SOME = (
    "dense", "dense-odd-head-dim", "dense-grouped", "dense-key-mask", "causal", "causal-both-masks", "scale-given",
    "window-causal", "window-both-sides", "longnet-causal", "longnet-ragged", "longnet-grouped",
    "longnet-block-offsets", "longnet-split", "rate-not-dividing-causal", "rate-over-segment", "uncovered-rows",
    "longnet-both-masks", "longnet-head-dim-not-last", "segments-alone", "neighborhood-1d-causal",
    "neighborhood-2d-shift", "neighborhood-2d-mixed", "neighborhood-3d", "neighborhood-key-mask",
)  # fmt: skip


def reordered(name: str, order: str) -> Case:
    case = BY_ID[name]
    return replace(case, id=f"{name}-{order}", pattern=Reordered(case.pattern, order))


SHARED = (
    *(BY_ID[name] for name in SOME),
    reordered("neighborhood-2d-mixed", "hilbert"),
    reordered("window-causal", "hilbert"),
    reordered("rate-not-dividing-causal", "residue"),
    reordered("longnet-both-masks", "residue"),
)
#: In what proportion ranks get tokens: evenly where the number of ranks is not here.
WEIGHTS = {3: (1.0, 5.0, 2.0)}


def exchanges(problem: Problem, layout: Layout) -> list[str]:
    """Those that can be forced."""
    pattern, heads, kv_heads = problem.pattern, problem.heads, problem.kv_heads
    if not any(traffic_of(pattern, layout, heads, kv_heads, rank).receives for rank in range(layout.ranks)):
        return [LOCAL]
    return [RING, GATHER, *[ULYSSES] * (not ulysses.why_not(problem, layout.ranks))]


def run(ranks: Ranks, case: Case, dtype: torch.dtype, layout: Layout, exchange: str) -> dict[str, Tensor]:
    """Results of all ranks, put together."""
    problem = case.problem(dtype, needs_grad=True)
    options = {"pattern": case.pattern, "scale": case.scale, "order": exchange}
    args = [(each, layout.kind, case.strides, options) for each in shards(gate(problem), layout)]
    return whole(ranks.each(attended, args), layout)


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.id)
def test_conformance(ranks: Ranks, case: Case, size: int, set_mode: Any) -> None:
    """Out, lse and gradients through both, whatever the layout and the exchange. Few lengths divide by the ranks."""
    set_mode("off")
    problem = case.problem(torch.float32, needs_grad=True)
    for kind in KINDS:
        layout = Layout(deal(problem.q_len, size, WEIGHTS.get(size)), kind)
        for exchange in exchanges(problem, layout):
            found = run(ranks, case, torch.float32, layout, exchange)
            assert gate(problem).check(found).failures == (), (kind, exchange)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["causal", "longnet-ragged", "neighborhood-2d-shift", "window-key-mask"])
def test_conformance_in_other_dtypes(ranks: Ranks, name: str, dtype: torch.dtype, set_mode: Any) -> None:
    set_mode("off")
    problem = BY_ID[name].problem(dtype, needs_grad=True)
    layout = Layout(deal(problem.q_len, 3), ZIGZAG)
    for exchange in (RING, GATHER):
        found = run(ranks, BY_ID[name], dtype, layout, exchange)
        assert gate(problem).check(found).failures == (), exchange


@pytest.mark.parametrize("name", ["causal", "dense-one-key-head", "longnet-causal", "neighborhood-2d", "longnet-seq-lens"])
def test_conformance_with_many_ranks(ranks: Ranks, name: str, set_mode: Any) -> None:
    set_mode("off")
    problem = BY_ID[name].problem(torch.float32, needs_grad=True)
    for kind, exchange in zip(KINDS, (GATHER, RING)):
        layout = Layout(deal(problem.q_len, 8), kind)
        found = run(ranks, BY_ID[name], torch.float32, layout, exchange)
        assert gate(problem).check(found).failures == (), kind


@pytest.mark.parametrize("exchange", [RING, GATHER, ULYSSES])
@pytest.mark.parametrize("name", ["causal", "longnet-causal"])
def test_the_same_bits_every_time(ranks: Ranks, name: str, exchange: str, set_mode: Any) -> None:
    set_mode("off")
    size = 2
    layout = Layout(deal(BY_ID[name].shape[1], size), ZIGZAG)
    first, second = (run(ranks, BY_ID[name], torch.float32, layout, exchange) for _ in range(2))
    assert all(torch.equal(first[part], second[part]) for part in ("out", "lse", "dq", "dk", "dv"))
