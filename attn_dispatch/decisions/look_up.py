"""Looks up the stored decision of a problem and checks which of its rows are still valid.

A row is valid while its backend has the version that was measured. Only candidates with missing or outdated rows are
measured again; until then an outdated row is used as a prior. What a provisional decision left open is measured again
by a later process on a calm machine; where that does not settle it, with growing pauses, and not for ever.

What another machine decided, imported or shipped with the package, is believed once a few calls here have confirmed it,
whatever versions it was measured with: those that are here were checked.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
import torch

from attn_dispatch.decisions.trial_limits import RateLimit, cannot_measure, lacks_space, measure, passes_hard_cases
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.log import logger, say_once
from attn_dispatch.machine import load
from attn_dispatch.settings import cache_folder, measures, trial_seconds
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import passed, quarantine
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row, time_of
from attn_dispatch.store.folder import Store, shipped
from attn_dispatch.text import printable, titled
from attn_dispatch.tuning.candidates import Candidate, Request, current_environment, static_choice, version_of

#: Statuses that may end without an upgrade (memory freed, quarantine lifted): checked again at every look-up.
TEMPORARY = ("over_memory", "quarantined", "incorrect")
FIRST_RETRY, LAST_RETRY = timedelta(hours=1), timedelta(days=1)  #: after which a failed candidate is tried again
MOST_ATTEMPTS = 6  #: trials of a problem after which a provisional choice is accepted
FIRST_PAUSE = timedelta(minutes=10)  #: after a second provisional trial; each further pause is four times as long
PAUSE_FACTOR = 4


class StoredDecision(NamedTuple):
    """A stored decision compared with the current candidates.

    `choice` is the candidate to run now: the decision's, or if that cannot run or is outdated, the best valid row's;
    None without a valid row. `changed` are the candidates to measure: their rows are missing, outdated or open.
    """

    decision: Decision
    choice: CandidateId | None
    changed: tuple[CandidateId, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether the decision is valid unchanged."""
        return self.choice == self.decision.chosen and not self.changed

    @property
    def is_valid_locked(self) -> bool:
        """Whether locked mode accepts it: a measured candidate can run, and the decision's choice is not outdated."""
        return self.choice is not None and self.decision.chosen not in self.changed


def as_prior(stored: StoredDecision | None) -> dict[str, Any]:
    """The arguments of a trial that completes a stored decision: of its changed candidates only, if any."""
    return {} if stored is None else {"prior": stored.decision, "changed": stored.changed or None}


def look_up(request: Request, budget_ms: float) -> StoredDecision | None:
    """Look up the user's decision, else the shipped one, and compare it with the current candidates.

    Args:
        budget_ms: candidates skipped for lack of time count as changed if this budget suffices for them. Below 0:
            nothing is to be measured.
    """
    decision = read_stored(request)
    if decision is None:
        return None
    affordable = _affordable(decision, budget_ms)
    if budget_ms >= 0 and _is_due(decision) and load.is_calm():
        affordable |= {row.id for row in decision.candidates if row.open} or {decision.chosen}
    temporary = any(row.status in TEMPORARY or _is_retry_due(row) for row in decision.candidates)
    outdated = _is_outdated(decision)  # loads its choice alone
    if not (affordable or temporary or outdated) and decision.environment == current_environment():
        with suppress(InvalidInput):  # the choice is not registered in this process
            if request.can_run(*decision.chosen):
                return StoredDecision(decision, decision.chosen)
    return _compare(request, decision, affordable)


def _is_outdated(decision: Decision) -> bool:
    """Whether a choice that was measured here has another version than then."""
    row = _usable_rows(decision).get(decision.chosen)
    return row is not None and not decision.origin and row.version != _installed_version(decision)


def read_stored(request: Request) -> Decision | None:
    """The user's decision at the problem's address, else the shipped one, without comparing candidates."""
    mine = Store(cache_folder()).get(*request.address)
    if mine is not None and _is_for(request, mine):
        return mine
    given = shipped(request.silicon).get(request.address.key)
    return given if given is not None and _is_for(request, given) else None


def nothing_stored(request: Request) -> str:
    """Says that no decision is stored for a problem here, and for which machines and numbers of threads one is."""
    threads = torch.get_num_threads()
    here = f" ({threads} thread{'s' * (threads != 1)})" * (request.problem.device.type == "cpu")
    others = ", ".join(Store(cache_folder()).silicons_of(request.plain))
    return f"no decision is stored on {request.silicon}{here}" + f", but one on {others}" * bool(others)


