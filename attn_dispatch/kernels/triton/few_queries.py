"""Triton forward kernels for few queries at the end of many keys: each program reads a part of the keys, once for all
heads that share them, and `join` adds the parts.

q, k and v may have any strides. Sums are in float32. Importing this module imports triton.

Source: Dao et al. 2023, Flash-Decoding for long-context inference; Milakov & Gimelshein 2018, online softmax.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.parts import LN_2, fold_scale, offsets, softmax_weights

#: Arguments whose values do not change the machine code.
VARIABLE = ("kv_heads", "splits", "share", "q_len", "first", "end", "low", "high")


@triton.jit(do_not_specialize=VARIABLE)
def part(
    q,
    k,
    v,
    sums,
    maxima,
    totals,
    key_mask,
    q_b,
    q_n,
    q_h,
    q_d,
    k_b,
    k_n,
    k_h,
    k_d,
    v_b,
    v_n,
    v_h,
    v_d,
    mask_b,
    mask_n,
    kv_heads,
    splits,
    share,
    q_len,
    first,
    end,
    low,
    high,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sums [batch, kv_heads, splits, ROWS, HEAD_DIM], maxima and totals [..., ROWS] of keys `first` to `end`.

    Rows are a key head's queries by its heads, those of one query side by side. A split has `share` keys.
    """
    program = tl.program_id(0)
    split = program % splits
    kv_head = (program // splits % kv_heads).to(tl.int64)
    batch = (program // splits // kv_heads).to(tl.int64)
    row = tl.arange(0, ROWS)
    lane = tl.minimum(row, GROUP * q_len - 1)  # the rest repeat the last one
    query_at = lane // GROUP
    lowest = (query_at + low)[:, None]
    highest = (query_at + high)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    d_valid = tl.full([1, BLOCK_D], True, tl.int1)
    if HEAD_DIM < BLOCK_D:
        d_valid = d < HEAD_DIM
    heads_at = (kv_head * GROUP + lane % GROUP) * q_h
    query = tl.load(q + batch * q_b + heads_at[:, None] + offsets(query_at, q_n, d, q_d, WIDE), mask=d_valid, other=0.0)
    query, slope = fold_scale(query, scale)
    k_head = k + batch * k_b + kv_head * k_h
    v_head = v + batch * v_b + kv_head * v_h
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    start = first + split * share
    stop = tl.minimum(start + share, end)
    for n in range(start, stop, COLUMNS):
        column = n + tl.arange(0, COLUMNS)
        visible = (column < stop)[None, :]
        columns = tl.minimum(column, stop - 1)
        if LOW:
            visible = visible & (columns[None, :] >= lowest)
        if HIGH:
            visible = visible & (columns[None, :] <= highest)
        seen = d_valid
        if KEY_MASK:
            key_allowed = tl.load(key_mask + batch * mask_b + columns * mask_n) != 0
            visible = visible & key_allowed[None, :]
            seen = key_allowed[:, None] & d_valid
        key = tl.load(k_head + offsets(columns, k_n, d, k_d, WIDE), mask=d_valid, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        s = tl.where(visible, s, float("-inf"))
        p, shrink, row_max = softmax_weights(s, slope, row_max)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(v_head + offsets(columns, v_n, d, v_d, WIDE), mask=seen, other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    at = program.to(tl.int64) * ROWS + row
    tl.store(maxima + at, row_max)
    tl.store(totals + at, total)
    tl.store(sums + at[:, None] * HEAD_DIM + d, acc, mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=("heads", "splits", "q_len"))
def join(
    sums,
    maxima,
    totals,
    out,
    lse,
    heads,
    splits,
    q_len,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len], a program for each row; SPLITS: at least."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    query = program // heads % q_len
    batch = program // heads // q_len
    split = tl.arange(0, SPLITS)
    there = split < splits
    first = (batch * (heads // GROUP) + head // GROUP) * splits
    at = (first + tl.minimum(split, splits - 1)) * ROWS + query * GROUP + head % GROUP
    maximum = tl.where(there, tl.load(maxima + at), float("-inf"))
    most = tl.max(maximum, 0)
    weight = tl.exp2(maximum - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(weight * tl.where(there, tl.load(totals + at), 0.0), 0)
    d = tl.arange(0, BLOCK_D)
    parts = tl.load(sums + at[:, None] * HEAD_DIM + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    has_keys = total > 0
    divisor = tl.where(has_keys, total, 1.0)
    result = tl.sum(weight[:, None] * parts, 0) / divisor
    result = tl.where(has_keys, result, 0.0).to(out.dtype.element_ty)
    tl.store(out + program * HEAD_DIM + d, result, mask=d < HEAD_DIM)
    result_lse = tl.where(has_keys, most * LN_2 + tl.log(divisor), float("-inf"))
    tl.store(lse + (batch * heads + head) * q_len + query, result_lse)
