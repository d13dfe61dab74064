"""Parts of all Triton kernels: positions in memory, the scale, softmax weights, and results.

Importing this module imports triton.

Source: Milakov & Gimelshein 2018, online softmax; Dao 2023, FlashAttention-2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def offsets(rows, stride, d, d_stride, WIDE: tl.constexpr):
    """Offsets [rows, head_dim] within a head; WIDE: 64-bit."""
    if WIDE:
        rows = rows.to(tl.int64)
        d = d.to(tl.int64)
    return (rows * stride)[:, None] + d * d_stride


@triton.jit
def fold_scale(x, scale):
    """x with the scale's sign, and a positive slope in powers of two: `scale * x @ y` is `LN_2 * slope * found @ y`.

    The maximum of scores can so be taken before they are scaled, and the product with the slope is part of the
    exponential. For a scale of 0, x is 0 and the slope 1.
    """
    found = tl.where(scale < 0, -x, x)
    return tl.where(scale == 0, x * 0, found), tl.where(scale == 0, 1.0, tl.abs(scale) * LOG2_E)


@triton.jit
def softmax_weights(s, slope, row_max):
    """Weights of scores, the factor of earlier sums, and the new maximum of each row, which is scaled by the slope."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * slope)
    # For rows without a key so far -inf - -inf would be NaN.
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    return tl.exp2(s * slope - safe[:, None]), tl.exp2(row_max - safe), new_max


@triton.jit
def store_forward(
    out, lse, acc, total, row_max, has_keys, batch, head, rows, d, stored, heads, q_len, HEAD_DIM: tl.constexpr
):
    """Store out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len]; zeros and -inf for rows without keys."""
    divisor = tl.where(has_keys, total, 1.0)
    result = tl.where(has_keys[:, None], acc / divisor[:, None], 0.0).to(out.dtype.element_ty)
    out_at = out + ((batch * q_len + rows) * heads + head)[:, None] * HEAD_DIM + d
    tl.store(out_at, result, mask=stored[:, None] & (d < HEAD_DIM))
    result_lse = tl.where(has_keys, row_max * LN_2 + tl.log(divisor), float("-inf"))
    tl.store(lse + (batch * heads + head) * q_len + rows, result_lse, mask=stored)


@triton.jit
def row_sums(out, d_out, lse, grad_lse, scaled_lse, delta, at, scalar_at, d_valid, stored, GRAD_LSE: tl.constexpr):
    """lse in powers of two, inf for rows without keys, and `rowsum(grad * out) - grad_lse`; both are also stored.

    With lse inf a weight `exp2(s - lse)` is 0.
    """
    row_lse = tl.load(lse + scalar_at)
    has_keys = row_lse > float("-inf")
    row_delta = tl.sum(d_out.to(tl.float32) * tl.load(out + at, mask=d_valid, other=0.0).to(tl.float32), 1)
    if GRAD_LSE:
        row_delta -= tl.load(grad_lse + scalar_at)
    row_delta = tl.where(has_keys, row_delta, 0.0)
    row_lse = tl.where(has_keys, row_lse * LOG2_E, float("inf"))
    tl.store(scaled_lse + scalar_at, row_lse, mask=stored)
    tl.store(delta + scalar_at, row_delta, mask=stored)
    return row_lse, row_delta, has_keys
