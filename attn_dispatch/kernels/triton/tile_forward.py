"""Triton forward kernel over tile pairs (`tiles.tables`): one online softmax over all pairs of a query tile.

Tokens are read by position from the caller's tensors; nothing is permuted. A tile's first pairs are weighted by
multiplicity; in the others every query sees every key once. Results are contiguous; sums are in float32. Importing this
module imports triton.

A short last tile repeats its last position. Results of repeated queries are not stored; repeated keys have multiplicity
0, and every pair with one is among the first pairs.

Source: Dao 2023, FlashAttention-2, algorithms 1 and 2; Milakov & Gimelshein 2018, online softmax.
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
    scores,
    softmax_weights,
    store_forward,
    zeros,
)

SPAN = tl.constexpr(3)  #: entries of a span and of a pair, see tiles.tables.PairLists
PAIR = tl.constexpr(2)


@triton.jit
def program_place(heads, tiles, TILE: tl.constexpr, ROWS: tl.constexpr):
    """This program's batch row, head, tile, and rows as lanes of the tile; programs are ordered by head."""
    program = tl.program_id(0)
    parts = tiles * (TILE // ROWS)
    start = program % parts * ROWS
    lane = start % TILE + tl.arange(0, ROWS)
    return (program // parts // heads).to(tl.int64), (program // parts % heads).to(tl.int64), start // TILE, lane


@triton.jit
def tile_multiplicity(
    masks,
    reach,
    mask,
    kind,
    q_tile,
    k_tile,
    q_lane,
    k_lane,
    q_tiles,
    k_tiles,
    TILE: tl.constexpr,
    BRANCHES: tl.constexpr,
    AXES: tl.constexpr,
):
    """How many times each query sees each key, float32: from `masks`, or if BRANCHES > 0 computed from `reach`.

    The lanes of queries and keys are [rows, 1] and [1, columns], or vice versa.
    """
    if BRANCHES == 0:
        found = tl.load(masks + mask.to(tl.int64) * (TILE * TILE) + q_lane * TILE + k_lane)
    else:
        found = (q_lane + k_lane) * 0
        queries = q_tiles * TILE
        for branch in tl.static_range(BRANCHES):
            sees = found >= 0
            for axis in tl.static_range(AXES):
                row = reach + ((kind * BRANCHES + branch) * AXES + axis) * (2 * queries + k_tiles * TILE)
                place = tl.load(row + 2 * queries + k_tile * TILE + k_lane)
                sees = sees & (place >= tl.load(row + q_tile * TILE + q_lane))
                sees = sees & (place <= tl.load(row + queries + q_tile * TILE + q_lane))
            found += sees.to(tl.int32)
    return found.to(tl.float32)


#: Arguments whose values do not change the machine code.
VARIABLE = ("heads", "q_tiles", "k_tiles", "q_len", "k_len")


@triton.jit(do_not_specialize=VARIABLE)
def forward(
    q,
    k,
    v,
    out,
    lse,
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
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len]; rows are queries, columns keys."""
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
    query, query_rest = load_rows(query_head, rows, every, q_n, q_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
    query, slope = fold_scale(query, scale)
    query_rest, slope = fold_scale(query_rest, scale)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
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
            key, key_rest = load_rows(k_head, columns, every, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
            s = scores(query, query_rest, key, key_rest, REST_D, PRECISION)
            if SEQ_LENS or KEY_MASK:
                s = tl.where(key_allowed[None, :], s, float("-inf"))
            count = 1.0
            if phase == 0:
                mask = tl.load(pair + 1)
                q_lane, k_lane = lane[:, None], k_lane[None, :]
                count = tile_multiplicity(
                    masks, reach, mask, kind, tile, k_tile, q_lane, k_lane, q_tiles, k_tiles, TILE, BRANCHES, AXES
                )
                s = tl.where(count > 0, s, float("-inf"))
            p, shrink, row_max = softmax_weights(s, slope, row_max)
            if phase == 0:
                p *= count
            total = total * shrink + tl.sum(p, 1)
            value, value_rest = load_rows(v_head, columns, seen, v_n, v_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
            acc = acc * shrink[:, None]
            if REST_D:
                acc_rest = acc_rest * shrink[:, None]
            acc, acc_rest = add_product(p.to(value.dtype), value, value_rest, acc, acc_rest, REST_D, PRECISION)
    has_keys = total > 0
    if SEQ_LENS:
        has_keys = has_keys & (rows < length)
    stored = tile * TILE + lane < q_len
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
