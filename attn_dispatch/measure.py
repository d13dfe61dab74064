"""Times callables in turns and measures their peak memory.

Nothing here knows of attention. Every interval is distribution-free: it assumes no shape of the noise.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import random
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_SHORTEST_SAMPLE_MS = 0.2
_MOST_REPEATS = 10_000
_FEWEST_FOR_95 = 6
CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Interval:
    """A closed interval, in the unit of the samples it was made from."""

    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """What was seen of one candidate.

    ``samples_ms[i]`` was taken in round ``i``, next to sample ``i`` of every other candidate of the same
    :func:`time_in_turns`. ``first_ms`` is the very first call, which may include planning and compilation.
    Raises :class:`ValueError` without samples or with a NaN among them.
    """

    samples_ms: tuple[float, ...]
    first_ms: float

    def __post_init__(self) -> None:
        if not self.samples_ms or any(map(math.isnan, self.samples_ms)):
            raise ValueError("samples_ms must hold at least one sample and no NaN")

    @property
    def median_ms(self) -> float:
        """Median of the samples, in milliseconds."""
        return statistics.median(self.samples_ms)

    @property
    def low_ms(self) -> float:
        """Lower end of the 95 % :func:`median_interval`, in milliseconds; of fewer than 6 samples, the smallest."""
        return median_interval(self.samples_ms).low

    @property
    def high_ms(self) -> float:
        """Upper end of the 95 % :func:`median_interval`, in milliseconds; of fewer than 6 samples, the largest."""
        return median_interval(self.samples_ms).high


@dataclass(frozen=True)
class Turns:
    """What :func:`time_in_turns` saw.

    ``timings`` holds every candidate that never failed, in the given order. ``failures`` holds the exception that
    ended a candidate. ``dropped`` holds the ratio to the fastest at which a candidate was dropped as hopeless, and
    ``cold`` those of them whose only sample is the first call, since the budget was gone. ``rounds`` counts the
    rounds that the survivors finished; ``elapsed_s`` is the time that all of it took, in seconds.
    """

    timings: dict[str, Timing]
    failures: dict[str, Exception]
    dropped: dict[str, float]
    rounds: int
    elapsed_s: float
    cold: frozenset[str] = frozenset()


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Interval that covers the median of the samples' distribution with at least ``confidence``.

    The ends are order statistics, by inversion of the sign test, so coverage is exact for any continuous
    distribution (Conover, *Practical Nonparametric Statistics*, 3rd ed., section 3.2). Too few samples, which is
    fewer than 6 at 95 %, have no such interval: theirs is the smallest to the largest sample, which covers less.
    Raises :class:`ValueError` without samples or for a confidence outside (0, 1).
    """
    if not samples or not 0.0 < confidence < 1.0:
        raise ValueError("median_interval needs at least one sample and a confidence between 0 and 1")
    ordered, n = sorted(samples), len(samples)
    outside = (1.0 - confidence) / 2 * 2**n
    rank = sum(count <= outside for count in accumulate(math.comb(n, k) for k in range(n))) or 1
    return Interval(ordered[rank - 1], ordered[-rank])


def ratio_interval(candidate: Timing, baseline: Timing) -> Interval:
    """95 % interval of the median of candidate / baseline, paired round by round over the rounds they share.

    Drift that both meet alike cancels out. Without a shared round it is (0, inf), with fewer than 6 it spans all.
    """
    ratios = _paired_ratios(candidate, baseline)
    return median_interval(ratios) if ratios else Interval(0.0, math.inf)


def faster(candidate: Timing, baseline: Timing, margin: float = 0.02) -> bool:
    """Whether :func:`ratio_interval` lies wholly below ``1 - margin``.

    Fewer than 6 shared rounds have no 95 % interval. Then every ratio must lie below ``1 - guard``, where the guard
    is the margin, but no less than 0.02, doubled for each round short of 6: with the default 0.04 at 5 rounds and
    0.64 at a single one. Equal candidates pass by sign alone with probability 2**-n, which the guard makes up for.

    At 25 rounds and independent normal noise of 3 % per sample, a candidate 5 % faster passes with probability 0.80
    and one 6 % faster with 0.96 (simulated), an equal one with less than 0.001.
    """
    shared = len(_paired_ratios(candidate, baseline))
    guard = margin if shared >= _FEWEST_FOR_95 else max(margin, 0.02) * 2 ** (_FEWEST_FOR_95 - shared)
    return ratio_interval(candidate, baseline).high < 1.0 - guard


def _paired_ratios(candidate: Timing, baseline: Timing) -> list[float]:
    return [_ratio(*pair) for pair in zip(candidate.samples_ms, baseline.samples_ms, strict=False)]