def read_believed(request: Request) -> Decision | None:
    """What `read_stored` returns, if it `is_believed`."""
    found = read_stored(request)
    return found if found is not None and is_believed(found) else None


def why_not(request: Request, name: CandidateId) -> str:
    """Why a candidate cannot run; empty if it can."""
    rows = {each.id: each.row for each in request.candidates}
    row = rows.get(name, Row(backend=name[0], order=name[1], status="unsupported", reason="it is not there"))
    return "" if row is None else row.reason or row.status


def why_unusable(request: Request, decision: Decision) -> str:
    """What keeps locked mode from a decision's choice, after its name."""
    if reason := why_not(request, decision.chosen):
        return f"cannot run now ({reason}), nor can another measured candidate"
    measured = [row.version for row in decision.candidates if row.id == decision.chosen]
    return f"has another version now: {_installed_version(decision)}, not {' '.join(map(str, measured))}"


def is_believed(decision: Decision) -> bool:
    """Whether a decision may be used: measured or confirmed here, or in a mode that measures nothing."""
    return not measures() or is_confirmed(decision)


def is_confirmed(decision: Decision) -> bool:
    """Whether a decision was measured here, or its choice, in the version that is installed, checked here."""
    return not decision.origin or passed.is_confirmed(cache_folder(), decision, _installed_version(decision))


def _installed_version(decision: Decision) -> str | None:
    """The version of the choice's backend; None where there is none."""
    try:
        return version_of(registry.load(decision.choice))
    except InvalidInput:
        return None


def confirmed(request: Request, stored: StoredDecision, limit: RateLimit) -> bool:
    """Whether another machine's decision holds here, by a few calls now; noted, so that no later process checks it.

    False where nothing may be timed now, or it does not fit the current candidates.
    """
    decision = stored.decision
    if not stored.is_valid or cannot_measure(request.problem.device) or lacks_space():
        return False
    if not limit.allows(trial_seconds()):
        return False
    start = time.perf_counter()
    why = _why_refuted(request, decision)
    limit.add(time.perf_counter() - start)
    if why:
        what = printable(f"{titled(*decision.chosen)}, {decision.origin}, for {decision.title}")
        logger.warning("not believed, and measured instead: %s: %s", what, printable(why))
        return False
    passed.note_confirmed(cache_folder(), decision, _installed_version(decision))
    return True


def _why_refuted(request: Request, decision: Decision) -> str:
    """Why another machine's choice does not hold here; empty where it does: it passes the hard cases, and a trial of it
    and the static choice alone keeps it.
    """
    static = static_choice(request.able)
    if static is None or static.id == decision.chosen:
        return "" if passes_hard_cases(request, decision.chosen, run=True) else "it fails the hard cases"
    from attn_dispatch.tuning.tuner import CHECK  # loaded only when something is measured

    found = measure(request, None, waiting=True, limits=CHECK, prior=decision, changed=[static.id])
    if found is None or found.chosen == decision.chosen:
        return "" if found else "too little memory to check it"
    row = next(row for row in found.candidates if row.id == decision.chosen)
    return f"{row.ratio:.3g} times the time of {titled(*found.chosen)} here" if row.ratio else row.reason


def _is_for(request: Request, decision: Decision) -> bool:
    """Whether the decision's own problem has the key of the request, which is a hash."""
    try:
        key = Problem.from_dict(decision.problem, request.problem.device).key(request.silicon)
    except ValueError:
        key = ""
    if key != request.address.key:
        say_once(f"ignored the decision {decision.key}: its key is not that of its problem")
    return key == request.address.key


def _compare(request: Request, decision: Decision, affordable: set[CandidateId]) -> StoredDecision:
    able = {each.id: each for each in request.able}
    rows = _usable_rows(decision)
    foreign = bool(decision.origin)
    changed = {name for name in able if not _is_valid_row(rows.get(name), able[name], foreign)}
    choice = best_candidate(decision, valid_rows(decision, able.values()))
    return StoredDecision(decision, choice, tuple(sorted(changed | (affordable & able.keys()))))


def valid_rows(decision: Decision, able: Collection[Candidate]) -> dict[CandidateId, Row]:
    """The timed rows of a decision that are valid for these candidates."""
    rows = _usable_rows(decision)
    foreign = bool(decision.origin)
    current = (each.id for each in able if _is_valid_row(rows.get(each.id), each, foreign))
    return {name: rows[name] for name in current if rows[name].status in TIMED}


