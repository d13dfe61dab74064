"""Looks up the stored decision of a problem and checks which of its rows are still valid.

A row is valid while its backend has the version that was measured. Only candidates with missing or outdated rows are
measured again; until then an outdated row is used as a prior. What a provisional decision left open is measured again
by a later process on a calm machine; where that does not settle it, with growing pauses, and not for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.log import say_once
from attn_dispatch.machine import load
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row, time_of
from attn_dispatch.store.folder import Store, shipped
from attn_dispatch.tuning.candidates import Candidate, Request, current_environment

#: Statuses that may end without an upgrade (memory freed, quarantine lifted): checked again at every look-up.
TEMPORARY = ("over_memory", "quarantined", "incorrect")


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
    temporary = any(row.status in TEMPORARY for row in decision.candidates)
    if not affordable and not temporary and decision.environment == current_environment():
        with suppress(InvalidInput):  # the choice is not registered in this process
            if request.can_run(*decision.chosen):
                return StoredDecision(decision, decision.chosen)
    return _compare(request, decision, affordable)


def read_stored(request: Request) -> Decision | None:
    """The user's decision at the problem's address, else the shipped one, without comparing candidates."""
    mine = Store(cache_folder()).get(*request.address)
    if mine is not None and _is_for(request, mine):
        return mine
    given = shipped(request.silicon).get(request.address.key)
    return given if given is not None and _is_for(request, given) else None


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
    rows = {row.id: row for row in decision.candidates}
    changed = {name for name in able if not _is_valid_row(rows.get(name), able[name])}
    choice = best_candidate(decision, valid_rows(decision, able.values()))
    return StoredDecision(decision, choice, tuple(sorted(changed | (affordable & able.keys()))))


def valid_rows(decision: Decision, able: Collection[Candidate]) -> dict[CandidateId, Row]:
    """The timed rows of a decision that are valid for these candidates."""
    rows = {row.id: row for row in decision.candidates}
    current = (each.id for each in able if _is_valid_row(rows.get(each.id), each))
    return {name: rows[name] for name in current if rows[name].status in TIMED}


def best_candidate(decision: Decision, rows: Mapping[CandidateId, Row]) -> CandidateId | None:
    """The decision's choice if it has one of these rows, else the fastest row's candidate; None without a time."""
    if decision.chosen in rows:
        return decision.chosen
    timed = {name: row.median_ms for name, row in rows.items() if row.median_ms is not None}
    return min(timed, key=lambda name: timed[name], default=None)


def _is_valid_row(row: Row | None, candidate: Candidate) -> bool:
    """Whether a row is of the candidate's version and was measured or tried; a candidate that could not run was not."""
    if row is None or row.version != candidate.version:
        return False
    # A candidate with wrong results that can run was released from quarantine; the last resort is never quarantined.
    wrong = row.status == "incorrect" and candidate.name == registry.LAST_RESORT
    return wrong or row.status in (*TIMED, "failed", "not_measured")


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
        text = f"measured with version {row.version}, which has changed"
        row = msgspec.structs.replace(row, reason="; ".join(filter(None, (row.reason, text))))
    return row
