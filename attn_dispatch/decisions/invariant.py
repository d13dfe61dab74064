"""Decisions for calls that ask for batch invariance: one backend for all calls of a family, checked by the gate.

Nothing is measured: else calls that differ in batch or lengths could get backends, or orders, whose bits differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from attn_dispatch import process_state
from attn_dispatch.decisions import unmeasured
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.tuning.candidates import Candidate, Request, ruled_out, version_of
from attn_dispatch.tuning.invariance import family_of

WhyNot = Callable[[Request, Candidate], str]
_Key = tuple[Problem, str | None]
#: By family and forced backend, whatever the number of threads.
_decided: dict[_Key, tuple[CandidateId | None, tuple[Row, ...]]] = {}
_deciding = threading.RLock()
process_state.register(process_state.DECISIONS, _decided.clear)


def invariant_decision(
    problem: Problem, backend: str | None, order: str | None, why_not: WhyNot | None = None
) -> Decision:
    """The decision for a problem that asks for batch invariance; without a choice where no backend passes, or the
    one that does cannot run this problem.

    Args:
        why_not: why the gate does not admit a candidate. None: one that is still to be checked is taken.
    """
    unmeasured.check_names(backend, order)
    request, family = Request.of(problem), family_of(problem)
    if family is None or order not in (None, NATURAL):
        what = f"in {order} order" if family is not None else f"for {_uncovered(problem)}"
        return _made(request, None, [_refused(each, f"is not checked {what}") for each in _asked(backend)])
    found = _decided.get((family, backend))
    if found is None:
        with _deciding:
            of_family = Request(family, request.silicon)
            found = _decided.get((family, backend)) or _of_family(of_family, backend, why_not)
            if why_not is not None and found[0] is not None:
                _decided[family, backend] = found
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


def _of_family(
    request: Request, forced: str | None, why_not: WhyNot | None
) -> tuple[CandidateId | None, tuple[Row, ...]]:
    """The first backend that passes, if one does, and a row for each."""
    chosen, rows = None, list[Row]()
    for backend in _asked(forced):
        candidate = next(iter(request.candidates_of(backend, None)))
        if chosen is not None:
            text = f"{chosen[0]} computes all such calls"
            rows.append(unmeasured.unmeasured_row(candidate, "not_measured", text))
        elif candidate.row is not None:
            rows.append(candidate.row)
        elif why_not is not None and (why := why_not(request, candidate)):
            rows.append(_refused(backend, why))
        else:
            chosen = candidate.id
            rows.append(unmeasured.unmeasured_row(candidate, "chosen"))
    return chosen, tuple(rows)


def _cannot(request: Request, chosen: CandidateId, row: Row) -> Row:
    """A row where the family's backend does not take this problem."""
    backend = registry.load(row.backend)
    if row.id != chosen:
        return row if row.status == "unsupported" else _refused(backend, f"{chosen[0]} computes all such calls")
    why = next((each.row.reason for each in request.candidates_of(backend, None) if each.row), "cannot run it")
    return _refused(backend, why)
