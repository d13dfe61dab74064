"""Triton backward kernels over a work list: dq by query tiles, dk and dv by key tiles.

The gradient of out may have any strides. There are no atomic additions: results are deterministic. Importing this
module imports triton.

Source: Dao 2023, FlashAttention-2, algorithm 2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.forward import (
    RUN,
    TILE,
    VARIABLE,
    columns_of,
    phases_of,
    program_place,
    rows_of,
    span_of,
)
from attn_dispatch.kernels.triton.parts import (
    add_product,
    fold_scale,
    load_rows,
    row_sums,
    scores,
    store_rows,
    weights,
    zeros,
)


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
    REST_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SEQ_LENS: tl.constexpr,
    KEY_MASK: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dq as out, scaled_lse and delta [batch, heads, q_len]; rows are queries, columns keys."""
    batch, head, tile, last_tile = program_place(first_tile, kind_of, heads, programs, together)
    if tile >= last_tile:
        return
    first, last, count, rows, first_run, end_run = rows_of(tiles + tile * TILE, ROWS)
    stored = tl.arange(0, ROWS) < count
    lowest = (rows + low)[:, None]
    highest = (rows + high)[:, None]
    every = tl.full([1, 1], True, tl.int1)
    length = k_len
    if SEQ_LENS:
        length = tl.load(seq_lens + batch).to(tl.int32)
    k_head = k + batch * k_b + head // GROUP * k_h
    v_head = v + batch * v_b + head // GROUP * v_h
    query_head = q + batch * q_b + head * q_h
    grad_head = grad + batch * grad_b + head * grad_h
    query, query_rest = load_rows(query_head, rows, every, q_n, q_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    d_out, d_out_rest = load_rows(grad_head, rows, every, grad_n, grad_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    query, slope = fold_scale(query, scale)
    query_rest, slope = fold_scale(query_rest, scale)
    row_at = ((batch * q_len + rows) * heads + head)[:, None] * HEAD_DIM
    scalar_at = (batch * heads + head) * q_len + rows
    row_lse, row_delta, has_keys = row_sums(
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
        HEAD_DIM,
        BLOCK_D,
        REST_D,
        GRAD_LSE,
    )
    acc, acc_rest = zeros(ROWS, BLOCK_D, REST_D)
    for run in range(first_run, end_run):
        run_start, run_step, begin, unmasked_begin, unmasked_end, end = phases_of(
            runs + run * RUN, first, last, length, low, high, COLUMNS, LOW, HIGH, SEQ_LENS
        )
        for phase in tl.static_range(0 if LOW else 1, 3):
            n_from, n_to = span_of(begin, unmasked_begin, unmasked_end, end, phase)
            for n in range(n_from, n_to, COLUMNS):
                columns, visible = columns_of(run_start, run_step, n, end, lowest, highest, phase, COLUMNS, LOW, HIGH)
                seen = every
                if KEY_MASK:
                    key_allowed = tl.load(key_mask + batch * mask_b + columns * mask_n) != 0
                    visible = visible & key_allowed[None, :]
                    seen = key_allowed[:, None]
                key, key_rest = load_rows(k_head, columns, seen, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                s = scores(query, query_rest, key, key_rest, REST_D, PRECISION)
                if phase != 1 or KEY_MASK:
                    s = tl.where(visible, s, float("-inf"))
                p = weights(s * slope - row_lse[:, None])
                value, value_rest = load_rows(v_head, columns, seen, v_n, v_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                ds = p * (scores(d_out, d_out_rest, value, value_rest, REST_D, PRECISION) - row_delta[:, None])
                acc, acc_rest = add_product(ds.to(key.dtype), key, key_rest, acc, acc_rest, REST_D, PRECISION)
    acc = tl.where(has_keys[:, None], acc * scale, 0.0)
    acc_rest = tl.where(has_keys[:, None], acc_rest * scale, 0.0)
    store_rows(dq, row_at, acc, acc_rest, stored, HEAD_DIM, BLOCK_D, REST_D)


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
    REST_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SEQ_LENS: tl.constexpr,
    KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dk and dv [batch, k_len, kv_heads, head_dim]; rows are keys, columns queries, `heads` the heads of k."""
    batch, head, tile, last_tile = program_place(first_tile, kind_of, heads, programs, together)
    if tile >= last_tile:
        return
    first, last, count, rows, first_run, end_run = rows_of(tiles + tile * TILE, ROWS)
    stored = tl.arange(0, ROWS) < count
    lowest = (rows + low)[:, None]
    highest = (rows + high)[:, None]
    every = tl.full([1, 1], True, tl.int1)
    length = q_len
    if SEQ_LENS:
        length = tl.load(seq_lens + batch).to(tl.int32)
    k_head = k + batch * k_b + head * k_h
    v_head = v + batch * v_b + head * v_h
    key, key_rest = load_rows(k_head, rows, every, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    value, value_rest = load_rows(v_head, rows, every, v_n, v_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    key, slope = fold_scale(key, scale)
    key_rest, slope = fold_scale(key_rest, scale)
    valid_key = stored
    if SEQ_LENS:
        valid_key = valid_key & (rows < length)
    if KEY_MASK:
        valid_key = valid_key & (tl.load(key_mask + batch * mask_b + rows * mask_n) != 0)
    acc_k, acc_k_rest = zeros(ROWS, BLOCK_D, REST_D)
    acc_v, acc_v_rest = zeros(ROWS, BLOCK_D, REST_D)
    for run in range(first_run, end_run):
        run_start, run_step, begin, unmasked_begin, unmasked_end, end = phases_of(
            runs + run * RUN, first, last, length, low, high, COLUMNS, LOW, HIGH, SEQ_LENS
        )
        q_head = head * GROUP + tl.load(runs + run * RUN + 3)
        query_head = q + batch * q_b + q_head * q_h
        grad_head = grad + batch * grad_b + q_head * grad_h
        scalars = (batch * heads * GROUP + q_head) * q_len
        for phase in tl.static_range(0 if LOW else 1, 3):
            n_from, n_to = span_of(begin, unmasked_begin, unmasked_end, end, phase)
            for n in range(n_from, n_to, COLUMNS):
                columns, visible = columns_of(run_start, run_step, n, end, lowest, highest, phase, COLUMNS, LOW, HIGH)
                query, query_rest = load_rows(query_head, columns, every, q_n, q_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                s = scores(key, key_rest, query, query_rest, REST_D, PRECISION)
                if SEQ_LENS or KEY_MASK:
                    visible = visible & valid_key[:, None]
                if phase != 1 or SEQ_LENS or KEY_MASK:
                    s = tl.where(visible, s, float("-inf"))
                p = weights(s * slope - tl.load(scaled_lse + scalars + columns)[None, :])
                d_out, d_out_rest = load_rows(
                    grad_head, columns, every, grad_n, grad_d, HEAD_DIM, BLOCK_D, REST_D, WIDE
                )
                acc_v, acc_v_rest = add_product(
                    p.to(d_out.dtype), d_out, d_out_rest, acc_v, acc_v_rest, REST_D, PRECISION
                )
                column_delta = tl.load(delta + scalars + columns)
                ds = p * (scores(value, value_rest, d_out, d_out_rest, REST_D, PRECISION) - column_delta[None, :])
                acc_k, acc_k_rest = add_product(
                    ds.to(query.dtype), query, query_rest, acc_k, acc_k_rest, REST_D, PRECISION
                )
    row_at = ((batch * k_len + rows) * heads + head)[:, None] * HEAD_DIM
    acc_k = tl.where(valid_key[:, None], acc_k * scale, 0.0)
    acc_k_rest = tl.where(valid_key[:, None], acc_k_rest * scale, 0.0)
    acc_v = tl.where(valid_key[:, None], acc_v, 0.0)
    acc_v_rest = tl.where(valid_key[:, None], acc_v_rest, 0.0)
    store_rows(dk, row_at, acc_k, acc_k_rest, stored, HEAD_DIM, BLOCK_D, REST_D)
    store_rows(dv, row_at, acc_v, acc_v_rest, stored, HEAD_DIM, BLOCK_D, REST_D)
