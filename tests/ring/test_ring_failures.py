"""Ranks that fail in a trial, a call or a backward pass: no other rank waits or uses incomplete gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, shard
from attn_dispatch.errors import BackendFailed
from attn_dispatch.ring.engine.passes import RingCall
from attn_dispatch.ring.engine.steps import Step
from attn_dispatch.spec.orders import GATHER, RING
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.decision import Row
from tests.support import ring_ranks
from tests.support.calls import close, formula
from tests.support.ring_calls import nothing, part, tensors
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("short_trials")

SIZE = 3


@contextmanager
def planted(fault: Callable[[], object]) -> Iterator[None]:
    """Call `fault` before each step on rows of several other ranks."""
    forward = RingCall._forward_step

    def faulty(self: RingCall, step: Step, *args: Any) -> None:
        if len(step.receives) > 1:
            fault()
        forward(self, step, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RingCall, "_forward_step", faulty)
        yield


@contextmanager
def planted_early(fault: Callable[[], object], name: str = "_forward_step") -> Iterator[None]:
    """Call `fault` instead of each step, the first included, while rows are still to be sent."""
    with pytest.MonkeyPatch.context() as patch:
        if fault is not nothing:
            patch.setattr(RingCall, name, lambda *_: fault())
        yield


def raises() -> None:
    raise ValueError("planted")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted")


def no_memory() -> None:
    raise MemoryError("planted")


def is_slow() -> None:
    time.sleep(0.3)


def tried(fault: Callable[[], object], plant: Any = planted) -> tuple[str, dict[str, Row], bool]:
    """A job: the choice of a trial, its rows by order, and whether the result is right."""
    mesh = ring_ranks.group()
    with plant(fault):
        out = attend(*part(mesh), mesh=mesh)
    found = explain(*part(mesh), mesh=mesh)
    return str(found.order), {row.order: row for row in found.candidates}, _right(out)


def _right(out: Tensor) -> bool:
    """Whether it is this rank's shard of attention to `tensors`."""
    expected, _ = formula(*tensors(), Dense())
    return close(out, shard(expected, ring_ranks.group()))


@pytest.mark.parametrize("fault", [raises, out_of_memory, no_memory])
def test_a_candidate_that_fails_on_one_rank_is_ruled_out_on_all(ranks: Ranks, fault: Callable[[], object]) -> None:
    found = ranks.each(tried, [(nothing,), (fault,), (nothing,)])
    assert [order for order, _, _ in found] == [RING] * SIZE
    assert all(right for _, _, right in found)
    for _, rows, _ in found:
        assert rows[GATHER].status == "failed"
        assert rows[GATHER].reason.startswith("rank 1: ")
        assert "planted" in rows[GATHER].reason
        assert rows[RING].status == "chosen"


def test_a_candidate_that_fails_everywhere_leaves_the_others(ranks: Ranks) -> None:
    for _, rows, right in ranks.everywhere(tried, raises, ranks=SIZE):
        assert right
        assert all(f"rank {rank}: ValueError: planted" in rows[GATHER].reason for rank in range(SIZE))


def test_the_slowest_rank_counts(ranks: Ranks) -> None:
    found = ranks.each(tried, [(nothing,), (nothing,), (is_slow,)])
    for order, rows, right in found:
        assert order == RING
        assert right
        assert (rows[GATHER].median_ms or 0.0) >= 300.0
    assert found[0][1] == found[1][1] == found[2][1]


def failing(fault: Callable[[], object], order: str, plant: Any) -> tuple[Any, bool]:
    """A job: the error of a call with the fault, if any, and whether the next call is right."""
    mesh, error = ring_ranks.group(), None
    attend(*part(mesh), mesh=mesh, order=order)
    with plant(fault):
        try:
            attend(*part(mesh), mesh=mesh, order=order, scale=0.5)
        except BackendFailed as raised:
            error = str(raised)
    return error, _right(attend(*part(mesh), mesh=mesh, order=order))


@pytest.mark.parametrize(
    ("fault", "order", "plant"),
    [(raises, GATHER, planted), (no_memory, RING, planted_early)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_kernel_that_fails_on_one_rank_stops_no_other_rank(
    ranks: Ranks, fault: Callable[[], object], order: str, plant: Any, set_mode: Any
) -> None:
    set_mode("off")
    found = ranks.each(failing, [(nothing, order, plant), (fault, order, plant), (nothing, order, plant)])
    assert [right for _, right in found] == [True] * SIZE
    assert found[0][0] is found[2][0] is None
    assert f"ring ({order}) failed on rank 1 on [2, 48, 4, 8]" in found[1][0]
    assert found[1][0].endswith("Error: planted")


def failing_in_training(fault: Callable[[], object]) -> tuple[Any, bool]:
    """A job: the error of a forward pass with gradients, and whether the next call is right."""
    mesh, error = ring_ranks.group(), None
    attend(*part(mesh, grads="qkv"), mesh=mesh, order=RING)
    with planted_early(fault):
        try:
            attend(*part(mesh, grads="qkv"), mesh=mesh, order=RING, scale=0.5).sum().backward()
        except BackendFailed as raised:
            error = str(raised)
    return error, _right(attend(*part(mesh), mesh=mesh, order=RING))


def test_no_backward_pass_after_a_rank_has_failed(ranks: Ranks, set_mode: Any) -> None:
    set_mode("off")
    found = ranks.each(failing_in_training, [(nothing,), (raises,)])
    assert [right for _, right in found] == [True] * 2
    assert found[0][0].endswith("rank 1 of the mesh failed in this call, and gradients need every rank")
    assert "planted" in found[1][0]


def failing_backward(fault: Callable[[], object], order: str) -> tuple[Any, bool, bool]:
    """A job: the error of a backward pass, whether it gave gradients, and whether the next call is right."""
    mesh, local, error = ring_ranks.group(), part(ring_ranks.group(), grads="qkv"), None
    out = attend(*local, mesh=mesh, order=order)
    with planted_early(fault, "_backward_step"):
        try:
            out.sum().backward()
        except (ValueError, BackendFailed) as raised:
            error = str(raised)
    return error, any(x.grad is not None for x in local), _right(attend(*part(mesh), mesh=mesh, order=order))


@pytest.mark.parametrize("order", [RING, GATHER])
def test_a_backward_pass_that_fails_on_one_rank_gives_no_gradients_on_any(
    ranks: Ranks, order: str, set_mode: Any
) -> None:
    """Gradients of other ranks' keys would lack the part of the failed rank's queries."""
    set_mode("off")
    others = ("rank 1 of the mesh failed in this call, and gradients need every rank", False, True)
    expected = [others, ("planted", False, True), others]
    assert ranks.each(failing_backward, [(nothing, order), (raises, order), (nothing, order)]) == expected
