"""Observers of the problems that calls meet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_dispatch.decisions.decide import lock
from attn_dispatch.dispatch import _routes
from attn_dispatch.spec.problem import Problem

_observers: list[Callable[[Problem], None]] = []


@contextmanager
def observing(observer: Callable[[Problem], None]) -> Iterator[None]:
    """Tell `observer` each problem that is met meanwhile, at least once."""
    with lock:
        _observers.append(observer)
        _routes.clear()  # what was met before must be seen again
        if "attn_dispatch.ring.link" in sys.modules:
            sys.modules["attn_dispatch.ring.link"].forget()
    try:
        yield
    finally:
        with lock:
            _observers.remove(observer)
