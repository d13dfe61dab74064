"""Triton backward kernels over runs or pairs of tiles (see `lists`): dq by query tiles, dk and dv by key tiles.

The gradient of out may have any strides. There are no atomic additions: results are deterministic. Importing this
module imports triton.

Source: Dao 2023, FlashAttention-2, algorithm 2.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.lists import (
    VARIABLE,
    block_of,
    member_of,
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
    q, k, v, out, grad, lse, grad_lse, scaled_lse, delta, dq, seq_lens, key_mask,
    tiles, runs, first_tile, kind_of, row_pos, column_pos, masks, reach,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d, grad_b, grad_n, grad_h, grad_d, mask_b, mask_n,
    heads, programs, together, q_len, k_len, low, high, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, BRANCHES: tl.constexpr, AXES: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dq as out, scaled_lse and delta [batch, heads, q_len]; rows are queries, columns keys."""
    batch, head, kind, tile, end_tile = program_place(first_tile, kind_of, heads, programs, together)
    if tile >= end_tile:
        return
    first, last, rows, stored, first_run, end_run = rows_of(tiles, row_pos, tile, q_len, 1, ROWS, TILE)
    length = k_len
    if seq_lens is not None:
        length = tl.load(seq_lens + batch).to(tl.int32)
    k_head = k + batch * k_b + head // GROUP * k_h
    v_head = v + batch * v_b + head // GROUP * v_h
    q_head = q + batch * q_b + head * q_h
    grad_head = grad + batch * grad_b + head * grad_h
    every = tl.full([1, 1], True, tl.int1)
    query, query_rest = load_rows(q_head, rows, every, q_n, q_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    d_out, d_out_rest = load_rows(grad_head, rows, every, grad_n, grad_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    query, query_rest, slope = fold_scale(query, query_rest, scale)
    row_at = ((batch * q_len + rows) * heads + head)[:, None] * HEAD_DIM
    scalar_at = (batch * heads + head) * q_len + rows
    row_lse, row_delta, has_keys = row_sums(
        out, d_out, d_out_rest, lse, grad_lse, scaled_lse, delta, row_at, scalar_at, stored, HEAD_DIM, BLOCK_D, REST_D
    )
    acc, acc_rest = zeros(ROWS, BLOCK_D, REST_D)
    for run in range(first_run, end_run):
        start, step, begin, full, full_end, end = phases_of(
            tiles, runs, run, kind, first, last, q_len, length, low, high, seq_lens, COLUMNS, TILE
        )
        for phase in tl.static_range(1 if low is None and TILE == 0 else 0, 2 if TILE else 3):
            n_from, n_to = span_of(begin, full, full_end, end, phase)
            for n in range(n_from, n_to, 1 if TILE else COLUMNS):
                columns, there, visible, times = block_of(
                    runs,
                    start,
                    step,
                    n,
                    end,
                    first,
                    rows,
                    kind,
                    low,
                    high,
                    seq_lens,
                    length,
                    key_mask,
                    batch * mask_b,
                    mask_n,
                    column_pos,
                    masks,
                    reach,
                    q_len,
                    k_len,
                    phase,
                    False,
                    ROWS,
                    COLUMNS,
                    TILE,
                    BRANCHES,
                    AXES,
                )
                seen = there[:, None]
                key, key_rest = load_rows(k_head, columns, seen, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                s = tl.where(visible, scores(query, query_rest, key, key_rest, REST_D, PRECISION), float("-inf"))
                p = times * weights(s * slope - row_lse[:, None])
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
    row_pos,
    column_pos,
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
    TILE: tl.constexpr,
    BRANCHES: tl.constexpr,
    AXES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dk and dv [batch, k_len, kv_heads, head_dim]; rows are keys, columns queries, `heads` the heads of k."""
    batch, head, kind, tile, end_tile = program_place(first_tile, kind_of, heads, programs, together)
    if tile >= end_tile:
        return
    first, last, rows, stored, first_run, end_run = rows_of(tiles, row_pos, tile, k_len, GROUP, ROWS, TILE)
    k_head = k + batch * k_b + head * k_h
    v_head = v + batch * v_b + head * v_h
    every = tl.full([1, 1], True, tl.int1)
    key, key_rest = load_rows(k_head, rows, every, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    value, value_rest = load_rows(v_head, rows, every, v_n, v_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    key, key_rest, slope = fold_scale(key, key_rest, scale)
    length = q_len
    valid_key = stored
    if seq_lens is not None:
        length = tl.load(seq_lens + batch).to(tl.int32)
        valid_key = valid_key & (rows < length)
    if key_mask is not None:
        valid_key = valid_key & (tl.load(key_mask + batch * mask_b + rows * mask_n) != 0)
    acc_k, acc_k_rest = zeros(ROWS, BLOCK_D, REST_D)
    acc_v, acc_v_rest = zeros(ROWS, BLOCK_D, REST_D)
    for run in range(first_run, end_run):
        member, member_kind = member_of(runs, kind_of, run, kind, head * GROUP, TILE)
        query_head = q + batch * q_b + member * q_h
        grad_head = grad + batch * grad_b + member * grad_h
        scalars = (batch * heads * GROUP + member) * q_len
        start, step, begin, full, full_end, end = phases_of(
            tiles, runs, run, member_kind, first, last, k_len, length, low, high, seq_lens, COLUMNS, TILE
        )
        for phase in tl.static_range(1 if low is None and TILE == 0 else 0, 2 if TILE else 3):
            n_from, n_to = span_of(begin, full, full_end, end, phase)
            for n in range(n_from, n_to, 1 if TILE else COLUMNS):
                columns, there, visible, times = block_of(
                    runs,
                    start,
                    step,
                    n,
                    end,
                    first,
                    rows,
                    member_kind,
                    low,
                    high,
                    seq_lens,
                    length,
                    None,
                    0,
                    0,
                    column_pos,
                    masks,
                    reach,
                    q_len,
                    k_len,
                    phase,
                    True,
                    ROWS,
                    COLUMNS,
                    TILE,
                    BRANCHES,
                    AXES,
                )
                if (seq_lens is not None) or (key_mask is not None):
                    visible = visible & valid_key[:, None]
                seen = every
                if seq_lens is not None:
                    seen = there[:, None]
                query, query_rest = load_rows(query_head, columns, seen, q_n, q_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                s = tl.where(visible, scores(key, key_rest, query, query_rest, REST_D, PRECISION), float("-inf"))
                # Repeated queries have weight exp2(s - inf) = 0.
                column_lse = tl.load(scaled_lse + scalars + columns, mask=there, other=float("inf"))
                p = times * weights(s * slope - column_lse[None, :])
                d_out, d_out_rest = load_rows(grad_head, columns, seen, grad_n, grad_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                acc_v, acc_v_rest = add_product(
                    p.to(d_out.dtype), d_out, d_out_rest, acc_v, acc_v_rest, REST_D, PRECISION
                )
                column_delta = tl.load(delta + scalars + columns, mask=there, other=0.0)
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
