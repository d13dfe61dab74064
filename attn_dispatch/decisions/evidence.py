"""Decisions measured so far, as evidence for sizes that were not."""

from __future__ import annotations

from attn_dispatch import process_state
from attn_dispatch.learning import predict as learned
from attn_dispatch.learning import thresholds
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store, shipped
from attn_dispatch.tuning.candidates import Request

# Decisions of a group as they were first read, and those made since: by silicon and group.
_evidence: dict[tuple[str, str], learned.Evidence] = {}
process_state.register(process_state.DECISIONS, _evidence.clear)


def predict(request: Request) -> learned.Prediction | None:
    """What evidence from other sizes says of a problem that was never measured."""
    able = [each.id for each in request.able]
    if not able:
        return None
    plain, known = request.plain, evidence(request.address.silicon, request.address.group)
    versions = {each.name: each.version for each in request.candidates}
    said = learned.predict(plain, known, able, versions)
    if said is None or said.in_bucket or said.order == NATURAL:
        return said
    # Far from what was measured an order is taken only above the length from which it has been seen to pay.
    worth = thresholds.allowed_orders(plain, known)
    return learned.predict(plain, known, [each for each in able if each[1] in worth], versions)


def evidence(where: str, group: str) -> learned.Evidence:
    """Every decision of a group: the user's, and the shipped ones of which the user has none."""
    known = _evidence.get((where, group))
    if known is None:
        mine = Store(cache_folder()).group(where, group)
        keys = {decision.key for decision in mine}
        given = [d for d in shipped(where).values() if d.group == group and d.key not in keys]
        known = _evidence[where, group] = learned.Evidence([*given, *mine])
    return known


def note(decision: Decision) -> None:
    """A decision that was just made is evidence from now on."""
    known = _evidence.get((decision.silicon, decision.group))
    if known is not None:
        known.add(decision)
