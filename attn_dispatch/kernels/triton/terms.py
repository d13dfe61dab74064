"""What a call does to scores: a cap, a bias, and ALiBi's slopes, in powers of two. Imports triton.

Source: Press et al. 2022, Train Short, Test Long; Gemma Team 2024, Gemma 2 (the cap).
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGEST_BIAS = tl.constexpr(1e30)  #: that of `formula`


@triton.jit
def head_terms(terms, batch, head, heads, meta):
    """The `support.Terms` of a head, or of heads [rows, 1]: its bias, strides of that, slope, the cap, and dropout."""
    bias = 0
    if meta.BIAS:
        bias = terms.bias + batch * terms.bias_b + head * terms.bias_h
    slope = 0.0
    if meta.ALIBI:
        slope = tl.load(terms.slopes + batch * heads + head) * LOG2_E
    dropout = terms.seed, batch * heads + head, terms.dropped, terms.gain
    return bias, terms.bias_q, terms.bias_k, slope, terms.softcap, dropout


@triton.jit
def added_to(rows, columns, visible, ahead, of_head, KEYS: tl.constexpr, meta):
    """Which of `visible` a bias leaves, and the sum of it and ALiBi's term [rows, columns].

    `ahead`: keys less queries. KEYS: rows are keys.
    """
    queries, keys = rows[:, None], columns[None, :]
    if KEYS:
        queries, keys = keys, queries
    bias, bias_q, bias_k, slope, _, _ = of_head
    added = 0.0
    if meta.ALIBI:
        added = -slope * tl.abs(queries + ahead - keys).to(tl.float32)
    if meta.BIAS:
        if meta.WIDE:
            queries = queries.to(tl.int64)
            keys = keys.to(tl.int64)
        entry = tl.load(bias + (queries * bias_q + keys * bias_k))
        visible = visible & (entry != float("-inf"))
        if entry.dtype != tl.float64:
            entry = entry.to(tl.float32)
        # A sum, or float32, could be infinite.
        entry = tl.maximum(entry, -LARGEST_BIAS, propagate_nan=tl.PropagateNan.ALL)
        entry = tl.minimum(entry, LARGEST_BIAS, propagate_nan=tl.PropagateNan.ALL)
        added += entry.to(tl.float32) * LOG2_E
    return visible, added


@triton.jit
def after_terms(s, slope, added, of_head, meta):
    """Scores and their slope after a cap and what is added; and the derivative of the cap."""
    derivative = 1.0
    if meta.SOFTCAP:
        capped = tanh(s * (slope * LN_2) * (1 / of_head[4]))
        s = capped * (of_head[4] * LOG2_E)
        slope = 1.0
        derivative = 1 - capped * capped
    if meta.BIAS or meta.ALIBI:
        s = s * slope + added
        slope = 1.0
    return s, slope, derivative


@triton.jit
def tanh(x):
    """Lambert's continued fraction where 1 - exp(-2 |x|) would cancel."""
    square = x * x
    small = square < 0.25
    e = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    above = tl.where(small, x * (945 + square * (105 + square)), tl.where(x < 0, e - 1, 1 - e))
    return above / tl.where(small, 945 + square * (420 + 15 * square), 1 + e)
