"""From a problem to a decision: refusals, memory, the gate, timing in turns. Every failure is data.

The static heuristic's choice is always a candidate and runs first. A candidate that another one beats significantly
cannot be chosen; among the rest the order of preference decides, so that noise does not.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from attn_dispatch import measure, registry
from attn_dispatch.candidates import Candidate, candidates, versions
from attn_dispatch.example import Example, example_bytes, make
from attn_dispatch.logging import logger
from attn_dispatch.machine import provenance, silicon
from attn_dispatch.order import NATURAL
from attn_dispatch.problem import Problem
from attn_dispatch.store import Decision, Row
from attn_dispatch.verify import Gate

GENEROUS = 2.0  #: how many times the incumbent's rate a candidate is believed capable of, before it is tried


def decide(problem: Problem, budget_s: float | None) -> Decision | None:
    """Measure and choose.

    Args:
        budget_s: seconds that trials may take; None for no limit.

    Returns:
        The decision, or None where nothing could be measured: no candidate, or no memory for a trial.
    """
    # The reference works on a few widened rows: the example is all that is held beside one candidate's call.
    found = candidates(problem, beside=example_bytes(problem))
    if all(candidate.row is not None for candidate in found):
        return None
    start = time.perf_counter()
    trial = _Trial(problem, found, budget_s, start)
    trial.run()
    chosen = trial.choose()
    trial.release()
    if chosen is None:
        return None
    elapsed_ms = (time.perf_counter() - start) * 1e3
    decision = trial.decision(chosen, elapsed_ms)
    logger.info("%s: %s in %s order, measured in %.0f ms", problem, chosen, NATURAL, elapsed_ms)
    return decision


@dataclass
class _Trial:
    problem: Problem
    found: list[Candidate]
    budget_s: float | None
    start: float
    rows: dict[str, Row] = field(default_factory=dict)
    passed: dict[str, Candidate] = field(default_factory=dict)
    call_ms: dict[str, float] = field(default_factory=dict)
    turns: measure.Turns | None = None
    chosen: str | None = None

    def run(self) -> None:
        problem = self.problem
        example = make(problem)
        gate = Gate.of(example)
        incumbent: tuple[Candidate, float] | None = None
        for candidate in self._by_work():
            if candidate.row is not None:
                self.rows[candidate.name] = candidate.row
                continue
            reason = None if incumbent is None else self._too_long(candidate, *incumbent)
            if reason is not None:
                self.rows[candidate.name] = self._row(candidate, "not_measured", reason)
                continue
            call_ms = self._gate(candidate, gate)
            if call_ms is not None and incumbent is None:
                incumbent = candidate, call_ms
        del gate
        self._race(example, incumbent)

    def _by_work(self) -> list[Candidate]:
        """The static choice, then those with the least work: what is likely to win comes before the budget is gone."""
        able = [candidate for candidate in self.found if candidate.row is None]
        unable = [candidate for candidate in self.found if candidate.row is not None]
        rest = sorted(able[1:], key=lambda candidate: _flops(candidate, self.problem) or 0)
        return unable + able[:1] + rest

    def release(self) -> None:
        """Drop what the trial left behind; not what the chosen backend took long to make and is about to need."""
        for candidate in self.found:
            forget, release = (getattr(candidate.backend, each, None) for each in ("forget", "release"))
            if candidate.row is not None or (forget is not None and candidate.name == self.chosen):
                continue
            if forget is not None:
                forget(self.problem)
            elif release is not None:
                release()

    def _remaining_s(self) -> float | None:
        return None if self.budget_s is None else self.budget_s - (time.perf_counter() - self.start)

    def _too_long(self, candidate: Candidate, incumbent: Candidate, incumbent_ms: float) -> str | None:
        """Why a candidate is not tried: what it builds first, or its arithmetic alone, would take the budget's rest."""
        remaining = self._remaining_s()
        if remaining is None:
            return None
        left_s = max(remaining, 0.0)
        first_s = _first_call_ms(candidate, self.problem) / 1e3
        if first_s > left_s:
            return (
                f"its first call takes about {first_s:.3g} s more than a later one, with {left_s:.3g} s of the budget "
                f"left: `attn-dispatch profile --full` measures it"
            )
        flops = [_flops(each, self.problem) for each in (candidate, incumbent)]
        if flops[0] is None or flops[1] is None:
            return None
        ratio = flops[0] / flops[1]
        least_s = incumbent_ms / 1e3 * ratio / GENEROUS
        if least_s <= left_s:
            return None
        return (
            f"{ratio:.3g} times {incumbent.name}'s work: at least {least_s:.3g} s at {GENEROUS:g} times its "
            f"rate, with {left_s:.3g} s of the budget left"
        )

    def _gate(self, candidate: Candidate, gate: Gate) -> float | None:
        """Run at full size and compare; milliseconds of that call, or None where it may not win.

        A backend that has something to build first is run once more: what a compiler takes is no part of a call.
        """
        device = self.problem.device
        try:
            self._prepare(candidate)
            builds = _first_call_ms(candidate, self.problem) > 0
            result, peak, first_ms = _checked_run(candidate, gate, device)
            call_ms = first_ms
            if builds:
                del result
                result, peak, call_ms = _checked_run(candidate, gate, device)
            verdict = gate.check(result)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a fact about the kernel
            self.rows[candidate.name] = self._row(candidate, "failed", _one_line(error))
            traceback.clear_frames(error.__traceback__)  # they hold what the kernel had allocated
            measure.release(device)
            return None
        status = "incorrect" if verdict.failures else "not_measured"
        self.rows[candidate.name] = self._row(
            candidate,
            status,
            "; ".join(verdict.failures),
            first_ms=first_ms,
            peak_bytes=peak,
            error=verdict.error if verdict.error < float("inf") else None,
        )
        if verdict.failures:
            logger.warning("%s gives wrong results for %s: %s", candidate.name, self.problem, verdict.failures)
            return None
        self.passed[candidate.name] = candidate
        self.call_ms[candidate.name] = call_ms
        return call_ms

    def _prepare(self, candidate: Candidate) -> None:
        """What is done once on a machine is no part of this problem's budget."""
        prepare = getattr(candidate.backend, "prepare", None)
        if prepare is not None:
            start = time.perf_counter()
            prepare()
            self.start += time.perf_counter() - start

    def _race(self, example: Example, incumbent: tuple[Candidate, float] | None) -> None:
        if incumbent is None:
            return
        calls = {name: example.call(candidate.backend) for name, candidate in self.passed.items()}
        device, remaining = self.problem.device, self._remaining_s()
        if len(calls) == 1 and remaining is not None and remaining <= 0:
            # Nobody to compare with, and the run that was checked has taken the time there was: it is the sample.
            name, call_ms = incumbent[0].name, incumbent[1]
            self.turns = measure.Turns({name: measure.Timing((call_ms,), call_ms)}, {}, {}, 0, 0.0)
            return
        self.turns = measure.time_in_turns(
            calls,
            budget_s=remaining,
            synchronize=(lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None,
            keep=(incumbent[0].name,),
            first_ms=self.call_ms,
        )

    def choose(self) -> str | None:
        """The first in the order of preference that no other candidate beats significantly."""
        if self.turns is None:
            return None
        timings = {name: t for name, t in self.turns.timings.items() if name not in self.turns.dropped}
        ordered = [candidate.name for candidate in self.found if candidate.name in timings]
        unbeaten = (
            name
            for name in ordered
            if not any(measure.faster(timings[rival], timings[name]) for rival in ordered if rival != name)
        )
        # "Significantly faster" need not be transitive: where everyone is beaten by someone, the median decides.
        fastest = min(ordered, key=lambda name: timings[name].median_ms, default=None)
        self.chosen = next(unbeaten, fastest)
        return self.chosen

    def decision(self, chosen: str, elapsed_ms: float) -> Decision:
        where = silicon(self.problem.device)
        return Decision(
            key=self.problem.key(where),
            silicon=where,
            title=str(self.problem),
            problem=self.problem.to_dict(),
            choice=chosen,
            order=NATURAL,
            source="measured",
            candidates=tuple(self._final_rows()),
            versions=versions(),
            provenance=provenance(self.problem.device),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            budget_ms=None if self.budget_s is None else self.budget_s * 1e3,
            elapsed_ms=round(elapsed_ms, 3),
        )

    def _final_rows(self) -> Iterator[Row]:
        assert self.turns is not None
        assert self.chosen is not None
        best = self.turns.timings[self.chosen]
        for candidate in self.found:
            row = self.rows[candidate.name]
            timing = self.turns.timings.get(candidate.name)
            if candidate.name in self.turns.failures:
                yield self._row(candidate, "failed", _one_line(self.turns.failures[candidate.name]))
            elif timing is None:
                yield row
            elif candidate.name in self.turns.cold:
                # One cold call, with all that is built once, is no measure of the calls to come.
                yield self._cold(candidate, row)
            else:
                yield self._timed(candidate, row, timing, best)

    def _timed(self, candidate: Candidate, row: Row, timing: measure.Timing, best: measure.Timing) -> Row:
        assert self.turns is not None
        slower = candidate.name in self.turns.dropped or measure.faster(best, timing)
        status = "chosen" if candidate.name == self.chosen else "slower" if slower else "tie"
        return self._row(
            candidate,
            status,
            self._remark(candidate.name, status, timing.median_ms / best.median_ms),
            median_ms=timing.median_ms,
            low_ms=timing.low_ms,
            high_ms=timing.high_ms,
            first_ms=row.first_ms,
            rounds=len(timing.samples_ms),
            peak_bytes=row.peak_bytes,
            error=row.error,
        )

    def _cold(self, candidate: Candidate, row: Row) -> Row:
        assert self.turns is not None
        ratio = self.turns.dropped[candidate.name]
        return self._row(
            candidate,
            "not_measured",
            f"its first call took {ratio:.1f} times as long as the fastest's, and the budget was gone",
            first_ms=row.first_ms,
            peak_bytes=row.peak_bytes,
            error=row.error,
        )

    def _remark(self, name: str, status: str, ratio: float) -> str:
        assert self.turns is not None
        if name in self.turns.dropped:
            return f"{self.turns.dropped[name]:.1f} times the fastest after one round, not tried again"
        if status == "tie" and not 0.9 < ratio < 1.1:
            return f"{len(self.turns.timings[name].samples_ms)} rounds are too few to tell"
        return ""

    def _row(self, candidate: Candidate, status: str, reason: str, **measured: float | None) -> Row:
        version = registry.version_of(candidate.backend)
        return Row(
            backend=candidate.name,
            order=candidate.order,
            status=status,
            reason=reason,
            version=version,
            **measured,  # type: ignore[arg-type]
        )


def _checked_run(
    candidate: Candidate, gate: Gate, device: torch.device
) -> tuple[dict[str, torch.Tensor], int | None, float]:
    """What the gate compares, the peak of memory in bytes, and milliseconds."""
    _synchronize(device)
    start = time.perf_counter()
    result, peak = measure.peak_bytes(lambda: gate.run(candidate.backend), device)
    _synchronize(device)
    return result, peak, (time.perf_counter() - start) * 1e3


def _flops(candidate: Candidate, problem: Problem) -> int | None:
    count = getattr(candidate.backend, "flops", None)
    return None if count is None else int(count(problem))


def _first_call_ms(candidate: Candidate, problem: Problem) -> float:
    estimate = getattr(candidate.backend, "first_call_ms", None)
    return 0.0 if estimate is None else float(estimate(problem))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
