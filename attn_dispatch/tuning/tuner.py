"""Runs a trial: candidates pass the gate, race in rounds, and the result is a decision. Failures become rows.

The incumbent is the prior decision's choice, else the static choice. It runs first, unless another candidate needs far
less work and might otherwise get no time; `choice` says what replaces it. With a prior decision only changed candidates
are measured again, with the best unchanged one for comparison. The chosen candidate must pass the hard cases.

Where a caller waits, the trial may take some tens of the problem's own calls, and everything that it does counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.log import say_once
from attn_dispatch.machine import load, memory
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.text import one_line, printable
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.candidates import (
    Candidate,
    Request,
    current_environment,
    finite,
    first_call_ms,
    flops,
    shares_builds,
    static_choice,
)
from attn_dispatch.tuning.example import Example, example_bytes, make_timed
from attn_dispatch.tuning.gate import Admitted, Gate, Rejected
from attn_dispatch.tuning.oracle import FEW_PAIRS, PAIRS, NoReference, reference
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import ENOUGH_ROUNDS

# Of a trial that a caller waits for.
FIXED_S = 0.1  #: seconds that it may take for a problem of microseconds
CALLS = 12  #: further time, in calls of the fastest candidate so far
SHORT_S = 0.02  #: seconds of a first call that are always left
RACE_S, RACE_CALLS = 0.02, 6  #: seconds and calls of the fastest candidate that a race gets at least
BUSY_FACTOR = 4  #: factor on all seconds where other programs take the cores: calls take longer, samples are repeated

LESS_WORK_FACTOR = 4  #: ratio of work from which a candidate with less work runs before the static choice
RATE_FACTOR = 2.0  #: rate assumed for an untried candidate, relative to the first admitted one's
LAST_RESORT_RATE = 0.25  #: the same for the last resort, which writes the matrix of scores to memory several times


def run_trial(
    request: Request,
    budget_s: float | None,
    *,
    waiting: bool = False,
    prior: Decision | None = None,
    changed: Collection[CandidateId] | None = None,
    first: CandidateId | None = None,
) -> Decision | None:
    """Measure the candidates of a problem and choose.

    Args:
        budget_s: seconds that the trial may take; None for no limit. A backend's `prepare` is not included.
        waiting: a caller waits: besides `budget_s`, the problem's own calls limit the trial (`CALLS`), and only the
            chosen candidate runs the hard cases.
        prior: the stored decision. Its choice is the incumbent; rows of candidates that are not measured again stay.
        changed: with `prior`, the candidates to measure, with the best of the others; None for all.
        first: the candidate to run first without a `prior`, by default the static choice: it may be the only one
            that the budget suffices for.

    Returns:
        The decision, or None if nothing could be measured: no candidate, or no memory for a trial (warned once).

    Raises:
        BackendFailed: a candidate left the device unusable.
    """
    # The reference computes a few rows at a time: besides a candidate's call, only the example needs memory.
    problem = request.problem
    found = request.candidates_with(example_bytes(problem))
    first = first if prior is None else prior.chosen
    runners = _to_measure(problem, found, prior, changed, first)
    if not runners:
        return None
    trial = _Trial(request, found, runners, budget_s, prior, waiting)
    try:
        trial.run()
    except Exception as error:
        if not isinstance(error, NoReference) and not guard.is_shortage(error):
            raise
        why = f"to check results: {printable(str(problem))} ({error})"
        if not isinstance(error, NoReference):
            why = f"for a trial: {printable(str(problem))} ({one_line(error)})"
        say_once(f"not measured, too little memory {why}")
        trial.chosen = None
    if trial.chosen is None:
        memory.release(problem.device)  # only here: in the handler the exception still references tensors
    trial.release()
    if trial.chosen is None:
        return None
    trial.clear_strikes()
    return trial.decision(trial.chosen)


def passes_hard_cases(request: Request, name: CandidateId) -> bool:
    """Whether a candidate that no trial of this problem has chosen passed the hard cases, or passes them now.

    Raises:
        BackendFailed: it left the device unusable.
    """
    candidate = next((each for each in request.able if each.id == name), None)
    try:
        return candidate is not None and Gate(request.problem, request.address).check_hard_cases(candidate) is None
    except Exception as error:
        if not isinstance(error, NoReference) and not guard.is_shortage(error):
            raise
        return False


def _to_measure(
    problem: Problem,
    found: list[Candidate],
    prior: Decision | None,
    changed: Collection[CandidateId] | None,
    first: CandidateId | None,
) -> list[Candidate]:
    """The candidates to measure, in order: the first, then by increasing work, as less work is likely faster.

    Of those with about the same work, the ones that move less memory come first.
    """
    able = {candidate.id: candidate for candidate in found if candidate.row is None}
    names = set(able)
    if prior is not None and changed is not None:
        names &= {*changed, prior.chosen, *_best_unchanged(prior, able.keys() - set(changed))}
    measurable = [able[name] for name in able if name in names]
    leading = next((each for each in measurable if each.id == first), None) or static_choice(measurable)
    rest = sorted((each for each in measurable if each is not leading), key=lambda each: _effort(each, problem))
    if prior is None and first is None and leading is not None and _has_far_less_work(rest, leading, problem):
        leading, rest = rest[0], [leading, *rest[1:]]
    return rest if leading is None else [leading, *rest]


def _effort(candidate: Candidate, problem: Problem) -> tuple[int, int, float]:
    """Octaves of declared work, then declared memory, then work itself; 0 where the work is unknown."""
    work = flops(candidate, problem) or 0.0
    return round(math.log2(work)) if work >= 1 else 0, candidate.workspace_bytes, work


def _has_far_less_work(rest: list[Candidate], first: Candidate, problem: Problem) -> bool:
    """Whether the least work of the others is at most 1 / `LESS_WORK_FACTOR` of the first one's."""
    least, whole = (flops(rest[0], problem) if rest else None), flops(first, problem)
    return bool(least and whole and least * LESS_WORK_FACTOR <= whole)