def _usable_rows(decision: Decision) -> dict[CandidateId, Row]:
    """The rows by candidate; of a decision made here, without those that a merge added from other machines."""
    return {row.id: row for row in decision.candidates if decision.origin or not row.origin}


def best_candidate(decision: Decision, rows: Mapping[CandidateId, Row]) -> CandidateId | None:
    """The decision's choice if it has one of these rows, else the fastest row's candidate; None without a time."""
    if decision.chosen in rows:
        return decision.chosen
    timed = {name: row.median_ms for name, row in rows.items() if row.median_ms is not None}
    return min(timed, key=lambda name: timed[name], default=None)


def _is_valid_row(row: Row | None, candidate: Candidate, foreign: bool) -> bool:
    """Whether a row is of the candidate's version and was measured or tried; a candidate that could not run was not.

    Another machine's (`foreign`) may be of any version, and what failed there is not tried again.
    """
    if row is None or (not foreign and (row.version != candidate.version or _is_retry_due(row))):
        return False
    # A candidate with wrong results that can run was released from quarantine; the last resort is never quarantined.
    wrong = row.status == "incorrect" and candidate.name == registry.LAST_RESORT
    return wrong or row.status in (*TIMED, "failed", "not_measured")


def _is_retry_due(row: Row) -> bool:
    """Whether a failed candidate is tried again: an hour after it failed, twice as long after each further failure."""
    if row.status != "failed" or row.measured is None:
        return row.status == "failed"  # it could not say whether it can run
    wait = min(FIRST_RETRY * 2 ** min((row.failures or 1) - 1, 10), LAST_RETRY)
    try:
        since = quarantine.clock() - datetime.fromisoformat(row.measured)
    except (TypeError, ValueError):  # no time, or without a time zone
        return False
    return not timedelta(0) <= since < wait


def _affordable(decision: Decision, budget_ms: float) -> set[CandidateId]:
    """The candidates skipped for lack of time that this budget suffices for, if it is larger than that of then."""
    rows = decision.candidates
    if decision.budget_ms is None or budget_ms <= decision.budget_ms:
        return set()
    return {row.id for row in rows if row.need_ms is not None and row.need_ms <= budget_ms}


def _is_due(decision: Decision) -> bool:
    """Whether a provisional decision may be measured again."""
    if not decision.provisional or decision.attempts >= MOST_ATTEMPTS:
        return False
    pause = FIRST_PAUSE * PAUSE_FACTOR ** (decision.attempts - 2) if decision.attempts > 1 else timedelta(0)
    return not timedelta(0) <= datetime.now(UTC) - time_of(decision.created) < pause


def with_rows(request: Request, decision: Decision) -> Decision:
    """A decision reduced to what calls need: with the rows on disk, else with that of its choice."""
    stored = read_stored(request)
    if stored is not None and stored.chosen == decision.chosen:
        return stored
    row = Row(backend=decision.choice, order=decision.order, status="chosen")
    return request.decision(decision.chosen, decision.source, [row], confidence=decision.confidence)


def with_drift(request: Request, decision: Decision) -> Decision:
    """Add drift from the stored decision: any process may have recorded it there."""
    stored = read_stored(request) if decision.source == "measured" else None
    if stored is None or stored.created != decision.created:
        return decision
    return msgspec.structs.replace(decision, drift=stored.drift)


def with_current_environment(decision: Decision) -> Decision:
    """The decision marked, also on disk, as valid in the current environment."""
    now = current_environment()
    if decision.source == "measured":
        Store(cache_folder()).amend(decision, environment=now)
    return msgspec.structs.replace(decision, environment=now)


def adjusted(stored: StoredDecision) -> Decision:
    """The decision with the candidate that runs now as its choice, and outdated rows marked."""
    rows = tuple(_adjusted_row(row, stored) for row in stored.decision.candidates)
    backend, order = stored.choice or ("", "")
    return msgspec.structs.replace(stored.decision, choice=backend, order=order, candidates=rows)


def _adjusted_row(row: Row, stored: StoredDecision) -> Row:
    if row.id == stored.choice:
        row = msgspec.structs.replace(row, status="chosen")
    elif row.status == "chosen":
        row = msgspec.structs.replace(row, status="slower")
    if row.id in stored.changed and row.median_ms is not None:
        text = f"measured with version {row.version}, which has changed"
        row = msgspec.structs.replace(row, reason="; ".join(filter(None, (row.reason, text))))
    return row
