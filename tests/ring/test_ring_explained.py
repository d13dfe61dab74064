"""Decisions for calls over many ranks, and what `explain` reports of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_dispatch import attend, counters, explain
from attn_dispatch.errors import NoBackend
from attn_dispatch.spec.orders import GATHER, LOCAL, ULYSSES
from tests.support import ring_ranks
from tests.support.ring_calls import part
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("little_time")


def decided(forget: bool) -> tuple[str, str, str]:
    """The order and the source of the decision, and as what it was counted."""
    if forget:
        ring_ranks.forget()
    mesh = ring_ranks.group()
    tensors = part(mesh)
    attend(*tensors, is_causal=True, mesh=mesh)
    found = explain(*tensors, is_causal=True, mesh=mesh)
    assert found.choice == "ring"
    (counted,) = [name for name, count in counters().items() if count]
    return str(found.order), found.source, counted


def explained(order: str) -> tuple[str, str]:
    """The order and source that `explain` reports of a forced exchange before any call, or its error."""
    ring_ranks.forget()
    mesh = ring_ranks.group()
    try:
        found = explain(*part(mesh), is_causal=True, mesh=mesh, order=order)
    except NoBackend as error:
        return "", str(error)
    return str(found.order), found.source


def test_a_forced_exchange_is_explained(ranks: Ranks, set_mode: Any) -> None:
    set_mode("off")
    for order in (GATHER, ULYSSES):
        assert ranks.everywhere(explained, order, ranks=2) == [(order, "forced")] * 2
    no_heads = "ulysses: 4 heads and 4 key heads do not come out even over 3 ranks"
    for forced, size, why in ((LOCAL, 2, "key rows of other ranks"), (ULYSSES, 3, no_heads)):
        for order, text in ranks.everywhere(explained, forced, ranks=size):
            assert order == ""
            assert why in text


def explained_documents() -> list[str]:
    """The problems that `explain` names before any call: of this rank's whole documents, and of cut ones' parts."""
    mesh = ring_ranks.group()
    ids = torch.arange(48).expand(2, -1) // 20
    found = explain(*part(mesh), is_causal=True, documents=ids, mesh=mesh)
    return [each.problem for each in (found, *found.others)]


def test_documents_are_explained_without_a_word_to_others(ranks: Ranks, set_mode: Any) -> None:
    """Documents of 20, 20 and 8 tokens, the second one cut after 4: the other 16 see those too."""
    set_mode("off")
    first, second = ranks.everywhere(explained_documents, ranks=2)
    assert [each.split(", 4, 8]")[0] for each in first] == ["[2, 4", "[2, 32"]  # classes of lengths
    assert [each.split("   ")[0] for each in second] == ["[2, 16, 4, 8] k, v [32, 4]", "[2, 8, 4, 8]"]


def test_a_decision_is_measured_once_and_stored(ranks: Ranks, set_mode: Any) -> None:
    found = set(ranks.everywhere(decided, False, ranks=2))
    assert len(found) == 1
    assert found.pop()[1:] == ("measured", "measured")
    set_mode("locked")  # nothing more is measured, or it would raise
    again = set(ranks.everywhere(decided, True, ranks=2))
    assert len(again) == 1
    assert again.pop()[1:] == ("measured", "loaded")
