"""Runs a trial: candidates pass the gate, race in rounds, and the result is a decision. Failures become rows.

The incumbent is the prior decision's choice, else the static choice. It runs first, unless another candidate needs far
less work and might otherwise get no time; only a significant win replaces it (see `choice`). With a prior decision only
changed candidates are measured again, with the best unchanged one for comparison.
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
from attn_dispatch.machine import memory
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.text import one_line, printable
from attn_dispatch.tuning import choice, guard, intervals
from attn_dispatch.tuning.candidates import Candidate, Request, current_environment, static_choice, utc_now
from attn_dispatch.tuning.example import Example, example_bytes, make
from attn_dispatch.tuning.gate import Admitted, Gate, Rejected, flops
from attn_dispatch.tuning.oracle import NoReference, reference
from attn_dispatch.tuning.race import ENOUGH_ROUNDS, Race

LESS_WORK_FACTOR = 4  #: ratio of work from which a candidate with less work runs before the static choice
RATE_FACTOR = 2.0  #: rate assumed for an untried candidate, relative to the first admitted one's


def run_trial(
    request: Request,
    budget_s: float | None,
    *,
    prior: Decision | None = None,
    changed: Collection[CandidateId] | None = None,
    first: CandidateId | None = None,
) -> Decision | None:
    """Measure the candidates of a problem and choose.

    Args:
        budget_s: seconds that the trial may take; None for no limit. Reference results and a backend's `prepare` are
            not included.
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
    trial = _Trial(request, found, runners, budget_s, prior)
    try:
        trial.run()
        chosen = trial.choose()
    except Exception as error:
        if not isinstance(error, NoReference) and not guard.is_shortage(error):
            raise
        why = f"to check results: {printable(str(problem))} ({error})"
        if not isinstance(error, NoReference):
            why = f"for a trial: {printable(str(problem))} ({one_line(error)})"
        say_once(f"not measured, too little memory {why}")
        chosen = None
    if chosen is None:
        memory.release(problem.device)  # only here: in the handler the exception still references tensors
    trial.release()
    if chosen is None:
        return None
    trial.clear_strikes()
    return trial.decision(chosen)


