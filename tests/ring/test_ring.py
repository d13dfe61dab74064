"""attend() over real processes: every exchange of rows against float64, and every kind of `mesh` argument."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attn_dispatch import Sharded, attend, shard, unshard
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.rows.layout import CONTIGUOUS, KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.traffic import traffic_of
from attn_dispatch.ring.shards import spread_of
from attn_dispatch.spec.orders import GATHER, LOCAL, RING, ULYSSES, Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import CASES, Case
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_hidden import with_hidden
from tests.support import ring_ranks
from tests.support.calls import close, formula
from tests.support.cases import gate
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import crossed
from tests.support.ring_calls import attended, attended_by, attended_in_blocks, changed, part, shards, tensors, whole
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("little_time", "no_trials")

BY_ID = {case.id: case for case in CASES}
SOME = (
    "dense", "dense-odd-head-dim", "dense-grouped", "dense-key-mask", "causal", "causal-both-masks", "scale-given",
    "window-causal", "window-both-sides", "window-sinks", "window-sinks-both-sides", "longnet-causal", "longnet-ragged",
    "longnet-grouped",
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
IN_BLOCKS = (
    "dense", "dense-grouped", "dense-key-mask", "causal", "causal-both-masks", "window-causal", "window-both-sides",
    "window-sinks", "rate-not-dividing-causal", "longnet-ragged", "neighborhood-2d-mixed",
)  # fmt: skip
#: Proportions of tokens by number of ranks; others get equal shares.
WEIGHTS = {3: (1.0, 5.0, 2.0)}


def exchanges(problem: Problem, layout: Layout) -> list[str]:
    """The exchanges that can be forced."""
    pattern, heads, kv_heads = problem.pattern, problem.heads, problem.kv_heads
    if not any(traffic_of(pattern, layout, heads, kv_heads, rank).receives for rank in range(layout.ranks)):
        return [LOCAL]
    return [RING, GATHER, *[ULYSSES] * (not ulysses.refusal(problem, layout.ranks))]


def options_of(case: Case, exchange: str) -> dict[str, Any]:
    return {"pattern": case.pattern, "scale": case.scale, "order": exchange}


def run(ranks: Ranks, case: Case, dtype: torch.dtype, layout: Layout, exchange: str) -> dict[str, Tensor]:
    """The joined results of all ranks."""
    problem = case.problem(dtype, needs_grad=True)
    args = [(each, layout.kind, case.strides, options_of(case, exchange)) for each in shards(gate(problem), layout)]
    return whole(ranks.each(attended, args), layout)


# --- what is computed -------------------------------------------------------------------------------------------------


@crossed(lambda case, size: {"size": size}, lambda case, size: case not in SHARED[::6], case=SHARED, size=(2, 3, 4))
def test_conformance(ranks: Ranks, case: Case, size: int) -> None:
    """Out, lse and gradients through both, for every layout and exchange. Few lengths are multiples of the ranks."""
    problem = case.problem(torch.float32, needs_grad=True)
    for number, kind in enumerate(KINDS):
        layout = Layout(deal(problem.q_len, size, WEIGHTS.get(size)), kind)
        usable = exchanges(problem, layout)
        # Two ranks run all of them; more ranks run every other one, and the rest in the other layout.
        for exchange in usable if size == 2 else usable[(number + size) % 2 :: 2] or usable:
            found = run(ranks, case, torch.float32, layout, exchange)
            assert gate(problem).check(found).failures == (), (kind, exchange)


@crossed(
    lambda name, dtype: {"dtype": dtype},
    name=("causal", "longnet-both-masks", "neighborhood-2d-shift", "window-key-mask"),
    dtype=(torch.bfloat16, torch.float16, torch.float64),
)
def test_conformance_in_other_dtypes(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    problem = BY_ID[name].problem(dtype, needs_grad=True)
    layout = Layout(deal(problem.q_len, 2), ZIGZAG)
    for exchange in exchanges(problem, layout):
        found = run(ranks, BY_ID[name], dtype, layout, exchange)
        assert gate(problem).check(found).failures == (), exchange


@pytest.mark.full
@crossed(lambda name, size: {"size": size}, lambda name, size: name not in IN_BLOCKS[1::2], name=IN_BLOCKS, size=(2, 3))
def test_conformance_piece_by_piece(ranks: Ranks, name: str, size: int) -> None:
    """Like shards of long sequences: rows are received in many messages and computed on in blocks."""
    problem = BY_ID[name].problem(torch.float32, needs_grad=True)
    for kind, rows in zip(KINDS, (5, 8)):
        layout = Layout(deal(problem.q_len, size, WEIGHTS.get(size)), kind)
        args = [
            (each, kind, BY_ID[name].strides, options_of(BY_ID[name], RING)) for each in shards(gate(problem), layout)
        ]
        found = whole(ranks.each(attended_in_blocks, [(rows, *each) for each in args]), layout)
        assert gate(problem).check(found).failures == (), kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("window-causal", ZIGZAG),
        pytest.param("causal", ZIGZAG, marks=pytest.mark.full),
        pytest.param("window-key-mask", CONTIGUOUS, marks=pytest.mark.full),
        pytest.param("longnet-ragged-causal", CONTIGUOUS, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("solver", ["triton", "sdpa", "tiles"])
def test_conformance_by_each_solver(ranks: Ranks, name: str, solver: str, kind: str) -> None:
    """`native`, the first on a CPU, computes the other tests. Of parts, out and lse are views of the whole."""
    if solver == "triton" and not INTERPRETED:
        pytest.skip("Triton is not installed, or there is a GPU for it")
    case = BY_ID[name]
    problem = case.problem(torch.float32, needs_grad=True)
    layout = Layout(deal(problem.q_len, 2), kind)
    args = [(solver, each, kind, case.strides, options_of(case, RING)) for each in shards(gate(problem), layout)]
    found, used = zip(*ranks.each(attended_by, args))
    assert any(used) != (solver == "sdpa" and "window" in name)  # windows are left to `tiles`
    assert gate(problem).check(whole(found, layout)).failures == ()


@pytest.mark.parametrize("exchange", [RING, GATHER, ULYSSES])
def test_the_same_bits_every_time(ranks: Ranks, exchange: str) -> None:
    case = BY_ID["causal"]
    layout = Layout(deal(case.shape[1], 2), ZIGZAG)
    first, second = (run(ranks, case, torch.float32, layout, exchange) for _ in range(2))
    assert all(torch.equal(first[part], second[part]) for part in ("out", "lse", "dq", "dk", "dv"))


# --- kinds of mesh ----------------------------------------------------------------------------------------------------


def right(mesh: object, data: int = 0) -> bool:
    """Whether results over a mesh are those of float64; `data`: number of the batch that this mesh gets."""
    q, k, v = changed(lambda x: x + data, tensors())
    found = attend(*changed(lambda x: shard(x, mesh), (q, k, v)), is_causal=True, mesh=mesh)
    return close(unshard(found, mesh), formula(q, k, v, Dense(True))[0])


def on_world() -> bool:
    return right("world")


def on_device_mesh() -> bool:
    return right(Sharded(init_device_mesh("cpu", (4,)), ZIGZAG))


def on_one_axis() -> bool:
    """2 x 2: each pair of neighbouring ranks has a sequence of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    return right(mesh["context"], data=mesh["data"].get_local_rank())


