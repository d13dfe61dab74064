"""Triton backward kernels over a work list: dq by query tiles, dk and dv by key tiles.

The gradient of out may have any strides. There are no atomic additions: results are deterministic. Importing this
module imports triton.

Source: Dao 2023, FlashAttention-2, algorithm 2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.forward import (
    RUN,
    TILE,
    VARIABLE,
    columns_of,
    mirrored,
    phases_of,
    program_place,
    rows_of,
    span_of,
)
from attn_dispatch.kernels.triton.parts import fold_scale, offsets, row_sums


@triton.jit(do_not_specialize=VARIABLE)
def backward_q(
    q,
    k,
    v,
    out,
    grad,
    lse,
    grad_lse,
    scaled_lse,
    delta,
    dq,
    seq_lens,
    key_mask,
    tiles,
    runs,
    first_tile,
    kind_of,
    launches,
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
    grad_b,
    grad_n,
    grad_h,
    grad_d,
    mask_b,
    mask_n,
    heads,
    programs,
    together,
    q_len,
    k_len,
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
    SEQ_LENS: tl.constexpr,
    KEY_MASK: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    LISTED: tl.constexpr,
):
    """dq as out, scaled_lse and delta [batch, heads, q_len]; rows are queries, columns keys."""
    batch, head, tile, last_tile, backwards = program_place(
        first_tile, kind_of, launches, heads, programs, together, LISTED
    )
    if tile >= last_tile:
        return
    first, last, count, rows, first_run, end_run = rows_of(tiles + tile * TILE, ROWS)
    stored = tl.arange(0, ROWS) < count
    lowest = (rows + low)[:, None]
    highest = (rows + high)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    d_valid = tl.full([1, BLOCK_D], True, tl.int1)
    if HEAD_DIM < BLOCK_D:
        d_valid = d < HEAD_DIM
    length = k_len
    if SEQ_LENS:
        length = tl.load(seq_lens + batch).to(tl.int32)
    k_head = k + batch * k_b + head // GROUP * k_h
    v_head = v + batch * v_b + head // GROUP * v_h
    query = tl.load(q + batch * q_b + head * q_h + offsets(rows, q_n, d, q_d, WIDE), mask=d_valid, other=0.0)
    d_out = tl.load(
        grad + batch * grad_b + head * grad_h + offsets(rows, grad_n, d, grad_d, WIDE), mask=d_valid, other=0.0
    )
    query, slope = fold_scale(query, scale)
    at = ((batch * q_len + rows) * heads + head)[:, None] * HEAD_DIM + d
    scalar_at = (batch * heads + head) * q_len + rows
    row_lse, row_delta, has_keys = row_sums(
        out, d_out, lse, grad_lse, scaled_lse, delta, at, scalar_at, d_valid, stored, GRAD_LSE
    )
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    for nth_run in range(first_run, end_run):
        run = mirrored(nth_run, first_run, end_run - 1, backwards, LISTED)
        run_start, run_step, begin, unmasked_begin, unmasked_end, end = phases_of(
            runs + run * RUN, first, last, length, low, high, COLUMNS, LOW, HIGH, SEQ_LENS
        )
        for phase in tl.static_range(0 if LOW or LISTED else 1, 3):
            n_from, n_to, n_last = span_of(begin, unmasked_begin, unmasked_end, end, backwards, phase, COLUMNS, LISTED)
            for nth in range(n_from, n_to, COLUMNS):
                n = mirrored(nth, n_from, n_last, backwards, LISTED)
                columns, visible = columns_of(run_start, run_step, n, end, lowest, highest, phase, COLUMNS, LOW, HIGH)
                seen = d_valid
                if KEY_MASK:
                    key_allowed = tl.load(key_mask + batch * mask_b + columns * mask_n) != 0
                    visible = visible & key_allowed[None, :]
                    seen = key_allowed[:, None] & d_valid
                key = tl.load(k_head + offsets(columns, k_n, d, k_d, WIDE), mask=seen, other=0.0)
                s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                if phase != 1 or KEY_MASK:
                    s = tl.where(visible, s, float("-inf"))
                p = tl.exp2(s * slope - row_lse[:, None])
                value = tl.load(v_head + offsets(columns, v_n, d, v_d, WIDE), mask=seen, other=0.0)
                ds = p * (tl.dot(d_out, tl.trans(value), input_precision=PRECISION) - row_delta[:, None])
                acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
    result = tl.where(has_keys[:, None], acc * scale, 0.0).to(dq.dtype.element_ty)
    tl.store(dq + at, result, mask=stored[:, None] & d_valid)


@triton.jit(do_not_specialize=VARIABLE)
def backward_kv(
    q,
    k,
    v,
    grad,
    scaled_lse,
    delta,
    dk,
    dv,
    seq_lens,
    key_mask,
    tiles,
    runs,
    first_tile,
    kind_of,
    launches,
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
    grad_b,
    grad_n,
    grad_h,
    grad_d,
    mask_b,
    mask_n,
    heads,
    programs,
    together,
    q_len,
    k_len,
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
    SEQ_LENS: tl.constexpr,
    KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    LISTED: tl.constexpr,
):
    """dk and dv [batch, k_len, kv_heads, head_dim]; rows are keys, columns queries, `heads` the heads of k."""
    batch, head, tile, last_tile, backwards = program_place(
        first_tile, kind_of, launches, heads, programs, together, LISTED
    )
    if tile >= last_tile:
        return
    first, last, count, rows, first_run, end_run = rows_of(tiles + tile * TILE, ROWS)
    stored = tl.arange(0, ROWS) < count
    lowest = (rows + low)[:, None]
    highest = (rows + high)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    d_valid = tl.full([1, BLOCK_D], True, tl.int1)
    if HEAD_DIM < BLOCK_D:
        d_valid = d < HEAD_DIM
    length = q_len
    if SEQ_LENS:
        length = tl.load(seq_lens + batch).to(tl.int32)
    key = tl.load(k + batch * k_b + head * k_h + offsets(rows, k_n, d, k_d, WIDE), mask=d_valid, other=0.0)
    value = tl.load(v + batch * v_b + head * v_h + offsets(rows, v_n, d, v_d, WIDE), mask=d_valid, other=0.0)
    key, slope = fold_scale(key, scale)
    valid_key = stored
    if SEQ_LENS:
        valid_key = valid_key & (rows < length)
    if KEY_MASK:
        valid_key = valid_key & (tl.load(key_mask + batch * mask_b + rows * mask_n) != 0)
    acc_k = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    acc_v = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    for nth_run in range(first_run, end_run):
        run = mirrored(nth_run, first_run, end_run - 1, backwards, LISTED)
        run_start, run_step, begin, unmasked_begin, unmasked_end, end = phases_of(
            runs + run * RUN, first, last, length, low, high, COLUMNS, LOW, HIGH, SEQ_LENS
        )
        q_head = head * GROUP + tl.load(runs + run * RUN + 3)
        query_head = q + batch * q_b + q_head * q_h
        grad_head = grad + batch * grad_b + q_head * grad_h
        scalars = (batch * heads * GROUP + q_head) * q_len
        for phase in tl.static_range(0 if LOW or LISTED else 1, 3):
            n_from, n_to, n_last = span_of(begin, unmasked_begin, unmasked_end, end, backwards, phase, COLUMNS, LISTED)
            for nth in range(n_from, n_to, COLUMNS):
                n = mirrored(nth, n_from, n_last, backwards, LISTED)
                columns, visible = columns_of(run_start, run_step, n, end, lowest, highest, phase, COLUMNS, LOW, HIGH)
                query = tl.load(query_head + offsets(columns, q_n, d, q_d, WIDE), mask=d_valid, other=0.0)
                s = tl.dot(key, tl.trans(query), input_precision=PRECISION)
                if SEQ_LENS or KEY_MASK:
                    visible = visible & valid_key[:, None]
                if phase != 1 or SEQ_LENS or KEY_MASK:
                    s = tl.where(visible, s, float("-inf"))
                p = tl.exp2(s * slope - tl.load(scaled_lse + scalars + columns)[None, :])
                d_out = tl.load(grad_head + offsets(columns, grad_n, d, grad_d, WIDE), mask=d_valid, other=0.0)
                acc_v = tl.dot(p.to(d_out.dtype), d_out, acc_v, input_precision=PRECISION)
                column_delta = tl.load(delta + scalars + columns)
                ds = p * (tl.dot(value, tl.trans(d_out), input_precision=PRECISION) - column_delta[None, :])
                acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision=PRECISION)
    at = ((batch * k_len + rows) * heads + head)[:, None] * HEAD_DIM + d
    acc_k = tl.where(valid_key[:, None], acc_k * scale, 0.0)
    acc_v = tl.where(valid_key[:, None], acc_v, 0.0)
    tl.store(dk + at, acc_k.to(dk.dtype.element_ty), mask=stored[:, None] & d_valid)
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty), mask=stored[:, None] & d_valid)
