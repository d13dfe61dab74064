"""Times calls by the host's clock, which waits for other devices, or by events on a CUDA device's stream.

An event is a time stamp taken by the device. On CUDA the calls of a sample are enqueued while the device is busy with
something else, so that they follow one another as in a model whose queue is ahead; what the host needs to enqueue them
is timed apart, and counts by `settings.host_share`. Samples have a warm cache: q, k and v are usually just written.
"""

from __future__ import annotations

import gc
import importlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_dispatch.machine.load import DISTURBED_PER_S, NO_LOAD, Load
from attn_dispatch.settings import host_share

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

SHORTEST_MS = 0.2  # shorter calls are repeated within one sample
_MAX_REPEATS = 10_000  # calls per sample
REST_S = 0.003  #: seconds of rest before a disturbed sample is taken again
RETAKES = 3  #: times that a disturbed sample is taken again at most
#: Milliseconds of a call on a CPU that may be one-time work, such as filling tables, or four ticks of the scheduler,
#: for which threads of a new pool may wait for one another.
ONE_TIME_MS = 17.0
LONGEST_DISTURBED_MS = 40.0  #: milliseconds that preemption may make of a call of microseconds

#: Calls per sample of the host's time: few, because the host waits for the device once the driver's queue is full.
HOST_REPEATS = 8
CYCLES_PER_MS = 2.0e6  #: of a device at its highest clock; at a lower one a lead is longer
LEAD_FACTOR = 2.0  #: ratio of a lead to the host's time
LONGEST_LEAD_MS = 40.0  #: past it there is none, and the device waits for the host between kernels
WAIT_SHARE = 0.8  #: share of a lead from which the host seems to have waited for its end
MOST_WAITS = 3  #: such samples in a row, after which a call gets no lead
PAUSE_S = 0.1  #: seconds without work after which a device's clocks may have fallen
WARM_S = 0.06  #: seconds of matrix products that raise them
WARM_SIZE = 2048  #: rows and columns of such a matrix
MOST_PRODUCTS = 1000  #: whatever the clock says


class Stopwatch:
    """Takes samples of a call, in milliseconds. `load` is what took place during all samples together."""

    load: Load = NO_LOAD
    shortest_ms: float = SHORTEST_MS  #: milliseconds of a sample, for which shorter calls are repeated

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        """Milliseconds per call over ``repeats`` calls in a row: the sample that candidates are compared by."""
        raise NotImplementedError

    def device_ms(self, call: Call) -> float | None:
        """Milliseconds of one call on the device, of the samples so far; None where the host does the work itself."""
        return None

    def host_ms(self, call: Call) -> float | None:
        """Milliseconds the host takes to enqueue one call, likewise."""
        return None


@dataclass
class HostStopwatch(Stopwatch):
    """A stopwatch by the host's ``clock`` (seconds), with the garbage collector off.

    Where other programs use the cores too, a short call is sampled again after a rest, for then the scheduler lets
    this process's threads run undisturbed for a few milliseconds.

    Args:
        reading: this process's load so far; None: disturbances are not noticed.
        finish: waits for what calls have given a device to do.
        rest: lets some seconds pass.
        retakes: times that a disturbed sample is taken again at most.
    """

    clock: Callable[[], float] = time.perf_counter
    reading: Callable[[], Load] | None = None
    rest: Callable[[float], None] = time.sleep
    retakes: int = RETAKES
    load: Load = NO_LOAD
    finish: Callable[[], object] = bool
    shortest_ms: float = SHORTEST_MS

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        mean_ms, disturbed = self._sample(call, repeats)
        left = self.retakes if mean_ms * repeats <= LONGEST_DISTURBED_MS else 0
        while disturbed and left:
            self.rest(REST_S)
            again_ms, disturbed = self._sample(call, 1)
            mean_ms, left = min(mean_ms, again_ms), left - 1
        return mean_ms

    def _sample(self, call: Call, repeats: int) -> tuple[float, bool]:
        """Mean milliseconds of a call, and whether other programs took cores from this process meanwhile."""
        with collector_off():
            before = NO_LOAD if self.reading is None else self.reading()
            self.finish()
            start_s = self.clock()
            for _ in range(repeats):
                call()
            self.finish()
            mean_ms = (self.clock() - start_s) * 1e3 / repeats
            beside = NO_LOAD if self.reading is None else self.reading().since(before)
        self.load = self.load.plus(beside)
        return mean_ms, beside.switches > DISTURBED_PER_S * beside.cpu_s


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
    """The number of repeats for a sample of `shortest_ms`, and the milliseconds of a call."""
    repeats, mean_ms = 1, stopwatch.mean_ms(call)
    while repeats * mean_ms < stopwatch.shortest_ms and repeats < _MAX_REPEATS:
        wanted = 1.25 * stopwatch.shortest_ms / mean_ms if mean_ms > 0.0 else math.inf
        # At most tenfold per step, so that one reading of a coarse clock cannot cause seconds of repeats.
        repeats = math.ceil(min(max(wanted, 2 * repeats), 10 * repeats, _MAX_REPEATS))
        mean_ms = stopwatch.mean_ms(call, repeats)
    return repeats, mean_ms


