"""The race of one trial: who runs in it, how long, and who is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from attn_dispatch.settings import cache_folder, expected_calls, timeout_s
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.crash_markers import Contact, contact
from attn_dispatch.tuning import choice, guard, intervals
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.clocks import CudaStopwatch, HostStopwatch, Stopwatch
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.gate import Admitted
from attn_dispatch.tuning.turns import Turns, time_in_turns

ENOUGH_ROUNDS = 10  #: that tell candidates apart which differ by more than a tenth
FEW_ROUNDS = 4
FAR = 1.5  #: times the fastest's first call, from which one is left out if there is no time for enough rounds
BEATEN = 8.0  #: times the fastest's, from which the incumbent too is left out then: it would take all of the time
NEAR = 1.15  #: and if there is none for a few of them
OVERTIME = 0.75  #: of the budget, for who seems faster by more than `PROMISE` when it ends
PROMISE = 0.05

Calls = Mapping[str, Callable[[], object]]


@dataclass
class Heat:
    """One race. Candidates go by their titles. `runners` stand in the order of preference; `aside` are those left out,
    with the ratio of their first call to the fastest's.
    """

    request: Request
    runners: dict[str, tuple[Candidate, Admitted]]
    incumbent: str
    budget_s: float | None
    aside: dict[str, float] = field(default_factory=dict[str, float])
    turns: Turns = field(init=False)
    outcomes: dict[str, choice.Outcome] = field(default_factory=dict[str, choice.Outcome])

    @property
    def problem(self) -> Problem:
        return self.request.problem

    def run(self, example: Example, remaining_s: float | None) -> None:
        """Time them in turns, within what remains of the budget."""
        self._set_aside(remaining_s)
        racing = {name: runner[0] for name, runner in self.runners.items() if name not in self.aside}
        if len(racing) == 1 and remaining_s is not None and remaining_s <= 0:
            # Nobody to compare with, and the run that was checked has taken the time there was: it is the sample.
            (only,) = racing
            call_ms = self.runners[only][1].call_ms
            self.turns = Turns({only: intervals.Timing((call_ms,), call_ms)}, {}, {}, 0, 0.0)
            return
        guard.retire()  # its threads would take part of the cores
        calls = {name: example.call(*candidate.run_by) for name, candidate in racing.items()}
        self.turns = self._rounds(calls, remaining_s)
        rival = self._unproven()
        if rival is not None and self.budget_s is not None:
            pair = {name: calls[name] for name in (self.incumbent, rival)}
            self.turns = _joined(self.turns, self._rounds(pair, OVERTIME * self.budget_s))

    def choose(self) -> str | None:
        """See `choice.choose`. What was dropped after one cold call is out; None where nobody is left."""
        timed = [name for name in self.runners if name in self.turns.timings and name not in self.turns.cold]
        if not timed:
            return None
        entrants = [self._entrant(name, rank) for rank, name in enumerate(timed)]
        first = self.incumbent if self.incumbent in timed else None
        chosen, self.outcomes = choice.choose(entrants, first, calls=_expected_calls())
        return chosen

    def left_out(self) -> dict[str, float]:
        """Who has no timing but a first call, with its ratio to the fastest's."""
        return {**self.aside, **{name: self.turns.dropped[name] for name in self.turns.cold}}

    def _entrant(self, name: str, rank: int) -> choice.Entrant:
        (candidate, admitted), timing = self.runners[name], self.turns.timings[name]
        return choice.Entrant(
            name,
            timing,
            workspace_bytes=candidate.workspace_bytes,
            rank=rank,
            plan_ms=max(0.0, admitted.first_ms - timing.median_ms),
            dropped=self.turns.dropped.get(name),
        )

    def _set_aside(self, remaining_s: float | None) -> None:
        """Leave the slowest out where there is no time for enough rounds of all: the close ones need them.

        On CUDA a first call says too little: what it plans may take a hundred times as long as the call.
        """
        if remaining_s is None or self.problem.device.type == "cuda":
            return
        times = {name: admitted.call_ms for name, (_, admitted) in self.runners.items()}
        least = min(times.values())
        for name in sorted(times, key=lambda name: -times[name]):
            rounds, ratio = remaining_s * 1e3 / sum(times.values()), times[name] / least
            if rounds >= ENOUGH_ROUNDS or ratio < NEAR or (rounds >= FEW_ROUNDS and ratio < FAR):
                return
            if name != self.incumbent or ratio >= BEATEN:
                self.aside[name] = times.pop(name) / least

    def _rounds(self, calls: Calls, budget_s: float | None) -> Turns:
        device = self.problem.device
        with guard.capped(device), ExitStack() as stack:
            marked = {call: stack.enter_context(self._marker(name)) for name, call in calls.items()}
            stopwatch = CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
            return time_in_turns(
                calls,
                budget_s=budget_s,
                stopwatch=_Marked(stopwatch, marked),
                keep=(self.incumbent,),
                first_ms={name: self.runners[name][1].call_ms for name in calls},
                extra_ms={name: self._plan_share_ms(name) for name in calls},
            )

    @contextmanager
    def _marker(self, name: str) -> Iterator[Contact]:
        """One marker for each, which counts only while it is this one's turn."""
        candidate = self.runners[name][0]
        where, title = self.request.silicon, candidate.described(self.problem)
        with contact(cache_folder(), where, candidate.name, candidate.version, title, patience_s=timeout_s()) as kept:
            kept.rest()
            yield kept

    def _plan_share_ms(self, name: str) -> float:
        """What a call costs for what the first one built, as far as that is known before the race."""
        admitted = self.runners[name][1]
        return choice.per_call_ms(admitted.first_ms - admitted.call_ms, _expected_calls())

    def _unproven(self) -> str | None:
        """Who seems much faster than the incumbent after too few rounds to be sure."""
        timings = {name: t for name, t in self.turns.timings.items() if name not in self.turns.dropped}
        if self.incumbent not in timings or self.choose() != self.incumbent:
            return None
        known = timings[self.incumbent]
        rival = min(timings, key=lambda name: timings[name].median_ms)
        rounds = len(timings[rival].samples_ms)
        seems = timings[rival].median_ms < (1 - PROMISE) * known.median_ms
        return rival if seems and rounds < ENOUGH_ROUNDS and rounds == len(known.samples_ms) else None


