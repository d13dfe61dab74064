"""Parts of all Triton kernels: rows and their products, the scale, a step of the online softmax, and results.

A row has head_dim numbers: BLOCK_D first dims, and where REST_D is not 0 a rest. Both are powers of two (`parts_of`).

Importing this module imports triton.

Source: Milakov & Gimelshein 2018, online softmax; Dao 2023, FlashAttention-2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

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
def dims_of(FIRST: tl.constexpr, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Numbers [1, COUNT] of dims, and which of them head_dim has."""
    d = FIRST + tl.arange(0, COUNT)[None, :]
    valid = tl.full([1, COUNT], True, tl.int1)
    if HEAD_DIM < FIRST + COUNT:
        valid = d < HEAD_DIM
    return d, valid


@triton.jit
def load_rows(
    x,
    rows,
    seen,
    stride,
    d_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows [rows, BLOCK_D] of a head and the rest of each [rows, REST_D], 0 where not `seen` [rows or 1, 1].

    Without a rest, here and below, the first dims stand for it; the compiler drops what is not used.
    """
    d, valid = dims_of(0, BLOCK_D, HEAD_DIM)
    found = tl.load(x + offsets(rows, stride, d, d_stride, WIDE), mask=seen & valid, other=0.0)
    rest = found
    if REST_D:
        d, valid = dims_of(BLOCK_D, REST_D, HEAD_DIM)
        rest = tl.load(x + offsets(rows, stride, d, d_stride, WIDE), mask=seen & valid, other=0.0)
    return found, rest


@triton.jit
def store_rows(to, row_at, x, rest, stored, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr):
    """Store rows, and the rest of each, at offsets `row_at` [rows, 1] where `stored` [rows]."""
    d, valid = dims_of(0, BLOCK_D, HEAD_DIM)
    tl.store(to + (row_at + d), x.to(to.dtype.element_ty), mask=stored[:, None] & valid)
    if REST_D:
        d, valid = dims_of(BLOCK_D, REST_D, HEAD_DIM)
        tl.store(to + (row_at + d), rest.to(to.dtype.element_ty), mask=stored[:, None] & valid)


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr):
    """Sums [ROWS, BLOCK_D] and [ROWS, REST_D]."""
    sums = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    rest = sums
    if REST_D:
        rest = tl.full([ROWS, REST_D], 0.0, tl.float32)
    return sums, rest


@triton.jit
def scores(x, x_rest, y, y_rest, REST_D: tl.constexpr, PRECISION: tl.constexpr):
    """x @ y^T."""
    found = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    if REST_D:
        found = tl.dot(x_rest, tl.trans(y_rest), found, input_precision=PRECISION)
    return found


@triton.jit
def add_product(weights, x, x_rest, sums, sums_rest, REST_D: tl.constexpr, PRECISION: tl.constexpr):
    """sums + weights @ x."""
    # The rest first: the last one's shape decides how Triton divides a product among warps, and of a narrow one several
    # warps would compute the same.
    if REST_D:
        sums_rest = tl.dot(weights, x_rest, sums_rest, input_precision=PRECISION)
    return tl.dot(weights, x, sums, input_precision=PRECISION), sums_rest


@triton.jit
def fold_scale(x, rest, scale):
    """Rows with the scale's sign, and a positive slope in powers of two: `scale * x @ y` is `LN_2 * slope * found @ y`.

    The maximum of scores can so be taken before they are scaled, and the product with the slope is part of the
    exponential. For a scale of 0, x is 0 and the slope 1.
    """
    return signed(x, scale), signed(rest, scale), tl.where(scale == 0, 1.0, tl.abs(scale) * LOG2_E)


@triton.jit
def signed(x, scale):
    """x by the scale's sign."""
    return tl.where(scale == 0, x * 0, tl.where(scale < 0, -x, x))


@triton.jit
def forward_step(
    query,
    query_rest,
    k_head,
    v_head,
    columns,
    there,
    visible,
    times,
    slope,
    row_max,
    total,
    sums,
    sums_rest,
    k_n,
    k_d,
    v_n,
    v_d,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The online softmax after a block of keys: each row's maximum, scaled by the slope, and its sums.

    See `lists.block_of` for columns, there, visible and times.
    """
    every = tl.full([1, 1], True, tl.int1)
    key, key_rest = load_rows(k_head, columns, every, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    s = tl.where(visible, scores(query, query_rest, key, key_rest, REST_D, PRECISION), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(s, 1) * slope)
    # For rows without a key so far -inf - -inf would be NaN.
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * slope - safe[:, None]) * times
    shrink = tl.exp2(row_max - safe)
    total = total * shrink + tl.sum(p, 1)
    value, value_rest = load_rows(v_head, columns, there[:, None], v_n, v_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    sums = sums * shrink[:, None]
    if REST_D:
        sums_rest = sums_rest * shrink[:, None]
    sums, sums_rest = add_product(p.to(value.dtype), value, value_rest, sums, sums_rest, REST_D, PRECISION)
    return new_max, total, sums, sums_rest


@triton.jit
def weights(exponent):
    """Weights of scores less lse, both in powers of two: 1 at most, which rounding of huge scores would exceed."""
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def store_forward(
    out,
    lse,
    sums,
    rest,
    total,
    row_max,
    has_keys,
    batch,
    head,
    rows,
    stored,
    heads,
    q_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
):
    """Store out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len]; zeros and -inf for rows without keys."""
    divisor = tl.where(has_keys, total, 1.0)
    sums = tl.where(has_keys[:, None], sums / divisor[:, None], 0.0)
    rest = tl.where(has_keys[:, None], rest / divisor[:, None], 0.0)
    row_at = ((batch * q_len + rows) * heads + head)[:, None] * HEAD_DIM
    store_rows(out, row_at, sums, rest, stored, HEAD_DIM, BLOCK_D, REST_D)
    result_lse = tl.where(has_keys, row_max * LN_2 + tl.log(divisor), float("-inf"))
    tl.store(lse + (batch * heads + head) * q_len + rows, result_lse, mask=stored)


@triton.jit
def row_sums(
    out,
    d_out,
    d_out_rest,
    lse,
    grad_lse,
    scaled_lse,
    delta,
    row_at,
    scalar_at,
    stored,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
):
    """lse in powers of two, inf for rows without keys, and `rowsum(grad * out) - grad_lse`; both are also stored.

    With lse inf a weight `exp2(s - lse)` is 0.
    """
    row_lse = tl.load(lse + scalar_at)
    has_keys = row_lse > float("-inf")
    d, valid = dims_of(0, BLOCK_D, HEAD_DIM)
    row_delta = tl.sum(d_out.to(tl.float32) * tl.load(out + (row_at + d), mask=valid, other=0.0).to(tl.float32), 1)
    if REST_D:
        d, valid = dims_of(BLOCK_D, REST_D, HEAD_DIM)
        rest = tl.load(out + (row_at + d), mask=valid, other=0.0)
        row_delta += tl.sum(d_out_rest.to(tl.float32) * rest.to(tl.float32), 1)
    if grad_lse is not None:
        row_delta -= tl.load(grad_lse + scalar_at)
    row_delta = tl.where(has_keys, row_delta, 0.0)
    row_lse = tl.where(has_keys, row_lse * LOG2_E, float("inf"))
    tl.store(scaled_lse + scalar_at, row_lse, mask=stored)
    tl.store(delta + scalar_at, row_delta, mask=stored)
    return row_lse, row_delta, has_keys
