"""How a problem comes to its decision: forced, known, stored, learned, measured, or by the static choice.

A decision that a call was routed by never changes within a process, unless it is measured anew by request: a forward
pass and its recomputation go the same way.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import msgspec
from torch.utils._python_dispatch import _disable_current_modes

from attn_dispatch import process_state, settings
from attn_dispatch.decisions import evidence, look_up, unmeasured
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.modes import decide_by_mode
from attn_dispatch.decisions.rate_limit import Pace
from attn_dispatch.decisions.torch_state import _own_randomness, undisturbed, unsettled
from attn_dispatch.errors import BackendFailed, NoBackend, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import traceable
from attn_dispatch.learning.predict import Prediction
from attn_dispatch.log import logger
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.store.folder import Store
from attn_dispatch.store.problem_files import note_missed
from attn_dispatch.text import printable, titled
from attn_dispatch.tuning.candidates import Candidate, Name, Request, environment_now, ruled_out

SURE = 0.9  #: confidence from which a neighbour of nearly the same size is believed without measuring
WAYS = ("measured", "loaded", "shipped", "learned", "heuristic", "forced")

lock = threading.RLock()  #: held while a decision is made: two threads that meet a new problem measure it once
# Another thread of the parent may hold it at a fork, and does not exist in the child.
os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]

# By silicon too: another number of threads makes the same processor another machine. And by the backend and the order
# that are forced.
_decided: dict[tuple[str, Problem, str | None, str | None], Decision] = {}
_counts: Counter[str] = Counter()
_pace = Pace()
process_state.register(process_state.DECISIONS, _decided.clear, _counts.clear, _pace.clear)
_UNTRACEABLE = "no graph that holds for other inputs can be made of it"


def explain_problem(problem: Problem, backend: str | None = None, order: str | None = None) -> Explanation:
    """`explain` for a problem."""
    unmeasured.check(backend, order)
    request = Request.of(problem)
    decision = _decided.get((request.silicon, problem, backend, order))
    if backend is not None or order is not None:
        return Explanation.of(decision or _forced(request, backend, order)[0])
    decision = decide_by_mode(_Steps(request, explained=True)) if decision is None else _with_drift(request, decision)
    return Explanation.of(_as_of_now(decision, request.candidates) if decision.choice else decision)


def counters() -> dict[str, int]:
    """How this process came by its decisions: `measured`, `loaded` from disk, `shipped`, `learned` from neighbours,
    `heuristic`, `forced`.
    """
    return {name: _counts[name] for name in WAYS}


def decide(problem: Problem) -> Decision:
    """The decision that routes a problem in this process; measured, if it must be and may be.

    Raises:
        NotDecided: locked mode, and nothing that holds is stored. NoBackend: none can run it.
    """
    request = Request.of(problem)
    known = request.silicon, problem, None, None
    decision = _decided.get(known)
    if decision is not None:
        return decision
    decision = decide_by_mode(_Steps(request))
    if not decision.choice:
        raise NoBackend(unmeasured.no_backend(problem, decision.candidates))
    if decision.source in ("learned", "heuristic"):
        _counts[decision.source] += 1
    logger.info("%s: %s in %s order (%s)", problem, decision.choice, decision.order, decision.source)
    if not unsettled(problem.device):  # what a capture could not measure, the next eager call can
        _decided[known] = decision
    return decision


def traced(problem: Problem) -> Decision:
    """The decision for a call that is traced, transformed or watched: the static choice among the backends that a graph
    can be made of. Nothing is measured or kept.

    Raises:
        NotDecided: locked mode, and nothing that holds is stored. NoBackend: none can be traced on this problem.
    """
    with _disable_current_modes():  # what backends keep is about plain tensors
        request, setting = Request.of(problem), mode()
        steps = _Steps(request)
        known = _decided.get((request.silicon, problem, None, None))
        if known is None and setting == "locked" and steps.stored() is None:
            steps.refused()
        decision = unmeasured.static(request, [_traceable(each, problem) for each in request.candidates])
        if not decision.choice:
            raise NoBackend(unmeasured.no_backend(problem, decision.candidates))
        if known is None and setting == "tune" and steps.kept is None:
            note_missed(cache_folder(), request.plain)
    _counts["heuristic"] += 1
    logger.info("%s: %s, while it is traced", problem, decision.choice)
    return decision


def check_traceable(problem: Problem, decision: Decision) -> None:
    """Raise NoBackend where no graph can be made of the backend that is forced."""
    if not traceable(registry.load(decision.choice), problem):
        raise NoBackend(
            f"{decision.choice} cannot be traced on {problem}: {_UNTRACEABLE}; "
            "pass backend=None, or call attend outside of torch.export and make_fx"
        )


def _traceable(each: Candidate, problem: Problem) -> Candidate:
    if each.row is not None or traceable(each.backend, problem):
        return each
    return ruled_out(each.backend, each.order, "unsupported", _UNTRACEABLE)


@dataclass(frozen=True, eq=False)
class _Steps:
    """The ways to a decision on one device. `explained`: nothing is measured, counted or noted."""

    request: Request
    explained: bool = False

    @cached_property
    def kept(self) -> look_up.Found | None:
        budget_ms = settings.budget_ms() if mode() == "tune" and not self.explained else -1.0
        return look_up.look_up(self.request, budget_ms)

    @cached_property
    def said(self) -> Prediction | None:
        """What neighbours say."""
        return evidence.predict(self.request)

    def stored(self) -> Decision | None:
        """In locked mode what was chosen must be what was measured. That others have changed does not matter, and where
        it lacks the memory for now, the best of what was measured stands in for it.
        """
        kept = self.kept
        if kept is None or not (kept.holds_locked if mode() == "locked" else kept.holds):
            return None
        return self._taken(kept)

    def refused(self) -> Decision:
        why = "nothing is decided"
        if self.kept is not None:
            decided = titled(*self.kept.decision.chosen)
            why = f"{decided}, as was decided, has another version now, or nothing measured can run"
        if not self.explained:
            command = "run 'attn-dispatch profile' on it first, or another mode"
            raise NotDecided(f"ATTN_DISPATCH_MODE=locked and {why} for {self.request.problem}; {command}")
        text, found = f"locked mode, and {why}: `attn-dispatch profile` measures it", self.request.candidates
        rows = (c.row or Row(backend=c.name, order=c.order, status="not_measured", reason=text) for c in found)
        return self.request.decision(None, "heuristic", rows)

    def measured(self) -> Decision | None:
        """Neighbours of nearly the same size that are sure; else a trial, where that is allowed."""
        kept, said = self.kept, None
        if self.explained or (kept is not None and not kept.changed):
            return None
        if kept is None:
            said = self.said
            if said is not None and said.in_bucket and said.confidence >= SURE:
                return unmeasured.predicted(self.request, said)
        if not _may_measure(self.request.problem):
            note_missed(cache_folder(), self.request.plain)
            return None
        start = time.perf_counter()
        first = None if said is None else (said.backend, said.order)
        decision = measure(self.request, settings.budget_ms() / 1e3, kept, first)
        _pace.spend(time.perf_counter() - start)
        if decision is None:
            again = _Steps(Request.of(self.request.problem))  # what failed in the trial may be in quarantine now
            return again.predicted() or again.static()
        keep(self.request.problem, decision)
        return decision

    def predicted(self) -> Decision | None:
        """What of the stored one still holds; else what neighbours say."""
        if self.kept is not None and self.kept.choice is not None:
            return self._taken(self.kept)
        return None if self.said is None else unmeasured.predicted(self.request, self.said)

    def static(self) -> Decision:
        return unmeasured.static(self.request)

    def _taken(self, kept: look_up.Found) -> Decision:
        return _told(kept) if self.explained else _taken(kept)


def _taken(kept: look_up.Found) -> Decision:
    """Go by what is stored, as far as it holds."""
    decision = kept.decision
    _counts["loaded" if decision.source == "measured" else "shipped"] += 1
    if kept.choice is not None and kept.choice != decision.chosen:
        decided, able = titled(*decision.chosen), titled(*kept.choice)
        logger.warning("%s cannot run now as was decided, %s can: %s", decided, able, printable(decision.title))
    elif not kept.changed and decision.environment != environment_now():
        decision = look_up.refresh(decision)
    return _told(look_up.Found(decision, kept.choice, kept.changed))


def _told(kept: look_up.Found) -> Decision:
    """The decision with the candidate that runs now, and what of it no longer holds said in its rows."""
    rows = tuple(_row_told(row, kept) for row in kept.decision.candidates)
    backend, order = kept.choice or ("", "")
    return msgspec.structs.replace(kept.decision, choice=backend, order=order, candidates=rows)


def _row_told(row: Row, kept: look_up.Found) -> Row:
    if row.id == kept.choice:
        row = msgspec.structs.replace(row, status="chosen")
    elif row.status == "chosen":
        row = msgspec.structs.replace(row, status="slower")
    if row.id in kept.changed and row.median_ms is not None:
        text = f"measured with version {row.version}, which has changed"
        row = msgspec.structs.replace(row, reason="; ".join(filter(None, (row.reason, text))))
    return row


def _with_drift(request: Request, decision: Decision) -> Decision:
    """What live calls took is noted on disk only, by whichever process saw it."""
    kept = look_up.read(request) if decision.source == "measured" else None
    if kept is None or kept.created != decision.created:
        return decision
    return msgspec.structs.replace(decision, drift=kept.drift)


def _as_of_now(decision: Decision, found: list[Candidate]) -> Decision:
    """With the candidates that are ruled out by now, and those that were not there then."""
    kept = {row.id: row for row in decision.candidates}
    rows = [_row_now(each, kept.pop(each.id, None), decision.chosen) for each in found]
    # A backend that refuses has one row alone, which is about all its orders.
    out = {each.name: each.row for each in found if each.row is not None}
    for name, row in kept.items():
        now = out.get(row.backend) if name != decision.chosen else None
        rows.append(row if now is None else msgspec.structs.replace(now, order=row.order))
    return msgspec.structs.replace(decision, candidates=tuple(rows))


def _row_now(each: Candidate, kept: Row | None, choice: Name) -> Row:
    if each.row is not None and each.id != choice:
        # What it was quarantined for on this very problem says more than that it is.
        told = kept is not None and kept.status in ("incorrect", "quarantined") and each.row.status == "quarantined"
        return kept if told and kept is not None else each.row
    reason = "was not there then"
    if kept is not None and kept.status in ("over_memory", "quarantined", "unsupported", "not_installed"):
        reason = f"could not run then: {kept.reason}"
        kept = None
    return kept or Row(backend=each.name, order=each.order, status="not_measured", reason=reason)


def _may_measure(problem: Problem) -> bool:
    """Whether a trial can be made now, and this minute's time for trials is not spent."""
    if unsettled(problem.device):
        logger.warning("not measured while a graph is captured or traced, or inside torch.func: %s", problem)
        return False
    if not _pace.allows(settings.trial_seconds()):
        logger.info("not measured: trials took %g s of this minute already: %s", settings.trial_seconds(), problem)
        return False
    return True


