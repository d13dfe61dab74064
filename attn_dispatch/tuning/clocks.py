"""Times calls by the host's clock, or by events on a CUDA device's stream.

An event is a time stamp taken by the device, so a sample includes neither the host's clock nor waiting for it. Where
the host enqueues more slowly than the device works, a sample includes the gaps, as a user's call does; `host_ms` is
their share. Samples have a warm cache by default, since q, k and v are usually just written when attention is called;
`cold_ms` has a flushed L2 cache, as in Triton's `do_bench` and CUTLASS's profiler.
"""

from __future__ import annotations

import gc
import importlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

_SHORTEST_SAMPLE_MS = 0.2  # shorter calls are repeated within one sample
_MAX_REPEATS = 10_000  # calls per sample

#: Calls per sample of the host's time: few, because the host waits for the device once the driver's queue is full.
HOST_REPEATS = 8
UNKNOWN_L2_BYTES = 128 * 2**20  #: L2 size assumed where PyTorch gives none; more than any device has today


class Stopwatch(Protocol):
    """Takes samples of a call, in milliseconds."""

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        """Milliseconds per call over ``repeats`` calls in a row: the sample that candidates are compared by."""
        ...

    def host_ms(self, call: Call) -> float | None:
        """Milliseconds the host takes to enqueue one call; None where the host does the work itself."""
        ...

    def cold_ms(self, call: Call) -> float | None:
        """Milliseconds of one call with a flushed L2 cache; None where it cannot be flushed."""
        ...


@dataclass(frozen=True)
class HostStopwatch:
    """A stopwatch by the host's ``clock`` (seconds) after ``synchronize``, with the garbage collector off."""

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
