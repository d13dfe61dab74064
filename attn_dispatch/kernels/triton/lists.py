"""The rows and columns of a program of `forward` and `backward`, by lists of either kind. Imports triton.

*Runs* (TILE is 0; see `work_list.WorkList`): `tiles` and `runs`. A row sees columns from `row + low` to `row + high`;
None: no bound. Runs of sinks, where there are SINKS, hold those beyond. A run's columns have three phases: first
columns that some rows do not see, columns that all rows see, and last columns that some rows do not see. A tile's
unused lanes repeat its last row: only stores need a mask for them.

*Pairs* of tiles of TILE places (see `tiles.tables.TileLists`): spans as `tiles`, pairs as `runs`, and the positions of
places, of which a program has ROWS. A tile's first pairs, phase 0, are weighted by multiplicity; in the others every
query sees every key once. A short last tile repeats its last position. Results of repeated queries are not stored;
repeated keys have multiplicity 0, and every pair with one is among the first pairs.

`lists` are `passes.Tables`, `meta` is `support.Meta`, `sizes` are low, high, q_len and k_len.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from attn_dispatch.kernels.triton.terms import added_to

#: Arguments of all kernels whose values do not change the machine code.
VARIABLE = ("heads", "programs", "together", "q_len", "k_len", "low", "high")
ENTRIES = tl.constexpr(5)  #: of a tile of runs
RUN = tl.constexpr(4)
SPAN = tl.constexpr(3)
PAIR = tl.constexpr(2)


@triton.jit
def program_place(lists, heads, programs, together, meta):
    """This program's batch row, head, the head's kind, tile, and the end of the head's tiles.

    Each head of a batch row has `programs` programs, as many as the most tiles of a head, and `together` of them take
    turns: first all their first tiles. Without `first_tile` all have that many.
    """
    program = tl.program_id(0)
    first = program // (together * programs) * together
    beside = tl.minimum(together, tl.num_programs(0) // programs - first)
    nth = program - first * programs
    batch = (first + nth % beside) // heads
    head = (first + nth % beside) % heads
    of_row = batch * heads if meta.BY_ROW else 0
    kind = tl.load(lists.kind_of + of_row + head)
    tile = nth // beside
    end = programs
    if lists.first_tile is not None:
        tile += tl.load(lists.first_tile + kind)
        end = tl.load(lists.first_tile + kind + 1)
    return batch.to(tl.int64), head.to(tl.int64), kind, tile, end


@triton.jit
def rows_of(lists, tile, row_len, MEMBERS: tl.constexpr, meta):
    """A tile's first and last row (of pairs the first place), all rows, which of them count, and its runs' first and
    end: of pairs one for each of MEMBERS query heads.
    """
    lane = tl.arange(0, meta.ROWS)
    if meta.TILE:
        first = tile * meta.ROWS
        last = first
        count = row_len - first
        rows = tl.load(lists.row_pos + first + lane)
        first_run = 0
        end_run = MEMBERS
    else:
        at = lists.tiles + tile * ENTRIES
        first = tl.load(at)
        step = tl.load(at + 1)
        count = tl.load(at + 2)
        rows = first + tl.minimum(lane, count - 1) * step
        last = first + (count - 1) * step
        first_run = tl.load(at + 3)
        end_run = tl.load(at + 4)
    return first, last, rows, lane < count, first_run, end_run


@triton.jit
def length_of(seq_lens, batch):
    """A batch row's length; None without seq_lens."""
    length = seq_lens
    if seq_lens is not None:
        length = tl.load(seq_lens + batch).to(tl.int32)
    return length


@triton.jit
def mask_of(key_mask, batch, k_len):
    """A batch row's first entry of key_mask; None without one."""
    mask = key_mask
    if key_mask is not None:
        mask = key_mask + batch * k_len
    return mask


