"""From a problem to a decision: refusals, memory, the gate, timing in turns. Every failure is data.

The incumbent, which is the stored decision or else the static choice, is always a candidate and runs first; only a
significant win replaces it (see `choice`). With a decision to start from, only what changed is measured again, beside
the best of what did not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from attn_dispatch import choice, measure, registry
from attn_dispatch.admission import Admitted, Gatekeeper, Rejected, flops
from attn_dispatch.candidates import Candidate, candidates, environment_now
from attn_dispatch.example import Example, example_bytes, make
from attn_dispatch.group import group_of
from attn_dispatch.heat import ENOUGH_ROUNDS, Heat
from attn_dispatch.logging import say_once
from attn_dispatch.machine import provenance, silicon
from attn_dispatch.order import NATURAL
from attn_dispatch.problem import Problem
from attn_dispatch.store import Decision, Row
from attn_dispatch.units import one_line, printable

GENEROUS = 2.0  #: how many times the incumbent's rate a candidate is believed capable of, before it is tried


def decide(
    problem: Problem,
    budget_s: float | None,
    *,
    prior: Decision | None = None,
    changed: Collection[str] | None = None,
    first: str | None = None,
) -> Decision | None:
    """Measure and choose.

    Args:
        budget_s: seconds that trials may take; None for no limit. Working out what results should be, and what a
            backend does once on a machine, come on top.
        prior: the decision so far. Its choice is the incumbent; rows of backends that are not measured are kept.
        changed: with `prior`, the backends to measure, beside the best of the others; None for all.
        first: who is tried first where there is no `prior`, by default the static choice: of a problem that takes
            long, the first may be the only one that there is time for.

    Returns:
        The decision, or None where nothing could be measured: no candidate, or no memory for a trial.

    Raises:
        BackendFailed: a candidate left the device unusable.
    """
    # The reference works on a few widened rows: the example is all that is held beside one candidate's call.
    found = candidates(problem, beside=example_bytes(problem))
    first = first if prior is None else prior.choice
    runners = _runners(problem, found, prior, changed, first)
    if not runners:
        return None
    trial = _Trial(problem, found, runners, budget_s, prior)
    trial.run()
    chosen = trial.choose()
    trial.release()
    return None if chosen is None else trial.decision(chosen)


def _runners(
    problem: Problem,
    found: list[Candidate],
    prior: Decision | None,
    changed: Collection[str] | None,
    first: str | None,
) -> list[Candidate]:
    """Who is measured: the first, then those with the least work, since they are likely to win."""
    able = {candidate.name: candidate for candidate in found if candidate.row is None}
    names = set(able)
    if prior is not None and changed is not None:
        names &= {*changed, prior.choice, *_anchor(prior, able.keys() - set(changed))}
    if not names:
        return []
    if first not in names:
        first = next(name for name in able if name in names)
    rest = [able[name] for name in able if name in names - {first}]
    return [able[first], *sorted(rest, key=lambda each: flops(each, problem) or 0)]


def _anchor(prior: Decision, names: Collection[str]) -> list[str]:
    """The best of what did not change: what is measured anew has its ratio to this one, taken in the same minute."""
    timed = [row for row in prior.candidates if row.backend in names and row.median_ms is not None]
    best = min(timed, key=lambda row: (row.backend != prior.choice, row.median_ms), default=None)
    return [] if best is None else [best.backend]


@dataclass
class _Trial:
    problem: Problem
    found: list[Candidate]
    runners: list[Candidate]
    budget_s: float | None
    prior: Decision | None
    start: float = field(default_factory=time.perf_counter)
    outside_s: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    admitted: dict[str, Admitted] = field(default_factory=dict[str, Admitted])
    beside: tuple[Problem, ...] = ()  #: other problems that candidates were run on
    heat: Heat | None = None
    chosen: str | None = None

    def run(self) -> None:
        example = make(self.problem)
        gate = Gatekeeper(example)
        self.outside_s += gate.outside_s
        for candidate in self.runners:
            reason, need_s = self._too_long(candidate, gate)
            if reason:
                self.rows[candidate.name] = _row(candidate, "not_measured", reason, need_ms=_finite(_ms(need_s)))
                continue
            before_s = gate.outside_s
            self._admit(candidate, gate)
            self.outside_s += gate.outside_s - before_s
        self.beside = gate.case_problems
        del gate
        self._race(example)

    def release(self) -> None:
        """Drop what the trial left behind; not what the chosen backend took long to make and is about to need."""
        for candidate in self.runners:
            try:
                self._clear(candidate)
            except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not take the call along
                say_once(f"{candidate.name} does not let go of what it keeps: {one_line(error)}")

    def _clear(self, candidate: Candidate) -> None:
        forget, release = (getattr(candidate.backend, each, None) for each in ("forget", "release"))
        if forget is not None:
            for problem in (*self.beside, *[self.problem] * (candidate.name != self.chosen)):
                forget(problem)
        elif release is not None:
            release()

    def _pacemaker(self) -> Candidate | None:
        """Of those admitted, the one that ran first."""
        return next((candidate for candidate in self.runners if candidate.name in self.admitted), None)

    def _incumbent(self) -> str | None:
        """Who is replaced only by a significant win: what was decided before, else the static choice."""
        if self.prior is not None and self.prior.choice in self.admitted:
            return self.prior.choice
        return next((candidate.name for candidate in self.found if candidate.name in self.admitted), None)

    def _remaining_s(self) -> float | None:
        spent = time.perf_counter() - self.start - self.outside_s
        return None if self.budget_s is None else self.budget_s - spent

    def _too_long(self, candidate: Candidate, gate: Gatekeeper) -> tuple[str, float]:
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
        least_s = self.admitted[pacemaker.name].call_ms / 1e3 * ratio / GENEROUS
        need_s = first_s + least_s * GENEROUS * ENOUGH_ROUNDS
        if least_s > left_s:
            return (
                f"{ratio:.3g} times {pacemaker.name}'s work: at least {least_s:.3g} s at {GENEROUS:g} times its "
                f"rate, with {left_s:.3g} s of the budget left"
            ), need_s
        rounds_s = ENOUGH_ROUNDS * sum(admitted.call_ms for admitted in self.admitted.values()) / 1e3
        if ratio > GENEROUS and rounds_s + least_s > left_s:
            return (
                f"{ratio:.3g} times {pacemaker.name}'s work, and the {left_s:.3g} s that are left of the budget are "
                f"needed to tell the others apart"
            ), need_s
        return "", 0.0

    def _admit(self, candidate: Candidate, gate: Gatekeeper) -> None:
        found = self._prepare(candidate, gate) or gate.admit(candidate)
        if isinstance(found, Admitted):
            self.admitted[candidate.name] = found
            return
        self.rows[candidate.name] = _row(
            candidate,
            "quarantined" if found.kept_out else found.status,
            found.reason,
            first_ms=found.first_ms,
            peak_bytes=found.peak_bytes,
            error=found.error,
        )

    def _prepare(self, candidate: Candidate, gate: Gatekeeper) -> Rejected | None:
        """What is done once on a machine is no part of this problem's budget."""
        prepare = getattr(candidate.backend, "prepare", None)
        if prepare is None:
            return None
        start = time.perf_counter()
        try:
            return gate.prepare(candidate, prepare)
        finally:
            self.outside_s += time.perf_counter() - start

    def _race(self, example: Example) -> None:
        incumbent = self._incumbent()
        if incumbent is None:
            return
        runners = {each.name: (each, self.admitted[each.name]) for each in self.found if each.name in self.admitted}
        self.heat = Heat(self.problem, runners, incumbent, self.budget_s)
        self.heat.run(example, self._remaining_s())

    def choose(self) -> str | None:
        self.chosen = None if self.heat is None else self.heat.choose()
        return self.chosen

    def decision(self, chosen: str) -> Decision:
        where, plain = silicon(self.problem.device), self.problem.to_dict()
        return Decision(
            key=self.problem.key(where),
            silicon=where,
            group=group_of(plain),
            title=str(self.problem),
            problem=plain,
            choice=chosen,
            order=NATURAL,
            source="measured",
            candidates=tuple(self._final_rows()),
            provenance=provenance(self.problem.device),
            created=_now(),
            budget_ms=None if self.budget_s is None else _finite(self.budget_s * 1e3),
            elapsed_ms=_ms(time.perf_counter() - self.start),
            environment=environment_now(),
        )

    def _final_rows(self) -> Iterator[Row]:
        assert self.heat is not None
        earlier = {} if self.prior is None else {row.backend: row for row in self.prior.candidates}
        failures, left_out = self.heat.turns.failures, self.heat.left_out()
        for candidate in self.found:
            name = candidate.name
            if name in failures:
                yield _row(candidate, "failed", one_line(failures[name]))
            elif name in self.heat.outcomes:
                yield self._timed(candidate, self.heat.outcomes[name], self.heat.turns.timings[name])
            elif name in left_out:
                yield self._left_out(candidate, left_out[name])
            elif name in self.rows:
                yield self._persistent(self.rows[name], earlier.get(name))
            elif candidate.row is not None:
                yield candidate.row
            else:
                yield self._kept(earlier.get(name), candidate, self.heat)

    def _timed(self, candidate: Candidate, outcome: choice.Outcome, timing: measure.Timing) -> Row:
        admitted = self.admitted[candidate.name]
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
        admitted = self.admitted[candidate.name]
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

    def _kept(self, row: Row | None, candidate: Candidate, heat: Heat) -> Row:
        """A row that was not measured again, told against what is chosen now."""
        assert self.chosen is not None
        if row is None:
            return _row(candidate, "not_measured", "was not there when the trial began")
        if row.status not in ("chosen", "slower", "tie") or row.low_ms is None:
            return row
        best = heat.turns.timings[self.chosen]
        status = "slower" if row.low_ms > best.high_ms else "tie"
        return msgspec.structs.replace(row, status=status, ratio=None, ratio_low=None, ratio_high=None, break_even=None)


def _row(candidate: Candidate, status: str, reason: str, **measured: float | None) -> Row:
    return Row(
        backend=candidate.name,
        order=candidate.order,
        status=status,
        reason=printable(reason),
        version=registry.version_of(candidate.backend),
        workspace_bytes=candidate.workspace_bytes,
        measured=_now(),
        **measured,  # type: ignore[arg-type]
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
