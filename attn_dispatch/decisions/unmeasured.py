"""Decisions that rest on no measurement of their own: the static choice, and what the caller forces.

A caller names a backend, a token order or both. What is left open then goes by what was measured, as far as that is
known, else by the static choice; nothing is measured for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from attn_dispatch.decisions import look_up
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, forced_orders, orders_of
from attn_dispatch.learning import predict
from attn_dispatch.spec import orders
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.text import one_line, titled
from attn_dispatch.tuning.candidates import Candidate, Name, Request, heuristic, refused, ruled_out


def static(request: Request, found: Sequence[Candidate] | None = None) -> Decision:
    """By the order of preference, of all candidates or of these; without a choice where none can run."""
    found = request.candidates if found is None else found
    first = heuristic(found)
    chosen = None if first is None else first.id
    return request.decision(chosen, "heuristic", (_row(each, chosen, None) for each in found))


def predicted(request: Request, said: predict.Prediction) -> Decision:
    """What neighbours say; evidence to come may know better."""
    rows = (_predicted(each, said) for each in request.candidates)
    chosen = said.backend, said.order
    return request.decision(chosen, "learned", rows, confidence=said.confidence, evidence=said.evidence)


def _predicted(each: Candidate, said: predict.Prediction) -> Row:
    if each.row is not None:
        return each.row
    version = each.version
    if each.id == (said.backend, said.order):
        reason = f"by {len(said.evidence)} measured neighbours, confidence {said.confidence:.2f}"
        return Row(backend=each.name, order=each.order, status="chosen", reason=reason, version=version)
    ratio = said.ratios.get(each.id)
    reason = "no neighbour measured it" if ratio is None else f"predicted at {ratio:.2f} times the chosen one's time"
    return Row(backend=each.name, order=each.order, status="not_measured", reason=reason, version=version)


def check(backend: object, order: object) -> None:
    """Raise InvalidInput where there is no such backend or order."""
    if order is not None:
        orders.check(order)
    if backend is not None and backend not in registry.names():
        raise InvalidInput(f"backend must be None or one of {', '.join(registry.names())}, got {backend!r}")


def forced(request: Request, found: Sequence[Candidate], measured: Decision | None) -> Decision:
    """The decision among these, which the caller left; without a choice where none can run.

    Args:
        measured: a decision with measured rows, where there is one.
    """
    able = [each for each in found if each.row is None]
    holding = {} if measured is None else look_up.holding(measured, able)
    choice = None if measured is None else look_up.best_of(measured, holding)
    first = heuristic(able)
    if choice is None and first is not None:
        choice = first.id
    return request.decision(choice, "forced", (_row(each, choice, holding.get(each.id)) for each in found))


def left_by(request: Request, backend: str | None, order: str | None) -> tuple[list[Candidate], Exception | None]:
    """The candidates that a caller leaves who forces a backend, an order or both; and what the backend raised when it
    was asked. A backend that is named is not held to the memory that is free, nor kept in quarantine.
    """
    if backend is None:
        return list(_in_order(request, order or NATURAL)), None
    return _of_backend(request.problem, backend, order)


def no_backend(problem: Problem, rows: Iterable[Row], backend: str | None = None, order: str | None = None) -> str:
    """What to tell a caller whose problem cannot be run, one line for each candidate."""
    kv = f"[{problem.batch}, {problem.k_len}, {problem.kv_heads}, {problem.head_dim}]"
    what = str(problem.pattern) if order is None else f"{problem.pattern} in {order} order"
    lines = [
        f"no backend can run {what} on {problem.device} in {str(problem.dtype).removeprefix('torch.')}:",
        f"  q [{problem.batch}, {problem.q_len}, {problem.heads}, {problem.head_dim}]  k, v {kv}",
        *(f"  {titled(*row.id) if order is None else row.backend}: {row.reason}" for row in rows),
    ]
    lines += ["Pass backend=None to let every backend be tried."] * (backend is not None)
    return "\n".join(lines + ["Pass order=None to let every order be tried."] * (order is not None))


def _of_backend(problem: Problem, name: str, order: str | None) -> tuple[list[Candidate], Exception | None]:
    """One backend in the order that is named, or in those that it offers."""
    backend = registry.load(name)
    try:
        refusals = list(backend.refusals(problem))
        if refusals:
            return [ruled_out(backend, order or NATURAL, *refused(refusals))], None
        offered = orders_of(backend, problem) or (NATURAL,)
        if order is not None and order not in forced_orders(backend, problem):
            return [_another_order(backend, problem, order, offered)], None
    except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way
        return [ruled_out(backend, order or NATURAL, "failed", one_line(error))], error
    version = registry.version_of(backend)
    return [Candidate(backend, each, version) for each in (offered if order is None else (order,))], None


def _in_order(request: Request, order: str) -> Iterator[Candidate]:
    """One candidate of every backend."""
    for _, group in groupby(request.candidates, key=lambda each: each.name):
        known = list(group)
        backend, row = known[0].backend, known[0].row
        same = next((each for each in known if each.order == order), None)
        if same is not None:
            yield same
        elif row is not None:
            yield Candidate(backend, order, row.version, msgspec.structs.replace(row, order=order))
        else:
            yield _another_order(backend, request.problem, order, [each.order for each in known])


def _another_order(backend: Backend, problem: Problem, order: str, offered: Sequence[str]) -> Candidate:
    """Ruled out, since it computes in others."""
    reason = f"computes in {' and '.join(offered)} order only"
    if order in forced_orders(backend, problem):
        reason = f"does not offer itself in {order} order: backend={backend.name!r} beside it forces that"
    return ruled_out(backend, order, "unsupported", reason)


def _row(each: Candidate, choice: Name | None, measured: Row | None) -> Row:
    if each.row is not None:
        return each.row
    chosen = each.id == choice
    if measured is None:
        status = "chosen" if chosen else "not_measured"
        return Row(backend=each.name, order=each.order, status=status, version=each.version)
    # What it was in the whole race is told against another one.
    alone = msgspec.structs.replace(measured, ratio=None, ratio_low=None, ratio_high=None, break_even=None)
    if not chosen or measured.status == "chosen":
        return alone
    return msgspec.structs.replace(alone, status="chosen", reason="")
