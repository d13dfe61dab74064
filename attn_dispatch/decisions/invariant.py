"""Decisions for calls that ask for batch invariance: one backend for all calls of a family, which the gate has checked.

Nothing is measured, and nothing else of a call is asked: calls that differ in batch, lengths or masks could be given
backends, or orders, whose bits differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from attn_dispatch import process_state
from attn_dispatch.decisions import unmeasured
from attn_dispatch.decisions.trial_limits import cannot_measure, isolated
from attn_dispatch.errors import NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.settings import mode
from attn_dispatch.spec.orders import NATURAL, check
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.text import one_line
from attn_dispatch.tuning.candidates import Candidate, Request, ruled_out, version_of

_Key = tuple[Problem, str | None]
_decided: dict[_Key, tuple[CandidateId | None, tuple[Row, ...]]] = {}  # by family and forced backend, whatever the number of threads
_deciding = threading.RLock()
process_state.register(process_state.DECISIONS, _decided.clear)


def invariant_decision(problem: Problem, backend: str | None = None, order: str | None = None) -> Decision:
    """The decision for a problem that asks for batch invariance, forced or not; its first one runs the check.

    Raises:
        InvalidInput: there is no such backend or order. NoBackend: no backend passes, or the one that does cannot run
        this problem.
    """
    decision = explained(problem, backend, order, run=True)
    if not decision.choice:
        raise NoBackend(unmeasured.no_backend_message(problem, decision.candidates, backend, order))
    return decision


def explained(problem: Problem, backend: str | None, order: str | None, *, run: bool = False) -> Decision:
    """The same, without a choice where there is none. Without `run`, a backend that is still to be checked is taken."""
    unmeasured.check_names(backend, order)
    from attn_dispatch.tuning.invariance import family_of  # loaded only when something is checked

    request, family = Request.of(problem), family_of(problem)
    if family is None or order not in (None, NATURAL):
        what = f"in {order} order" if family is not None else f"for {_uncovered(problem)}"
        return _made(request, None, [_refused(each, f"is not checked {what}") for each in _asked(backend)])
    key = family, backend
    found = _decided.get(key)
    if found is None:
        with _deciding:
            found = _decided.get(key) or _of_family(Request(family, request.silicon), backend, run)
            if run and not cannot_measure(problem.device):
                _decided[key] = found
    chosen, rows = found
    if chosen is not None and not unmeasured.can_run(problem, chosen):
        return _made(request, None, [_cannot(request, chosen, row) for row in rows])
    return _made(request, chosen, rows)


def _made(request: Request, chosen: CandidateId | None, rows: Iterable[Row]) -> Decision:
    return request.decision(chosen, "forced", rows)  # by the setting, if not by the call


def _uncovered(problem: Problem) -> str:
    if problem.dropout_p:
        return "dropout, which draws by the place in the batch"
    return f"{problem.ranks} ranks, whose sums are joined" if problem.ranks > 1 else str(problem.pattern)


def _asked(forced: str | None) -> list[Backend]:
    """The forced backend; or all, in the order in which they are asked, which is the same for all problems."""
    if forced is not None:
        return [registry.load(forced)]
    return sorted(registry.backends(), key=lambda each: each.name != registry.OFTEN_FASTEST)


def _refused(backend: Backend, why: str) -> Row:
    row = ruled_out(Candidate(backend, NATURAL, version_of(backend)), "unsupported", f"batch_invariant: {why}").row
    assert row is not None
    return row


def _of_family(request: Request, forced: str | None, run: bool) -> tuple[CandidateId | None, tuple[Row, ...]]:
    """The first backend that passes, if one does, and a row for each."""
    chosen, rows = None, list[Row]()
    for backend in _asked(forced):
        plain = Candidate(backend, NATURAL, version_of(backend))
        if chosen is not None:
            rows.append(unmeasured.unmeasured_row(plain, "not_measured", f"{chosen[0]} computes all such calls"))
        elif why := _why_not(request, backend, run):
            rows.append(_refused(backend, why))
        else:
            chosen = plain.id
            rows.append(unmeasured.unmeasured_row(plain, "chosen"))
    return chosen, tuple(rows)


def _why_not(request: Request, backend: Backend, run: bool) -> str:
    """Why a backend is not admitted to a family, which the request is for; empty where it is."""
    candidate = next(iter(request.candidates_of(backend, None)))
    if candidate.row is not None:
        return candidate.row.reason
    from attn_dispatch.tuning import gate, invariance

    checks = gate.Gate(request.problem, request.address)
    if not run or checks.is_invariant(candidate):
        return ""
    if cannot_measure(request.problem.device):
        return "is not checked yet, and cannot be while a call is traced, captured or transformed"
    with isolated(request.problem.device):
        if mode() != "off":  # else no file is read or written
            return checks.why_variant(candidate)
        try:
            return invariance.difference(backend, request.problem)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            return one_line(error)


def _cannot(request: Request, chosen: CandidateId, row: Row) -> Row:
    """A row where the family's backend does not take this problem."""
    backend = registry.load(row.backend)
    if row.id != chosen:
        return row if row.status == "unsupported" else _refused(backend, f"{chosen[0]} computes all such calls")
    why = next((each.row.reason for each in request.candidates_of(backend, None) if each.row), "cannot run it")
    return _refused(backend, why)
