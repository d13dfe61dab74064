"""Ranks that crash, hang or make no call: every other rank raises RankLost within the time-out, at every later call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attn_dispatch import Sharded, attend
from attn_dispatch.errors import RankLost
from attn_dispatch.ring.engine.passes import RingCall
from attn_dispatch.ring.shards import spread_of
from attn_dispatch.spec.orders import GATHER, RING
from tests.support import ring_ranks
from tests.support.pairwise import thinned
from tests.support.ring_calls import part, tensors
from tests.support.ring_ranks import Exited, Ranks

TIMEOUT_S = 3.0  #: of the process group


@pytest.fixture
def three(set_mode: Callable[[str], None]) -> Iterator[Ranks]:
    """Processes for one test; the last one is lost in it."""
    set_mode("off")
    made = Ranks(3, TIMEOUT_S)
    try:
        made.everywhere(warmed)
        yield made
    finally:
        made.close()


def warmed() -> None:
    """A job: load everything that a first call loads, before ranks wait for one another."""
    attend(*tensors())
    spread_of(ring_ranks.group())


def survived(fault: int, passing: str, order: str | None) -> list[tuple[str, float]]:
    """A job: the errors of two calls, with their seconds, while the last rank sends itself a signal.

    Args:
        passing: the pass in which the signal is sent, "forward" or "backward".
    """
    mesh = Sharded(ring_ranks.group(), "zigzag")
    attend(*part(mesh, grads="q"), mesh=mesh, order=order).sum().backward()
    _signalled(fault, passing)
    found = []
    for _ in range(2):
        start = time.perf_counter()
        try:
            attend(*part(mesh, grads="q"), mesh=mesh, order=order).sum().backward()
            found.append(("nothing", 0.0))
        except RankLost as error:
            found.append((str(error), time.perf_counter() - start))
    return found


def _signalled(fault: int, passing: str) -> None:
    """From now on the last rank sends itself a signal when it computes on rows of other ranks."""
    if ring_ranks.rank() < 2:
        return
    name = f"_{passing}_step"
    step_of = getattr(RingCall, name)

    def faulty(self: RingCall, step: Any, *args: Any) -> None:
        if step.receives:
            os.kill(os.getpid(), fault)
        step_of(self, step, *args)

    setattr(RingCall, name, faulty)


@thinned(
    ("fault", "passing", "order"),
    [
        (signal.SIGKILL, "forward", RING),
        (signal.SIGKILL, "backward", GATHER),
        (signal.SIGSTOP, "forward", GATHER),
        (signal.SIGSTOP, "backward", RING),
    ],
    4,
    str,
)
def test_a_rank_that_is_lost_during_a_call(three: Ranks, fault: int, passing: str, order: str) -> None:
    killed = fault == signal.SIGKILL
    found = three.outcomes(survived, [(fault, passing, order)] * 3, but=[] if killed else [2])
    assert found[2] == (Exited(-signal.SIGKILL, "") if killed else None)
    for first, second in found[:2]:
        for error, seconds in (first, second):
            assert "a rank of the mesh is gone, or did not answer in time" in error
            assert seconds < TIMEOUT_S + 10  # far from the minutes that a process group waits by default
