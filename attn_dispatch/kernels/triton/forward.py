"""Triton forward kernel over a work list (`work_list`): one online softmax over all runs of a tile.

q, k and v may have any strides. Results are contiguous; sums are in float32. Importing this module imports triton.

A tile's unused lanes repeat its last row, so that only stores need a mask for them. A run's columns have three phases:
first columns that some rows do not see, columns that all rows see, and last columns that some rows do not see; only the
outer two are masked. With a launch order, some tiles process their runs, phases and blocks in reverse.

Source: Dao 2023, FlashAttention-2, algorithm 1; Milakov & Gimelshein 2018, online softmax.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
TILE = tl.constexpr(5)  #: entries of a tile, see work_list.WorkList
RUN = tl.constexpr(4)
LAUNCH = tl.constexpr(3)  #: entries of a launch, see launch_order.launch_order_of


@triton.jit
def program_place(first_tile, kind_of, launches, heads, programs, LISTED: tl.constexpr):
    """This program's batch row, head and tile, the end of the head's tiles, and whether columns go in reverse.

    Programs are ordered by batch row. With LISTED the `programs` entries of `launches` give head, tile and direction;
    otherwise each head has `programs` programs, as many as the most tiles of a head.
    """
    program = tl.program_id(0).to(tl.int64)
    if LISTED:
        at = launches + program % programs * LAUNCH
        batch = program // programs
        head = tl.load(at).to(tl.int64)
        tile = tl.load(at + 1).to(tl.int64)
        last_tile = tile + 1
        backwards = tl.load(at + 2) != 0
    else:
        head = (program // programs) % heads
        kind = tl.load(kind_of + head)
        tile = tl.load(first_tile + kind) + program % programs
        batch = program // programs // heads
        last_tile = tl.load(first_tile + kind + 1)
        backwards = program < 0
    return batch, head, tile, last_tile, backwards


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
    start = tl.load(at).to(tl.int64)
    step = tl.load(at + 1).to(tl.int64)
    end = tl.load(at + 2).to(tl.int64)
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
def span_of(
    begin,
    unmasked_begin,
    unmasked_end,
    end,
    backwards,
    PHASE: tl.constexpr,
    COLUMNS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """A phase's first column, end and start of the last block. In reverse, the outer phases are swapped."""
    n_from = unmasked_begin
    n_to = unmasked_end
    if PHASE == 0:
        n_from = begin
        n_to = tl.minimum(unmasked_begin, end)
        if LISTED:
            n_from = tl.where(backwards, unmasked_end, n_from)
            n_to = tl.where(backwards, end, n_to)
    if PHASE == 2:
        n_from = unmasked_end
        n_to = end
        if LISTED:
            n_from = tl.where(backwards, begin, n_from)
            n_to = tl.where(backwards, tl.minimum(unmasked_begin, end), n_to)
    return n_from, n_to, n_from + (n_to - n_from - 1) // COLUMNS * COLUMNS


@triton.jit
def mirrored(at, first, last, backwards, LISTED: tl.constexpr):
    """`at` mirrored between `first` and `last` if the tile goes in reverse."""
    if LISTED:
        at = tl.where(backwards, first + last - at, at)
    return at


@triton.jit
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
    """out [batch, q_len, heads, head_dim] and lse [batch, heads, q_len]; rows are queries, columns keys."""
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
    lane_n = tl.arange(0, COLUMNS).to(tl.int64)
    slope = scale * LOG2_E
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
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
                new_max = tl.maximum(row_max, tl.max(s, 1))
                # For rows without a key so far -inf - -inf would be NaN.
                safe = tl.where(new_max == float("-inf"), 0.0, new_max)
                p = tl.exp2(s - safe[:, None])
                shrink = tl.exp2(row_max - safe)
                total = total * shrink + tl.sum(p, 1)
                value = tl.load(v_row + (columns * v_n)[:, None], mask=seen, other=0.0)
                acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
                row_max = new_max
    has_keys = total > 0
    if SEQ_LENS:
        has_keys = has_keys & (rows < length)
    divisor = tl.where(has_keys, total, 1.0)
    result = tl.where(has_keys[:, None], acc / divisor[:, None], 0.0).to(out.dtype.element_ty)
    out_at = out + ((batch * q_len + rows) * heads + head)[:, None] * HEAD_DIM + d
    tl.store(out_at, result, mask=(lane < count)[:, None] & d_valid)
    result_lse = tl.where(has_keys, row_max * LN_2 + tl.log(divisor), float("-inf"))
    tl.store(lse + (batch * heads + head) * q_len + rows, result_lse, mask=lane < count)
