"""Blocks within patterns that differ by head, or fix the number of tokens; copies of Ranges and Blocks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from attn_dispatch import Blocks, Dilated, Neighborhood, Ranges, attend
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.pattern import Pattern
from tests.support.calls import close, drawn, formula

pytestmark = pytest.mark.usefixtures("no_trials")

WITHIN = [Dilated((6, 22), (1, 4)), Dilated((6, 22), (1, 2), heads="split"), Neighborhood((2, 11), (1, 5))]


@pytest.mark.parametrize("tables", [1, 4, 8])
@pytest.mark.parametrize("within", WITHIN, ids=str)
def test_blocks_within(within: Pattern, tables: int) -> None:
    q, k, v = (drawn(2, 22, heads, 8, seed=n) for n, heads in enumerate((8, 4, 4)))
    table = drawn(1, tables, 6, 3, seed=3) > -0.5
    exact, _ = formula(q, k, v, Blocks(table, (4, 8), within))
    assert close(attend(q, k, v, Blocks(table, (4, 8), within)), exact)
    assert close(attend(q, k, v, Blocks(table, (4, 8), within), backend="manual"), exact)
    own = table if tables == 1 else table[:, tables // 4 : tables * 3 // 4]
    part = attend(q[:, :, 2:6], k[:, :, 1:3], v[:, :, 1:3], Blocks(own, (4, 8), within), first_head=2, all_heads=8)
    assert close(part, exact[:, :, 2:6])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied: Callable[[DataPattern], DataPattern]) -> None:
    """As modules and data loaders make them: they hold the same, in tensors of their own."""
    q, ids, table = drawn(1, 8, 2, 8), torch.arange(8)[None] // 3, torch.ones(1, 1, 2, 2) > 0
    for pattern in (Ranges.spans(ids), Blocks(table, 4)):
        other = copied(pattern)
        assert torch.equal(attend(q, q, q, other), attend(q, q, q, pattern))