@dataclass
class Lead:
    """How long a CUDA device is kept busy before a sample of one call, so that the host enqueues the call meanwhile.

    A call that waits for the device itself cannot be enqueued meanwhile: it gets no lead once that is certain.

    Args:
        host_ms: milliseconds the host needs to enqueue a call. Unknown, there is no lead.
        waits: samples in a row in which the host seems to have waited for the device.
    """

    host_ms: float = math.inf
    waits: int = 0

    def for_calls(self, repeats: int) -> float:
        """Milliseconds of the lead of a sample of ``repeats`` calls; 0 where that would be long."""
        lead_ms = LEAD_FACTOR * self.host_ms * repeats
        return lead_ms if lead_ms <= LONGEST_LEAD_MS and self.waits < MOST_WAITS else 0.0

    def is_valid(self, sample: CudaSample, repeats: int) -> bool:
        """Whether the lead of a sample was long enough, or there was none; notes the host's time."""
        if 0 < WAIT_SHARE * sample.lead_ms <= sample.mean_host_ms * repeats:
            self.waits += 1
            self.host_ms = sample.mean_host_ms  # it may also have become slower
            return False
        if sample.lead_ms > 0:
            self.waits = 0
        self.host_ms = min(self.host_ms, sample.mean_host_ms)
        return True


class CudaSample(NamedTuple):
    """Milliseconds of a call on the device and, to enqueue it, on the host; and the lead before the sample.

    The host's are the median of single calls, and their mean.
    """

    device_ms: float
    host_ms: float
    lead_ms: float
    mean_host_ms: float


def cuda_sample(
    device: torch.device,
    call: Call,
    repeats: int = 1,
    lead_ms: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CudaSample:
    """Time ``repeats`` calls on the current stream, by events of the device and by the host's clock.

    Where the device is idle it waits for the host between kernels, which a model whose queue is ahead does not: a lead
    of ``lead_ms`` milliseconds keeps it busy while the calls are enqueued.
    """
    cuda: Any = importlib.import_module("torch.cuda")
    few = min(repeats, HOST_REPEATS)
    with collector_off(), cuda.device(device):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        if lead_ms > 0.0:
            cuda._sleep(int(lead_ms * CYCLES_PER_MS))
        start.record()
        times = [clock()]
        for _ in range(few):
            call()
            times.append(clock())
        for _ in range(repeats - few):
            call()
        end.record()
        cuda.synchronize()
        # The first call after a wait takes the host several times as long as the next ones.
        host_ms = statistics.median(after - before for before, after in pairwise(times)) * 1e3
        mean_ms = (times[-1] - times[0]) * 1e3 / few
        return CudaSample(start.elapsed_time(end) / repeats, host_ms, lead_ms, mean_ms)


class CudaStopwatch(Stopwatch):
    """A stopwatch by CUDA events on the device's current stream.

    A sample is the device's time, and a share of what the host takes longer, which a queue hides in part. Before the
    first sample, and after a pause, the device multiplies matrices until its clocks are those of work.
    """

    #: Milliseconds of a sample: the first call after a wait for the device takes the host up to three times as long.
    shortest_ms: float = 4.0

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter, *, warms: bool = True
    ) -> None:
        self.warms = warms  #: unless what runs between samples does
        self._device, self._clock = device, clock
        self._torch: Any = importlib.import_module("torch")
        self._worked_s = -math.inf  # when the device last worked
        self._leads: defaultdict[Call, Lead] = defaultdict(Lead)
        self._samples: defaultdict[Call, list[CudaSample]] = defaultdict(list)

    def mean_ms(self, call: Call, repeats: int = 1) -> float:
        """Milliseconds per call: the device's time, and `host_share` of what the host's is longer."""
        sample = self._sample(call, repeats)
        self._samples[call].append(sample)
        return sample.device_ms + host_share() * max(0.0, sample.host_ms - sample.device_ms)

    def device_ms(self, call: Call) -> float | None:
        """Milliseconds of one call on the device, the median of the samples so far; None without any."""
        return self._median(call, "device_ms")

    def host_ms(self, call: Call) -> float | None:
        """Milliseconds to enqueue one call, likewise, of up to :data:`HOST_REPEATS` calls in a sample."""
        return self._median(call, "host_ms")

    def warm(self) -> None:
        """Let the device multiply matrices for `WARM_S` seconds, unless it worked in the last `PAUSE_S`.

        Idle devices lower their clocks, by up to five times, and take some ten milliseconds to raise them.
        """
        if not self.warms or self._clock() - self._worked_s <= PAUSE_S:
            return
        cuda = self._torch.cuda
        with suppress(RuntimeError), cuda.device(self._device):  # no memory for it, or torch's settings refuse products
            size, kind = (WARM_SIZE, WARM_SIZE), self._torch.float32
            a, b = (self._torch.ones(size, dtype=kind, device=self._device) for _ in range(2))
            end_s = self._clock() + WARM_S
            for _ in range(MOST_PRODUCTS):
                self._torch.mm(a, a, out=b)
                cuda.synchronize()
                if self._clock() >= end_s:
                    break
        self._worked_s = self._clock()

    def _sample(self, call: Call, repeats: int) -> CudaSample:
        lead = self._leads[call]
        while True:
            self.warm()
            found = cuda_sample(self._device, call, repeats, lead.for_calls(repeats), self._clock)
            idle = found.host_ms * repeats > PAUSE_S * 1e3  # the host compiled or planned meanwhile
            self._worked_s = -math.inf if idle else self._clock()
            if lead.is_valid(found, repeats):
                return found

    def _median(self, call: Call, name: str) -> float | None:
        """One number of a call's samples; without the first, which may hold one-time work, if there are others."""
        found = self._samples[call]
        times = [getattr(sample, name) for sample in found[1:] or found]
        return statistics.median(times) if times else None
