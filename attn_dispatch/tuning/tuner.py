"""From a problem to a decision: refusals, memory, the gate, timing in turns. Every failure is data. A candidate is a
backend in an order of tokens.

The incumbent, which is the stored decision or else the static choice, is always a candidate. It runs first, unless
another has so much less to do that there might be no time left for it; only a significant win replaces it (see
`choice`). With a decision to start from, only what changed is measured again, beside the best of what did not.
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
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.text import one_line, printable
from attn_dispatch.tuning import choice, intervals
from attn_dispatch.tuning.candidates import Candidate, Name, Request, environment_now, heuristic, now
from attn_dispatch.tuning.example import Example, example_bytes, make
from attn_dispatch.tuning.gate import Admitted, Gate, Rejected, flops
from attn_dispatch.tuning.oracle import NoReference, reference
from attn_dispatch.tuning.race import ENOUGH_ROUNDS, Race

FAR_LESS = 4  #: times less work than the static choice's, from which a candidate is tried before it
GENEROUS = 2.0  #: how many times the incumbent's rate a candidate is believed capable of, before it is tried


def decide(
    request: Request,
    budget_s: float | None,
    *,
    prior: Decision | None = None,
    changed: Collection[Name] | None = None,
    first: Name | None = None,
) -> Decision | None:
    """Measure and choose.

    Args:
        budget_s: seconds that trials may take; None for no limit. Working out what results should be, and what a
            backend does once on a machine, come on top.
        prior: the decision so far. Its choice is the incumbent; rows of candidates that are not measured are kept.
        changed: with `prior`, the candidates to measure, beside the best of the others; None for all.
        first: who is tried first where there is no `prior`, by default the static choice: of a problem that takes
            long, the first may be the only one that there is time for.

    Returns:
        The decision, or None where nothing could be measured: no candidate, or no memory for a trial (said once).

    Raises:
        BackendFailed: a candidate left the device unusable.
    """
    # The reference works on a few widened rows: the example is all that is held beside one candidate's call.
    problem = request.problem
    found = request.beside(example_bytes(problem))
    first = first if prior is None else prior.chosen
    runners = _runners(problem, found, prior, changed, first)
    if not runners:
        return None
    trial = _Trial(request, found, runners, budget_s, prior)
    try:
        trial.run()
        chosen = trial.choose()
    except NoReference as error:
        say_once(f"not measured, for want of memory to check results: {printable(str(problem))} ({error})")
        chosen = None
    if chosen is None:
        memory.release(problem.device)  # only here, where the error does not hold what was worked out any more
    trial.release()
    return None if chosen is None else trial.decision(chosen)


def _runners(
    problem: Problem,
    found: list[Candidate],
    prior: Decision | None,
    changed: Collection[Name] | None,
    first: Name | None,
) -> list[Candidate]:
    """Who is measured: the first, then those with the least work, since they are likely to win."""
    able = {candidate.id: candidate for candidate in found if candidate.row is None}
    names = set(able)
    if prior is not None and changed is not None:
        names &= {*changed, prior.chosen, *_anchor(prior, able.keys() - set(changed))}
    there = [able[name] for name in able if name in names]
    first_one = next((each for each in there if each.id == first), None) or heuristic(there)
    rest = sorted((each for each in there if each is not first_one), key=lambda each: flops(each, problem) or 0)
    if prior is None and first is None and first_one is not None and _is_far_less(rest, first_one, problem):
        first_one, rest = rest[0], [first_one, *rest[1:]]
    return rest if first_one is None else [first_one, *rest]


def _is_far_less(rest: list[Candidate], first: Candidate, problem: Problem) -> bool:
    """Whether the least work of the others is a small part of the first one's, which might leave them no time."""
    least, whole = (flops(rest[0], problem) if rest else None), flops(first, problem)
    return bool(least and whole and least * FAR_LESS <= whole)


def _anchor(prior: Decision, names: Collection[Name]) -> list[Name]:
    """The best of what did not change: what is measured anew has its ratio to this one, taken in the same minute."""
    timed = [row for row in prior.candidates if row.id in names and row.median_ms is not None]
    best = min(timed, key=lambda row: (row.id != prior.chosen, row.median_ms), default=None)
    return [] if best is None else [best.id]


