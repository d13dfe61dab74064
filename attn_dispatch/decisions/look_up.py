"""Looks up the stored decision of a problem, checks which of its rows are still valid, and predicts from others.

A row is valid while its backend has the version that was measured. Only candidates with missing or outdated rows are
measured again; until then an outdated row is used as a prior. What a provisional decision left open is measured again
by a later process on a calm machine; where that does not settle it, with growing pauses, and not for ever.

What another machine decided, imported or shipped with the package, is believed once a few calls here have confirmed it,
whatever versions it was measured with: those that are here were checked. Until then it is no evidence for other sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from attn_dispatch import process_state
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.learning import predict as learned
from attn_dispatch.learning import thresholds
from attn_dispatch.log import say_once
from attn_dispatch.machine import load
from attn_dispatch.settings import cache_folder, measures
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import passed, quarantine
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row, time_of
from attn_dispatch.store.folder import Store, shipped
from attn_dispatch.tuning.candidates import Candidate, Request, current_environment, version_of

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
    rows, foreign = _usable_rows(decision), bool(decision.origin)
    row = rows.get(decision.chosen)  # of which alone the backend is loaded
    outdated = row is not None and not foreign and row.version != _installed_version(decision)
    if not (affordable or temporary or outdated) and decision.environment == current_environment():
        with suppress(InvalidInput):  # the choice is not registered in this process
            if request.can_run(*decision.chosen):
                return StoredDecision(decision, decision.chosen)
    able = {each.id: each for each in request.able}
    changed = {name for name in able if not _is_valid_row(rows.get(name), able[name], foreign)}
    choice = best_candidate(decision, valid_rows(decision, able.values()))
    return StoredDecision(decision, choice, tuple(sorted(changed | (affordable & able.keys()))))


def read_stored(request: Request) -> Decision | None:
    """The user's decision at the problem's address, else the shipped one, without comparing candidates."""
    mine = Store(cache_folder()).get(*request.address)
    if mine is not None and _is_for(request, mine):
        return mine
    given = shipped(request.silicon).get(request.address.key)
    return given if given is not None and _is_for(request, given) else None


def why_not(request: Request, name: CandidateId) -> str:
    """Why a candidate cannot run; empty if it can."""
    rows = {each.id: each.row for each in request.candidates}
    row = rows.get(name, Row(backend=name[0], order=name[1], status="unsupported", reason="it is not there"))
    return "" if row is None else row.reason or row.status


def is_believed(decision: Decision) -> bool:
    """Whether a decision may be used: measured or confirmed here, or in a mode that measures nothing."""
    return not measures() or is_confirmed(decision)


def is_confirmed(decision: Decision) -> bool:
    """Whether a decision was measured here, or its choice, in the version that is installed, checked here."""
    return not decision.origin or passed.is_confirmed(cache_folder(), decision, _installed_version(decision))


def note_confirmed(decision: Decision) -> None:
    """Have no later process check another machine's decision."""
    passed.note_confirmed(cache_folder(), decision, _installed_version(decision))


def _installed_version(decision: Decision) -> str | None:
    """The version of the choice's backend; None where there is none."""
    try:
        return version_of(registry.load(decision.choice))
    except InvalidInput:
        return None


def _is_for(request: Request, decision: Decision) -> bool:
    """Whether the decision's own problem has the key of the request, which is a hash."""
    try:
        key = Problem.from_dict(decision.problem, request.problem.device).key(request.silicon)
    except ValueError:
        key = ""
    if key != request.address.key:
        say_once(f"ignored the decision {decision.key}: its key is not that of its problem")
    return key == request.address.key


def valid_rows(decision: Decision, able: Collection[Candidate]) -> dict[CandidateId, Row]:
    """The timed rows of a decision that are valid for these candidates."""
    rows, foreign = _usable_rows(decision), bool(decision.origin)
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
        row = remarked(row, f"measured with version {row.version}, which has changed")
    return row


def remarked(row: Row, text: str) -> Row:
    """The row with a text added to its reason."""
    return msgspec.structs.replace(row, reason="; ".join(filter(None, (row.reason, text))))


# --- evidence for problems of other sizes -----------------------------------------------------------------------------

MOST_DECISIONS = 500  #: of a group, from which predictions are made; each takes 0.1 ms to read

# Decisions of a group as first read, and those made since; keys: silicon, group, whether those of others are believed.
_evidence: dict[tuple[str, str, bool], learned.Evidence] = {}
_added: Counter[tuple[str, str]] = Counter()  # decisions made since, by silicon and group
_adding = process_state.lock()
process_state.register(process_state.DECISIONS, _evidence.clear, _added.clear)


def predict_for(request: Request) -> learned.Prediction | None:
    """The learned choice for a problem that was never measured; None without evidence."""
    able = [each.id for each in request.able]
    if not able:
        return None
    plain, known = request.plain, group_evidence(request.address.silicon, request.address.group)
    versions = {each.name: each.version for each in request.candidates}
    prediction = learned.predict(plain, known, able, versions)
    if prediction is None or prediction.in_bucket or prediction.order == NATURAL:
        return prediction
    # Outside measured buckets an order is taken only from its threshold on.
    allowed = thresholds.allowed_orders(plain, known)
    return learned.predict(plain, known, [each for each in able if each[1] in allowed], versions)


def group_evidence(silicon: str, group: str) -> learned.Evidence:
    """Every decision of a group: the user's, and the shipped ones of other problems."""
    key = silicon, group, not measures()
    known = _evidence.get(key)
    while known is None:
        before = _added[silicon, group]
        own = Store(cache_folder()).group(silicon, group, MOST_DECISIONS)
        keys = {decision.key for decision in own}
        shipped_only = [d for d in shipped(silicon).values() if d.group == group and d.key not in keys]
        read = _evidence[key] = learned.Evidence(filter(is_believed, [*shipped_only, *own]))
        if _added[silicon, group] == before:  # else what another thread has made may be missing
            known = read
    return known


def add_evidence(decision: Decision) -> None:
    """Add a new decision to the evidence of its group."""
    with _adding:
        _added[decision.silicon, decision.group] += 1  # first: `group_evidence` looks at it last
    for everyone in (False, True):
        known = _evidence.get((decision.silicon, decision.group, everyone))
        if known is not None:
            known.add(decision, MOST_DECISIONS)
