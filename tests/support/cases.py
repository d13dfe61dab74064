"""Expected results of the cases."""

from __future__ import annotations

from functools import cache

from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle


@cache
def gate(problem: Problem) -> Oracle:
    """Expected results, worked out once for all backends."""
    return Oracle.of(make(problem))
