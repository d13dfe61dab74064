"""Observers are called with the problem of each attend() call; `record` uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_dispatch import process_state
from attn_dispatch.decisions.decide import lock
from attn_dispatch.spec.problem import Problem

_observers: list[Callable[[Problem], None]] = []


def notify(problem: Problem) -> None:
    """Call every observer with a problem."""
    for observer in tuple(_observers):
        observer(problem)


@contextmanager
def observing(observer: Callable[[Problem], None]) -> Iterator[None]:
    """Call `observer` with each problem of a call inside the block, at least once per problem."""
    with lock:
        _observers.append(observer)
        process_state.forget(process_state.ROUTES)
    try:
        yield
    finally:
        with lock:
            _observers.remove(observer)