@dataclass
class _Trial:
    """One trial; its tables are by the candidates' titles."""

    request: Request
    found: list[Candidate]
    runners: list[Candidate]
    budget_s: float | None
    prior: Decision | None
    start: float = field(default_factory=time.perf_counter)
    outside_s: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    admitted: dict[str, Admitted] = field(default_factory=dict[str, Admitted])
    prepared: dict[str, Rejected | None] = field(default_factory=dict[str, Rejected | None])  #: by backend
    beside: tuple[Problem, ...] = ()  #: other problems that candidates were run on
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
            reason, need_s = self._too_long(candidate, gate)
            if reason:
                self.rows[candidate.title] = _row(candidate, "not_measured", reason, need_ms=_finite(_ms(need_s)))
                continue
            before_s = gate.outside_s
            self._admit(candidate, gate)
            self.outside_s += gate.outside_s - before_s
        self.beside = gate.case_problems
        del gate
        self._race(example)

    def release(self) -> None:
        """Drop what the trial left behind; not what the chosen backend took long to make and is about to need."""
        for backend in {candidate.name: candidate.backend for candidate in self.runners}.values():
            try:
                self._clear(backend)
            except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not take the call along
                say_once(f"{backend.name} does not let go of what it keeps: {one_line(error)}")

    def _clear(self, backend: Backend) -> None:
        forget, release = (getattr(backend, each, None) for each in ("forget", "release"))
        if forget is not None:
            won = self.chosen is not None and backend.name == self.chosen.name
            for problem in (*self.beside, *[self.problem] * (not won)):
                forget(problem)
        elif release is not None:
            release()

    def _pacemaker(self) -> Candidate | None:
        """Of those admitted, the one that ran first."""
        return next((candidate for candidate in self.runners if candidate.title in self.admitted), None)

    def _incumbent(self) -> str | None:
        """Who is replaced only by a significant win: what was decided before, else the static choice."""
        admitted = [candidate for candidate in self.found if candidate.title in self.admitted]
        decided = next((each for each in admitted if self.prior is not None and each.id == self.prior.chosen), None)
        incumbent = decided or heuristic(admitted)
        return None if incumbent is None else incumbent.title

    def _remaining_s(self) -> float | None:
        spent = time.perf_counter() - self.start - self.outside_s
        return None if self.budget_s is None else self.budget_s - spent

    def _too_long(self, candidate: Candidate, gate: Gate) -> tuple[str, float]:
        """Why a candidate is not tried, and the seconds that it would have needed: what it builds first, or its
        arithmetic alone, would take the rest of the budget.
        """
        pacemaker, remaining = self._pacemaker(), self._remaining_s()
        if remaining is None or pacemaker is None:
            return "", 0.0
        left_s = max(remaining, 0.0)
        first_s = gate.builds_ms(candidate) / 1e3
        if first_s > left_s:
            return (
                f"its first calls, the checks' too, take about {first_s:.3g} s more than later ones, with "
                f"{left_s:.3g} s of the budget left: `attn-dispatch profile --full` measures it"
            ), first_s
        work = [flops(each, self.problem) for each in (candidate, pacemaker)]
        if work[0] is None or not work[1]:
            return "", 0.0
        ratio = work[0] / work[1]
        least_s = self.admitted[pacemaker.title].call_ms / 1e3 * ratio / GENEROUS
        need_s = first_s + least_s * GENEROUS * ENOUGH_ROUNDS
        if least_s > left_s:
            return (
                f"{ratio:.3g} times {pacemaker.title}'s work: at least {least_s:.3g} s at {GENEROUS:g} times its "
                f"rate, with {left_s:.3g} s of the budget left"
            ), need_s
        rounds_s = ENOUGH_ROUNDS * sum(admitted.call_ms for admitted in self.admitted.values()) / 1e3
        if ratio > GENEROUS and rounds_s + least_s > left_s:
            return (
                f"{ratio:.3g} times {pacemaker.title}'s work, and the {left_s:.3g} s that are left of the budget are "
                f"needed to tell the others apart"
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
            self._keep_out(candidate, found.reason)

    def _keep_out(self, culprit: Candidate, reason: str) -> None:
        """A quarantine is of a version: what is wrong in one order is trusted in no other."""
        for candidate in self.found:
            others = candidate.row is None and candidate is not culprit
            if others and candidate.name == culprit.name != registry.LAST_RESORT:
                self.admitted.pop(candidate.title, None)
                text = f"kept out with {culprit.title}: {reason}"
                self.rows[candidate.title] = _row(candidate, "quarantined", text)

    def _prepare(self, candidate: Candidate, gate: Gate) -> Rejected | None:
        """What is done once on a machine is no part of this problem's budget."""
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
        admitted = [each for each in self.found if each.title in self.admitted]
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
            self._final_rows(),
            budget_ms=None if self.budget_s is None else _finite(self.budget_s * 1e3),
            elapsed_ms=_ms(time.perf_counter() - self.start),
            environment=environment_now(),
        )

    def _final_rows(self) -> Iterator[Row]:
        assert self.race is not None
        earlier = {} if self.prior is None else {row.id: row for row in self.prior.candidates}
        failures, left_out = self.race.rounds.failures, self.race.left_out()
        for candidate in self.found:
            name = candidate.title
            if name in failures:
                yield _row(candidate, "failed", one_line(failures[name]))
            elif name in self.race.outcomes:
                yield self._timed(candidate, self.race.outcomes[name], self.race.rounds.timings[name])
            elif name in left_out:
                yield self._left_out(candidate, left_out[name])
            elif name in self.rows:
                yield self._persistent(self.rows[name], earlier.get(candidate.id))
            elif candidate.row is not None:
                yield candidate.row
            else:
                yield self._kept(earlier.get(candidate.id), candidate, self.race)

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
        """One cold call, with all that is built once, is no measure of the calls to come."""
        admitted = self.admitted[candidate.title]
        return _row(
            candidate,
            "not_measured",
            f"its first call took {ratio:.1f} times as long as the fastest's, and the budget was short",
            first_ms=admitted.first_ms,
            peak_bytes=admitted.peak_bytes,
            error=admitted.error,
        )

    def _persistent(self, row: Row, earlier: Row | None) -> Row:
        """What was put off again is thought to need twice as long: it is not tried for ever."""
        if row.need_ms is None or earlier is None or earlier.need_ms is None:
            return row
        return msgspec.structs.replace(row, need_ms=max(row.need_ms, 2 * earlier.need_ms))

    def _kept(self, row: Row | None, candidate: Candidate, race: Race) -> Row:
        """A row that was not measured again, told against what is chosen now."""
        assert self.chosen is not None
        if row is None:
            return _row(candidate, "not_measured", "was not there when the trial began")
        if row.status not in ("chosen", "slower", "tie") or row.low_ms is None:
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
        measured=now(),
        **measured,  # type: ignore[arg-type]
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