def on_a_single_rank() -> bool:
    """Without communication: the other ranks do not take part."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "context"))
    if dist.get_rank() % 2:
        return True
    return right(mesh["context"])


def forced_on_a_single_rank() -> list[Any]:
    """It runs everything that needs no other rank, and raises for the rest."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "context"))["context"]
    q, k, v = tensors()
    found: list[Any] = []
    for backend, order in ((None, LOCAL), ("ring", None), ("ring", LOCAL), ("manual", None)):
        out = attend(q, k, v, mesh=mesh, backend=backend, order=order)
        found.append(close(out, formula(q, k, v, Dense())[0]))
    for order in (RING, GATHER, ULYSSES):
        with pytest.raises(NoBackend) as raised:
            attend(q, k, v, mesh=mesh, order=order)
        found.append(str(raised.value))
    return found


def on_two_groups_in_turn() -> bool:
    """The same call, with a decision for each group."""
    world, half = dist.group.WORLD, dist.new_group(range(2))
    found = [right(mesh) for mesh in ((half, world, half) if dist.get_rank() < 2 else (world,))]
    return all(found)


def on_groups() -> bool:
    """Disjoint groups at the same time."""
    groups = [dist.new_group(range(start, start + 2)) for start in range(0, 4, 2)]
    return right(groups[dist.get_rank() // 2], data=dist.get_rank() // 2)


JOBS = (on_world, on_device_mesh, on_one_axis, on_a_single_rank, on_two_groups_in_turn, on_groups)


@pytest.mark.parametrize("job", JOBS)
def test_every_kind_of_mesh(ranks: Ranks, job: Any) -> None:
    assert all(ranks.everywhere(job))


def test_exchanges_on_a_single_rank(ranks: Ranks) -> None:
    why = "cannot run over a single rank: no rank sees another's rows: there is nothing to exchange"
    expected = [True] * 4 + [f"{order!r} {why}" for order in (RING, GATHER, ULYSSES)]
    assert ranks.everywhere(forced_on_a_single_rank) == [expected] * 4


def not_a_mesh(mesh: object) -> str:
    q, k, v = tensors()
    with pytest.raises(InvalidInput) as raised:
        attend(q, k, v, mesh=mesh)
    return str(raised.value)


def of_others() -> str:
    group = dist.new_group(range(2))
    return not_a_mesh(group) if dist.get_rank() >= 2 else ""


def of_two_axes() -> str:
    return not_a_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context")))


def test_arguments_that_are_no_mesh(ranks: Ranks) -> None:
    assert "does not contain this process" in ranks.everywhere(of_others)[-1]
    assert "one dimension, got 2: name one" in ranks.everywhere(of_two_axes)[0]
    assert "got int" in ranks.outcomes(not_a_mesh, [(4,)])[0]


def test_a_world_that_was_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "mesh is 'world', but torch.distributed is not initialized" in not_a_mesh("world")


# --- arguments --------------------------------------------------------------------------------------------------------


def swapped(kind: str) -> tuple[bool, bool]:
    """Whether layout="bhnd" gives the same bits, gradients included."""
    mesh = Sharded(ring_ranks.group(), kind)
    local = part(mesh, grads="qkv")
    out = attend(*local, is_causal=True, mesh=mesh)
    turned = changed(lambda x: x.transpose(1, 2), local)
    other = attend(*turned, is_causal=True, mesh=mesh, layout="bhnd").transpose(1, 2)
    grads, others = (torch.autograd.grad(x.square().sum(), local) for x in (out, other))
    return torch.equal(out, other), all(torch.equal(x, y) for x, y in zip(grads, others))


def test_heads_first(ranks: Ranks) -> None:
    assert ranks.everywhere(swapped, ZIGZAG, ranks=3) == [(True, True)] * 3


def with_autocast() -> list[Any]:
    mesh = ring_ranks.group()
    local = part(mesh, grads="qkv")
    expected = attend(*changed(Tensor.bfloat16, local), mesh=mesh)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(*local, mesh=mesh, return_lse=True)
        single = attend(*changed(lambda x: x.detach().double(), local), mesh=mesh)
    out.sum().backward()
    grad = local[0].grad
    assert grad is not None
    return [out.dtype, lse.dtype, torch.equal(out, expected), grad.dtype, single.dtype]


def test_autocast(ranks: Ranks) -> None:
    expected = [torch.bfloat16, torch.float32, True, torch.float32, torch.float64]
    assert ranks.everywhere(with_autocast, ranks=2) == [expected] * 2


def without_gradients(order: str) -> tuple[bool, bool]:
    mesh = ring_ranks.group()
    local = part(mesh)
    alone = attend(*local, mesh=mesh, order=order)
    with torch.no_grad():
        also = attend(*changed(Tensor.requires_grad_, local), mesh=mesh, order=order)
    return alone.requires_grad or also.requires_grad, torch.equal(alone, also)


@pytest.mark.parametrize("order", [RING, GATHER, ULYSSES])
def test_no_gradients_unless_required(ranks: Ranks, order: str) -> None:
    assert ranks.everywhere(without_gradients, order, ranks=2) == [(False, True)] * 2


def some_gradients(which: str) -> bool:
    """Whether only those of q, k and v that need a gradient get one, and the right one."""
    mesh = Sharded(ring_ranks.group(), ZIGZAG)
    exact = changed(lambda x: x.double().requires_grad_(), tensors())
    local = part(mesh, grads=which)
    expected = torch.autograd.grad(formula(*exact, Dense(True))[0].square().sum(), exact)
    attend(*local, is_causal=True, mesh=mesh).square().sum().backward()
    assert [x.grad is not None for x in local] == [name in which for name in "qkv"]
    return all(close(x.grad, shard(y, mesh)) for x, y in zip(local, expected) if x.grad is not None)


@pytest.mark.parametrize("which", ["q", "k", "qv"])
def test_gradients_of_some_inputs(ranks: Ranks, which: str) -> None:
    assert all(ranks.everywhere(some_gradients, which, ranks=3))


@pytest.mark.parametrize("lengths", [(1, 30, 2), (30, 1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_a_single_token(ranks: Ranks, lengths: tuple[int, ...], kind: str) -> None:
    case = Case("", Dilated((8, 16), (1, 2), True), (2, sum(lengths), 2, 8), key_mask=True)
    for exchange in (RING, GATHER):
        found = run(ranks, case, torch.float32, Layout(lengths, kind), exchange)
        assert gate(case.problem(torch.float32, needs_grad=True)).check(found).failures == ()


@pytest.mark.parametrize("exchange", [RING, GATHER, ULYSSES])
@pytest.mark.parametrize(
    "case",
    [
        Case("both-masks", Dense(True), (2, 40, 4, 8), seq_lens=True, key_mask=True),
        Case("uncovered", Dilated((20,), (2,)), (2, 40, 4, 8)),
    ],
    ids=lambda case: case.id,
)
def test_invisible_rows_reach_no_result(ranks: Ranks, case: Case, exchange: str) -> None:
    example = with_hidden(gate(case.problem(torch.float32, needs_grad=True)).example, math.nan)
    layout = Layout(deal(case.shape[1], 2), ZIGZAG)
    args = [
        (each, layout.kind, case.strides, options_of(case, exchange)) for each in shards(Oracle.of(example), layout)
    ]
    found = whole(ranks.each(attended, args), layout)
    assert gate(example.problem).check(found).failures == ()


# --- bytes sent -------------------------------------------------------------------------------------------------------


def sent(pattern: Pattern, tokens: int, kind: str, order: str) -> int:
    """Bytes that this rank sent in one forward pass."""
    mesh = Sharded(ring_ranks.group(), kind)
    link, _ = spread_of(mesh)
    local = part(mesh, tokens)
    attend(*local, pattern=pattern, mesh=mesh, order=order)
    link.transport.bytes_sent = 0
    attend(*local, pattern=pattern, mesh=mesh, order=order)
    return link.transport.bytes_sent


def test_only_needed_rows_are_sent(ranks: Ranks) -> None:
    """A window of 4 needs 4 rows of the rank before; k and v of [2, rows, 4, 8] float32."""
    row = 2 * 2 * 4 * 8 * 4
    for order in (RING, GATHER):
        assert ranks.everywhere(sent, Window(4, 0), 48, CONTIGUOUS, order, ranks=3) == [4 * row, 4 * row, 0]
    assert ranks.everywhere(sent, Dense(), 48, CONTIGUOUS, RING, ranks=3) == [2 * 16 * row] * 3
    assert ranks.everywhere(sent, Dilated((16,), (2,)), 48, CONTIGUOUS, LOCAL, ranks=3) == [0] * 3
