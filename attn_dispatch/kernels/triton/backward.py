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

from attn_dispatch.kernels.triton.forward import LOG2_E, RUN, TILE, mirrored, phases_of, program_place, span_of


@triton.jit
def backward_q(
    q,
    k,
    v,
    out,
    grad,
    lse,
    grad_lse,
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
    LISTED: tl.constexpr,
):
    """dq as out, and delta [batch, heads, q_len], `rowsum(grad * out) - grad_lse`; rows are queries, columns keys."""
    batch, head, tile, last_tile, backwards = program_place(first_tile, kind_of, launches, heads, programs, LISTED)
    if tile >= last_tile:
        return
    tile_at = tiles + tile * TILE
    start = tl.load(tile_at).to(tl.int64)
    step = tl.load(tile_at + 1).to(tl.int64)
    count = tl.load(tile_at + 2).to(tl.int64)
    lane = tl.arange(0, ROWS).to(tl.int64)
    rows = start + tl.minimum(lane, count - 1) * step
    last = start + (count - 1) * step
    lowest = (rows + low)[:, None]
    highest = (rows + high)[:, None]
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    d_valid = tl.full([1, BLOCK_D], True, tl.int1)
    if HEAD_DIM < BLOCK_D:
        d_valid = d < HEAD_DIM
    length = k_len
    if SEQ_LENS:
        length = tl.load(seq_lens + batch).to(tl.int64)
    k_row = k + batch * k_b + head // GROUP * k_h + d * k_d
    v_row = v + batch * v_b + head // GROUP * v_h + d * v_d
    query = tl.load(q + batch * q_b + head * q_h + d * q_d + (rows * q_n)[:, None], mask=d_valid, other=0.0)
    grad_at = grad + batch * grad_b + head * grad_h + d * grad_d + (rows * grad_n)[:, None]
    d_out = tl.load(grad_at, mask=d_valid, other=0.0)
    at = ((batch * q_len + rows) * heads + head)[:, None] * HEAD_DIM + d
    scalar_at = (batch * heads + head) * q_len + rows
    row_lse = tl.load(lse + scalar_at)
    has_keys = row_lse > float("-inf")
    row_delta = tl.sum(d_out.to(tl.float32) * tl.load(out + at, mask=d_valid, other=0.0).to(tl.float32), 1)
    if GRAD_LSE:
        row_delta -= tl.load(grad_lse + scalar_at)
    # Rows without keys have weight exp(s - inf) = 0.
    row_delta = tl.where(has_keys, row_delta, 0.0)
    row_lse = tl.where(has_keys, row_lse * LOG2_E, float("inf"))
    tl.store(delta + scalar_at, row_delta, mask=lane < count)
    lane_n = tl.arange(0, COLUMNS).to(tl.int64)
    slope = scale * LOG2_E
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    first_run = tl.load(tile_at + 3)
    end_run = tl.load(tile_at + 4)
    for nth_run in range(first_run, end_run):
        run = mirrored(nth_run, first_run, end_run - 1, backwards, LISTED)
        run_start, run_step, begin, unmasked_begin, unmasked_end, end = phases_of(
            runs + run * RUN, start, last, length, low, high, COLUMNS, LOW, HIGH, SEQ_LENS
        )
        run_lane = run_start + lane_n * run_step
        run_end = run_start + end * run_step
        for phase in tl.static_range(0 if LOW or LISTED else 1, 3):
            n_from, n_to, n_last = span_of(begin, unmasked_begin, unmasked_end, end, backwards, phase, COLUMNS, LISTED)
            for nth in range(n_from, n_to, COLUMNS):
                n = mirrored(nth, n_from, n_last, backwards, LISTED)
                columns = run_lane + n * run_step
                seen = d_valid
                if phase != 1:
                    seen = (columns < run_end)[:, None] & d_valid
                if KEY_MASK:
                    key_allowed = (
                        tl.load(key_mask + batch * mask_b + columns * mask_n, mask=columns < run_end, other=0) != 0
                    )
                    seen = seen & key_allowed[:, None]
                key = tl.load(k_row + (columns * k_n)[:, None], mask=seen, other=0.0)
                s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * slope
                if phase != 1:
                    visible = (columns < run_end)[None, :]
                    if LOW:
                        visible = visible & (columns[None, :] >= lowest)
                    if HIGH:
                        visible = visible & (columns[None, :] <= highest)
                    s = tl.where(visible, s, float("-inf"))
                if KEY_MASK:
                    s = tl.where(key_allowed[None, :], s, float("-inf"))  # pyright: ignore[reportPossiblyUnboundVariable]
                p = tl.exp2(s - row_lse[:, None])
                value = tl.load(v_row + (columns * v_n)[:, None], mask=seen, other=0.0)
                ds = p * (tl.dot(d_out, tl.trans(value), input_precision=PRECISION) - row_delta[:, None])
                acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
    result = tl.where(has_keys[:, None], acc * scale, 0.0).to(dq.dtype.element_ty)
    tl.store(dq + at, result, mask=(lane < count)[:, None] & d_valid)


