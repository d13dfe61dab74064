"""Triton forward kernel over runs or pairs of tiles (see `lists`): one online softmax over all columns of a tile.

q, k and v may have any strides. Results are contiguous; sums are in float32. Importing this module imports triton.

Source: Dao 2023, FlashAttention-2, algorithm 1; Milakov & Gimelshein 2018, online softmax.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.lists import VARIABLE, block_of, phases_of, program_place, rows_of, span_of
from attn_dispatch.kernels.triton.parts import fold_scale, forward_step, load_rows, store_forward, zeros


@triton.jit(do_not_specialize=VARIABLE)
def forward(
    q,
    k,
    v,
    out,
    lse,
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
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len]; rows are queries, columns keys."""
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
    every = tl.full([1, 1], True, tl.int1)
    query, query_rest = load_rows(q_head, rows, every, q_n, q_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    query, query_rest, slope = fold_scale(query, query_rest, scale)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
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
                    REST_D,
                    PRECISION,
                    WIDE,
                )
    has_keys = total > 0
    if seq_lens is not None:
        has_keys = has_keys & (rows < length)
    store_forward(
        out,
        lse,
        acc,
        acc_rest,
        total,
        row_max,
        has_keys,
        batch,
        head,
        rows,
        stored,
        heads,
        q_len,
        HEAD_DIM,
        BLOCK_D,
        REST_D,
    )
