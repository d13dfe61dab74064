"""Parts of all Triton kernels: rows and their products, the scale, a step of the online softmax, and results.

A row has head_dim numbers: BLOCK_D first dims, and where REST_D is not 0 a rest. Both are powers of two (`parts_of`).
Rows are a pair of both; without a rest the first dims stand for it, and the compiler drops what is not used.

Importing this module imports triton.

Source: Milakov & Gimelshein 2018, online softmax; Dao 2023, FlashAttention-2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.dropout import gains
from attn_dispatch.kernels.triton.terms import LOG2_E, after_terms


@triton.jit
def head_of(x, strides, batch, head):
    """The first element of a head, of x by its strides [batch, len, heads, head_dim]."""
    return x + batch * strides[0] + head * strides[2]


@triton.jit
def offsets(rows, d, strides, meta):
    """Offsets [rows, head_dim] within a head; WIDE: 64-bit."""
    if meta.WIDE:
        rows = rows.to(tl.int64)
        d = d.to(tl.int64)
    return (rows * strides[1])[:, None] + d * strides[3]


@triton.jit
def dims_of(FIRST: tl.constexpr, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Numbers [1, COUNT] of dims, and which of them head_dim has."""
    d = FIRST + tl.arange(0, COUNT)[None, :]
    valid = tl.full([1, COUNT], True, tl.int1)
    if HEAD_DIM < FIRST + COUNT:
        valid = d < HEAD_DIM
    return d, valid


@triton.jit
def load_rows(x, rows, seen, strides, meta):
    """Rows [rows, BLOCK_D and REST_D] of a head, 0 where not `seen` [rows or 1, 1]."""
    d, valid = dims_of(0, meta.BLOCK_D, meta.HEAD_DIM)
    found = tl.load(x + offsets(rows, d, strides, meta), mask=seen & valid, other=0.0)
    rest = found
    if meta.REST_D:
        d, valid = dims_of(meta.BLOCK_D, meta.REST_D, meta.HEAD_DIM)
        rest = tl.load(x + offsets(rows, d, strides, meta), mask=seen & valid, other=0.0)
    return found, rest


@triton.jit
def store_rows(to, row_at, x, stored, meta):
    """Store rows at offsets `row_at` [rows, 1] where `stored` [rows]."""
    d, valid = dims_of(0, meta.BLOCK_D, meta.HEAD_DIM)
    tl.store(to + (row_at + d), x[0].to(to.dtype.element_ty), mask=stored[:, None] & valid)
    if meta.REST_D:
        d, valid = dims_of(meta.BLOCK_D, meta.REST_D, meta.HEAD_DIM)
        tl.store(to + (row_at + d), x[1].to(to.dtype.element_ty), mask=stored[:, None] & valid)


@triton.jit
def zeros(meta):
    """Sums of rows [ROWS, BLOCK_D and REST_D]."""
    sums = tl.full([meta.ROWS, meta.BLOCK_D], 0.0, tl.float32)
    rest = sums
    if meta.REST_D:
        rest = tl.full([meta.ROWS, meta.REST_D], 0.0, tl.float32)
    return sums, rest


@triton.jit
def times_rows(x, factor, kept):
    """Rows by a factor, 0 where not `kept` [rows]."""
    return tl.where(kept[:, None], x[0] * factor, 0.0), tl.where(kept[:, None], x[1] * factor, 0.0)


@triton.jit
def scores(x, y, meta):
    """x @ y^T."""
    found = tl.dot(x[0], tl.trans(y[0]), input_precision=meta.PRECISION)
    if meta.REST_D:
        found = tl.dot(x[1], tl.trans(y[1]), found, input_precision=meta.PRECISION)
    return found


@triton.jit
def add_product(weights, x, sums, meta):
    """sums + weights @ x."""
    # The rest first: the last one's shape decides how Triton divides a product among warps, and of a narrow one several
    # warps would compute the same.
    rest = sums[1]
    if meta.REST_D:
        rest = tl.dot(weights, x[1], rest, input_precision=meta.PRECISION)
    return tl.dot(weights, x[0], sums[0], input_precision=meta.PRECISION), rest


@triton.jit
def fold_scale(x, scale):
    """Rows with the scale's sign, and a positive slope in powers of two: `scale * x @ y` is `LN_2 * slope * found @ y`.

    The maximum of scores can so be taken before they are scaled, and the product with the slope is part of the
    exponential. For a scale of 0, x is 0 and the slope 1.
    """
    return (signed(x[0], scale), signed(x[1], scale)), tl.where(scale == 0, 1.0, tl.abs(scale) * LOG2_E)


@triton.jit
def signed(x, scale):
    """x by the scale's sign."""
    return tl.where(scale == 0, x * 0, tl.where(scale < 0, -x, x))


@triton.jit
def forward_step(query, rows, k_head, k_by, v_head, v_by, block, slope, of_head, row_max, total, sums, meta):
    """The online softmax after a block of keys (see `lists.block_of`).

    Returns each row's maximum, scaled by the slope, and its sums.
    """
    columns, there, visible, times, added = block
    key = load_rows(k_head, columns, tl.full([1, 1], True, tl.int1), k_by, meta)
    s, slope, _ = after_terms(scores(query, key, meta), slope, added, of_head, meta)
    s = tl.where(visible, s, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(s, 1) * slope)
    # For rows without a key so far -inf - -inf would be NaN.
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * slope - safe[:, None]) * times
    shrink = tl.exp2(row_max - safe)
    total = total * shrink + tl.sum(p, 1)
    if meta.DROPS:
        p *= gains(rows, columns, of_head, False)
    value = load_rows(v_head, columns, there[:, None], v_by, meta)
    rest = sums[1]
    if meta.REST_D:
        rest = rest * shrink[:, None]
    return new_max, total, add_product(p.to(value[0].dtype), value, (sums[0] * shrink[:, None], rest), meta)


@triton.jit
def weights(exponent):
    """Weights of scores less lse, both in powers of two: 1 at most, which rounding of huge scores would exceed."""
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def row_sums(out, d_out, lse, grad_lse, scaled_lse, delta, row_at, scalar_at, stored, meta):
    """lse in powers of two, inf for rows without keys, and `rowsum(grad * out) - grad_lse`; both are also stored.

    With lse inf a weight `exp2(s - lse)` is 0.
    """
    row_lse = tl.load(lse + scalar_at)
    has_keys = row_lse != float("-inf")
    d, valid = dims_of(0, meta.BLOCK_D, meta.HEAD_DIM)
    row_delta = tl.sum(d_out[0].to(tl.float32) * tl.load(out + (row_at + d), mask=valid, other=0.0).to(tl.float32), 1)
    if meta.REST_D:
        d, valid = dims_of(meta.BLOCK_D, meta.REST_D, meta.HEAD_DIM)
        rest = tl.load(out + (row_at + d), mask=valid, other=0.0)
        row_delta += tl.sum(d_out[1].to(tl.float32) * rest.to(tl.float32), 1)
    if grad_lse is not None:
        row_delta -= tl.load(grad_lse + scalar_at)
    row_delta = tl.where(has_keys, row_delta, 0.0)
    row_lse = tl.where(has_keys, row_lse * LOG2_E, float("inf"))
    tl.store(scaled_lse + scalar_at, row_lse, mask=stored)
    tl.store(delta + scalar_at, row_delta, mask=stored)
    return row_lse, row_delta, has_keys
