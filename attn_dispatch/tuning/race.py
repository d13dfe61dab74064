"""The race of one trial: times the admitted candidates against one another within the budget and chooses one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from attn_dispatch.machine.load import Load
from attn_dispatch.settings import cache_folder, expected_calls, timeout_s
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.crash_markers import CrashMarker, crash_marker
from attn_dispatch.store.decision import Row
from attn_dispatch.text import one_line, printable
from attn_dispatch.tuning import choice, guard, intervals
from attn_dispatch.tuning.candidates import Candidate, Request, utc_now
from attn_dispatch.tuning.clocks import LONGEST_DISTURBED_MS, RETAKES, CudaStopwatch, HostStopwatch, Stopwatch
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.gate import Admitted
from attn_dispatch.tuning.rounds import ENOUGH_ROUNDS, Rounds, Steps, sampled_in_rounds

if TYPE_CHECKING:
    import torch

HOPELESS_RATIO = 4.0  #: ratio of a first call to the fastest one, from which a candidate is skipped if time is short
INCUMBENT_FACTOR = 2.0  #: factor on this for the incumbent
MAY_WIN_RATIO = 1.5  #: a candidate left out at a lower ratio might still be the fastest

Calls = Mapping[str, Callable[[], object]]


@dataclass
class Race:
    """One race; all tables are keyed by candidate title.

    `runners` are ordered by preference. `skipped` maps a candidate that is not raced to the ratio of its first call to
    the fastest one's. `clock` measures the budget, in seconds; `retakes` is that of `HostStopwatch`.
    """

    request: Request
    runners: dict[str, tuple[Candidate, Admitted]]
    incumbent: str
    skipped: dict[str, float] = field(default_factory=dict[str, float])
    rounds: Rounds = field(init=False)
    outcomes: dict[str, choice.Outcome] = field(default_factory=dict[str, choice.Outcome])
    clock: Callable[[], float] = time.perf_counter
    retakes: int = RETAKES
    _stopwatch: _GuardedStopwatch | None = None

    @property
    def problem(self) -> Problem:
        return self.request.problem

    def run(self, example: Example, remaining_s: float | None, disturbed_s: float | None = None) -> Steps[None]:
        """Time the candidates round by round, within what remains of the budget (seconds); `disturbed_s` if that is
        more, and other programs take the cores. Where other code runs between two steps, call `pause` before it.
        """
        self._skip_slowest(remaining_s)
        racing = {name: runner[0] for name, runner in self.runners.items() if name not in self.skipped}
        if len(racing) == 1 and remaining_s is not None and remaining_s <= 0:
            # Nothing to compare with and no budget left: the run that the gate checked is the only sample.
            (only,) = racing
            call_ms = self.runners[only][1].call_ms
            self.rounds = Rounds({only: intervals.Timing((call_ms,), call_ms)}, {}, {}, 0, 0.0)
            return
        guard.end_idle_threads()  # they would occupy cores during the timing
        calls = {name: example.call(*candidate.backend_and_order) for name, candidate in racing.items()}
        try:
            self.rounds = yield from self._time(calls, remaining_s, disturbed_s)
        finally:
            self.pause()

    def pause(self) -> None:
        """Lift the limit of memory and remove the crash markers until the next sample."""
        if self._stopwatch is not None:
            self._stopwatch.pause()

    def remove(self, name: str) -> None:
        """Take a candidate out of the choice: it was timed, and its results proved wrong."""
        self.runners.pop(name, None)
        self.skipped.pop(name, None)
        self.outcomes.pop(name, None)
        self.rounds.timings.pop(name, None)

    def choose(self) -> str | None:
        """Choose a candidate as `choice.choose` does; None where none was timed beyond a first call."""
        timed = [name for name in self.runners if name in self.rounds.timings and name not in self.rounds.short_of_time]
        if not timed:
            return None
        entrants = [self._entrant(name, rank) for rank, name in enumerate(timed)]
        first = self.incumbent if self.incumbent in timed else None
        chosen, self.outcomes = choice.choose(
            entrants, first, calls=_expected_calls(), disturbed=self.rounds.load.disturbed
        )
        return chosen

    def why_provisional(self) -> str:
        """Why the choice may be another one under better conditions; empty where it is settled."""
        if self.rounds.load.disturbed:
            return "other programs took the cores while it was measured"
        unclear = [name for name, outcome in self.outcomes.items() if outcome.open]
        unclear += [name for name, ratio in self.left_out().items() if ratio < MAY_WIN_RATIO]
        return f"too few rounds to compare it with {', '.join(unclear)}" if unclear else ""

    def timing(self, name: str) -> intervals.Timing:
        """What is stored: of a disturbed race, what the machine can do when left alone."""
        timing = self.rounds.timings[name]
        return timing.undisturbed() if self.rounds.load.disturbed else timing

    def left_out(self) -> dict[str, float]:
        """Candidates timed by a first call only, with its ratio to the fastest one's."""
        return {**self.skipped, **{name: self.rounds.dropped[name] for name in self.rounds.short_of_time}}

    def row(self, candidate: Candidate) -> Row | None:
        """The row of a candidate that ran in this race or was left out of it; None for others."""
        title, left_out = candidate.title, self.left_out()
        if title in self.rounds.failures:
            return row_of(candidate, "failed", one_line(self.rounds.failures[title]))
        if title in self.outcomes:
            return self._timed(candidate, self.outcomes[title], self.timing(title))
        return self._left_out(candidate, left_out[title]) if title in left_out else None

    def _timed(self, candidate: Candidate, outcome: choice.Outcome, timing: intervals.Timing) -> Row:
        admitted = self.runners[candidate.title][1]
        return row_of(
            candidate,
            outcome.status,
            outcome.reason,
            median_ms=timing.median_ms,
            low_ms=timing.low_ms,
            high_ms=timing.high_ms,
            fastest_ms=min(timing.samples_ms),
            first_ms=admitted.first_ms,
            host_ms=timing.host_ms,
            cold_ms=timing.cold_ms,
            rounds=len(timing.samples_ms),
            ratio=outcome.ratio,
            ratio_low=outcome.ratio_low,
            ratio_high=outcome.ratio_high,
            break_even=finite(outcome.break_even),
            open=outcome.open,
            peak_bytes=admitted.peak_bytes,
            error=admitted.error,
        )

    def _left_out(self, candidate: Candidate, ratio: float) -> Row:
        """The row of a candidate with a first call only: it includes one-time work and is no measurement."""
        admitted = self.runners[candidate.title][1]
        return row_of(
            candidate,
            "not_measured",
            f"its first calls took {ratio:.1f} times as long as the fastest's, and the budget was short",
            first_ms=admitted.first_ms,
            open=True,
            peak_bytes=admitted.peak_bytes,
            error=admitted.error,
        )

    def _entrant(self, name: str, rank: int) -> choice.Entrant:
        (candidate, admitted), timing = self.runners[name], self.rounds.timings[name]
        # Preemption makes any first call longer.
        builds = not self.rounds.load.disturbed or hasattr(candidate.backend, "first_call_ms")
        return choice.Entrant(
            name,
            timing,
            workspace_bytes=candidate.workspace_bytes,
            rank=rank,
            plan_ms=max(0.0, admitted.first_ms - timing.median_ms) if builds else 0.0,
            dropped=self.rounds.dropped.get(name),
        )

    def _skip_slowest(self, remaining_s: float | None) -> None:
        """Skip candidates that are hopeless by their first calls, where the budget is short of rounds.

        Nothing is skipped on CUDA, where planning in the first call may take a hundred times as long as a call, nor by
        times of short calls, which preemption may have made.
        """
        if remaining_s is None or self.problem.device.type == "cuda":
            return
        times = {name: admitted.call_ms for name, (_, admitted) in self.runners.items()}
        least = min(times.values())
        if least <= 0:
            return  # the clock is too coarse to show a call
        for name in sorted(times, key=lambda name: -times[name]):
            rounds, ratio = remaining_s * 1e3 / sum(times.values()), times[name] / least
            factor = 1.0 if name != self.incumbent else INCUMBENT_FACTOR
            if rounds >= ENOUGH_ROUNDS or ratio < factor * HOPELESS_RATIO or times[name] <= LONGEST_DISTURBED_MS:
                return
            self.skipped[name] = times.pop(name) / least

    def _time(self, calls: Calls, budget_s: float | None, disturbed_s: float | None) -> Steps[Rounds]:
        device = self.problem.device
        stopwatch: Stopwatch = (
            CudaStopwatch(device) if device.type == "cuda" else HostStopwatch(reading=Load.so_far, retakes=self.retakes)
        )
        markers = {call: partial(self._marker, name) for name, call in calls.items()}
        self._stopwatch = _GuardedStopwatch(stopwatch, markers, device)
        return sampled_in_rounds(
            calls,
            budget_s=budget_s,
            disturbed_budget_s=disturbed_s,
            short_of_rounds=device.type != "cuda",
            clock=self.clock,
            stopwatch=self._stopwatch,
            incumbents=(self.incumbent,),
            first_ms={name: self.runners[name][1].call_ms for name in calls},
            extra_ms={name: self._plan_share_ms(name) for name in calls},
        )

    def _marker(self, name: str) -> AbstractContextManager[CrashMarker]:
        candidate = self.runners[name][0]
        title = candidate.problem_title(self.problem)
        names = (self.request.silicon, candidate.name, candidate.version, title)
        return crash_marker(cache_folder(), *names, patience_s=timeout_s())

    def _plan_share_ms(self, name: str) -> float:
        """A call's share of the first call's extra milliseconds, as known before the race."""
        admitted = self.runners[name][1]
        return choice.per_call_ms(admitted.first_ms - admitted.call_ms, _expected_calls())


