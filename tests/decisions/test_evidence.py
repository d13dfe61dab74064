"""Decisions of a group as evidence: what is made while they are read from disk."""

from __future__ import annotations

import pytest

from attn_dispatch.decisions import look_up
from attn_dispatch.settings import cache_folder
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store
from tests.support.made_up import SILICON, decision, problem_at

TIMES = {("a", "natural"): 1.0, ("b", "natural"): 2.0}


def test_a_decision_made_while_others_are_read_is_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread stores it after this one has read the folder, and before it keeps what it has read."""
    early, late = (decision(problem_at(length), TIMES) for length in (512, 1024))
    read = Store.group
    made = iter([late])

    def slowly(store: Store, *where: object) -> list[Decision]:
        found = read(store, *where)  # type: ignore[arg-type]
        for each in made:
            store.put(each)
            look_up.add_evidence(each)
        return found

    Store(cache_folder()).put(early)
    monkeypatch.setattr(Store, "group", slowly)
    known = look_up.group_evidence(SILICON, early.group)
    assert set(known.groups[early.group]) == {early.key, late.key}
    assert look_up.group_evidence(SILICON, early.group) is known
