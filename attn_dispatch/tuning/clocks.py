"""Times calls by the host's clock, or by events on a CUDA device's stream.

An event is a time stamp taken by the device, so a sample includes neither the host's clock nor waiting for it. Where
the host enqueues more slowly than the device works, a sample includes the gaps, as a user's call does; `host_ms` is
their share. Samples have a warm cache by default, since q, k and v are usually just written when attention is called;
`cold_ms` has a flushed L2 cache, as in Triton's `do_bench` and CUTLASS's profiler.

On a CPU that other programs use too, a short call is sampled again after a rest, for then the scheduler lets this
process's threads run undisturbed for a few milliseconds. Longer calls are all slowed down alike.
"""

from __future__ import annotations

import gc
import importlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from attn_dispatch.machine.load import DISTURBED_PER_S, NO_LOAD, Load

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

_SHORTEST_SAMPLE_MS = 0.2  # shorter calls are repeated within one sample
_MAX_REPEATS = 10_000  # calls per sample
REST_S = 0.003  #: seconds of rest before a disturbed sample is taken again
RETAKES = 3  #: times that a disturbed sample is taken again at most
BURST = 6  #: calls after a rest, of which the fastest counts
SLICE_MS = 5.0  #: milliseconds for which rested threads may run undisturbed, at most
MOST_FAILURES = 3  #: samples disturbed in all retakes, after which a call counts as one that never ends in time
LONGEST_DISTURBED_MS = 40.0  #: milliseconds that preemption may make of a call of microseconds

#: Calls per sample of the host's time: few, because the host waits for the device once the driver's queue is full.
HOST_REPEATS = 8
UNKNOWN_L2_BYTES = 128 * 2**20  #: L2 size assumed where PyTorch gives none; more than any device has today


class Stopwatch(Protocol):
    """Takes samples of a call, in milliseconds. `load` is what took place during all samples together."""

    @property
    def load(self) -> Load: ...

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        """Milliseconds per call over ``repeats`` calls in a row: the sample that candidates are compared by."""
        ...

    def host_ms(self, call: Call) -> float | None:
        """Milliseconds the host takes to enqueue one call; None where the host does the work itself."""
        ...

    def cold_ms(self, call: Call) -> float | None:
        """Milliseconds of one call with a flushed L2 cache; None where it cannot be flushed."""
        ...


@dataclass
class HostStopwatch:
    """A stopwatch by the host's ``clock`` (seconds) after ``synchronize``, with the garbage collector off.

    Args:
        reading: this process's load so far; None: disturbances are not noticed.
        rest: lets some seconds pass.
        retakes: times that a disturbed sample is taken again at most.
    """

    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] = lambda: None
    reading: Callable[[], Load] | None = None
    rest: Callable[[float], None] = time.sleep
    retakes: int = RETAKES
    load: Load = NO_LOAD
    # How often all retakes of a call were disturbed too; -inf once one was not: it can end within a slice.
    _failures: defaultdict[Call, float] = field(default_factory=lambda: defaultdict[Call, float](float))

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        mean_ms, disturbed = self._sample(call, repeats)
        if not disturbed or self._failures[call] >= MOST_FAILURES or mean_ms * repeats > LONGEST_DISTURBED_MS:
            return mean_ms
        for _ in range(self.retakes):
            self.rest(REST_S)
            again_ms, disturbed = self._burst(call)
            mean_ms = min(mean_ms, again_ms)
            if not disturbed:
                self._failures[call] = -math.inf
                return mean_ms
        self._failures[call] += 1
        return mean_ms

    def _burst(self, call: Call) -> tuple[float, bool]:
        """The fastest of a few calls, one by one until a slice is over, and whether all of them were disturbed.

        The first ones wake the threads of the pool.
        """
        fastest_ms, spent_ms, all_disturbed = math.inf, 0.0, True
        for _ in range(BURST):
            call_ms, disturbed = self._sample(call, 1)
            fastest_ms, spent_ms = min(fastest_ms, call_ms), spent_ms + call_ms
            all_disturbed = all_disturbed and disturbed
            if spent_ms > SLICE_MS:
                break
        return fastest_ms, all_disturbed

    def _sample(self, call: Call, repeats: int) -> tuple[float, bool]:
        """Mean milliseconds of a call, and whether other programs took cores from this process meanwhile."""
        with collector_off():
            self.synchronize()
            before = None if self.reading is None else self.reading()
            start_s = self.clock()
            for _ in range(repeats):
                call()
            self.synchronize()
            mean_ms = (self.clock() - start_s) * 1e3 / repeats
            if before is None or self.reading is None:
                return mean_ms, False
            beside = self.reading().since(before)
        self.load = self.load.plus(beside)
        return mean_ms, beside.switches > DISTURBED_PER_S * beside.cpu_s

    def host_ms(self, call: Call) -> float | None:
        return None

    def cold_ms(self, call: Call) -> float | None:
        return None


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn the garbage collector off inside, and back on afterwards where it was on."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def calibrate(stopwatch: Stopwatch, call: Call) -> tuple[int, float]:
    """Find how many repeats make a sample last 0.2 ms or more; that number, and the mean milliseconds of a call."""
    repeats, mean_ms = 1, stopwatch.mean_ms(call)
    while repeats * mean_ms < _SHORTEST_SAMPLE_MS and repeats < _MAX_REPEATS:
        wanted = 1.25 * _SHORTEST_SAMPLE_MS / mean_ms if mean_ms > 0.0 else math.inf
        # At most tenfold per step, so that one reading of a coarse clock cannot cause seconds of repeats.
        repeats = math.ceil(min(max(wanted, 2 * repeats), 10 * repeats, _MAX_REPEATS))
        mean_ms = stopwatch.mean_ms(call, repeats)
    return repeats, mean_ms


class CudaStopwatch:
    """A :class:`~attn_dispatch.tuning.clocks.Stopwatch` by CUDA events on the device's current stream.

    Allocates a buffer of twice the L2 cache at the first :meth:`cold_ms` and keeps it.
    """

    load = NO_LOAD

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._torch: Any = importlib.import_module("torch")
        self._buffer: Any = None

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        """Milliseconds per call between two events around ``repeats`` calls."""
        return self._between_events(call, repeats, lambda: None)

    def host_ms(self, call: Call) -> float | None:
        """Milliseconds to enqueue one call, the mean of :data:`HOST_REPEATS` calls that start on an idle device."""
        cuda = self._torch.cuda
        with collector_off(), cuda.device(self._device):
            cuda.synchronize()
            start_s = self._clock()
            for _ in range(HOST_REPEATS):
                call()
            elapsed_s = self._clock() - start_s
            cuda.synchronize()
        return elapsed_s * 1e3 / HOST_REPEATS

    def cold_ms(self, call: Call) -> float | None:
        """Milliseconds of one call after overwriting a buffer of twice the L2 cache; None without memory for it."""
        if self._buffer is None:
            with suppress(self._torch.OutOfMemoryError):
                size = 2 * self._l2_bytes()
                self._buffer = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        return None if self._buffer is None else self._between_events(call, 1, self._buffer.zero_)

    def _between_events(self, call: Call, repeats: int, before: Call) -> float:
        cuda = self._torch.cuda
        with collector_off(), cuda.device(self._device):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda.synchronize()
            before()
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            cuda.synchronize()
            elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms / repeats

    def _l2_bytes(self) -> int:
        known = getattr(self._torch.cuda.get_device_properties(self._device), "L2_cache_size", 0)
        return int(known) or UNKNOWN_L2_BYTES
