"""Observers of the problems that calls meet: how a run is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_dispatch.decisions.decide import lock
from attn_dispatch.spec.problem import Problem

_observers: list[Callable[[Problem], None]] = []
_caches: list[Callable[[], None]] = []


def notify(problem: Problem) -> None:
    """Hand a problem to every observer."""
    for observer in _observers:
        observer(problem)


def clear_when_observed(clear: Callable[[], None]) -> None:
    """Have a cache that hides problems from observers cleared when one is added."""
    _caches.append(clear)


@contextmanager
def observing(observer: Callable[[Problem], None]) -> Iterator[None]:
    """Call `observer` with each problem that is met meanwhile, at least once."""
    with lock:
        _observers.append(observer)
        for clear in _caches:
            clear()
    try:
        yield
    finally:
        with lock:
            _observers.remove(observer)