def _best_unchanged(prior: Decision, names: Collection[CandidateId]) -> list[CandidateId]:
    """The fastest unchanged candidate, measured again so that ratios to it are paired."""
    timed = [row for row in prior.candidates if row.id in names and row.median_ms is not None]
    best = min(timed, key=lambda row: (row.id != prior.chosen, row.median_ms), default=None)
    return [] if best is None else [best.id]


@dataclass
class _Trial:
    """One trial; all tables are keyed by candidate title."""

    request: Request
    candidates: list[Candidate]
    runners: list[Candidate]
    budget_s: float | None
    prior: Decision | None
    waiting: bool = False
    start: float = field(default_factory=time.perf_counter)
    calm: bool = field(default_factory=lambda: load.is_calm())
    outside_s: float = 0.0  #: seconds of `prepare`, and of drawing an example on CUDA
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    admitted: dict[str, Admitted] = field(default_factory=dict[str, Admitted])
    prepared: dict[str, Rejected | None] = field(default_factory=dict[str, Rejected | None])  #: keyed by backend
    case_problems: tuple[Problem, ...] = ()  #: problems of the hard cases
    untried: list[str] = field(default_factory=list[str])  #: skipped for lack of time, though they may be the fastest
    race: Race | None = None
    chosen: Candidate | None = None

    @property
    def problem(self) -> Problem:
        return self.request.problem

    def run(self) -> None:
        """Admit, time and choose: `chosen` is None if nothing could be measured. Raises NoReference, BackendFailed."""
        with reference():
            example, self.outside_s = make_timed(self.problem)
        gate = Gate(self.problem, self.request.address, example, FEW_PAIRS if self.waiting else PAIRS)
        for candidate in self.runners:
            if candidate.title in self.rows:
                continue
            reason, need_s = self._reason_to_skip(candidate, gate)
            if reason:
                may_win = candidate.title in self.untried
                more = {"need_ms": finite(_ms(need_s)), "open": may_win}
                self.rows[candidate.title] = candidate.measured_row("not_measured", reason, **more)
                continue
            found = self._prepare(candidate, gate) or gate.admit(candidate)
            if isinstance(found, Admitted):
                self.admitted[candidate.title] = found
                # What is kept on disk is compiled once per machine, as by `prepare`.
                self.outside_s += max(0.0, found.first_ms - found.call_ms) / 1e3 * shares_builds(candidate)
            else:
                self._reject(candidate, found)
        self._race(example)
        del example
        self._choose(gate)
        self.case_problems = gate.case_problems

    def _choose(self, gate: Gate) -> None:
        """Choose the best candidate that passes the hard cases; all timed ones run them if no caller waits."""
        if self.race is None:
            return
        by_title = {candidate.title: candidate for candidate in self.runners}
        due = [] if self.waiting else [by_title[title] for title in self.race.rounds.timings]
        while True:
            title = self.race.choose()
            if title is not None and by_title[title] not in due:
                due.append(by_title[title])
            rejected = {
                each.title: found
                for each in due
                if (found := gate.check_hard_cases(each, waiting=self.waiting)) is not None
            }
            due.clear()
            for name, found in rejected.items():
                self.race.remove(name)
                self._reject(by_title[name], found)
            if not rejected:
                self.chosen = None if title is None else by_title[title]
                return

    def release(self) -> None:
        """Clear the backends' tables for the trial's problems, except the chosen backend's for this one."""
        for backend in {candidate.name: candidate.backend for candidate in self.runners}.values():
            try:
                self._clear_tables(backend)
            except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not fail the call
                say_once(f"{backend.name} failed to clear its tables: {one_line(error)}")

    def clear_strikes(self) -> None:
        """Forget the deaths and hangs of the versions that passed the gate and did not fail in the race."""
        failures = {} if self.race is None else self.race.rounds.failures
        quarantine = Quarantine(cache_folder(), self.request.silicon)
        for candidate in self.runners:
            if candidate.title in self.admitted and candidate.title not in failures:
                quarantine.clear_strikes(candidate.name, candidate.version, self.request.address.group)

    def _clear_tables(self, backend: Backend) -> None:
        forget, release = (getattr(backend, each, None) for each in ("forget", "release"))
        if forget is not None:
            is_chosen = self.chosen is not None and backend.name == self.chosen.name
            for problem in (*self.case_problems, *[self.problem] * (not is_chosen)):
                forget(problem)
        elif release is not None:
            release()

    def _incumbent(self) -> str | None:
        """The title of the incumbent: the prior choice, else the static choice, among the admitted."""
        admitted = [candidate for candidate in self.candidates if candidate.title in self.admitted]
        decided = next((each for each in admitted if self.prior is not None and each.id == self.prior.chosen), None)
        incumbent = decided or static_choice(admitted)
        return None if incumbent is None else incumbent.title

    def _remaining_s(self) -> float | None:
        spent = time.perf_counter() - self.start - self.outside_s
        most = [] if self.budget_s is None else [self.budget_s]
        if self.waiting and self.admitted:
            most.append(FIXED_S * (1 if self.calm else BUSY_FACTOR) + CALLS * self._call_s())
        return min(most) - spent if most else None

    def _call_s(self) -> float:
        """Seconds of a call of the fastest candidate so far."""
        return min(admitted.call_ms for admitted in self.admitted.values()) / 1e3

    @property
    def attempts(self) -> int:
        """Earlier trials of the problem whose choice was provisional."""
        return 0 if self.prior is None else self.prior.attempts

    def _reason_to_skip(self, candidate: Candidate, gate: Gate) -> tuple[str, float]:
        """Why a candidate is skipped, with the seconds it would need; empty if it is not.

        It is skipped if its one-time work or its estimated calls would exceed the rest of the budget.
        """
        first = next((each for each in self.runners if each.title in self.admitted), None)
        remaining = self._remaining_s()
        if remaining is None or first is None:
            return "", 0.0
        if self.waiting and first_call_ms(candidate, self.problem) and isinstance(self.problem.pattern.natural, Dense):
            return f"compiles first: a call that {first.title} serves by one kernel does not wait for that", 0.0
        left_s = max(remaining, SHORT_S if self.waiting else 0.0)
        first_s = gate.builds_ms(candidate) / 1e3
        if first_s > left_s:
            return (
                f"its first calls, the checks' too, take about {first_s:.3g} s more than later ones, with "
                f"{left_s:.3g} s of the budget left: `attn-dispatch profile --full` measures it"
            ), first_s
        work = [flops(each, self.problem) for each in (candidate, first)]
        if work[0] is None or not work[1]:
            return "", 0.0
        ratio = work[0] / work[1]
        rate = RATE_FACTOR if candidate.name != registry.LAST_RESORT else LAST_RESORT_RATE
        least_s = self.admitted[first.title].call_ms / 1e3 * ratio / rate
        need_s = first_s + least_s * max(rate, 1.0) * ENOUGH_ROUNDS
        if least_s > left_s:
            self.untried += [candidate.title] * (ratio < rate)
            return (
                f"{ratio:.3g} times {first.title}'s work: at least {least_s:.3g} s at {rate:g} times its "
                f"rate, with {left_s:.3g} s of the budget left"
            ), need_s
        rounds_s = ENOUGH_ROUNDS * sum(admitted.call_ms for admitted in self.admitted.values()) / 1e3
        if ratio > RATE_FACTOR and rounds_s + least_s > left_s:
            return (
                f"{ratio:.3g} times {first.title}'s work, and the {left_s:.3g} s left of the budget are needed to "
                f"compare the others"
            ), need_s
        return "", 0.0

    def _reject(self, candidate: Candidate, found: Rejected) -> None:
        self.admitted.pop(candidate.title, None)
        self.rows[candidate.title] = candidate.measured_row(
            "quarantined" if found.quarantined else found.status,
            found.reason,
            first_ms=found.first_ms,
            peak_bytes=found.peak_bytes,
            error=found.error,
        )
        if found.quarantined or found.status == "incorrect":
            self._quarantine_other_orders(candidate, found.reason)

    def _quarantine_other_orders(self, culprit: Candidate, reason: str) -> None:
        """Rule out the culprit's other orders too: the quarantine is of its version."""
        for candidate in self.candidates:
            others = candidate.row is None and candidate is not culprit
            if others and candidate.name == culprit.name != registry.LAST_RESORT:
                self.admitted.pop(candidate.title, None)
                if self.race is not None:
                    self.race.remove(candidate.title)
                text = f"quarantined with {culprit.title}: {reason}"
                self.rows[candidate.title] = candidate.measured_row("quarantined", text)

    def _prepare(self, candidate: Candidate, gate: Gate) -> Rejected | None:
        """Run the backend's `prepare` once per trial, outside the budget; its rejection, if it failed."""
        prepare = getattr(candidate.backend, "prepare", None)
        if prepare is None or candidate.name in self.prepared:
            return self.prepared.get(candidate.name)
        start = time.perf_counter()
        try:
            found = self.prepared[candidate.name] = gate.prepare(candidate, prepare)
        finally:
            self.outside_s += time.perf_counter() - start
        return found

    def _race(self, example: Example) -> None:
        incumbent = self._incumbent()
        if incumbent is None:
            return
        admitted = [each for each in self.candidates if each.title in self.admitted]
        runners = {each.title: (each, self.admitted[each.title]) for each in admitted}
        self.race = Race(self.request, runners, incumbent)
        remaining, more_s = self._remaining_s(), None
        if self.waiting and remaining is not None:
            least_s, most_s = RACE_S + RACE_CALLS * self._call_s(), math.inf if self.budget_s is None else self.budget_s
            remaining, more_s = (max(remaining, min(factor * least_s, most_s)) for factor in (1, BUSY_FACTOR))
        self.race.run(example, remaining, more_s)

    def decision(self, chosen: Candidate) -> Decision:
        assert self.race is not None
        untried = f"no time was left to try {', '.join(self.untried)}" if self.untried else ""
        provisional = self.race.why_provisional() or untried
        remaining, load = self._remaining_s(), self.race.rounds.load
        if not self.waiting and not load.disturbed and (remaining is None or remaining > self.race.round_s):
            provisional = ""  # it had more time, which would tell no more
        return self.request.decision(
            chosen.id,
            "measured",
            self._counted_failures(self._final_rows()),
            provisional=provisional,
            attempts=self.attempts + 1 if provisional else 0,
            load=load._asdict(),
            budget_ms=None if self.budget_s is None else finite(self.budget_s * 1e3),
            elapsed_ms=_ms(time.perf_counter() - self.start),
            environment=current_environment(),
        )

    def _final_rows(self) -> Iterator[Row]:
        assert self.race is not None
        earlier = {} if self.prior is None else {row.id: row for row in self.prior.candidates}
        for candidate in self.candidates:
            raced = self.race.row(candidate)
            if raced is not None:
                yield raced
            elif candidate.title in self.rows:
                yield self.rows[candidate.title]
            elif candidate.row is not None:
                yield candidate.row
            else:
                yield self._earlier_row(earlier.get(candidate.id), candidate)

    def _counted_failures(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Count the trials in a row in which a candidate's version failed, so that later trials retry it less often."""
        earlier = {} if self.prior is None else {row.id: row for row in self.prior.candidates}
        for row in rows:
            known = earlier.get(row.id)
            if row.status == "failed" and known is not row:
                same = known is not None and (known.status, known.version) == ("failed", row.version)
                row = msgspec.structs.replace(row, failures=1 + ((known.failures or 1) if same and known else 0))
            yield row

    def _earlier_row(self, row: Row | None, candidate: Candidate) -> Row:
        """The prior row of a candidate not measured again, compared with the chosen one's times."""
        assert self.chosen is not None
        assert self.race is not None
        if row is None:
            return candidate.measured_row("not_measured", "was not available when the trial began")
        if row.status not in TIMED or row.low_ms is None:
            return row
        best = self.race.rounds.timings[self.chosen.title]
        status = "slower" if row.low_ms > best.high_ms else "tie"
        relative = dict.fromkeys(("ratio", "ratio_low", "ratio_high", "break_even"))
        return msgspec.structs.replace(row, status=status, open=False, **relative)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
