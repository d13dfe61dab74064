"""Runs a trial: candidates pass the gate, race in rounds, and the result is a decision. Failures become rows.

The prior decision's choice runs first, else the static choice, unless another candidate needs far less work and might
otherwise get no time. The incumbent of the race is that prior choice, else the one that mostly is the fastest; `choice`
says what replaces it. With a prior decision only changed candidates
are measured again, with the best unchanged one for comparison. The chosen candidate must pass the hard cases.

Where a caller waits, the trial may take some tens of the problem's own calls, and everything that it does counts. A
trial can also be taken in steps, between calls of the program: each is one call of a candidate, or some milliseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attn_dispatch.kernels import registry
from attn_dispatch.log import say_once
from attn_dispatch.machine import load, memory
from attn_dispatch.machine.devices import synchronize
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.text import gib, one_line, printable
from attn_dispatch.tuning import candidates, guard
from attn_dispatch.tuning.candidates import Candidate, Request, current_environment, flops, incumbent_of, to_measure
from attn_dispatch.tuning.choice import Admitted, Rejected
from attn_dispatch.tuning.example import Example, example_bytes, make
from attn_dispatch.tuning.gate import Gate
from attn_dispatch.tuning.oracle import FEW_PAIRS, PAIRS, STEP_PAIRS, Incorrect
from attn_dispatch.tuning.race import MAY_WIN_RATIO, Race
from attn_dispatch.tuning.rounds import ENOUGH_ROUNDS, Steps, exhausted, warned_if_long


class Limits(NamedTuple):
    """Limits of a trial that a caller waits for, and what its race gets at least: seconds, and calls of the
    fastest candidate so far besides.
    """

    fixed_s: float
    calls: float
    race_s: float
    race_calls: float


WAITING = Limits(0.05, 12, 0.03, 7)
CHECK = Limits(0.005, 8, 0.005, 6)  #: of one that compares another machine's choice with the static choice
SHORT_S = 0.02  #: seconds of a first call that are always left to a caller who waits
BUSY_FACTOR = 5  #: factor on all seconds where other programs take the cores: calls take longer

# Of a trial that is taken in steps between calls of the program.
STEP_S, STEP_SHARE = 0.01, 0.5  #: longest call of a candidate: seconds, and calls of the first candidate besides
STEP_CALLS = 1.25  #: the same of long calls: calls of the first candidate
CHECK_S = 0.005  #: seconds that checking a candidate's results is expected to take
BACKWARD_CALLS = 3.5  #: forward and backward pass in forward passes, as expected before one was timed

RATE = 2.0  #: rate assumed at most for an untried candidate, relative to the first admitted one's
RATES = {registry.LAST_RESORT: 0.25, "tiles": 1.0}  #: the same for some, as tools/results/choices.json has them


def run_trial(request: Request, budget_s: float | None, **options: Any) -> Decision | None:
    """All steps of `trial_of` at once, with the same arguments; the decision, or None if nothing could be measured."""
    trial = trial_of(request, budget_s, **options)
    return None if trial is None else exhausted(trial.steps(), trial.say_if_long)


def trial_of(
    request: Request,
    budget_s: float | None,
    *,
    waiting: bool = False,
    limits: Limits | None = None,
    prior: Decision | None = None,
    changed: Collection[CandidateId] | None = None,
    first: CandidateId | None = None,
    live_s: float | None = None,
    clock: Callable[[], float] | None = None,
) -> Trial | None:
    """A trial that measures the candidates of a problem and chooses; None without a candidate.

    Args:
        budget_s: seconds that the trial may take, `prepare` not included; None for no limit.
        waiting: a caller waits: the problem's own calls limit the trial too, and the choice alone runs hard cases.
        limits: of such a trial, by default `WAITING`.
        prior: the stored decision. Its choice is the incumbent; rows of candidates that are not measured again stay.
        changed: with `prior`, the candidates to measure, with the best of the others; None for all.
        first: the candidate to run first without a `prior`, by default the static choice.
        live_s: seconds of a call of the program, where the trial is taken in steps between such calls: then only
            `budget_s` limits it, and no candidate is tried whose call takes much longer (`STEP_CALLS`).
        clock: seconds that the trial has taken, from any start; time.perf_counter if None.
    """
    # The reference computes a few rows at a time: besides a candidate's call, only the example needs memory.
    problem = request.problem
    found = request.candidates_with(example_bytes(problem))
    first = first if prior is None else prior.chosen
    runners = to_measure(problem, found, prior, changed, first)
    if not runners:
        return None
    most_s, clock = math.inf if budget_s is None else budget_s, clock or time.perf_counter
    return Trial(request, found, runners, most_s, prior, waiting, limits or WAITING, live_s, clock)


@dataclass
class Trial:
    """One trial; all tables are keyed by candidate title."""

    request: Request
    candidates: list[Candidate]
    runners: list[Candidate]
    budget_s: float
    prior: Decision | None
    waiting: bool = False
    limits: Limits = WAITING
    live_s: float | None = None
    clock: Callable[[], float] = time.perf_counter
    start: float = field(init=False)
    patience: float = field(default_factory=lambda: 1 if load.is_calm() else BUSY_FACTOR)
    outside_s: float = 0.0  #: seconds of `prepare`, and of drawing an example on CUDA
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    admitted: dict[str, Admitted] = field(default_factory=dict[str, Admitted])
    case_problems: tuple[Problem, ...] = ()  #: problems of the hard cases
    untried: list[str] = field(default_factory=list[str])  #: skipped for lack of time, though they may be the fastest
    race: Race | None = None
    chosen: Candidate | None = None
    gate: Gate | None = None  #: while its example is needed
    warned: bool = False  #: that it takes long

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def problem(self) -> Problem:
        return self.request.problem

    def steps(self) -> Steps[Decision | None]:
        """Run the trial; the decision, or None if nothing could be measured: no memory for a trial (warned once).

        Where other code runs between two steps, call `pause` before it.

        Raises:
            BackendFailed: a candidate left the device unusable.
        """
        try:
            yield from self._measure()
        except Exception as error:
            if not guard.is_shortage(error):
                raise
            what = f"{printable(str(self.problem))} ({one_line(error)})"
            say_once(f"not measured, too little memory for a trial: {what}")
            self.chosen = None
        self.gate = None
        self._clear_tables()
        if self.chosen is None:
            memory.release(self.problem.device)  # only here: in the handler the exception still references tensors
            return None
        self._clear_strikes()
        return self._decision(self.chosen)

    def say_if_long(self) -> None:
        """Say once, where a caller waits, that the trial goes on for seconds."""
        if self.waiting and not self.warned:
            self.warned = warned_if_long(self.problem, self.clock() - self.start, self.outside_s)

    def pause(self, most_bytes: float) -> int:
        """Give back what other code must not find; bytes of the tensors that stay.

        Raises:
            MemoryError: they are more than `most_bytes`.
        """
        if self.race is not None:
            self.race.pause()
        need = 2 * example_bytes(self.problem) if self.gate is not None else 0  # the reference's gradients too
        if need > most_bytes:
            raise MemoryError(f"its tensors need {gib(need)} between calls, {gib(int(most_bytes))} may be held")
        return need

    def _measure(self) -> Steps[None]:
        """Admit, time and choose: `chosen` is None if nothing could be measured."""
        start, stepped = self.clock(), self.live_s is not None
        with guard.reference():
            example = make(self.problem, on_device=True)
            synchronize(self.problem.device)
        if self.problem.device.type != "cpu":  # its first use, which may take seconds, and the time to draw there
            self.outside_s = self.clock() - start
        pairs = STEP_PAIRS if stepped else FEW_PAIRS if self.waiting else PAIRS
        gate = self.gate = Gate(self.problem, self.request.address, example, pairs)
        gate.oracle  # noqa: B018 - outside of the candidates' own steps
        for candidate in self.runners:
            if candidate.title in self.rows:
                continue
            reason, need_s = self._reason_to_skip(candidate, gate)
            if reason:
                may_win = candidate.title in self.untried
                more = {"need_ms": round(need_s * 1e3, 3), "open": may_win}
                self.rows[candidate.title] = candidate.measured_row("not_measured", reason, **more)
                continue
            yield CHECK_S + self._expected_s(candidate)
            found = self._prepare(candidate, gate) or gate.admit(candidate)
            if isinstance(found, Admitted):
                self.admitted[candidate.title] = found
                # What is kept on disk is compiled once per machine, as by `prepare`.
                self.outside_s += max(0.0, found.first_ms - found.call_ms) / 1e3 * candidate.backend.shares_builds
            else:
                self._reject(candidate, found)
        yield from self._race(example, gate.differences)
        self.gate = gate.example = None
        gate.__dict__.pop("oracle", None)
        del example
        yield from self._choose(gate)
        self.case_problems = gate.case_problems

    def _expected_s(self, candidate: Candidate) -> float:
        """Seconds of a candidate's call, by its work and the rate of the first one."""
        if (first := self._first_admitted()) is None:
            return (self.live_s or 0.0) * (BACKWARD_CALLS if self.problem.needs_grad else 1)
        rate = min(RATES.get(candidate.name, RATE), 1.0)
        return self.admitted[first.title].call_ms / 1e3 * self._work_ratio(candidate, first) / rate

    def _work_ratio(self, candidate: Candidate, first: Candidate) -> float:
        """The candidate's work relative to the first one's; 1 where it is unknown."""
        work = [flops(each, self.problem) for each in (candidate, first)]
        return work[0] / work[1] if work[0] is not None and work[1] else 1.0

    def _choose(self, gate: Gate) -> Steps[None]:
        """Choose the best candidate that passes the hard cases; all timed ones run them if no caller waits."""
        if self.race is None:
            return
        by_title = {candidate.title: candidate for candidate in self.runners}
        for name, error in list(self.race.rounds.failures.items()):
            if isinstance(error, Incorrect):
                self.race.remove(name)
                self._reject(by_title[name], gate.incorrect(by_title[name], [str(error)]))
        timed = self.race.rounds.timings.keys() - self.race.rounds.short_of_time
        due = [] if self.waiting else [each for title, each in by_title.items() if title in timed]
        while True:
            title = self.race.choose()
            if title is not None and by_title[title] not in due:
                due.append(by_title[title])
            rejected: dict[str, Rejected] = {}
            for each in due:
                found = yield from gate.check_hard_cases(each, brief=self.waiting and self.live_s is None)
                rejected |= {} if found is None else {each.title: found}
            due.clear()
            for name, found in rejected.items():
                self.race.remove(name)
                self._reject(by_title[name], found)
            if not rejected:
                self.chosen = None if title is None else by_title[title]
                return

    def _clear_tables(self) -> None:
        """Clear the backends' tables for the trial's problems, except the chosen backend's for this one."""
        for name, backend in {candidate.name: candidate.backend for candidate in self.runners}.items():
            keeps = self.chosen is not None and name == self.chosen.name
            try:
                if backend.forget is None:
                    backend.release()
                else:
                    for problem in (*self.case_problems, *([] if keeps else [self.problem])):
                        backend.forget(problem)
            except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not fail the call
                say_once(f"{name} failed to clear its tables: {one_line(error)}")

    def _clear_strikes(self) -> None:
        """Forget the deaths and hangs of the versions that passed the gate and did not fail in the race."""
        failures = {} if self.race is None else self.race.rounds.failures
        quarantine = Quarantine(cache_folder(), self.request.silicon)
        for candidate in self.runners:
            if candidate.title in self.admitted and candidate.title not in failures:
                quarantine.clear_strikes(candidate.name, candidate.version)

    @property
    def first_call_s(self) -> float | None:
        """Seconds of a call of the first candidate, as the gate took it; None before."""
        first = self._first_admitted()
        return None if first is None else self.admitted[first.title].call_ms / 1e3

    def _first_admitted(self) -> Candidate | None:
        """The admitted candidate that ran first."""
        return next((candidate for candidate in self.runners if candidate.title in self.admitted), None)

    def _remaining_s(self) -> float:
        most_s = self.budget_s
        if self.waiting and self.admitted and self.live_s is None:
            most_s = min(most_s, self.limits.fixed_s * self.patience + self.limits.calls * self._call_s())
        return most_s - (self.clock() - self.start - self.outside_s)

    def _call_s(self) -> float:
        """Seconds of a call of the fastest candidate so far."""
        return min(admitted.call_ms for admitted in self.admitted.values()) / 1e3

    def _reason_to_skip(self, candidate: Candidate, gate: Gate) -> tuple[str, float]:
        """Why a candidate is skipped, with the seconds it would need: more than is left; empty if it is not."""
        first, remaining = self._first_admitted(), self._remaining_s()
        if remaining == math.inf or first is None:
            return "", 0.0
        compiles_s = candidates.first_call_ms(candidate, self.problem) / 1e3
        if self.waiting and compiles_s and isinstance(self.problem.pattern.natural, Dense):
            return f"compiles first: a call that {first.title} serves by one kernel does not wait for that", 0.0
        left_s = max(remaining, SHORT_S if self.waiting else 0.0)
        first_s = gate.builds_ms(candidate) / 1e3
        if self.live_s is not None and (reason := self._too_long(candidate, first, max(first_s, compiles_s))):
            return reason, first_s + self._expected_s(candidate) * ENOUGH_ROUNDS
        if first_s > left_s:
            return (
                f"its first calls, the checks' too, take about {first_s:.3g} s more than later ones, with "
                f"{left_s:.3g} s of the budget left: `attn-dispatch profile --full` measures it"
            ), first_s
        if flops(candidate, self.problem) is None or not flops(first, self.problem):
            return "", 0.0
        ratio = self._work_ratio(candidate, first)
        rate = RATES.get(candidate.name, RATE)
        least_s = self.admitted[first.title].call_ms / 1e3 * ratio / rate
        need_s = first_s + least_s * max(rate, 1.0) * ENOUGH_ROUNDS
        may_win, work = ratio < rate, f"{ratio:.3g} times {first.title}'s work"
        # The first candidate's calls alone may spend the budget: a second one then gets a call all the same.
        if least_s > left_s and not (may_win and self.budget_s and len(self.admitted) == 1):
            self.untried += [candidate.title] if may_win else []
            why = f"{work}: at least {least_s:.3g} s at {rate:g} times its rate, with {left_s:.3g} s of the budget left"
            return why, need_s
        rounds_s = ENOUGH_ROUNDS * sum(admitted.call_ms for admitted in self.admitted.values()) / 1e3
        if not may_win and rounds_s + least_s > left_s:
            return f"{work}, and the {left_s:.3g} s left of the budget are needed to compare the others", need_s
        return "", 0.0

    @property
    def _longest_s(self) -> float:
        """Seconds of a candidate's call from which it would delay a call of the program too much."""
        call_s = None if self.live_s is None else self.first_call_s
        return max(STEP_S + STEP_SHARE * call_s, STEP_CALLS * call_s) if call_s else math.inf

    def _too_long(self, candidate: Candidate, first: Candidate, first_s: float) -> str:
        """Why a candidate is not tried between calls of the program: a single one would be delayed too long."""
        need_s, later = first_s + self._expected_s(candidate), "between calls: `attn-dispatch profile` measures it"
        if need_s > self._longest_s:
            if first_s <= self._longest_s and self._work_ratio(candidate, first) < RATES.get(candidate.name, RATE):
                self.untried.append(candidate.title)
            return f"a first call of about {need_s:.3g} s is too long to be tried {later}"
        if not candidate.backend.prepared():
            self.untried.append(candidate.title)
            return f"has to be prepared, which takes too long {later}"
        return ""

    def _reject(self, candidate: Candidate, found: Rejected) -> None:
        self.admitted.pop(candidate.title, None)
        status = "quarantined" if found.quarantined else found.status
        seen = {"first_ms": found.first_ms, "peak_bytes": found.peak_bytes, "error": found.error}
        self.rows[candidate.title] = candidate.measured_row(status, found.reason, **seen)
        if found.quarantined or found.status == "incorrect":
            self._quarantine_other_orders(candidate, found.reason)

    def _quarantine_other_orders(self, culprit: Candidate, reason: str) -> None:
        """Rule out the culprit's other orders too: the quarantine is of its version."""
        for candidate in self.candidates:
            others = candidate.row is None and candidate is not culprit and candidate.version == culprit.version
            if others and candidate.name == culprit.name != registry.LAST_RESORT:
                self.admitted.pop(candidate.title, None)
                if self.race is not None:
                    self.race.remove(candidate.title)
                text = f"quarantined with {culprit.title}: {reason}"
                self.rows[candidate.title] = candidate.measured_row("quarantined", text)

    def _prepare(self, candidate: Candidate, gate: Gate) -> Rejected | None:
        """Run the backend's `prepare` once per trial, outside the budget; its rejection, if it failed."""
        start = self.clock()
        try:
            return gate.prepare(candidate)
        finally:
            self.outside_s += self.clock() - start

    def _race(self, example: Example, differences: Sequence[float]) -> Steps[None]:
        admitted = [each for each in self.candidates if each.title in self.admitted]
        decided = next((each for each in admitted if self.prior is not None and each.id == self.prior.chosen), None)
        if (first := decided or incumbent_of(admitted)) is None:
            return
        incumbent = first.title
        runners = {each.title: (each, self.admitted[each.title]) for each in admitted}
        for title, (each, seen) in list(runners.items()):
            if seen.call_ms > self._longest_s * 1e3 and title != incumbent:  # it would delay a call of the program
                ratio = seen.call_ms / 1e3 / self._call_s()
                text = f"its first calls took {ratio:.1f} times as long as the fastest's: too long between calls"
                self.rows[title] = each.measured_row("not_measured", text, first_ms=seen.first_ms)
                self.untried += [title] if ratio < MAY_WIN_RATIO else []
                del runners[title]
        race = self.race = Race(self.request, runners, incumbent, self.clock, self.live_s is not None, differences)
        remaining = self._remaining_s()
        if self.waiting:
            attempts = 1 if self.prior is None else 1 + self.prior.attempts
            least_s = self.limits.race_s * self.patience + self.limits.race_calls * self._call_s()
            remaining = max(remaining, min(attempts * least_s, self.budget_s))
        yield from race.run(lambda each: example.call(*each.backend_and_order), remaining, brief=self.waiting)

    def _decision(self, chosen: Candidate) -> Decision:
        assert self.race is not None
        untried = f"no time was left to try {', '.join(self.untried)}" if self.untried else ""
        provisional = self.race.why_provisional() or untried
        remaining, load = self._remaining_s(), self.race.rounds.load
        earlier = 0 if self.prior is None else self.prior.attempts  # provisional ones
        round_s = sum(timing.median_ms for timing in self.race.rounds.timings.values()) / 1e3
        if not self.waiting and not load.disturbed and remaining > round_s:
            provisional = ""  # it had more time, which would tell no more
        return self.request.decision(
            chosen.id,
            "measured",
            self.race.all_rows(self.candidates, self.rows, self.prior, chosen),
            provisional=provisional,
            attempts=earlier + 1 if provisional else 0,
            load=load._asdict(),
            budget_ms=None if self.budget_s == math.inf else self.budget_s * 1e3,
            elapsed_ms=round((self.clock() - self.start) * 1e3, 3),
            environment=current_environment(),
        )
