"""Decisions without a trial: the static choice, learned choices, and forced backends or orders.

A caller may force a backend, a token order or both. Of the remaining candidates the best measured one is taken, else
the static choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby

import msgspec

from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, forced_orders, orders_of, refusals_of, traceable
from attn_dispatch.learning import predict
from attn_dispatch.spec import orders
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.text import one_line, titled
from attn_dispatch.tuning.candidates import Candidate, Request, ruled_out, static_choice, status_and_reason, version_of

_UNTRACEABLE = "a graph traced from it would not be valid for other inputs"


def static_decision(
    request: Request, found: Sequence[Candidate] | None = None, chosen: CandidateId | None = None
) -> Decision:
    """`chosen`, else the first by order of preference, of `found` or all candidates; no choice if none can run."""
    found = request.candidates if found is None else found
    first = static_choice(found)
    chosen = chosen or (None if first is None else first.id)
    return request.decision(chosen, "heuristic", (row_of(each, chosen) for each in found))


def can_run(problem: Problem, name: CandidateId) -> bool:
    """Whether a candidate that was decided on for another number of keys takes this problem."""
    with suppress(InvalidInput):  # it is not registered
        return Request.of(problem).can_run(*name)
    return False


def runs(problem: Problem) -> bool:
    """Whether any candidate takes the problem."""
    return bool(Request.of(problem).able)


def learned_decision(request: Request, prediction: predict.Prediction) -> Decision:
    """A decision with the predicted choice; it is not stored, since later evidence may change it."""
    rows = (_learned_row(each, prediction) for each in request.candidates)
    chosen = prediction.backend, prediction.order
    return request.decision(chosen, "learned", rows, confidence=prediction.confidence, evidence=prediction.evidence)


def _learned_row(each: Candidate, prediction: predict.Prediction) -> Row:
    if each.id == (prediction.backend, prediction.order):
        reason = f"by {len(prediction.evidence)} measured neighbours, confidence {prediction.confidence:.2f}"
        return unmeasured_row(each, "chosen", reason)
    ratio = prediction.ratios.get(each.id)
    reason = "no neighbour measured it" if ratio is None else f"predicted at {ratio:.2f} times the chosen one's time"
    return unmeasured_row(each, "not_measured", reason)


def unmeasured_row(each: Candidate, status: str, reason: str = "") -> Row:
    """A row of a candidate that was not measured, unless it is ruled out."""
    return each.row or Row(backend=each.name, order=each.order, status=status, reason=reason, version=each.version)


def check_names(backend: object, order: object) -> None:
    """Raise InvalidInput if there is no such backend or order."""
    if order is not None:
        orders.check(order)
    if backend is not None and backend not in registry.names():
        raise InvalidInput(f"backend must be None or one of {', '.join(registry.names())}, got {backend!r}")


def forced_candidates(request: Request, backend: str | None, order: str | None) -> list[Candidate]:
    """The candidates of a forced backend, order or both; one with the status `failed` where a forced backend raised.

    A forced backend is checked neither against free memory nor quarantine.
    """
    if backend is None:
        return list(_order_candidates(request, order or NATURAL))
    return _backend_candidates(request.problem, registry.load(backend), order)


def no_backend_message(
    problem: Problem, rows: Iterable[Row], backend: str | None = None, order: str | None = None
) -> str:
    """The message of NoBackend, one line for each candidate."""
    kv = f"[{problem.batch}, {problem.k_len}, {problem.kv_heads}, {problem.head_dim}]"
    who = "no backend can" if backend is None else f"backend={backend!r} cannot"
    what = f"{problem.pattern}{problem.as_given}" + (f" in {order} order" if order is not None else "")
    lines = [
        f"{who} run {what} on {problem.device} in {str(problem.dtype).removeprefix('torch.')}:",
        f"  q [{problem.batch}, {problem.q_len}, {problem.heads}, {problem.head_dim}]  k, v {kv}",
        *(f"  {titled(*row.id) if order is None else row.backend}: {row.reason}" for row in rows),
    ]
    forced = [name for name, given in (("backend", backend), ("order", order)) if given is not None]
    return "\n".join([*lines, *(f"Pass {name}=None to let every {name} be tried." for name in forced)])


def _backend_candidates(problem: Problem, backend: Backend, order: str | None) -> list[Candidate]:
    """The candidates of one backend, in the forced order or the orders that it offers."""
    try:
        if refusals := refusals_of(backend, problem):
            why = status_and_reason(refusals)
            return [ruled_out(Candidate(backend, order or NATURAL, version_of(backend)), *why)]
        offered = orders_of(backend, problem) or (NATURAL,)
        if order is not None and order not in forced_orders(backend, problem):
            return [_unsupported_order(backend, problem, order, offered)]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may fail in any way
        return [ruled_out(Candidate(backend, order or NATURAL, version_of(backend)), "failed", one_line(error))]
    version = registry.version_of(backend)
    return [Candidate(backend, each, version) for each in (offered if order is None else (order,))]


def _order_candidates(request: Request, order: str) -> Iterator[Candidate]:
    """One candidate of every backend, in a forced order."""
    for _, group in groupby(request.candidates, key=lambda each: each.name):
        known = list(group)
        backend, row = known[0].backend, known[0].row
        same = next((each for each in known if each.order == order), None)
        if same is not None:
            yield same
        elif row is not None:
            yield Candidate(backend, order, row.version, msgspec.structs.replace(row, order=order))
        else:
            yield _unsupported_order(backend, request.problem, order, [each.order for each in known])


def _unsupported_order(backend: Backend, problem: Problem, order: str, offered: Sequence[str]) -> Candidate:
    """A candidate ruled out because the backend does not offer this order."""
    reason = f"computes in {' and '.join(offered)} order only"
    if order in forced_orders(backend, problem):
        reason = f"offers {order} order only if forced: add backend={backend.name!r}"
    return ruled_out(Candidate(backend, order, version_of(backend)), "unsupported", reason)


def row_of(each: Candidate, choice: CandidateId | None, measured: Row | None = None) -> Row:
    """A candidate's row in a decision for `choice`, by what was measured of it if anything was."""
    if each.row is not None or measured is None:
        return unmeasured_row(each, "chosen" if each.id == choice else "not_measured")
    # Its ratios are relative to the chosen candidate of the race.
    row = msgspec.structs.replace(measured, ratio=None, ratio_low=None, ratio_high=None)
    if each.id == choice and row.status != "chosen":
        return msgspec.structs.replace(row, status="chosen", reason="")
    return row


def check_traceable(problem: Problem, decision: Decision) -> None:
    """Raise NoBackend if the decision's backend cannot be traced on this problem."""
    if not traceable(registry.load(decision.choice), problem):
        raise NoBackend(
            f"{decision.choice} cannot be traced on {problem}{problem.as_given}: {_UNTRACEABLE}; "
            "pass backend=None, or call attend outside of torch.export and make_fx"
        )


def if_traceable(each: Candidate, problem: Problem) -> Candidate:
    """The candidate, ruled out if it cannot be traced on this problem."""
    if each.row is not None or traceable(each.backend, problem):
        return each
    return ruled_out(each, "unsupported", _UNTRACEABLE)
