"""The rows and columns of a program of `forward` and `backward`, by lists of either kind. Imports triton.

*Runs* (TILE is 0; see `work_list.WorkList`): `tiles` and `runs`. A row sees columns from `row + low` to `row + high`;
None: no bound. A run's columns have three phases: first columns that some rows do not see, columns that all rows see,
and last columns that some rows do not see. A tile's unused lanes repeat its last row: only stores need a mask for them.

*Pairs* of tiles of TILE places (see `tiles.tables.TileLists`): spans as `tiles`, pairs as `runs`, and the positions of
places, of which a program has ROWS. A tile's first pairs, phase 0, are weighted by multiplicity; in the others every
query sees every key once. A short last tile repeats its last position. Results of repeated queries are not stored;
repeated keys have multiplicity 0, and every pair with one is among the first pairs.
"""

# Triton reads the annotations itself: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

#: Arguments of all kernels whose values do not change the machine code.
VARIABLE = ("heads", "programs", "together", "q_len", "k_len", "low", "high")
ENTRIES = tl.constexpr(5)  #: of a tile of runs
RUN = tl.constexpr(4)
SPAN = tl.constexpr(3)
PAIR = tl.constexpr(2)


@triton.jit
def program_place(first_tile, kind_of, heads, programs, together):
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
    kind = tl.load(kind_of + head)
    tile = nth // beside
    end = programs
    if first_tile is not None:
        tile += tl.load(first_tile + kind)
        end = tl.load(first_tile + kind + 1)
    return batch.to(tl.int64), head.to(tl.int64), kind, tile, end


