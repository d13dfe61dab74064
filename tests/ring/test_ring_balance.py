"""The query-key pairs that each rank computes of a mask made of data, and that a layout makes them even."""

from __future__ import annotations

import pytest
import torch

from attn_dispatch import Blocks, Ranges
from attn_dispatch.ring.rows.data import Held
from attn_dispatch.ring.rows.layout import CONTIGUOUS, KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of

RANKS, TOKENS = 4, 16_384
EVEN = 1.05  #: pairs of the rank with the most / the mean


def masks(tokens: int) -> dict[str, Blocks | Ranges]:
    """Tables of blocks of 64 tokens, and spans."""
    block, token = torch.arange(tokens // 64), torch.arange(tokens)
    before = block[:, None] - block
    drawn = torch.rand(before.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    seen = {
        "10 % of blocks": drawn,
        "10 % of blocks, causal": (drawn | (before == 0)) & (before >= 0),
        "near blocks": before.abs() <= 12,
        "a dense twelfth of the queries": drawn | (block[:, None] < len(block) // 12),
    }
    spans = Ranges.spans((token // 256).where(token // 256 % 2 == 0, -1)[None])
    return {name: Blocks(table[None, None], 64) for name, table in seen.items()} | {"spans, causal": spans}


def pairs(name: str, tokens: int, kind: str) -> list[int]:
    """By rank, from the intervals of keys that the ring works from."""
    held, layout = Held.of(masks(tokens)[name], 1, 1), Layout(deal(tokens, RANKS), kind)
    bounds = (held.intervals(positions_of(layout, rank), tokens, ()) for rank in range(RANKS))
    return [int((last - first + 1).clamp(min=0).sum()) for first, last in bounds]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", masks(1024))
def test_pairs_are_those_of_the_mask(name: str, kind: str) -> None:
    tokens = 512
    counts = masks(tokens)[name].multiplicity(tokens, heads=1).reshape(tokens, tokens)
    layout = Layout(deal(tokens, RANKS), kind)
    expected = [int(counts[positions_of(layout, rank)].sum()) for rank in range(RANKS)]
    assert pairs(name, tokens, kind) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("10 % of blocks", CONTIGUOUS),
        ("near blocks", CONTIGUOUS),
        *(((name, ZIGZAG)) for name in ("10 % of blocks", "near blocks", "10 % of blocks, causal", "spans, causal")),
    ],
)
def test_ranks_have_about_as_many_pairs(name: str, kind: str) -> None:
    found = pairs(name, TOKENS, kind)
    assert max(found) * RANKS <= EVEN * sum(found)