def _to_measure(
    problem: Problem,
    found: list[Candidate],
    prior: Decision | None,
    changed: Collection[CandidateId] | None,
    first: CandidateId | None,
) -> list[Candidate]:
    """The candidates to measure, in order: the first, then by increasing work, as less work is likely faster."""
    able = {candidate.id: candidate for candidate in found if candidate.row is None}
    names = set(able)
    if prior is not None and changed is not None:
        names &= {*changed, prior.chosen, *_best_unchanged(prior, able.keys() - set(changed))}
    measurable = [able[name] for name in able if name in names]
    leading = next((each for each in measurable if each.id == first), None) or static_choice(measurable)
    rest = sorted((each for each in measurable if each is not leading), key=lambda each: flops(each, problem) or 0)
    if prior is None and first is None and leading is not None and _has_far_less_work(rest, leading, problem):
        leading, rest = rest[0], [leading, *rest[1:]]
    return rest if leading is None else [leading, *rest]


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
    start: float = field(default_factory=time.perf_counter)
    outside_s: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    admitted: dict[str, Admitted] = field(default_factory=dict[str, Admitted])
    prepared: dict[str, Rejected | None] = field(default_factory=dict[str, Rejected | None])  #: keyed by backend
    case_problems: tuple[Problem, ...] = ()  #: problems of the hard cases
    race: Race | None = None
    chosen: Candidate | None = None

    @property
    def problem(self) -> Problem:
        return self.request.problem

    def run(self) -> None:
        with reference():
            example = make(self.problem)
        gate = Gate(example, self.request.address)
        self.outside_s += gate.outside_s
        for candidate in self.runners:
            if candidate.title in self.rows:
                continue
            reason, need_s = self._reason_to_skip(candidate, gate)
            if reason:
                self.rows[candidate.title] = _row(candidate, "not_measured", reason, need_ms=_finite(_ms(need_s)))
                continue
            before_s = gate.outside_s
            self._admit(candidate, gate)
            self.outside_s += gate.outside_s - before_s
        self.case_problems = gate.case_problems
        del gate
        self._race(example)

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

    def _first_admitted(self) -> Candidate | None:
        """The admitted candidate that ran first."""
        return next((candidate for candidate in self.runners if candidate.title in self.admitted), None)

    def _incumbent(self) -> str | None:
        """The title of the incumbent: the prior choice, else the static choice, among the admitted."""
        admitted = [candidate for candidate in self.candidates if candidate.title in self.admitted]
        decided = next((each for each in admitted if self.prior is not None and each.id == self.prior.chosen), None)
        incumbent = decided or static_choice(admitted)
        return None if incumbent is None else incumbent.title

    def _remaining_s(self) -> float | None:
        spent = time.perf_counter() - self.start - self.outside_s
        return None if self.budget_s is None else self.budget_s - spent

    def _reason_to_skip(self, candidate: Candidate, gate: Gate) -> tuple[str, float]:
        """Why a candidate is skipped, with the seconds it would need; empty if it is not.

        It is skipped if its one-time work or its estimated calls would exceed the rest of the budget.
        """
        first, remaining = self._first_admitted(), self._remaining_s()
        if remaining is None or first is None:
            return "", 0.0
        left_s = max(remaining, 0.0)
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
        least_s = self.admitted[first.title].call_ms / 1e3 * ratio / RATE_FACTOR
        need_s = first_s + least_s * RATE_FACTOR * ENOUGH_ROUNDS
        if least_s > left_s:
            return (
                f"{ratio:.3g} times {first.title}'s work: at least {least_s:.3g} s at {RATE_FACTOR:g} times its "
                f"rate, with {left_s:.3g} s of the budget left"
            ), need_s
        rounds_s = ENOUGH_ROUNDS * sum(admitted.call_ms for admitted in self.admitted.values()) / 1e3
        if ratio > RATE_FACTOR and rounds_s + least_s > left_s:
            return (
                f"{ratio:.3g} times {first.title}'s work, and the {left_s:.3g} s left of the budget are needed to "
                f"compare the others"
            ), need_s
        return "", 0.0

    def _admit(self, candidate: Candidate, gate: Gate) -> None:
        found = self._prepare(candidate, gate) or gate.admit(candidate)
        if isinstance(found, Admitted):
            self.admitted[candidate.title] = found
            return
        self.rows[candidate.title] = _row(
            candidate,
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
                text = f"quarantined with {culprit.title}: {reason}"
                self.rows[candidate.title] = _row(candidate, "quarantined", text)

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
        self.race = Race(self.request, runners, incumbent, self.budget_s)
        self.race.run(example, self._remaining_s())

    def choose(self) -> Candidate | None:
        title = None if self.race is None else self.race.choose()
        self.chosen = next((each for each in self.runners if each.title == title), None)
        return self.chosen

    def decision(self, chosen: Candidate) -> Decision:
        return self.request.decision(
            chosen.id,
            "measured",
            self._counted_failures(self._final_rows()),
            budget_ms=None if self.budget_s is None else _finite(self.budget_s * 1e3),
            elapsed_ms=_ms(time.perf_counter() - self.start),
            environment=current_environment(),
        )

    def _final_rows(self) -> Iterator[Row]:
        assert self.race is not None
        earlier = {} if self.prior is None else {row.id: row for row in self.prior.candidates}
        failures, left_out = self.race.rounds.failures, self.race.left_out()
        for candidate in self.candidates:
            title = candidate.title
            if title in failures:
                yield _row(candidate, "failed", one_line(failures[title]))
            elif title in self.race.outcomes:
                yield self._timed(candidate, self.race.outcomes[title], self.race.rounds.timings[title])
            elif title in left_out:
                yield self._left_out(candidate, left_out[title])
            elif title in self.rows:
                yield self._with_doubled_need(self.rows[title], earlier.get(candidate.id))
            elif candidate.row is not None:
                yield candidate.row
            else:
                yield self._earlier_row(earlier.get(candidate.id), candidate, self.race)

    def _timed(self, candidate: Candidate, outcome: choice.Outcome, timing: intervals.Timing) -> Row:
        admitted = self.admitted[candidate.title]
        return _row(
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
            break_even=_finite(outcome.break_even),
            peak_bytes=admitted.peak_bytes,
            error=admitted.error,
        )

    def _left_out(self, candidate: Candidate, ratio: float) -> Row:
        """The row of a candidate with a first call only: it includes one-time work and is no measurement."""
        admitted = self.admitted[candidate.title]
        return _row(
            candidate,
            "not_measured",
            f"its first call took {ratio:.1f} times as long as the fastest's, and the budget was short",
            first_ms=admitted.first_ms,
            peak_bytes=admitted.peak_bytes,
            error=admitted.error,
        )

    def _counted_failures(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Count the trials in a row in which a candidate's version failed, so that later trials retry it less often."""
        earlier = {} if self.prior is None else {row.id: row for row in self.prior.candidates}
        for row in rows:
            known = earlier.get(row.id)
            if row.status == "failed" and known is not row:
                same = known is not None and (known.status, known.version) == ("failed", row.version)
                row = msgspec.structs.replace(row, failures=1 + ((known.failures or 1) if same and known else 0))
            yield row

    def _with_doubled_need(self, row: Row, earlier: Row | None) -> Row:
        """Double the estimated need of a candidate skipped again, so that later trials stop retrying it."""
        if row.need_ms is None or earlier is None or earlier.need_ms is None:
            return row
        return msgspec.structs.replace(row, need_ms=max(row.need_ms, 2 * earlier.need_ms))

    def _earlier_row(self, row: Row | None, candidate: Candidate, race: Race) -> Row:
        """The prior row of a candidate not measured again, compared with the chosen one's times."""
        assert self.chosen is not None
        if row is None:
            return _row(candidate, "not_measured", "was not available when the trial began")
        if row.status not in TIMED or row.low_ms is None:
            return row
        best = race.rounds.timings[self.chosen.title]
        status = "slower" if row.low_ms > best.high_ms else "tie"
        return msgspec.structs.replace(row, status=status, ratio=None, ratio_low=None, ratio_high=None, break_even=None)


def _row(candidate: Candidate, status: str, reason: str, **measured: float | None) -> Row:
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


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