def _ratio(value: float, reference: float) -> float:
    """``value / reference``, where a clock too coarse to see either gives 1 and inf instead of an error."""
    if reference > 0.0:
        return value / reference
    return math.inf if value > reference else 1.0


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    budget_s: float | None,
    min_rounds: int = 5,
    max_rounds: int = 25,
    hopeless: float | None = 4.0,
    target: float = 0.02,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    keep: Collection[str] = (),
    first_ms: Mapping[str, float] | None = None,
) -> Turns:
    """Time the calls against one another, every survivor once per round in a shuffled order.

    Each call runs once in the given order, unless ``first_ms`` has the milliseconds of its first call already.
    Round 0 warms up: it finds how many repeats make a
    sample last 0.2 ms or more (a sample is their mean), and whoever is then over ``hopeless`` times slower than the
    fastest is dropped, save for the names in ``keep``. Rounds go on until the next would exceed ``budget_s``
    seconds (None: no limit), until ``max_rounds``, or until after ``min_rounds`` the interval of every survivor has
    a half-width below ``target`` of its median.

    Round 0 runs whatever the budget, but once that is gone, those that were hopeless by their first call are
    dropped on it alone. ``synchronize`` runs before ``clock`` (seconds) is read; the garbage collector is off
    meanwhile. The same clock, calls and ``seed`` give the same result.

    An :class:`Exception` of a call ends that candidate only; others, such as KeyboardInterrupt, propagate. Raises
    :class:`ValueError` for ``max_rounds`` below 1 or ``hopeless`` below 1.
    """
    if max_rounds < 1 or (hopeless is not None and hopeless < 1.0):
        raise ValueError("max_rounds and hopeless must be at least 1")
    start_s = clock()
    limit_s, ratio = math.inf if budget_s is None else budget_s, math.inf if hopeless is None else hopeless
    stopwatch = _Stopwatch(clock, synchronize or (lambda: None))
    race = _Race(stopwatch, start_s + limit_s, ratio, keep, random.Random(seed))
    race.run_first_calls(calls, first_ms or {})
    race.run_warm_round()
    while race.rounds < max_rounds and race.next_round_fits():
        if race.rounds >= min_rounds and race.settled(target):
            break
        race.run_round()
    return Turns(race.timings(), race.failures, race.dropped, race.rounds, clock() - start_s, race.cold)


@dataclass(frozen=True)
class _Stopwatch:
    clock: Callable[[], float]
    synchronize: Callable[[], None]

    def mean_ms(self, call: Callable[[], object], repeats: int = 1) -> float:
        collecting = gc.isenabled()
        gc.disable()
        try:
            self.synchronize()
            start_s = self.clock()
            for _ in range(repeats):
                call()
            self.synchronize()
            return (self.clock() - start_s) * 1e3 / repeats
        finally:
            if collecting:
                gc.enable()

    def calibrate(self, call: Callable[[], object]) -> tuple[int, float]:
        """Repeats that make a sample long enough, and the mean milliseconds seen with them."""
        repeats, mean_ms = 1, self.mean_ms(call)
        while repeats * mean_ms < _SHORTEST_SAMPLE_MS and repeats < _MOST_REPEATS:
            wanted = 1.25 * _SHORTEST_SAMPLE_MS / mean_ms if mean_ms > 0.0 else math.inf
            # At most tenfold at a time, so that one reading of a coarse clock cannot ask for seconds of repeats.
            repeats = math.ceil(min(max(wanted, 2 * repeats), 10 * repeats, _MOST_REPEATS))
            mean_ms = self.mean_ms(call, repeats)
        return repeats, mean_ms


@dataclass
class _Candidate:
    call: Callable[[], object]
    first_ms: float
    repeats: int = 1
    samples_ms: list[float] = field(default_factory=list[float])


