"""The cases' kinds, and their expected results."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from attn_dispatch.backends import manual
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.kernels.formula import largest
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.oracle import Oracle


@cache
def gate(problem: Problem) -> Oracle:
    """Expected results, worked out once for all backends."""
    return Oracle.of(make(problem))


def failures(backend: Backend, given: Problem | Example, order: str = NATURAL) -> tuple[str, ...]:
    """What is wrong with a backend's results: of a problem's tensors, worked out once, or of these."""
    expected = gate(given) if isinstance(given, Problem) else Oracle.of(given)
    return expected.check(expected.run(backend, order)).failures


def dropped_otherwise(backend: Backend, problem: Problem) -> list[str]:
    """The results that are not those of `manual`, of one state of the generators."""
    found = []
    for each in (backend, manual):
        example = make(problem)
        torch.manual_seed(0)
        out, lse = each.run(example.q, example.k, example.v, problem, **example.masks)
        grads = torch.autograd.grad(out, (example.q, example.k, example.v), example.grad)
        found.append([x.detach().double() for x in (out, lse, *grads)])
    off = 1e-4 if problem.dtype == torch.float32 else 0.02
    pairs = zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True)
    return [name for name, x, y in pairs if not torch.allclose(x, y, rtol=off, atol=off * largest(y))]


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
