"""What a trial makes of a backend's failures: strikes, quarantines, and failures that are tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from attn_dispatch import attend, explain, register
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.store import quarantine
from attn_dispatch.store.quarantine import FIRST_HOLD, Entry, Quarantine
from attn_dispatch.tuning import candidates, guard
from tests.support.calls import forget, qkv, status
from tests.support.fakes import raising
from tests.support.planted import Planted, right

pytestmark = pytest.mark.usefixtures("short_trials")

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


class Clock:
    now = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(quarantine, "clock", lambda: found.now)
    monkeypatch.setattr(candidates, "utc_now", lambda: found.now.isoformat())
    return found


def is_tried(backend: Planted) -> bool:
    """Whether a later process tries the backend."""
    forget()
    before = backend.calls
    attend(*qkv(32))
    return backend.calls > before


def quarantined() -> Quarantine:
    return Quarantine(cache_folder(), silicon("cpu"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        *(pytest.param(each, marks=pytest.mark.full) for each in (OSError(24, ""), SystemExit(3), ValueError("no"))),
    ],
    ids=["threads", "files", "exit", "other"],
)
def test_failures_quarantine_nobody_and_are_tried_again(error: BaseException, clock: Clock) -> None:
    """After an hour, then after two, and so on up to a day."""
    backend = Planted(raising(error))
    register(backend)
    assert is_tried(backend)
    assert status(explain(*qkv(32)), "planted") == "failed"
    assert quarantined().entries() == []
    for hours in (1, 2, 4, 8, 16, 24, 24):
        clock.now += hours * HOUR - MINUTE
        assert not is_tried(backend)
        clock.now += MINUTE
        assert is_tried(backend)
    backend.compute = right
    clock.now += 24 * HOUR
    assert is_tried(backend)
    found = explain(*qkv(32))
    assert status(found, "planted") != "failed"
    assert found.choice == "planted" or not is_tried(backend)  # on a busy machine it may win


@pytest.mark.full
@pytest.mark.parametrize(
    ("free", "lies"),
    [((1, 1, 1, 1), True), ((1, 0), False), ((0, 1), False), ((1, 1, 1, 0), False), ((1, 1, 0, 1), False)],
    ids=str,
)
def test_memory_that_others_took(free: tuple[int, ...], lies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The declared bytes must be free before and after two calls that fail."""
    readings: Iterator[int] = iter(free)
    backend = Planted(raising(MemoryError()))
    monkeypatch.setattr(registry, "backends", lambda: [backend, registry.load("manual")])
    monkeypatch.setattr("attn_dispatch.machine.memory.available_bytes", lambda device: next(readings, 1) << 30)
    attend(*qkv(32))
    assert [entry.kind for entry in quarantined().entries()] == ["memory"] * lies
    assert status(explain(*qkv(32)), "planted") == ("quarantined" if lies else "failed")


def strike(kind: quarantine.Kind) -> None:
    where, text = silicon("cpu"), "a fault"
    quarantined().add(Entry(backend="planted", version="1", silicon=where, kind=kind, reason=text, title="x"))


@pytest.mark.parametrize("kind", ["died", "hung"])
def test_a_success_clears_strikes(kind: quarantine.Kind, clock: Clock) -> None:
    backend = Planted()
    register(backend)
    strike(kind)
    assert not is_tried(backend)
    clock.now += FIRST_HOLD
    assert len(quarantined().strikes()) == 1
    assert is_tried(backend)
    assert quarantined().strikes() == []


def test_a_failure_clears_none(clock: Clock) -> None:
    backend = Planted(raising(ValueError("no")))
    register(backend)
    strike("died")
    clock.now += FIRST_HOLD
    assert is_tried(backend)
    assert len(quarantined().strikes()) == 1


def test_a_hang_excludes_at_once_and_a_second_for_an_hour(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    register(Planted(name="b"))
    backend = Planted()
    register(backend)
    for hold in (FIRST_HOLD, HOUR):
        with monkeypatch.context() as patch:
            patch.setattr(guard, "run_at_once", lambda calls, limit_s: backend_hangs(calls, limit_s, backend))
            forget()
            attend(*qkv(32))
        (entry,) = quarantined().entries()
        assert (entry.backend, entry.until) == ("planted", clock.now + hold)
        clock.now += hold
        assert quarantined().entries() == []


def backend_hangs(calls: list[Callable[[], Any]], limit_s: float, backend: Planted) -> list[Any]:
    """Run calls; where they ran the backend, as if they did not return."""
    before = backend.calls
    results = [call() for call in calls]
    if backend.calls > before:
        raise guard.TimedOut(limit_s)
    return results