@triton.jit
def backward_kv(
    q,
    k,
    v,
    grad,
    lse,
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
    LISTED: tl.constexpr,
):
    """dk and dv [batch, k_len, kv_heads, head_dim]; rows are keys, columns queries, `heads` the heads of k."""
    batch, head, tile, last_tile, backwards = program_place(first_tile, kind_of, launches, heads, programs, LISTED)
    if tile >= last_tile:
        return
    tile_at = tiles + tile * TILE
    start = tl.load(tile_at).to(tl.int64)
    step = tl.load(tile_at + 1).to(tl.int64)
    count = tl.load(tile_at + 2).to(tl.int64)
    lane = tl.arange(0, ROWS).to(tl.int64)
    rows = start + tl.minimum(lane, count - 1) * step
    last = start + (count - 1) * step
    lowest = (rows + low)[:, None]
    highest = (rows + high)[:, None]
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    d_valid = tl.full([1, BLOCK_D], True, tl.int1)
    if HEAD_DIM < BLOCK_D:
        d_valid = d < HEAD_DIM
    length = q_len
    if SEQ_LENS:
        length = tl.load(seq_lens + batch).to(tl.int64)
    key = tl.load(k + batch * k_b + head * k_h + d * k_d + (rows * k_n)[:, None], mask=d_valid, other=0.0)
    value = tl.load(v + batch * v_b + head * v_h + d * v_d + (rows * v_n)[:, None], mask=d_valid, other=0.0)
    valid_key = lane < count
    if SEQ_LENS:
        valid_key = valid_key & (rows < length)
    if KEY_MASK:
        valid_key = valid_key & (tl.load(key_mask + batch * mask_b + rows * mask_n) != 0)
    lane_n = tl.arange(0, COLUMNS).to(tl.int64)
    slope = scale * LOG2_E
    acc_k = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    acc_v = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    first_run = tl.load(tile_at + 3)
    end_run = tl.load(tile_at + 4)
    for nth_run in range(first_run, end_run):
        run = mirrored(nth_run, first_run, end_run - 1, backwards, LISTED)
        run_start, run_step, begin, unmasked_begin, unmasked_end, end = phases_of(
            runs + run * RUN, start, last, length, low, high, COLUMNS, LOW, HIGH, SEQ_LENS
        )
        run_lane = run_start + lane_n * run_step
        run_end = run_start + end * run_step
        q_head = head * GROUP + tl.load(runs + run * RUN + 3)
        q_row = q + batch * q_b + q_head * q_h + d * q_d
        grad_row = grad + batch * grad_b + q_head * grad_h + d * grad_d
        scalar_row = (batch * heads * GROUP + q_head) * q_len
        for phase in tl.static_range(0 if LOW or LISTED else 1, 3):
            n_from, n_to, n_last = span_of(begin, unmasked_begin, unmasked_end, end, backwards, phase, COLUMNS, LISTED)
            for nth in range(n_from, n_to, COLUMNS):
                n = mirrored(nth, n_from, n_last, backwards, LISTED)
                columns = run_lane + n * run_step
                seen = d_valid
                if phase != 1:
                    seen = (columns < run_end)[:, None] & d_valid
                query = tl.load(q_row + (columns * q_n)[:, None], mask=seen, other=0.0)
                s = tl.dot(key, tl.trans(query), input_precision=PRECISION) * slope
                if phase != 1:
                    # Columns past the end have lse = inf, hence weight 0.
                    column_lse = tl.load(lse + scalar_row + columns, mask=columns < run_end, other=float("inf"))
                    column_delta = tl.load(delta + scalar_row + columns, mask=columns < run_end, other=0.0)
                    if LOW:
                        s = tl.where(columns[None, :] >= lowest, s, float("-inf"))
                    if HIGH:
                        s = tl.where(columns[None, :] <= highest, s, float("-inf"))
                else:
                    column_lse = tl.load(lse + scalar_row + columns)
                    column_delta = tl.load(delta + scalar_row + columns)
                if SEQ_LENS or KEY_MASK:
                    s = tl.where(valid_key[:, None], s, float("-inf"))
                column_lse = tl.where(column_lse == float("-inf"), float("inf"), column_lse * LOG2_E)
                p = tl.exp2(s - column_lse[None, :])
                d_out = tl.load(grad_row + (columns * grad_n)[:, None], mask=seen, other=0.0)
                acc_v = tl.dot(p.to(d_out.dtype), d_out, acc_v, input_precision=PRECISION)
                ds = p * (tl.dot(value, tl.trans(d_out), input_precision=PRECISION) - column_delta[None, :])
                acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision=PRECISION)
    at = ((batch * k_len + rows) * heads + head)[:, None] * HEAD_DIM + d
    stored = (lane < count)[:, None] & d_valid
    acc_k = tl.where(valid_key[:, None], acc_k * scale, 0.0)
    acc_v = tl.where(valid_key[:, None], acc_v, 0.0)
    tl.store(dk + at, acc_k.to(dk.dtype.element_ty), mask=stored)
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty), mask=stored)
