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
from attn_dispatch.spec.orders import GATHER, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.decision import Row
from tests.support import ring_ranks
from tests.support.calls import close, formula
from tests.support.ring_calls import nothing, part, tensors
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("short_trials")

SIZE = 3


@contextmanager
def planted(fault: Callable[[], object], name: str = "_forward_step", early: bool = False) -> Iterator[None]:
    """Call `fault` before each step on rows of several other ranks; `early`: before each step, while rows are still to
    be sent.
    """
    original = getattr(RingCall, name)

    def faulty(self: RingCall, step: Step, *args: Any) -> None:
        if early or len(step.receives) > 1:
            fault()
        original(self, step, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RingCall, name, faulty)
        yield


def raises() -> None:
    raise ValueError("planted")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted")


def no_memory() -> None:
    raise MemoryError("planted")


def is_slow() -> None:
    time.sleep(0.3)


def tried(fault: Callable[[], object]) -> tuple[str, dict[str, Row], bool]:
    """A job: the choice of a trial, its rows by order, and whether the result is right."""
    mesh = ring_ranks.group()
    with planted(fault):
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


def failing(fault: Callable[[], object], passing: str, order: str, early: bool) -> tuple[Any, bool, bool]:
    """A job: the error of a call with the fault, whether it gave gradients, and whether the next call is right."""
    mesh, error = ring_ranks.group(), None
    attend(*part(mesh), mesh=mesh, order=order)
    local = part(mesh, grads="" if passing == "inference" else "qkv")
    with planted(fault, "_backward_step" if passing == "backward" else "_forward_step", early):
        try:
            out = attend(*local, mesh=mesh, order=order, scale=0.5)
            if passing != "inference":
                out.sum().backward()
        except (ValueError, BackendFailed) as raised:
            error = str(raised)
    right = _right(attend(*part(mesh), mesh=mesh, order=order))
    return error, any(x.grad is not None for x in local), right


@pytest.mark.parametrize(
    ("fault", "passing", "order", "early"),
    [
        (raises, "inference", GATHER, False),
        (no_memory, "inference", RING, True),
        (raises, "forward", RING, True),
        (raises, "backward", RING, True),
        (raises, "backward", GATHER, True),
        (raises, "inference", ULYSSES, True),
        (raises, "backward", ULYSSES, True),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_rank_that_fails_stops_no_other_rank_and_no_rank_has_gradients(
    ranks: Ranks, fault: Callable[[], object], passing: str, order: str, early: bool, set_mode: Any
) -> None:
    """Gradients of other ranks' keys would lack the part of the failed rank's queries."""
    set_mode("off")
    faults = (nothing, fault, nothing)[: 2 if order == ULYSSES else SIZE]  # 4 heads
    found = ranks.each(failing, [(each, passing, order, early) for each in faults])
    for rank, (error, has_gradients, right) in enumerate(found):
        assert (has_gradients, right) == (False, True)
        if rank == 1:
            assert error.endswith("planted")
            assert passing == "backward" or f"ring ({order}) failed on rank 1 on [2, 48, 4, 8]" in error
        elif passing == "inference" and order != ULYSSES:
            assert error is None
        else:
            assert error.endswith("rank 1 of the mesh failed in this call, which needs every rank")
