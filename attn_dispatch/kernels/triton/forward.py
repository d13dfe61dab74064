"""Triton forward kernel over a work list (`work_list`): one online softmax over all runs of a tile.

q, k and v may have any strides. Results are contiguous; sums are in float32. Importing this module imports triton.

A tile's unused lanes repeat its last row, so that only stores need a mask for them. A run's columns have three phases:
first columns that some rows do not see, columns that all rows see, and last columns that some rows do not see; only the
outer two are masked.

Source: Dao 2023, FlashAttention-2, algorithm 1; Milakov & Gimelshein 2018, online softmax.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

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

TILE = tl.constexpr(5)  #: entries of a tile, see work_list.WorkList
RUN = tl.constexpr(4)


#: Arguments whose values do not change the machine code.
VARIABLE = ("heads", "programs", "together", "q_len", "k_len", "low", "high")


@triton.jit
def program_place(first_tile, kind_of, heads, programs, together):
    """This program's batch row, head and tile, and the end of the head's tiles.

    Each head of a batch row has `programs` programs, as many as the most tiles of a head, and `together` of them take
    turns: first all their first tiles.
    """
    program = tl.program_id(0)
    first = program // (together * programs) * together
    beside = tl.minimum(together, tl.num_programs(0) // programs - first)
    nth = program - first * programs
    batch = (first + nth % beside) // heads
    head = (first + nth % beside) % heads
    kind = tl.load(kind_of + head)
    tile = tl.load(first_tile + kind) + nth // beside
    return batch.to(tl.int64), head.to(tl.int64), tile, tl.load(first_tile + kind + 1)


@triton.jit
def rows_of(tile_at, ROWS: tl.constexpr):
    """A tile's first and last row, its number of rows, all rows, and first and end of its runs."""
    start = tl.load(tile_at)
    step = tl.load(tile_at + 1)
    count = tl.load(tile_at + 2)
    rows = start + tl.minimum(tl.arange(0, ROWS), count - 1) * step
    return start, start + (count - 1) * step, count, rows, tl.load(tile_at + 3), tl.load(tile_at + 4)


@triton.jit
def phases_of(
    at,
    first,
    last,
    length,
    low,
    high,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SEQ_LENS: tl.constexpr,
):
    """A run's start and step, and in numbers of its columns the first column of each phase and the end.

    Rows are positions `first` to `last`; with SEQ_LENS, columns at and past `length` are left out.
    """
    start = tl.load(at)
    step = tl.load(at + 1)
    end = tl.load(at + 2)
    if SEQ_LENS:
        end = tl.minimum(end, tl.maximum(length - start + step - 1, 0) // step)
    unmasked = end  # a number of columns
    if HIGH:
        unmasked = tl.minimum(tl.maximum(first + high - start + step, 0) // step, end)
        end = tl.minimum(tl.maximum(last + high - start + step, 0) // step, end)
    begin = start * 0
    unmasked_begin = begin
    if LOW:
        begin = tl.minimum(tl.maximum(first + low - start + step - 1, 0) // step, end)
        unmasked_begin = tl.maximum(last + low - start + step - 1, 0) // step
        unmasked_begin = begin + (tl.maximum(unmasked_begin - begin, 0) + COLUMNS - 1) // COLUMNS * COLUMNS
        unmasked = tl.maximum(unmasked - unmasked_begin, 0)
    return start, step, begin, unmasked_begin, unmasked_begin + unmasked // COLUMNS * COLUMNS, end


@triton.jit
def span_of(begin, unmasked_begin, unmasked_end, end, PHASE: tl.constexpr):
    """A phase's first column and end."""
    n_from = unmasked_begin
    n_to = unmasked_end
    if PHASE == 0:
        n_from = begin
        n_to = tl.minimum(unmasked_begin, end)
    if PHASE == 2:
        n_from = unmasked_end
        n_to = end
    return n_from, n_to


@triton.jit
def columns_of(
    run_start,
    run_step,
    n,
    end,
    lowest,
    highest,
    PHASE: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """A block's columns, and which of them rows see; in an outer phase, columns past the end repeat the last one."""
    lane = n + tl.arange(0, COLUMNS)
    visible = tl.full([1, COLUMNS], True, tl.int1)
    if PHASE != 1:
        visible = (lane < end)[None, :]
        lane = tl.minimum(lane, end - 1)
    columns = run_start + lane * run_step
    if PHASE != 1 and LOW:
        visible = visible & (columns[None, :] >= lowest)
    if PHASE != 1 and HIGH:
        visible = visible & (columns[None, :] <= highest)
    return columns, visible


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
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SEQ_LENS: tl.constexpr,
    KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len]; rows are queries, columns keys."""
    batch, head, tile, last_tile = program_place(first_tile, kind_of, heads, programs, together)
    if tile >= last_tile:
        return
    first, last, count, rows, first_run, end_run = rows_of(tiles + tile * TILE, ROWS)
    lowest = (rows + low)[:, None]
    highest = (rows + high)[:, None]
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
                key, key_rest = load_rows(k_head, columns, every, k_n, k_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                s = scores(query, query_rest, key, key_rest, REST_D, PRECISION)
                if phase != 1 or KEY_MASK:
                    s = tl.where(visible, s, float("-inf"))
                p, shrink, row_max = softmax_weights(s, slope, row_max)
                total = total * shrink + tl.sum(p, 1)
                value, value_rest = load_rows(v_head, columns, seen, v_n, v_d, HEAD_DIM, BLOCK_D, REST_D, WIDE)
                acc = acc * shrink[:, None]
                if REST_D:
                    acc_rest = acc_rest * shrink[:, None]
                acc, acc_rest = add_product(p.to(value.dtype), value, value_rest, acc, acc_rest, REST_D, PRECISION)
    has_keys = total > 0
    if SEQ_LENS:
        has_keys = has_keys & (rows < length)
    stored = tl.arange(0, ROWS) < count
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
