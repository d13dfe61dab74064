"""Measured decisions as evidence for problems of other sizes, cached by group.

In modes that measure, other machines' decisions are none before they are confirmed here.
"""

from __future__ import annotations

from collections import Counter

from attn_dispatch import process_state
from attn_dispatch.decisions import look_up
from attn_dispatch.learning import predict as learned
from attn_dispatch.learning import thresholds
from attn_dispatch.settings import cache_folder, measures
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store, shipped
from attn_dispatch.tuning.candidates import Request

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
        read = _evidence[key] = learned.Evidence(filter(look_up.is_believed, [*shipped_only, *own]))
        if _added[silicon, group] == before:  # else what another thread has made may be missing
            known = read
    return known


def add(decision: Decision) -> None:
    """Add a new decision to the evidence of its group."""
    with _adding:
        _added[decision.silicon, decision.group] += 1  # first: `group_evidence` looks at it last
    for everyone in (False, True):
        known = _evidence.get((decision.silicon, decision.group, everyone))
        if known is not None:
            known.add(decision, MOST_DECISIONS)
