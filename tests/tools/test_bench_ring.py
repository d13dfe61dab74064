"""Rows drawn from ranks: their check can fail."""

from __future__ import annotations

import pytest
import torch

from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.spec.pattern import Dilated
from tools.lib.ranks import Drawn, Tokens, checked, drawn, errors


def test_rows_drawn_must_be_right_and_all_there() -> None:
    layout, pattern = Layout(deal(90, 3), "zigzag"), Dilated((30, 45), (2, 3))
    tokens = Tokens(layout, 2, 8, torch.float32)
    q, k, v = (x.double() for x in tokens.whole())
    counts = pattern.multiplicity(90, heads=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5 + counts.double().log()
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), v).float()
    draws = drawn(pattern, tokens, 2)
    shards = [out[:, positions_of(layout, rank)] for rank in range(3)]
    found = [errors(shard, layout, rank, draws) for rank, shard in enumerate(shards)]
    assert checked(found, draws)["rows_of_heads"] == 180
    with pytest.raises(RuntimeError, match="are not its"):
        checked(found[1:], draws)
    with pytest.raises(RuntimeError, match="out is off by"):
        checked([errors(shards[0] + 1e-3, layout, 0, draws), *found[1:]], draws)
    worse = [Drawn(one.rows, one.heads, one.value, float("nan")) for one in draws]
    with pytest.raises(RuntimeError, match="out is off by"):
        checked(found, worse)