@dataclass
class _Race:
    stopwatch: _Stopwatch
    end_s: float
    hopeless: float
    keep: Collection[str]
    order: random.Random
    candidates: dict[str, _Candidate] = field(default_factory=dict[str, _Candidate])
    failures: dict[str, Exception] = field(default_factory=dict[str, Exception])
    dropped: dict[str, float] = field(default_factory=dict[str, float])
    cold: frozenset[str] = frozenset()
    rounds: int = 0

    def run_first_calls(self, calls: Mapping[str, Callable[[], object]], known_ms: Mapping[str, float]) -> None:
        for name, call in calls.items():
            with self._ending_on_failure(name):
                first_ms = known_ms[name] if name in known_ms else self.stopwatch.mean_ms(call)
                self.candidates[name] = _Candidate(call, first_ms)

    def run_warm_round(self) -> None:
        cold = self._hopeless_among({name: candidate.first_ms for name, candidate in self.candidates.items()})
        for name, candidate in self._shuffled():
            if name in cold and self.stopwatch.clock() >= self.end_s:
                candidate.samples_ms.append(candidate.first_ms)
                self.dropped[name] = cold[name]
                continue
            with self._ending_on_failure(name):
                candidate.repeats, sample_ms = self.stopwatch.calibrate(candidate.call)
                candidate.samples_ms.append(sample_ms)
        self.cold = frozenset(self.dropped)
        running = self.running().items()
        self.dropped |= self._hopeless_among({name: candidate.samples_ms[0] for name, candidate in running})
        self.rounds += bool(running)

    def run_round(self) -> None:
        for name, candidate in self._shuffled():
            with self._ending_on_failure(name):
                candidate.samples_ms.append(self.stopwatch.mean_ms(candidate.call, candidate.repeats))
        self.rounds += bool(self.running())

    def running(self) -> dict[str, _Candidate]:
        out = self.failures.keys() | self.dropped.keys()
        return {name: candidate for name, candidate in self.candidates.items() if name not in out}

    def next_round_fits(self) -> bool:
        running = self.running().values()
        next_s = sum(candidate.samples_ms[-1] * candidate.repeats for candidate in running) / 1e3
        return bool(running) and self.stopwatch.clock() + next_s <= self.end_s

    def settled(self, target: float) -> bool:
        samples = [candidate.samples_ms for candidate in self.running().values()]
        intervals = [median_interval(each) for each in samples]
        widths = [(interval.high - interval.low) / 2 for interval in intervals]
        return all(width < target * statistics.median(each) for width, each in zip(widths, samples, strict=True))

    def timings(self) -> dict[str, Timing]:
        seen = [(name, each) for name, each in self.candidates.items() if name not in self.failures]
        return {name: Timing(tuple(each.samples_ms), each.first_ms) for name, each in seen}

    def _shuffled(self) -> list[tuple[str, _Candidate]]:
        running = list(self.running().items())
        self.order.shuffle(running)
        return running

    def _hopeless_among(self, times_ms: Mapping[str, float]) -> dict[str, float]:
        fastest_ms = min(times_ms.values(), default=0.0)
        ratios = {name: _ratio(time_ms, fastest_ms) for name, time_ms in times_ms.items() if name not in self.keep}
        return {name: ratio for name, ratio in ratios.items() if ratio > self.hopeless}

    @contextmanager
    def _ending_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a kernel under test may fail in any way
            # The frames hold what the call had allocated, which the candidates still to come may need.
            traceback.clear_frames(error.__traceback__)
            self.failures[name] = error


def peak_bytes(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Run ``call`` once; its result, and the peak of memory above what was held before, in bytes.

    CUDA: the caching allocator's own count, whose peak statistics of the device are reset. CPU: how far the process's
    resident memory rose, from Linux's high-water mark, which is reset: scratch memory of libraries and what other
    threads take meanwhile count too, and freed blocks that the C library keeps; pages that were never touched do
    not, and below a few hundred KiB it is noise.
    None for other devices, or where the mark cannot be reset. Errors of ``call`` propagate.
    """
    if device.type == "cuda":
        return _cuda_peak(call, device)
    before = _reset_resident_peak() if device.type == "cpu" else None
    result = call()
    return result, None if before is None else max(0, _status_bytes("VmHWM") - before)


def _cuda_peak(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    cuda: Any = importlib.import_module("torch.cuda")
    cuda.init()
    cuda.reset_peak_memory_stats(device)
    before: int = cuda.memory_allocated(device)
    result = call()
    return result, cuda.max_memory_allocated(device) - before


def _reset_resident_peak() -> int | None:
    """Resident bytes from which the peak counts anew, or None where that is not to be had."""
    with suppress(AttributeError):  # only glibc has it
        # Free memory that the C library keeps is resident: a call that used it again would seem to take nothing.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR_REFS.write_text("5")
        return _status_bytes("VmRSS")
    except (OSError, ValueError):
        return None


def _status_bytes(name: str) -> int:
    lines = STATUS.read_text().splitlines()
    line = next((line for line in lines if line.startswith(f"{name}:")), "")
    if not line.endswith(" kB"):
        raise ValueError(f"{STATUS} has no {name}")
    return int(line.split()[1]) * 1024


def release(device: torch.device) -> None:
    """Collect garbage and, on CUDA, hand the caching allocator's unused blocks back to the driver."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
