"""The cases' kinds, and their expected results."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

from attn_dispatch.spec.pattern import Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle


@cache
def gate(problem: Problem) -> Oracle:
    """Expected results, worked out once for all backends."""
    return Oracle.of(make(problem))


def factors_of(case: Case) -> dict[str, Hashable]:
    """What a choice of cases has in every pair."""
    masks = (case.seq_lens, case.key_mask)
    return {"pattern": kind_of(case.pattern), "masks": masks, "grouped": case.kv_heads is not None}


def kind_of(pattern: Pattern) -> str:
    """The pattern's class, and what a backend may treat apart: causality, axes, edges, strides, selection."""
    more: tuple[Any, ...] = tuple(getattr(pattern, name, None) for name in ("is_causal", "offsets", "heads"))
    if isinstance(pattern, Window):
        more = (pattern.right == 0,)
    elif isinstance(pattern, Neighborhood):
        plain = len(pattern.grid), any(pattern.is_causal), pattern.edges
        more = ("strided",) if max(pattern.stride) > 1 else plain
    return "-".join(map(str, (type(pattern).__name__, *more)))
