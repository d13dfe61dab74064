"""Times callables against one another in interleaved rounds, spending time on the comparisons that are still open.

Independent of attention. Hopeless candidates are dropped early (successive halving: Jamieson & Talwalkar 2016) and
surely beaten ones run no further (Hoeffding races: Maron & Moore 1994; F-Race: Birattari et al. 2002). The test is a
sign-test interval of paired ratios, see :mod:`attn_dispatch.tuning.intervals`.
"""

from __future__ import annotations

import math
import random
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from attn_dispatch.errors import RankLost
from attn_dispatch.log import logger
from attn_dispatch.machine.load import NO_LOAD, Load
from attn_dispatch.tuning.clocks import ONE_TIME_MS, HostStopwatch, Stopwatch, calibrate
from attn_dispatch.tuning.guard import DeviceLost
from attn_dispatch.tuning.intervals import MARGIN, RatioTest, Timing, median_interval, ratio_test, safe_ratio

FINE_ROUNDS = 24  #: rounds after which medians are precise enough and only open comparisons ask for more
#: {rounds: seconds}: from these rounds on, a race ends once it has taken these seconds, whatever its budget.
TIME_LIMITS_S = {FINE_ROUNDS: 10.0, 300: 0.5}
#: Factor on `hopeless` for the incumbent and for a disturbed sample: dropped only where there is no doubt.
DOUBT_FACTOR = 4.0
LATE = 0.75, 2.0  #: on `hopeless`, and for the incumbent: long first calls not made again for lack of time
# Where the budget is short of rounds, the slowest by the first two calls are dropped.
ENOUGH_ROUNDS = 10  #: rounds that separate candidates whose times differ by more than a tenth
FAR_RATIO = 1.5  #: ratio to the fastest from which candidates are dropped where fewer fit
FEW_ROUNDS, NEAR_RATIO = 4, 1.15  #: rounds below which all but incumbents are dropped from a smaller ratio on
SAID_AFTER_S = 5.0  #: seconds after which a trial that a caller waits for says so
_LOOKS_GROW = 1.25  # factor between the rounds of two looks: fewer looks mean fewer errors and less work

T = TypeVar("T")
Call = Callable[[], object]
#: Work in steps: yields, before each one, the seconds that it is expected to take; 0 where they are unknown or few.
Steps: TypeAlias = Generator[float, None, T]
#: What surrounds each sample of a candidate, by its name.
Around = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Rounds:
    """Result of :func:`time_in_rounds`.

    ``timings``: every candidate that never failed, in the given order. ``failures``: the exception that ended a
    candidate. ``dropped``: the ratio to the fastest at which a candidate was dropped as hopeless, or for lack of time;
    ``short_of_time``: those of the latter that might be the fastest. ``retired``: candidates that stopped early because
    their comparison was settled: beaten, or not faster than the incumbent. ``rounds``: rounds that the survivors
    finished. ``load``: what took place beside the samples.
    """

    timings: dict[str, Timing]
    failures: dict[str, Exception]
    dropped: dict[str, float]
    rounds: int
    short_of_time: frozenset[str] = frozenset()
    retired: frozenset[str] = frozenset()
    load: Load = NO_LOAD


def time_in_rounds(calls: Mapping[str, Call], **options: Any) -> Rounds:
    """All of :func:`sampled_in_rounds` at once; same arguments and errors."""
    return exhausted(sampled_in_rounds(calls, **options))