@triton.jit
def rows_of(tiles, row_pos, tile, row_len, MEMBERS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """A tile's first and last row (of pairs the first place), all rows, which of them count, and its runs' first and
    end: of pairs one for each of MEMBERS query heads.
    """
    lane = tl.arange(0, ROWS)
    if TILE:
        first = tile * ROWS
        last = first
        count = row_len - first
        rows = tl.load(row_pos + first + lane)
        first_run = 0
        end_run = MEMBERS
    else:
        at = tiles + tile * ENTRIES
        first = tl.load(at)
        step = tl.load(at + 1)
        count = tl.load(at + 2)
        rows = first + tl.minimum(lane, count - 1) * step
        last = first + (count - 1) * step
        first_run = tl.load(at + 3)
        end_run = tl.load(at + 4)
    return first, last, rows, lane < count, first_run, end_run


@triton.jit
def phases_of(
    tiles, runs, run, kind, first, last, row_len, length, low, high, seq_lens, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """A run's start and step, and in numbers of its columns, or of blocks of pairs, each phase's first and the end.

    Rows are positions `first` to `last`; with seq_lens, columns at and past `length` are left out.
    """
    if TILE:
        span = tiles + (kind.to(tl.int64) * ((row_len + TILE - 1) // TILE) + first // TILE) * SPAN
        begin = tl.load(span) * (TILE // COLUMNS)
        full = tl.load(span + 1) * (TILE // COLUMNS)
        end = tl.load(span + 2) * (TILE // COLUMNS)
        full_end = end
        start = begin
        step = begin
    else:
        start = tl.load(runs + run * RUN)
        step = tl.load(runs + run * RUN + 1)
        end = tl.load(runs + run * RUN + 2)
        if seq_lens is not None:
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
            full = begin + (tl.maximum(full - begin, 0) + COLUMNS - 1) // COLUMNS * COLUMNS
            count = tl.maximum(count - full, 0)
        full_end = full + count // COLUMNS * COLUMNS
    return start, step, begin, full, full_end, end


@triton.jit
def member_of(runs, kind_of, run, kind, first_head, TILE: tl.constexpr):
    """Where rows are keys: a run's query head, of those from `first_head` on, and its kind."""
    if TILE:
        head = first_head + run
        kind = tl.load(kind_of + head)
    else:
        head = first_head + tl.load(runs + run * RUN + 3)
    return head, kind


@triton.jit
def span_of(begin, full, full_end, end, PHASE: tl.constexpr):
    """A phase's first column and end."""
    n_from = full
    n_to = full_end
    if PHASE == 0:
        n_from = begin
        n_to = tl.minimum(full, end)
    if PHASE == 2:
        n_from = full_end
        n_to = end
    return n_from, n_to


@triton.jit
def block_of(
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
    mask_at,
    mask_n,
    column_pos,
    masks,
    reach,
    q_len,
    k_len,
    PHASE: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BRANCHES: tl.constexpr,
    AXES: tl.constexpr,
):
    """A block's columns, which of them count [COLUMNS], and which each row sees and how often [ROWS or 1, COLUMNS].

    KEYS: rows are keys, key_mask is None, and rows may see columns that do not count. In a run's outer phases columns
    past the end repeat the last one.
    """
    lane = tl.arange(0, COLUMNS)
    there = tl.full([COLUMNS], True, tl.int1)
    visible = tl.full([1, COLUMNS], True, tl.int1)
    times = tl.full([1, COLUMNS], 1.0, tl.float32)
    if TILE:
        listed = n // (TILE // COLUMNS)
        tile = tl.load(runs + listed * PAIR)
        lane += (n - listed * (TILE // COLUMNS)) * COLUMNS
        columns = tl.load(column_pos + tile * TILE + lane)
        if KEYS:
            there = tile * TILE + lane < q_len
        if seq_lens is not None:
            there = there & (columns < length)
    else:
        lane += n
        if PHASE != 1:
            visible = (lane < end)[None, :]
            lane = tl.minimum(lane, end - 1)
        columns = start + lane * step
        if PHASE != 1 and low is not None:
            visible = visible & (columns[None, :] >= (rows + low)[:, None])
        if PHASE != 1 and high is not None:
            visible = visible & (columns[None, :] <= (rows + high)[:, None])
    if key_mask is not None:
        there = there & (tl.load(key_mask + mask_at + columns * mask_n) != 0)
    if not KEYS:
        visible = visible & there[None, :]
    if TILE > 0 and PHASE == 0:
        q_tile, q_lane = first // TILE, (first % TILE + tl.arange(0, ROWS))[:, None]
        k_tile, k_lane = tile, lane[None, :]
        if KEYS:
            q_tile, q_lane, k_tile, k_lane = k_tile, k_lane, q_tile, q_lane
        times = multiplicity(
            masks,
            reach,
            tl.load(runs + listed * PAIR + 1),
            kind,
            q_tile,
            q_lane,
            k_tile,
            k_lane,
            q_len,
            k_len,
            TILE,
            BRANCHES,
            AXES,
        )
        times = tl.where(visible, times, 0.0)
        visible = times > 0
    return columns, there, visible, times


@triton.jit
def multiplicity(
    masks,
    reach,
    mask,
    kind,
    q_tile,
    q_lane,
    k_tile,
    k_lane,
    q_len,
    k_len,
    TILE: tl.constexpr,
    BRANCHES: tl.constexpr,
    AXES: tl.constexpr,
):
    """How many times each query sees each key, float32: from `masks`, or if BRANCHES > 0 computed from `reach`.

    The lanes of queries and keys in their tiles are [rows, 1] and [1, columns], or vice versa.
    """
    if BRANCHES == 0:
        found = tl.load(masks + mask.to(tl.int64) * (TILE * TILE) + q_lane * TILE + k_lane)
    else:
        found = (q_lane + k_lane) * 0
        queries = (q_len + TILE - 1) // TILE * TILE
        places = 2 * queries + (k_len + TILE - 1) // TILE * TILE
        for branch in tl.static_range(BRANCHES):
            sees = found >= 0
            for axis in tl.static_range(AXES):
                row = reach + ((kind.to(tl.int64) * BRANCHES + branch) * AXES + axis) * places
                at = tl.load(row + 2 * queries + k_tile * TILE + k_lane)
                sees = sees & (at >= tl.load(row + q_tile * TILE + q_lane))
                sees = sees & (at <= tl.load(row + queries + q_tile * TILE + q_lane))
            found += sees.to(tl.int32)
    return found.to(tl.float32)