@triton.jit
def sizes_of(lists, run, sizes, KEYS: tl.constexpr):
    """Where there are sinks, the sizes with the bounds of a run, which may be one of sinks. KEYS: rows are keys."""
    low, high, q_len, k_len = sizes
    sinks = tl.load(lists.runs + run * RUN + 3) % 2 == 1
    if KEYS:
        bounds = tl.where(sinks, high + 1, low), tl.where(sinks, q_len + k_len, high)
    else:
        bounds = tl.where(sinks, -q_len - k_len, low), tl.where(sinks, low - 1, high)
    return bounds[0], bounds[1], q_len, k_len


@triton.jit
def phases_of(lists, run, kind, first, last, row_len, length, sizes, meta):
    """A run's start, step and end, and the first of each phase and the end.

    All but start and step are numbers of its columns, or of blocks of pairs.

    Rows are positions `first` to `last`; columns at and past a `length` are left out.
    """
    low, high, _, _ = sizes
    if meta.TILE:
        tiles = (row_len + meta.TILE - 1) // meta.TILE
        span = lists.tiles + (kind.to(tl.int64) * tiles + first // meta.TILE) * SPAN
        begin = tl.load(span) * (meta.TILE // meta.COLUMNS)
        full = tl.load(span + 1) * (meta.TILE // meta.COLUMNS)
        end = tl.load(span + 2) * (meta.TILE // meta.COLUMNS)
        full_end = end
        start = begin
        step = begin
    else:
        start = tl.load(lists.runs + run * RUN)
        step = tl.load(lists.runs + run * RUN + 1)
        end = tl.load(lists.runs + run * RUN + 2)
        if length is not None:
            end = tl.minimum(end, tl.maximum(length - start + step - 1, 0) // step)
        count = end
        if high is not None:
            count = tl.minimum(tl.maximum(first + high - start + step, 0) // step, end)
            end = tl.minimum(tl.maximum(last + high - start + step, 0) // step, end)
        begin = start * 0
        full = begin
        if low is not None:
            begin = tl.minimum(tl.maximum(first + low - start + step - 1, 0) // step, end)
            full = tl.maximum(last + low - start + step - 1, 0) // step
            full = begin + (tl.maximum(full - begin, 0) + meta.COLUMNS - 1) // meta.COLUMNS * meta.COLUMNS
            count = tl.maximum(count - full, 0)
        full_end = full + count // meta.COLUMNS * meta.COLUMNS
    return (start, step, end), (begin, full, full_end, end)


@triton.jit
def member_of(lists, run, kind, batch, k_head, k_heads, meta):
    """Where rows are keys: a run's query head, of those that share a key head, and its kind."""
    head = k_head * meta.GROUP
    if meta.TILE:
        head += run
        of_row = batch * k_heads * meta.GROUP if meta.BY_ROW else 0
        kind = tl.load(lists.kind_of + of_row + head)
    else:
        head += tl.load(lists.runs + run * RUN + 3) // 2
    return head, kind


@triton.jit
def span_of(phases, PHASE: tl.constexpr):
    """A phase's first column and end, of `phases_of`."""
    end = phases[PHASE + 1]
    if PHASE == 0:
        end = tl.minimum(end, phases[3])
    return phases[PHASE], end


@triton.jit
def block_of(
    lists, run, n, first, rows, kind, sizes, length, mask, of_head, PHASE: tl.constexpr, KEYS: tl.constexpr, meta
):
    """A block's columns, which of them count [COLUMNS], which each row sees, how often, and what is added to scores
    [ROWS or 1, COLUMNS]; the last by `terms.added_to`, of no use without a bias and slopes.

    KEYS: rows are keys, the mask is None, and rows may see columns that do not count. In a run's outer phases
    columns past the end repeat the last one.
    """
    low, high, q_len, k_len = sizes
    lane = tl.arange(0, meta.COLUMNS)
    there = tl.full([meta.COLUMNS], True, tl.int1)
    visible = tl.full([1, meta.COLUMNS], True, tl.int1)
    times = tl.full([1, meta.COLUMNS], 1.0, tl.float32)
    if meta.TILE:
        listed = n // (meta.TILE // meta.COLUMNS)
        tile = tl.load(lists.runs + listed * PAIR)
        lane += (n - listed * (meta.TILE // meta.COLUMNS)) * meta.COLUMNS
        columns = tl.load(lists.column_pos + tile * meta.TILE + lane)
        if KEYS:
            there = tile * meta.TILE + lane < q_len
        if length is not None:
            there = there & (columns < length)
    else:
        start, step, end = run
        lane += n
        if PHASE != 1:
            visible = (lane < end)[None, :]
            lane = tl.minimum(lane, end - 1)
        columns = start + lane * step
        if PHASE != 1 and low is not None:
            visible = visible & (columns[None, :] >= (rows + low)[:, None])
        if PHASE != 1 and high is not None:
            visible = visible & (columns[None, :] <= (rows + high)[:, None])
    if mask is not None:
        there = there & (tl.load(mask + columns) != 0)
    if not KEYS:
        visible = visible & there[None, :]
    if meta.TILE > 0 and PHASE == 0:
        q_tile, q_lane = first // meta.TILE, (first % meta.TILE + tl.arange(0, meta.ROWS))[:, None]
        k_tile, k_lane = tile, lane[None, :]
        if KEYS:
            q_tile, q_lane, k_tile, k_lane = k_tile, k_lane, q_tile, q_lane
        number = tl.load(lists.runs + listed * PAIR + 1)
        times = multiplicity(lists, number, kind, q_tile, q_lane, k_tile, k_lane, q_len, k_len, meta)
        times = tl.where(visible, times, 0.0)
        visible = times > 0
    added = times
    if meta.BIAS or meta.ALIBI:
        visible, added = added_to(rows, columns, visible, k_len - q_len, of_head, KEYS, meta)
    if meta.BIAS and not KEYS:  # what a bias hides from all queries may be NaN
        if length is not None:
            visible = visible & (rows < length)[:, None]
        there = there & (tl.max(visible.to(tl.int32), 0) > 0)
    return columns, there, visible, times, added


@triton.jit
def multiplicity(lists, mask, kind, q_tile, q_lane, k_tile, k_lane, q_len, k_len, meta):
    """How many times each query sees each key, float32: from `masks`, or if BRANCHES > 0 computed from `reach`, by
    `counts` if there are any.

    The lanes of queries and keys in their tiles are [rows, 1] and [1, columns], or vice versa.
    """
    if meta.BRANCHES == 0:
        found = tl.load(lists.masks + mask.to(tl.int64) * (meta.TILE * meta.TILE) + q_lane * meta.TILE + k_lane)
    else:
        found = (q_lane + k_lane) * 0
        queries = (q_len + meta.TILE - 1) // meta.TILE * meta.TILE
        places = 2 * queries + (k_len + meta.TILE - 1) // meta.TILE * meta.TILE
        for branch in tl.static_range(meta.BRANCHES):
            sees = found >= 0
            for axis in tl.static_range(meta.AXES):
                row = lists.reach + ((kind.to(tl.int64) * meta.BRANCHES + branch) * meta.AXES + axis) * places
                at = tl.load(row + 2 * queries + k_tile * meta.TILE + k_lane)
                sees = sees & (at >= tl.load(row + q_tile * meta.TILE + q_lane))
                sees = sees & (at <= tl.load(row + queries + q_tile * meta.TILE + q_lane))
            found += sees.to(tl.int32)
        if lists.counts is not None:
            row = lists.block_at + kind.to(tl.int64) * (places - queries)
            at = tl.load(row + q_tile * meta.TILE + q_lane) + tl.load(row + queries + k_tile * meta.TILE + k_lane)
            found *= tl.load(lists.counts + at).to(tl.int32)
    return found.to(tl.float32)
