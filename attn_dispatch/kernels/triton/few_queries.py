"""Triton forward kernels for few queries at the end of many keys: each program reads a part of the keys, once for all
heads that share them, and `join` adds the parts.

q, k and v may have any strides. Sums are in float32. Importing this module imports triton.

Source: Dao et al. 2023, Flash-Decoding for long-context inference; Milakov & Gimelshein 2018, online softmax.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.lists import block_of
from attn_dispatch.kernels.triton.parts import LN_2, fold_scale, forward_step, load_rows, store_rows, zeros

SPLITS = tl.constexpr(16)  #: that are joined at a time
#: Arguments whose values do not change the machine code.
VARIABLE = ("kv_heads", "splits", "share", "q_len", "k_len", "first", "end", "low", "high")


@triton.jit(do_not_specialize=VARIABLE)
def part(
    q,
    k,
    v,
    sums,
    maxima,
    totals,
    key_mask,
    key_lens,
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
    k_len,
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
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sums [batch, kv_heads, splits, ROWS, HEAD_DIM], maxima and totals [..., ROWS] of keys `first` to `end`.

    Rows are a key head's queries by its heads, those of one query side by side. A split has `share` keys. With
    key_lens [batch] that is for k_len keys: bounds move with a row's end, and its splits share what it has.
    """
    program = tl.program_id(0)
    split = program % splits
    kv_head = (program // splits % kv_heads).to(tl.int64)
    batch = (program // splits // kv_heads).to(tl.int64)
    row = tl.arange(0, ROWS)
    lane = tl.minimum(row, GROUP * q_len - 1)  # the rest repeat the last one
    rows = lane // GROUP
    q_heads = q + batch * q_b + ((kv_head * GROUP + lane % GROUP) * q_h)[:, None]
    every = tl.full([1, 1], True, tl.int1)
    query, query_rest = load_rows(q_heads, rows, every, q_n, q_d, HEAD_DIM, BLOCK_D, 0, WIDE)
    query, query_rest, slope = fold_scale(query, query_rest, scale)
    k_head = k + batch * k_b + kv_head * k_h
    v_head = v + batch * v_b + kv_head * v_h
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc, acc_rest = zeros(ROWS, BLOCK_D, 0)
    if key_lens is not None:
        missing = k_len - tl.minimum(tl.maximum(tl.load(key_lens + batch), 0), k_len).to(tl.int32)
        first = tl.maximum(first - missing, 0)
        end -= missing
        share = tl.cdiv(tl.cdiv(end - first, splits), COLUMNS) * COLUMNS
        if low is not None:
            low -= missing
        if high is not None:
            high -= missing
    start = first + split * share
    stop = tl.minimum(start + share, end)
    for n in range(start, stop, COLUMNS):
        columns, there, visible, times = block_of(
            None,
            0,
            1,
            n,
            stop,
            0,
            rows,
            0,
            low,
            high,
            None,
            0,
            key_mask,
            batch * mask_b,
            mask_n,
            None,
            None,
            None,
            0,
            0,
            0,
            False,
            ROWS,
            COLUMNS,
            0,
            0,
            0,
        )
        row_max, total, acc, acc_rest = forward_step(
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
            acc,
            acc_rest,
            k_n,
            k_d,
            v_n,
            v_d,
            HEAD_DIM,
            BLOCK_D,
            0,
            PRECISION,
            WIDE,
        )
    at = program.to(tl.int64) * ROWS + row
    tl.store(maxima + at, row_max)
    tl.store(totals + at, total)
    store_rows(sums, at[:, None] * HEAD_DIM, acc, acc_rest, row < ROWS, HEAD_DIM, BLOCK_D, 0)


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
):
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len], a program for each row; SPLITS at a time."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    query = program // heads % q_len
    batch = program // heads // q_len
    first = (batch * (heads // GROUP) + head // GROUP) * splits
    d = tl.arange(0, BLOCK_D)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    result = tl.full([BLOCK_D], 0.0, tl.float32)
    for n in range(0, splits, SPLITS):
        split = n + tl.arange(0, SPLITS)
        at = (first + tl.minimum(split, splits - 1)) * ROWS + query * GROUP + head % GROUP
        maximum = tl.where(split < splits, tl.load(maxima + at), float("-inf"))
        new_most = tl.maximum(most, tl.max(maximum, 0))
        safe = tl.where(new_most == float("-inf"), 0.0, new_most)
        weight = tl.exp2(maximum - safe)
        shrink = tl.exp2(most - safe)
        parts = tl.load(sums + at[:, None] * HEAD_DIM + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
        total = total * shrink + tl.sum(weight * tl.load(totals + at), 0)
        result = result * shrink + tl.sum(weight[:, None] * parts, 0)
        most = new_most
    has_keys = total > 0
    divisor = tl.where(has_keys, total, 1.0)
    result = tl.where(has_keys, result / divisor, 0.0).to(out.dtype.element_ty)
    tl.store(out + program * HEAD_DIM + d, result, mask=d < HEAD_DIM)
    result_lse = tl.where(has_keys, most * LN_2 + tl.log(divisor), float("-inf"))
    tl.store(lse + (batch * heads + head) * q_len + query + tl.arange(0, 1), result_lse)
