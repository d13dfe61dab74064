"""What is on disk for a problem, and what of it still holds.

Each row of a decision has the version of its backend. A row holds where that is the version there is now. What changed
is measured again, by itself; until then it is a prior, and is told as such.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.log import say_once
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.store.folder import Store, shipped
from attn_dispatch.tuning.candidates import Candidate, Name, Request, environment_now

TIMED = ("chosen", "slower", "tie")
PASSING = ("over_memory", "quarantined", "incorrect")  #: what a candidate may be for a while


@dataclass(frozen=True, slots=True)
class Found:
    """A decision that is kept.

    `choice` is the candidate to run now: the one decided, or where that cannot run or has changed, the best of the rows
    that hold; None where none does. `changed` are the candidates whose rows are missing or of another version.
    """

    decision: Decision
    choice: Name | None
    changed: tuple[Name, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether it can be gone by as it is."""
        return self.choice == self.decision.chosen and not self.changed

    @property
    def holds_locked(self) -> bool:
        """Whether locked mode goes by it: what was decided, as it was measured, or what was measured beside it."""
        return self.choice is not None and self.decision.chosen not in self.changed


def look_up(request: Request, budget_ms: float) -> Found | None:
    """The decision on disk, or the shipped one.

    Args:
        budget_ms: candidates that were not measured for want of time count as changed where this would be enough.
    """
    decision = read(request)
    if decision is None:
        return None
    waiting = _waiting(decision, budget_ms)
    # What could not run for the moment, or was kept out, may be able by now.
    passing = any(row.status in PASSING for row in decision.candidates)
    if not waiting and not passing and decision.environment == environment_now():
        with suppress(InvalidInput):  # a backend that is registered elsewhere
            if request.can_run(*decision.chosen):
                return Found(decision, decision.chosen)
    return _compare(request, decision, waiting)


def read(request: Request) -> Decision | None:
    """What is kept at the problem's address, as it is, if it is this problem's."""
    mine = Store(cache_folder()).get(*request.address)
    if mine is not None and _same(request, mine):
        return mine
    given = shipped(request.silicon).get(request.address.key)
    return given if given is not None and _same(request, given) else None


def _same(request: Request, decision: Decision) -> bool:
    """A file's name is a hash; what it says it decides must have that hash too."""
    try:
        told = Problem.from_dict(decision.problem, request.problem.device).key(request.silicon)
    except ValueError:
        told = ""
    if told != request.address.key:
        say_once(f"ignored the decision {decision.key}: it is for another problem than it says")
    return told == request.address.key


def _compare(request: Request, decision: Decision, waiting: set[Name]) -> Found:
    able = {each.id: each for each in request.able}
    rows = {row.id: row for row in decision.candidates}
    changed = {name for name in able if not _current(rows.get(name), able[name])}
    choice = best_of(decision, holding(decision, able.values()))
    return Found(decision, choice, tuple(sorted(changed | (waiting & able.keys()))))


def holding(decision: Decision, able: Collection[Candidate]) -> dict[Name, Row]:
    """Those of a decision's timed rows that say something of these candidates as they are now."""
    rows = {row.id: row for row in decision.candidates}
    current = (each.id for each in able if _current(rows.get(each.id), each))
    return {name: rows[name] for name in current if rows[name].status in TIMED}


def best_of(decision: Decision, rows: Mapping[Name, Row]) -> Name | None:
    """The candidate decided on, if it has one of these rows, else the fastest; None where there is no time."""
    if decision.chosen in rows:
        return decision.chosen
    timed = {name: row.median_ms for name, row in rows.items() if row.median_ms is not None}
    return min(timed, key=lambda name: timed[name], default=None)


def _current(row: Row | None, candidate: Candidate) -> bool:
    """Whether a row says something of the backend as it is now. What could not run then was not measured."""
    if row is None or row.version != candidate.version:
        return False
    # What gave wrong results is in quarantine; where it can run, that was lifted. The last resort never is kept out.
    wrong = row.status == "incorrect" and candidate.name == registry.LAST_RESORT
    return wrong or row.status in (*TIMED, "failed", "not_measured")


def _waiting(decision: Decision, budget_ms: float) -> set[Name]:
    rows = decision.candidates
    return {row.id for row in rows if row.need_ms is not None and row.need_ms <= budget_ms}


def refresh(decision: Decision) -> Decision:
    """The same, known to hold in the surroundings of now; kept so."""
    now = environment_now()
    if decision.source == "measured":
        Store(cache_folder()).amend(decision, environment=now)
    return msgspec.structs.replace(decision, environment=now)