@dataclass
class _GuardedStopwatch:
    """A stopwatch that caps memory, and has a crash marker for each call that is paused but while it is sampled."""

    stopwatch: Stopwatch
    make_marker: Mapping[Callable[[], object], Callable[[], AbstractContextManager[CrashMarker]]]
    device: torch.device
    markers: dict[Callable[[], object], CrashMarker] = field(default_factory=dict[Callable[[], object], CrashMarker])
    entered: ExitStack = field(default_factory=ExitStack)

    @property
    def load(self) -> Load:
        return self.stopwatch.load

    def mean_ms(self, call: Callable[[], object], repeats: int = 1) -> float:
        with self._marked(call):
            return self.stopwatch.mean_ms(call, repeats)

    def host_ms(self, call: Callable[[], object]) -> float | None:
        with self._marked(call):
            return self.stopwatch.host_ms(call)

    def cold_ms(self, call: Callable[[], object]) -> float | None:
        with self._marked(call):
            return self.stopwatch.cold_ms(call)

    def pause(self) -> None:
        """Lift the cap and remove the markers until the next sample."""
        self.markers.clear()
        self.entered.close()

    @contextmanager
    def _marked(self, call: Callable[[], object]) -> Iterator[None]:
        if not self.markers:
            self.entered.enter_context(guard.capped(self.device))
        marker = self.markers.get(call)
        if marker is None:
            marker = self.markers[call] = self.entered.enter_context(self.make_marker[call]())
        else:
            marker.resume()
        try:
            yield
        finally:
            marker.pause()


def _expected_calls() -> int:
    """`settings.expected_calls` as an integer; infinity becomes 10**15."""
    return int(min(expected_calls(), 1e15))


def row_of(candidate: Candidate, status: str, reason: str, **measured: float | bool | None) -> Row:
    return Row(
        backend=candidate.name,
        order=candidate.order,
        status=status,
        reason=printable(reason),
        version=candidate.version,
        workspace_bytes=candidate.workspace_bytes,
        measured=utc_now(),
        **measured,  # type: ignore[arg-type]
    )


def milliseconds_of(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