def exhausted(steps: Steps[T], between: Callable[[], object] = lambda: None) -> T:
    """Run all steps, and `between` after each; what the steps return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)
        between()


def warned_if_long(what: object, seconds: float, once_s: float = 0.0) -> bool:
    """Whether a trial takes long enough to say what keeps a caller, and how to avoid it; then it is logged."""
    if seconds <= SAID_AFTER_S:
        return False
    compiled = f"{once_s:.0f} s compiled for this machine: attn-dispatch profile does so before"
    limited = "ATTN_DISPATCH_BUDGET_MS limits that, ATTN_DISPATCH_MODE=predict or online avoids it"
    how = compiled if once_s > seconds / 2 else limited
    logger.warning("measuring %s, for %.0f s so far; later calls use the decision. %s", what, seconds, how)
    return True


def sampled_in_rounds(
    calls: Mapping[str, Call],
    *,
    budget_s: float | None,
    short_of_rounds: bool = False,
    min_rounds: int = 5,
    max_rounds: int = 1000,
    hopeless: float | None = 4.0,
    target: float = 0.02,
    margin: float = MARGIN,
    resolution: float = 0.005,
    clock: Callable[[], float] = time.perf_counter,
    stopwatch: Stopwatch | None = None,
    around: Around = nullcontext,
    seed: int = 0,
    incumbents: Collection[str] = (),
    first_ms: Mapping[str, float] | None = None,
    extra_ms: Mapping[str, float] | None = None,
) -> Steps[Rounds]:
    """Time the calls against one another: every survivor once per round, in shuffled order.

    Yields, before each candidate's sample, the seconds that it is expected to take.

    Round 0 finds how many repeats make a sample last 0.2 ms or more (a sample is their mean). It runs whatever the
    budget; but where that is short, what was slow by a long first call is dropped without another. Then every
    candidate over ``hopeless`` times slower than the fastest is dropped; one of ``incumbents``, or any in a
    disturbed race, only past four times that. Both of its runs must exceed the ratio.

    From ``min_rounds`` on, at growing distances, the comparisons are tested. A candidate is retired where another one
    surely beats it by more than ``margin``, or where it surely does not beat the incumbent by that much; its samples
    stay. The incumbent is retired once all others left surely beat it. The race ends when no comparison left is open
    (:func:`~attn_dispatch.tuning.intervals.ratio_test`) and either the 95 % interval of every median has a
    half-width below ``target`` of it or 24 rounds have passed; earlier where the next round would exceed
    ``budget_s`` seconds (None: no limit), at ``max_rounds`` and by :data:`TIME_LIMITS_S`.

    Args:
        calls: the candidates by name.
        short_of_rounds: whether to drop the slowest by one or two calls where the budget is short of rounds, so
            that the close ones get enough.
        first_ms: milliseconds of first calls that were made; others are made first, in the given order.
        extra_ms: milliseconds added to a candidate's samples in comparisons only, such as its share of its first call.
        stopwatch: takes the samples; by default ``clock`` (seconds), with the garbage collector off.
        around: entered around each sample; what it raises ends the candidate.
        clock: measures the budget, in seconds. The same clock, calls and ``seed`` give the same result.

    An :class:`Exception` of a call ends that candidate only; DeviceLost, and others such as KeyboardInterrupt,
    propagate.
    """
    start_s = clock()
    timer = _RoundTimer(
        stopwatch=stopwatch or HostStopwatch(clock),
        around=around,
        clock=clock,
        end_s=start_s + (math.inf if budget_s is None else budget_s),
        short_of_rounds=short_of_rounds,
        hopeless=math.inf if hopeless is None else hopeless,
        test=partial(ratio_test, margin=margin, resolution=resolution),
        target=target,
        incumbents=frozenset(incumbents),
        extra_ms=extra_ms or {},
        order=random.Random(seed),
    )
    timer.run_first_calls(calls, first_ms or {})
    yield from timer.run_warm_round()
    timer.drop_hopeless()
    timer.drop_slowest()
    yield from timer.run_rounds(min_rounds, max_rounds, start_s)
    found = timer.timings(), timer.failures, timer.dropped, timer.rounds, timer.short_of_time
    return Rounds(*found, frozenset(timer.retired), timer.stopwatch.load)


@dataclass
class _Timed:
    call: Call
    first_ms: float
    repeats: int = 1
    samples_ms: list[float] = field(default_factory=list[float])

    @property
    def sample_s(self) -> float:
        """Expected seconds of the next sample: the low median of the last five, robust to a disturbed one."""
        return statistics.median_low(self.samples_ms[-5:] or [self.first_ms]) * self.repeats / 1e3

    @property
    def least_ms(self) -> float:
        return min([self.first_ms, *self.samples_ms])


@dataclass
class _RoundTimer:
    stopwatch: Stopwatch
    around: Around
    clock: Callable[[], float]
    end_s: float
    short_of_rounds: bool
    hopeless: float
    test: Callable[[Timing, Timing], RatioTest]
    target: float
    incumbents: frozenset[str]
    extra_ms: Mapping[str, float]
    order: random.Random
    candidates: dict[str, _Timed] = field(default_factory=dict[str, _Timed])
    failures: dict[str, Exception] = field(default_factory=dict[str, Exception])
    dropped: dict[str, float] = field(default_factory=dict[str, float])
    retired: set[str] = field(default_factory=set[str])
    short_of_time: frozenset[str] = frozenset()
    rounds: int = 0

    def run_first_calls(self, calls: Mapping[str, Call], known_ms: Mapping[str, float]) -> None:
        for name, call in calls.items():
            with ending_on_failure(name, self.failures, self.around):
                first_ms = known_ms[name] if name in known_ms else self.stopwatch.mean_ms(call)
                self.candidates[name] = _Timed(call, first_ms)

    def run_warm_round(self) -> Steps[None]:
        first_ms = {name: each.first_ms for name, each in self.candidates.items()}
        late = self._hopeless(first_ms, *(LATE if self.short_of_rounds else ()))
        for name in sorted(late, key=lambda name: -late[name]):
            if first_ms[name] > ONE_TIME_MS and (self._rounds_left() < ENOUGH_ROUNDS or self.clock() >= self.end_s):
                self.candidates[name].samples_ms.append(first_ms[name])
                self.dropped[name] = late[name]
        for name, each in self._shuffled():
            yield each.first_ms / 1e3
            with ending_on_failure(name, self.failures, self.around):
                if name in late and self.clock() >= self.end_s:
                    sample_ms = self.stopwatch.mean_ms(each.call)
                else:
                    each.repeats, sample_ms = calibrate(self.stopwatch, each.call)
                each.samples_ms.append(sample_ms)
        self.short_of_time = frozenset(self.dropped)

    def drop_hopeless(self) -> None:
        """Drop hopeless candidates by the better of two runs: a single one may have been disturbed."""
        least_ms = {name: each.least_ms for name, each in self.running().items()}
        for name in self._hopeless(least_ms):
            each = self.candidates[name]
            if each.first_ms > 2 * each.samples_ms[0] and self.clock() < self.end_s:
                with ending_on_failure(name, self.failures, self.around):
                    least_ms[name] = min(least_ms[name], self.stopwatch.mean_ms(each.call, each.repeats))
        running = self.running().keys()
        self.dropped |= self._hopeless({name: ms for name, ms in least_ms.items() if name in running})
        self.rounds += bool(self.running())

    def drop_slowest(self) -> None:
        """Drop the slowest candidates where the budget is short of rounds; none by disturbed samples."""
        least_ms = {name: each.least_ms for name, each in self.running().items()}
        fastest_ms = min(least_ms.values(), default=0.0)
        for name in [] if self.stopwatch.load.disturbed else sorted(least_ms, key=lambda name: -least_ms[name]):
            ratio, rounds = safe_ratio(least_ms[name], fastest_ms), self._rounds_left()
            near = name in self.incumbents or rounds >= FEW_ROUNDS
            if rounds >= ENOUGH_ROUNDS or ratio < (FAR_RATIO if near else NEAR_RATIO):
                return
            self.dropped[name] = ratio
            self.short_of_time |= {name} if ratio < FAR_RATIO else set()

    def run_rounds(self, min_rounds: int, max_rounds: int, start_s: float) -> Steps[None]:
        next_look = min_rounds
        while self.rounds < max_rounds and self.running():
            if self.rounds >= next_look:
                if self._settled():
                    break
                next_look = math.ceil(self.rounds * _LOOKS_GROW)
            limit_s = min((most for rounds, most in TIME_LIMITS_S.items() if self.rounds >= rounds), default=math.inf)
            if self.clock() - start_s >= limit_s or self._round_s() > self.end_s - self.clock():
                break
            for name, each in self._shuffled():
                yield each.sample_s
                with ending_on_failure(name, self.failures, self.around):
                    each.samples_ms.append(self.stopwatch.mean_ms(each.call, each.repeats))
            self.rounds += bool(self.running())

    def running(self) -> dict[str, _Timed]:
        out = self.failures.keys() | self.dropped.keys() | self.retired
        return {name: each for name, each in self.candidates.items() if name not in out}

    def timings(self) -> dict[str, Timing]:
        """The timing of each candidate that did not fail; with a device's times where it was never retired."""
        running, found = self.running(), dict[str, Timing]()
        for name, each in self.candidates.items():
            if name not in self.failures:
                watch = self.stopwatch if name in running else Stopwatch()
                samples = tuple(each.samples_ms)
                found[name] = Timing(samples, each.first_ms, watch.host_ms(each.call), watch.device_ms(each.call))
        return found

    def _round_s(self) -> float:
        return sum(each.sample_s for each in self.running().values())

    def _rounds_left(self) -> float:
        """Rounds that the budget suffices for; infinity where nothing is dropped for lack of them."""
        return safe_ratio(self.end_s - self.clock(), self._round_s()) if self.short_of_rounds else math.inf

    def _shuffled(self) -> list[tuple[str, _Timed]]:
        running = list(self.running().items())
        self.order.shuffle(running)
        return running

    def _hopeless(
        self, times_ms: Mapping[str, float], share: float = 1, doubt: float = DOUBT_FACTOR
    ) -> dict[str, float]:
        """The ratios to the fastest of the candidates that are hopeless by these times."""
        costs_ms = {name: time_ms + self.extra_ms.get(name, 0.0) for name, time_ms in times_ms.items()}
        fastest_ms, found = min(costs_ms.values(), default=0.0), dict[str, float]()
        for name, cost_ms in costs_ms.items():
            ratio = safe_ratio(cost_ms, fastest_ms)
            doubtful = self.stopwatch.load.disturbed or name in self.incumbents
            if ratio > self.hopeless * share * (doubt if doubtful else 1.0):
                found[name] = ratio
        return found

    def _settled(self) -> bool:
        """Retire candidates; whether no comparison among the others needs another round."""
        timings = {name: Timing(tuple(each.samples_ms), each.first_ms) for name, each in self.running().items()}
        costs = {name: timing.plus(self.extra_ms.get(name, 0.0)) for name, timing in timings.items()}
        out, is_open = self._compared(costs)
        self.retired |= out
        fine = all(
            median_interval(timings[name].samples_ms).half_width < self.target * timings[name].median_ms
            for name in timings.keys() - out
        )
        return not is_open and (self.rounds >= FINE_ROUNDS or fine)

    def _compared(self, timings: Mapping[str, Timing]) -> tuple[set[str], bool]:
        """The candidates to retire, and whether any comparison among the others is still open."""
        seen = {(a, b): self.test(timings[a], timings[b]) for a in timings for b in timings if a != b}
        # "Surely faster" need not be transitive: the candidate of the least median stays in any case.
        least = min(timings, key=lambda name: timings[name].median_ms, default="")
        free = timings.keys() - self.incumbents
        out = {name for name in free - {least} if any(seen[a, name] == "faster" for a in timings.keys() - {name})}
        incumbents = timings.keys() & self.incumbents
        if incumbents:
            out |= {name for name in free if all(seen[name, incumbent] == "not" for incumbent in incumbents)}
        remaining = free - out
        if remaining:
            out |= {name for name in incumbents if all(seen[rival, name] == "faster" for rival in remaining)}
        return out, any(seen[a, b] == "open" for a in remaining for b in (remaining | incumbents) - {a})


@contextmanager
def ending_on_failure(name: str, failures: dict[str, Exception], around: Around = nullcontext) -> Iterator[None]:
    """Note a candidate's exception under its name, also one of `around`. DeviceLost and RankLost propagate."""
    try:
        with around(name):
            yield
    except (DeviceLost, RankLost):  # no other candidate can run either
        raise
    except Exception as error:  # noqa: BLE001 - a kernel under test may fail in any way
        # The frames hold the call's allocations, memory that later candidates may need.
        traceback.clear_frames(error.__traceback__)
        failures[name] = error
