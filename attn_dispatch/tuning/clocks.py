"""Times one call by the host's clock, and says how long a sample has to be."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

Call = Callable[[], object]

_SHORTEST_SAMPLE_MS = 0.2
_MOST_REPEATS = 10_000


class Stopwatch(Protocol):
    """Takes samples of a call, in milliseconds."""

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        """Milliseconds per call of ``repeats`` calls in a row: the sample that candidates are compared by."""
        ...

    def host_ms(self, call: Call) -> float | None:
        """What the host needs to enqueue one call; None where the host does the work itself."""
        ...

    def cold_ms(self, call: Call) -> float | None:
        """One call whose data the L2 cache does not hold; None where that cannot be arranged."""
        ...


@dataclass(frozen=True)
class HostStopwatch:
    """By ``clock`` (seconds), after ``synchronize``; the garbage collector is off meanwhile."""

    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] = lambda: None

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        with collector_off():
            self.synchronize()
            start_s = self.clock()
            for _ in range(repeats):
                call()
            self.synchronize()
            return (self.clock() - start_s) * 1e3 / repeats

    def host_ms(self, call: Call) -> float | None:
        return None

    def cold_ms(self, call: Call) -> float | None:
        return None


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside; afterwards as it was."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def calibrate(stopwatch: Stopwatch, call: Call) -> tuple[int, float]:
    """Repeats that make a sample last 0.2 ms or more, and the mean milliseconds seen with them."""
    repeats, mean_ms = 1, stopwatch.mean_ms(call)
    while repeats * mean_ms < _SHORTEST_SAMPLE_MS and repeats < _MOST_REPEATS:
        wanted = 1.25 * _SHORTEST_SAMPLE_MS / mean_ms if mean_ms > 0.0 else math.inf
        # At most tenfold at a time, so that one reading of a coarse clock cannot ask for seconds of repeats.
        repeats = math.ceil(min(max(wanted, 2 * repeats), 10 * repeats, _MOST_REPEATS))
        mean_ms = stopwatch.mean_ms(call, repeats)
    return repeats, mean_ms
