"""Observers of the problems that calls meet: how a run is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_dispatch import process_state
from attn_dispatch.decisions.decide import lock
from attn_dispatch.spec.problem import Problem

_observers: list[Callable[[Problem], None]] = []


def notify(problem: Problem) -> None:
    """Hand a problem to every observer."""
    for observer in _observers:
        observer(problem)


@contextmanager
def observing(observer: Callable[[Problem], None]) -> Iterator[None]:
    """Call `observer` with each problem that is met meanwhile, at least once."""
    with lock:
        _observers.append(observer)
        process_state.forget(process_state.ROUTES)
    try:
        yield
    finally:
        with lock:
            _observers.remove(observer)