@dataclass(frozen=True)
class _Marked:
    """A stopwatch; whose sample it takes is known to the next process, should this one die of it."""

    stopwatch: Stopwatch
    markers: Mapping[Callable[[], object], Contact]

    def mean_ms(self, call: Callable[[], object], repeats: int = 1) -> float:
        with self._marked(call):
            return self.stopwatch.mean_ms(call, repeats)

    def host_ms(self, call: Callable[[], object]) -> float | None:
        with self._marked(call):
            return self.stopwatch.host_ms(call)

    def cold_ms(self, call: Callable[[], object]) -> float | None:
        with self._marked(call):
            return self.stopwatch.cold_ms(call)

    @contextmanager
    def _marked(self, call: Callable[[], object]) -> Iterator[None]:
        marker = self.markers[call]
        marker.resume()
        try:
            yield
        finally:
            marker.rest()


def _joined(turns: Turns, more: Turns) -> Turns:
    """More rounds of a few: sample i of each still stands beside sample i of the other."""
    timings = dict(turns.timings)
    for name, timing in more.timings.items():
        timings[name] = replace(timings[name], samples_ms=timings[name].samples_ms + timing.samples_ms)
    for name in more.failures:
        timings.pop(name, None)
    return replace(turns, timings=timings, failures={**turns.failures, **more.failures})


def _expected_calls() -> int:
    """As an integer, however large it was set."""
    return int(min(expected_calls(), 1e15))