def measure(
    request: Request, budget_s: float | None, kept: look_up.Found | None, first: Name | None = None
) -> Decision | None:
    """Measure; what changed alone, where a decision is there to start from. Arguments as for `tuner.decide`."""
    from attn_dispatch.tuning import tuner  # what measures is loaded when there is something to measure

    prior, changed = (None, None) if kept is None else (kept.decision, kept.changed or None)
    with undisturbed(request.problem.device), _own_randomness(request.problem):
        return tuner.decide(request, budget_s, prior=prior, changed=changed, first=first)


def keep(problem: Problem, decision: Decision) -> None:
    """Store a new measurement and go by it in this process."""
    Store(cache_folder()).put(decision)
    evidence.note(decision)
    _decided[decision.silicon, problem, None, None] = decision
    _counts["measured"] += 1


def measured_anew(problem: Problem, decision: Decision) -> None:
    """`keep` by request: what was forced in part goes by it from now on too."""
    for known in [known for known in _decided if known[:2] == (decision.silicon, problem)]:
        del _decided[known]
    keep(problem, decision)


def force(problem: Problem, backend: str | None, order: str | None) -> Decision:
    """The decision for a backend, an order or both, whatever is stored; nothing is measured. Of several candidates that
    are left, the one decided on, else the fastest that was measured, else the static choice; the same one throughout a
    process.

    Raises:
        InvalidInput: there is no such backend. NoBackend: none can run it so. BackendFailed: it cannot say.
    """
    unmeasured.check(backend, order)
    request = Request.of(problem)
    known = request.silicon, problem, backend, order
    decision = _decided.get(known)
    if decision is None:
        decision, error = _forced(request, backend, order)
        if error is not None:
            raise BackendFailed(f"{backend} cannot tell whether it can run {problem}: {error!r}") from error
        if not decision.choice:
            raise NoBackend(unmeasured.no_backend(problem, decision.candidates, backend, order))
        if len(decision.candidates) > 1 and not unsettled(problem.device):
            _decided[known] = decision
    _counts["forced"] += 1
    logger.info("%s: %s in %s order (forced)", problem, decision.choice, decision.order)
    return decision


def _forced(request: Request, backend: str | None, order: str | None) -> tuple[Decision, Exception | None]:
    """What was measured, here or in another process, is asked for where it can make a difference."""
    found, error = unmeasured.left_by(request, backend, order)
    measured = None
    if sum(each.row is None for each in found) > 1:
        measured = _decided.get((request.silicon, request.problem, None, None))
        if measured is None and mode() != "off":
            measured = look_up.read(request)
    return unmeasured.forced(request, found, measured), error
