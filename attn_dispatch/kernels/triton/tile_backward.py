"""Triton backward kernels over tile pairs: dq by query tiles, dk and dv by key tiles.

There are no atomic additions: results are deterministic. Queries repeated in a short last tile have weight 0. Importing
this module imports triton.

Source: Dao 2023, FlashAttention-2, algorithm 2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

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
from attn_dispatch.kernels.triton.tile_forward import PAIR, SPAN, VARIABLE, program_place, tile_multiplicity


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
    q_pos,
    k_pos,
    kind_of,
    spans,
    pairs,
    masks,
    reach,
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
    q_tiles,
    k_tiles,
    q_len,
    k_len,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BRANCHES: tl.constexpr,
    AXES: tl.constexpr,
    SEQ_LENS: tl.constexpr,
    KEY_MASK: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dq as out, and delta [batch, heads, q_len], `rowsum(grad * out) - grad_lse`; rows are queries, columns keys."""
    batch, head, tile, lane = program_place(heads, q_tiles, TILE, ROWS)
    kind = tl.load(kind_of + head).to(tl.int64)
    rows = tl.load(q_pos + tile * TILE + lane)
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
    stored = tile * TILE + lane < q_len
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
    PARTS: tl.constexpr = TILE // COLUMNS
    span = spans + (kind * q_tiles + tile) * SPAN
    for phase in tl.static_range(2):
        for nth in range(tl.load(span + phase) * PARTS, tl.load(span + phase + 1) * PARTS):
            listed = nth // PARTS
            pair = pairs + listed * PAIR
            k_tile = tl.load(pair)
            k_lane = (nth - listed * PARTS) * COLUMNS + tl.arange(0, COLUMNS)
            columns = tl.load(k_pos + k_tile * TILE + k_lane)
            key_allowed = tl.full([COLUMNS], True, tl.int1)
            if SEQ_LENS:
                key_allowed = columns < length
            if KEY_MASK:
                key_allowed = key_allowed & (tl.load(key_mask + batch * mask_b + columns * mask_n) != 0)
            seen = every
            if SEQ_LENS or KEY_MASK:
                seen = key_allowed[:, None]
            key, key_rest = load_rows(k_head, columns, seen, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
            s = scores(query, query_rest, key, key_rest, REST_D, PRECISION)
            if SEQ_LENS or KEY_MASK:
                s = tl.where(key_allowed[None, :], s, float("-inf"))
            if phase == 0:
                mask = tl.load(pair + 1)
                q_lane, k_lane = lane[:, None], k_lane[None, :]
                count = tile_multiplicity(
                    masks, reach, mask, kind, tile, k_tile, q_lane, k_lane, q_tiles, k_tiles, TILE, BRANCHES, AXES
                )
                # For a hidden key exp(s - lse) may be inf, and 0 * inf is NaN.
                p = count * weights(tl.where(count > 0, s, float("-inf")) * slope - row_lse[:, None])
            else:
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
    q_pos,
    k_pos,
    kind_of,
    spans,
    pairs,
    masks,
    reach,
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
    q_tiles,
    k_tiles,
    q_len,
    k_len,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BRANCHES: tl.constexpr,
    AXES: tl.constexpr,
    SEQ_LENS: tl.constexpr,
    KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dk and dv [batch, k_len, kv_heads, head_dim]; rows are keys, columns queries, `heads` the heads of k."""
    batch, head, tile, lane = program_place(heads, k_tiles, TILE, ROWS)
    rows = tl.load(k_pos + tile * TILE + lane)
    every = tl.full([1, 1], True, tl.int1)
    length = q_len
    if SEQ_LENS:
        length = tl.load(seq_lens + batch).to(tl.int32)
    k_head = k + batch * k_b + head * k_h
    v_head = v + batch * v_b + head * v_h
    key, key_rest = load_rows(k_head, rows, every, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    value, value_rest = load_rows(v_head, rows, every, v_n, v_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    key_allowed = rows < k_len
    if SEQ_LENS:
        key_allowed = key_allowed & (rows < length)
    if KEY_MASK:
        key_allowed = key_allowed & (tl.load(key_mask + batch * mask_b + rows * mask_n) != 0)
    key, slope = fold_scale(key, scale)
    key_rest, slope = fold_scale(key_rest, scale)
    acc_k, acc_k_rest = zeros(ROWS, BLOCK_D, REST_D)
    acc_v, acc_v_rest = zeros(ROWS, BLOCK_D, REST_D)
    PARTS: tl.constexpr = TILE // COLUMNS
    for member in range(GROUP):
        q_head = head * GROUP + member
        query_head = q + batch * q_b + q_head * q_h
        grad_head = grad + batch * grad_b + q_head * grad_h
        scalars = (batch * heads * GROUP + q_head) * q_len
        kind = tl.load(kind_of + q_head).to(tl.int64)
        span = spans + (kind * k_tiles + tile) * SPAN
        for phase in tl.static_range(2):
            for nth in range(tl.load(span + phase) * PARTS, tl.load(span + phase + 1) * PARTS):
                listed = nth // PARTS
                pair = pairs + listed * PAIR
                q_tile = tl.load(pair)
                q_lane = (nth - listed * PARTS) * COLUMNS + tl.arange(0, COLUMNS)
                columns = tl.load(q_pos + q_tile * TILE + q_lane)
                valid_query = q_tile * TILE + q_lane < q_len
                seen = every
                if SEQ_LENS:
                    valid_query = valid_query & (columns < length)
                    seen = valid_query[:, None]
                query, query_rest = load_rows(query_head, columns, seen, q_n, q_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                s = scores(key, key_rest, query, query_rest, REST_D, PRECISION)
                if SEQ_LENS or KEY_MASK:
                    s = tl.where(key_allowed[:, None], s, float("-inf"))
                # Repeated queries have weight exp2(s - inf) = 0.
                column_lse = tl.load(scaled_lse + scalars + columns, mask=valid_query, other=float("inf"))
                column_delta = tl.load(delta + scalars + columns, mask=valid_query, other=0.0)
                if phase == 0:
                    mask = tl.load(pair + 1)
                    q_lane, k_lane = q_lane[None, :], lane[:, None]
                    count = tile_multiplicity(
                        masks, reach, mask, kind, q_tile, tile, q_lane, k_lane, q_tiles, k_tiles, TILE, BRANCHES, AXES
                    )
                    p = count * weights(tl.where(count > 0, s, float("-inf")) * slope - column_lse[None, :])
                else:
                    p = weights(s * slope - column_lse[None, :])
                d_out, d_out_rest = load_rows(grad_head, columns, seen, grad_n, grad_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                acc_v, acc_v_rest = add_product(
                    p.to(d_out.dtype), d_out, d_out_rest, acc_v, acc_v_rest, REST_D, PRECISION
                )
                ds = p * (scores(value, value_rest, d_out, d_out_rest, REST_D, PRECISION) - column_delta[None, :])
                acc_k, acc_k_rest = add_product(
                    ds.to(query.dtype), query, query_rest, acc_k, acc_k_rest, REST_D, PRECISION
                )
    row_at = ((batch * k_len + rows) * heads + head)[:, None] * HEAD_DIM
    stored = tile * TILE + lane < k_len
    acc_k = tl.where(key_allowed[:, None], acc_k * scale, 0.0)
    acc_k_rest = tl.where(key_allowed[:, None], acc_k_rest * scale, 0.0)
    acc_v = tl.where(key_allowed[:, None], acc_v, 0.0)
    acc_v_rest = tl.where(key_allowed[:, None], acc_v_rest, 0.0)
    store_rows(dk, row_at, acc_k, acc_k_rest, stored, HEAD_DIM, BLOCK_D, REST_D)
    store_rows(dv, row_at, acc_v, acc_v_rest, stored, HEAD_DIM, BLOCK_D, REST_D)
