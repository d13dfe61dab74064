"""Decides which backend and order run a problem: forced, stored, learned, measured or by the static choice.

Within a process the decision of a problem stays the same unless `profile` replaces it, so that a forward pass and its
recomputation use the same backend.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from attn_dispatch import process_state, settings
from attn_dispatch.decisions import look_up, unmeasured
from attn_dispatch.decisions.explanation import Explanation, with_current_candidates
from attn_dispatch.decisions.invariant import invariant_decision
from attn_dispatch.decisions.modes import decide_by_mode
from attn_dispatch.decisions.trial_limits import (
    RateLimit,
    cannot_measure,
    lacks_space,
    measure,
    passes_hard_cases,
    why_refuted,
    why_variant,
)
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend, NotDecided
from attn_dispatch.learning.predict import Prediction
from attn_dispatch.log import logger
from attn_dispatch.private import without_modes
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import measured_for
from attn_dispatch.store.decision import CandidateId, Decision
from attn_dispatch.store.folder import Store
from attn_dispatch.store.passed import note_missed
from attn_dispatch.system import in_forked_child
from attn_dispatch.text import printable, titled
from attn_dispatch.tuning.candidates import Request, current_environment, static_choice, to_measure

MIN_CONFIDENCE = 0.9  #: confidence from which a prediction from a problem of nearly the same size replaces a trial
COUNTED = ("measured", "loaded", "imported", "shipped", "learned", "heuristic", "forced")

lock = process_state.rlock()  #: guards tables, for moments; nobody waits for it while something is measured
measuring = process_state.rlock()  #: held through a trial: two at a time would disturb each other
_deciding: dict[Any, threading.RLock] = {}  # held while a problem is decided: concurrent calls measure it once


def drop_oldest(table: dict[Any, Any], most: int) -> None:
    """Drop the first entries of a table past `most`; no other thread may change it meanwhile."""
    while len(table) > most:
        del table[next(iter(table))]


in_forked_child(_deciding.clear)  # they may be held by threads that do not exist there

#: Silicon (which depends on the number of threads), problem, forced backend, forced order.
_Key = tuple[str, Problem, str | None, str | None]
#: Decisions that are remembered, the latest used last: more than routes, so that a call in use keeps its backend.
MAX_DECISIONS = 8192
MAX_ON_TRIAL = 4096  #: problems that wait for a trial between calls; past this the oldest keeps its guess
_decided: OrderedDict[_Key, Decision] = OrderedDict()
on_trial: dict[tuple[str, Problem], look_up.StoredDecision | None] = {}  #: by silicon: problems on trial between calls
_counts: Counter[str] = Counter()
_rate_limit = RateLimit()
process_state.register(process_state.DECISIONS, _decided.clear, on_trial.clear, _counts.clear, _rate_limit.clear)


def explain_problem(problem: Problem, backend: str | None = None, order: str | None = None) -> Explanation:
    """Explain the decision for a problem, as `explain` does for tensors."""
    unmeasured.check_names(backend, order)
    if backend is None and order is None and (other := measured_for(problem)) != problem:
        shared = _explained(other, None, None)
        if shared.choice and shared.order and unmeasured.can_run(problem, (shared.choice, shared.order)):
            return shared
    return _explained(problem, backend, order)


def _explained(problem: Problem, backend: str | None, order: str | None) -> Explanation:
    if problem.batch_invariant:
        return Explanation.of(invariant_decision(problem, backend, order))
    request = Request.of(problem)
    decision = _decided.get((request.silicon, problem, backend, order))
    if backend is not None or order is not None:
        return Explanation.of(decision or _forced_among(request, backend, order))
    if decision is None:
        decision = decide_by_mode(_DeviceSteps(request, explained=True))
    if (request.silicon, problem) in on_trial:
        text = "the guess, while a trial goes on between calls"
        rows = (look_up.remarked(row, text) if row.id == decision.chosen else row for row in decision.candidates)
        decision = msgspec.structs.replace(decision, candidates=tuple(rows))
    decision = with_current_candidates(decision, request.candidates) if decision.choice else decision
    return Explanation.of(decision, request=request)


def counters() -> dict[str, int]:
    """How many decisions of this process were `measured`, `loaded` from disk as measured here before, `imported`,
    `shipped`, `learned` from neighbours, `heuristic` and `forced`; those over a mesh are counted on each rank.
    """
    return {name: _counts[name] for name in COUNTED}


def decision_for(problem: Problem) -> Decision:
    """The decision for a problem in this process, found by the steps of the mode and then remembered.

    Only threads that need the same problem, or a trial of another one, wait for each other.

    Raises:
        NotDecided: locked mode without a valid stored decision. NoBackend: no backend can run the problem.
    """
    if problem.batch_invariant:
        return _invariant(problem)
    if (other := measured_for(problem)) != problem:
        try:
            shared = decision_for(other)
            if unmeasured.can_run(problem, shared.chosen):
                return shared
        except (NoBackend, NotDecided) as error:  # no backend may have the memory for it
            if isinstance(error, NotDecided) and unmeasured.runs(other):
                raise
    request = Request.of(problem)
    key = request.silicon, problem, None, None
    if (decision := _decided.get(key)) is not None:
        return decision
    with _deciding.setdefault(key, threading.RLock()):
        try:
            return _decided.get(key) or _decide(request, key)
        finally:
            _deciding.pop(key, None)


def _invariant(problem: Problem, backend: str | None = None, order: str | None = None) -> Decision:
    """The decision for a problem that asks for batch invariance. Raises as `forced_decision`."""
    decision = invariant_decision(problem, backend, order, why_variant)
    if not decision.choice:
        raise NoBackend(unmeasured.no_backend_message(problem, decision.candidates, backend, order))
    return counted(decision)


def without_trial(problem: Problem) -> Decision | None:
    """The decision for a problem in this process, or the stored one where no call would measure; None without either.

    The stored one is remembered. One of another machine is checked first, in the mode `tune`.
    """
    if problem.batch_invariant:
        return _invariant(problem)
    request = Request.of(measured_for(problem))
    key = request.silicon, request.problem, None, None
    decision = _decided.get(key) or _DeviceSteps(request, unhurried=True).stored()
    if decision is None or not unmeasured.can_run(problem, decision.chosen):
        return None
    _remember(key, decision)
    return decision


def latest(problem: Problem, decision: Decision) -> Decision:
    """The decision by which a route is made under `lock`: a trial may have ended since this one was taken."""
    for each in (problem, measured_for(problem)):
        key = decision.silicon, each, None, None
        found = _decided.get(key)
        if found is not None and found.key == decision.key:
            _remember(key, found)
            return found
    return decision


def _decide(request: Request, key: _Key) -> Decision:
    problem = request.problem
    decision = decide_by_mode(_DeviceSteps(request))
    if not decision.choice:
        raise NoBackend(unmeasured.no_backend_message(problem, decision.candidates))
    if decision.source in ("learned", "heuristic"):
        counted(decision)
    logger.info("%s: %s in %s order (%s)", problem, decision.choice, decision.order, decision.decided_by)
    if not cannot_measure(problem.device):  # the next plain call can measure
        _remember(key, decision)
    return decision


def counted(decision: Decision, *, loaded: bool = False) -> Decision:
    """The decision, counted: as `loaded` where it was, and measured here."""
    with lock:
        _counts["loaded" if loaded and decision.decided_by == "measured" else decision.decided_by] += 1
    return decision


def _remember(key: _Key, decision: Decision) -> None:
    """Remember a decision in this process."""
    with lock:
        _decided[key] = decision
        _decided.move_to_end(key)
        drop_oldest(_decided, MAX_DECISIONS)


def decision_while_traced(problem: Problem) -> Decision:
    """The decision for a traced, transformed or intercepted call: the static choice among traceable backends.

    Nothing is measured or remembered.

    Raises:
        NotDecided: locked mode without a valid stored decision. NoBackend: no backend can be traced on this problem.
    """
    if problem.batch_invariant:
        raise NoBackend(f"while it is traced or transformed, nothing computes a batch-invariant call: {problem}")
    with without_modes():  # tables that backends cache must hold plain tensors
        request, setting = Request.of(problem), mode()
        steps = _DeviceSteps(request)
        known = _decided.get((request.silicon, problem, None, None))
        if known is None and setting == "locked" and steps.stored() is None:
            steps.locked_miss()
        found = [unmeasured.if_traceable(each, problem) for each in request.candidates]
        decision = unmeasured.static_decision(request, found)
        if not decision.choice:
            raise NoBackend(unmeasured.no_backend_message(problem, decision.candidates))
        if known is None and settings.measures() and steps.on_disk is None:
            note_missed(cache_folder(), request.plain)
    counted(decision)
    logger.info("%s: %s, while it is traced", problem, decision.choice)
    return decision


@dataclass(frozen=True, eq=False)
class _DeviceSteps:
    """The steps to a decision on one device. With `explained`, nothing is measured, counted or written.

    `unhurried`: no call waits, so that the checks of a minute are not limited.
    """

    request: Request
    explained: bool = False
    unhurried: bool = False

    @cached_property
    def found(self) -> look_up.StoredDecision | None:
        budget_ms = settings.budget_ms() if settings.measures() and not self.explained else -1.0
        return look_up.look_up(self.request, budget_ms)

    @cached_property
    def on_disk(self) -> look_up.StoredDecision | None:
        """The stored decision, if it was measured here, or is confirmed here."""
        found = self.found
        if found is None or look_up.is_believed(found.decision):
            return found
        if mode() == "online":
            return None  # a check would delay the call: a trial beside later ones measures
        return found if self.explained or self._confirmed(found) else None

    def _confirmed(self, found: look_up.StoredDecision) -> bool:
        """Whether another machine's decision holds here, by a few calls now, so that no later process checks it.

        False where nothing may be timed now, or it does not fit the current candidates.
        """
        decision, allowed = found.decision, found.is_valid and not lacks_space()
        with measuring:
            if not (allowed and (self.unhurried or _trial_allowed(self.request.problem))):
                return False
            with _rate_limit.counting():
                why = why_refuted(self.request, decision)
        if why:
            what = printable(f"{titled(*decision.chosen)}, {decision.origin}, for {decision.title}")
            logger.warning("not believed, and measured instead: %s: %s", what, printable(why))
            return False
        look_up.note_confirmed(decision)
        look_up.add_evidence(decision)
        return True

    @cached_property
    def prediction(self) -> Prediction | None:
        """The learned choice, from measured neighbours."""
        return look_up.predict_for(self.request)

    def stored(self) -> Decision | None:
        """The stored decision if it is valid.

        In locked mode rows of other candidates may be outdated, and if the choice cannot run now, the fastest measured
        candidate replaces it.
        """
        stored = self.on_disk
        if stored is None:
            return None
        usable = stored.choice is not None and stored.decision.chosen not in stored.changed
        return self._use(stored) if (usable if mode() == "locked" else stored.is_valid) else None

    def locked_miss(self) -> Decision:
        why = f"no decision is stored on {self.request.silicon}"
        if self.on_disk is not None:
            chosen = self.on_disk.decision.chosen
            reason = look_up.why_not(self.request, chosen) or "its version has changed"
            why = f"the stored choice {titled(*chosen)} cannot run now ({reason})"
        if not self.explained:
            command = "run 'attn-dispatch profile' on it first, or use another mode"
            raise NotDecided(f"ATTN_DISPATCH_MODE=locked and {why} for {self.request.problem}; {command}")
        text = f"locked mode, and {why}: `attn-dispatch profile` measures it"
        rows = (unmeasured.unmeasured_row(each, "not_measured", text) for each in self.request.candidates)
        return self.request.decision(None, "heuristic", rows)

    def measured(self) -> Decision | None:
        """A confident prediction from a problem of nearly the same size, else a trial if one is allowed."""
        stored, trials = self.on_disk, _counts["measured"]
        if self.explained or (stored is not None and not stored.changed):
            return None
        if self.found is None and (learned := self._sure()) is not None:
            return learned
        with measuring:
            # A trial that this thread waited for may have been of a neighbour.
            steps = self if trials == _counts["measured"] else _DeviceSteps(self.request)
            if self.found is None and steps is not self and (learned := steps._sure()) is not None:
                return learned
            prediction = steps.prediction if self.found is None else None
            first = None if prediction is None else (prediction.backend, prediction.order)
            if not _trial_allowed(self.request.problem):
                note_missed(cache_folder(), self.request.plain)
                return None
            prior = look_up.as_prior(stored)
            with _rate_limit.counting():
                decision = measure(self.request, settings.budget_ms() / 1e3, waiting=True, first=first, **prior)
            if decision is not None:
                store_measured(self.request.problem, decision)
                return decision
        again = _DeviceSteps(Request.of(self.request.problem))  # the trial may have quarantined backends
        return again.predicted() or again.static()

    def _sure(self) -> Decision | None:
        """The learned choice if it is sure enough to replace a trial."""
        found = self.prediction
        sure = found is not None and found.in_bucket and found.confidence >= MIN_CONFIDENCE
        return self._learned() if sure else None

    def deferred(self) -> Decision | None:
        """A confident prediction; else, unless the stored decision leaves nothing open, a trial between calls."""
        stored = self.on_disk
        learned = self._sure() if stored is None else None
        needed = learned is None and (stored is None or stored.changed)
        if needed and not self.explained and not cannot_measure(self.request.problem.device):
            with lock:
                on_trial[self.request.silicon, self.request.problem] = stored
                drop_oldest(on_trial, MAX_ON_TRIAL)
        return learned

    def predicted(self) -> Decision | None:
        """The best candidate of the stored decision that is still valid, else the learned choice."""
        stored = self.on_disk
        if stored is None or stored.choice is None:
            return self._learned()
        decided = stored.choice == stored.decision.chosen
        return self._use(stored) if decided or self._may_run(stored.choice) else self._learned()

    def _learned(self) -> Decision | None:
        found = self.prediction
        if found is None or not self._may_run((found.backend, found.order)):
            return None
        return unmeasured.learned_decision(self.request, found)

    def _may_run(self, name: CandidateId) -> bool:
        """Whether a candidate that no trial of this problem has chosen passes the hard cases."""
        if mode() == "online":  # nothing is run before the first call
            first = static_choice(self.request.candidates)
            return (first is not None and first.id == name) or passes_hard_cases(self.request, name, run=False)
        if self.explained or cannot_measure(self.request.problem.device):
            return True
        return passes_hard_cases(self.request, name, run=True)

    def static(self) -> Decision:
        """The static choice; in online mode a candidate with far less work if that has passed the hard cases."""
        able = self.request.able
        if mode() == "online" and able:
            least = to_measure(self.request.problem, able)[0]
            if self._may_run(least.id):
                return unmeasured.static_decision(self.request, self.request.candidates, least.id)
        return unmeasured.static_decision(self.request)

    def _use(self, stored: look_up.StoredDecision) -> Decision:
        return look_up.adjusted(stored) if self.explained else _from_store(self.request, stored)


def _from_store(request: Request, stored: look_up.StoredDecision) -> Decision:
    """Count the stored decision, report a replaced choice, and adjust the decision to the current candidates."""
    decision = counted(stored.decision, loaded=True)
    if stored.choice is not None and stored.choice != decision.chosen:
        decided, able = titled(*decision.chosen), titled(*stored.choice)
        why = printable(look_up.why_not(request, decision.chosen))
        text = "the stored choice %s cannot run now (%s), %s runs instead: %s"
        logger.warning(text, decided, why, able, printable(decision.title))
    elif not stored.changed and decision.environment != current_environment():
        decision = look_up.with_current_environment(decision)
    return look_up.adjusted(look_up.StoredDecision(decision, stored.choice, stored.changed))


def _trial_allowed(problem: Problem) -> bool:
    """Whether timing is possible now and $ATTN_DISPATCH_TRIAL_SECONDS of this minute are not used up; logs why not."""
    if cannot_measure(problem.device):
        logger.warning("not measured while a graph is captured or traced, or inside torch.func: %s", problem)
        return False
    if not _rate_limit.allows(settings.trial_seconds()):
        logger.info("not measured: trials took %g s of this minute already: %s", settings.trial_seconds(), problem)
        return False
    return True


def store_measured(problem: Problem, decision: Decision, *, use: bool = True) -> None:
    """Store a new measurement and, with `use`, take it in this process from now on."""
    Store(cache_folder()).put(decision)
    look_up.add_evidence(decision)
    if use:
        _remember((decision.silicon, problem, None, None), decision)
    counted(decision)


def sure_prediction(request: Request) -> Decision | None:
    """A learned decision that is sure enough to replace a trial."""
    return _DeviceSteps(request)._sure()


def end_trial(problem: Problem, guess: Decision, decision: Decision | None, *, use: bool) -> None:
    """End a trial between calls. Store its decision and take it if `use`."""
    key = guess.silicon, problem, None, None
    with lock:  # a route that is made meanwhile is of the one or of the other
        on_trial.pop((guess.silicon, problem), None)
        if decision is not None and decision.source == "measured":
            store_measured(problem, decision, use=use)
        elif decision is not None and use:
            _remember(key, decision)
            counted(decision)
        with suppress(InvalidInput):  # the guess is not registered any more
            if decision is None and use and not Request.of(problem).can_run(*guess.chosen):
                _decided.pop(key, None)  # perhaps the trial has quarantined the guess


def adopt(problem: Problem, decision: Decision) -> None:
    """Store a measured decision, and run calls by it from now on, partly forced ones too, which it may change."""
    with lock:
        on_trial.pop((decision.silicon, problem), None)
        for key in [key for key in _decided if key[:2] == (decision.silicon, problem)]:
            del _decided[key]
        store_measured(problem, decision)
        process_state.forget(process_state.ROUTES)


def forced_decision(problem: Problem, backend: str | None, order: str | None) -> Decision:
    """The decision for a forced backend, order or both; nothing is measured.

    Of several candidates: the one decided on, else the fastest measured, else the static choice; the same one
    throughout a process.

    Raises:
        InvalidInput: there is no such backend or order. NoBackend: no candidate can run the problem.
        BackendFailed: the backend raised when asked whether it can.
    """
    if problem.batch_invariant:
        return _invariant(problem, backend, order)
    unmeasured.check_names(backend, order)
    request = Request.of(problem)
    key = request.silicon, problem, backend, order
    decision = _decided.get(key)
    if decision is None:
        decision = _forced_among(request, backend, order)
        if backend is not None and decision.candidates[0].status == "failed":
            raise BackendFailed(f"{backend} cannot tell whether it can run {problem}: {decision.candidates[0].reason}")
        if not decision.choice:
            raise NoBackend(unmeasured.no_backend_message(problem, decision.candidates, backend, order))
        if len(decision.candidates) > 1 and not cannot_measure(problem.device):
            _remember(key, decision)
    counted(decision)
    logger.info("%s: %s in %s order (forced)", problem, decision.choice, decision.order)
    return decision


def _forced_among(request: Request, backend: str | None, order: str | None) -> Decision:
    """The forced decision; reads the measured decision if several candidates can run."""
    found = unmeasured.forced_candidates(request, backend, order)
    able, measured = [each for each in found if each.row is None], None
    if len(able) > 1:
        measured = _decided.get((request.silicon, request.problem, None, None))
        if measured is None and mode() != "off":
            measured = look_up.read_stored(request)
            measured = None if measured is None or not look_up.is_believed(measured) else measured
    rows = {} if measured is None else look_up.valid_rows(measured, able)
    choice = None if measured is None else look_up.best_candidate(measured, rows)
    if choice is None and (first := static_choice(found)) is not None:
        choice = first.id
    return request.decision(choice, "forced", (unmeasured.row_of(each, choice, rows.get(each.id)) for each in found))
