"""Dropout of weights, as `kernels.dropout` defines it. Imports triton."""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels import dropout

ROUNDS = tl.constexpr(dropout.ROUNDS)
DRAWN = tl.constexpr(dropout.DRAWN)


@triton.jit
def gains(rows, columns, of_head, KEYS: tl.constexpr):
    """By what weights [rows, columns] are multiplied: 0 where dropped. KEYS: rows are keys."""
    seed, head, dropped, gain = of_head[5]
    queries, keys = rows[:, None], columns[None, :]
    if KEYS:
        queries, keys = keys, queries
    place = queries % DRAWN
    first = (queries - place).to(tl.uint32)
    x0, x1, x2, x3 = tl.philox(tl.load(seed), first, keys.to(tl.uint32), head.to(tl.uint32), first * 0, ROUNDS)
    word = tl.where(place < 4, tl.where(place < 2, x1, x0), tl.where(place < 6, x3, x2))
    number = (word >> (place % 2 * 16).to(tl.uint32)) & 0xFFFF
    return tl.where(number.to(tl.int32) >= dropped, gain, 0.0)
