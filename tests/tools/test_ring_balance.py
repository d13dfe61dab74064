"""`python -m tools.bench.ring balance`: the pairs of each rank, and that a layout makes them even."""

from __future__ import annotations

import pytest
import torch

from attn_dispatch.ring.rows.layout import CONTIGUOUS, KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from tools.bench import ring

RANKS = 4
EVEN = 1.05  #: pairs of the rank with the most / the mean


def pairs(name: str, tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found, pattern = [], ring.masks(tokens)[name]
    for rank in range(RANKS):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(ring._pairs(pattern, Layout(deal(tokens, RANKS), kind)))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ring.masks(1024))
def test_pairs_are_those_of_the_mask(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 512
    counts = ring.masks(tokens)[name].multiplicity(tokens, heads=1).reshape(tokens, tokens)
    layout = Layout(deal(tokens, RANKS), kind)
    expected = [int(counts[positions_of(layout, rank)].sum()) for rank in range(RANKS)]
    assert pairs(name, tokens, kind, monkeypatch) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("10 % of blocks", CONTIGUOUS),
        ("near blocks", CONTIGUOUS),
        *(((name, ZIGZAG)) for name in ("10 % of blocks", "near blocks", "10 % of blocks, causal", "spans, causal")),
    ],
)
def test_ranks_have_about_as_many_pairs(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pairs(name, ring.BALANCED_TOKENS, kind, monkeypatch)
    assert max(found) * RANKS <= EVEN * sum(found)
