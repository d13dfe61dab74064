"""Work lists: the columns of each tile of rows, for a kernel that computes a whole pattern in one pass.

Rows are queries and columns keys, or vice versa for the gradients of keys. A *tile* is a part of a row group (see
`progressions`). For causality and windows, a row at position p uses only columns from `p + low` to `p + high`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.heads import Kind, heads_by_kind
from attn_dispatch.kernels.progressions import RowGroups, most_row_groups, row_groups, tiled
from attn_dispatch.kernels.triton.blocks import SMALLEST_SIDE, padded
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band
from attn_dispatch.spec.tracing import make_plain

Side = Literal["queries", "keys"]

Bounds = tuple[int | None, int | None]

TILE = 5  #: entries of a tile
RUN = 4  #: entries of a run


@dataclass(frozen=True, slots=True)
class WorkList:
    """The tiles of every kind of heads.

    Args:
        tiles: int32 [tiles, 5]; start, step and count of the rows, first run, end of the runs.
        runs: int32 [runs, 4]; start, step and count of the columns, and twice the number of the query head within the
            key head's group, which is 0 where rows are queries, and 1 more for a run of sinks.
        first_tile: int32 [kinds + 1]; a kind's tiles are `tiles[first_tile[kind] : first_tile[kind + 1]]`.
        kind_of: int32 [heads], or [kv_heads] where rows are keys.
        bounds: low and high of the runs, and where there are sinks, of theirs: a row at p uses columns `p + low` to
            `p + high`; None: no bound.
        most_tiles: the most tiles of a kind.
    """

    tiles: Tensor
    runs: Tensor
    first_tile: Tensor
    kind_of: Tensor
    bounds: tuple[Bounds, ...]
    most_tiles: int

    def pairs(self, rows: int, columns: int) -> int:
        """Scores computed per batch row in blocks of `rows` x `columns`, unused lanes included."""
        return make_plain(self._pairs, rows, columns)

    def longest_first(self, columns: int) -> WorkList:
        """The same tiles, in each kind those with the most blocks of `columns` first.

        The last programs to start are then the shortest, so that all multiprocessors end at about the same time.
        """
        return make_plain(self._longest_first, columns)

    def _pairs(self, rows: int, columns: int) -> int:
        blocks = self._blocks(columns)
        edges = self.first_tile.tolist()
        by_kind = [int(blocks[a:b].sum()) for a, b in pairwise(edges)]
        heads: list[int] = self.kind_of.tolist()
        return rows * columns * sum(by_kind[kind] for kind in heads)

    def _longest_first(self, columns: int) -> WorkList:
        blocks, edges = self._blocks(columns), self.first_tile.tolist()
        parts = [a + blocks[a:b].argsort(descending=True, stable=True) for a, b in pairwise(edges)]
        return replace(self, tiles=self.tiles[torch.cat(parts)])

    def _blocks(self, columns: int) -> Tensor:
        """The number of blocks of `columns` columns of each tile, int64 [tiles]."""
        start, step, count, first_run, end_run = self.tiles.long().unbind(-1)
        run_counts = end_run - first_run
        tile = torch.arange(len(self.tiles)).repeat_interleave(run_counts)
        run = torch.arange(len(tile)) - (run_counts.cumsum(0) - run_counts - first_run).repeat_interleave(run_counts)
        run_start, run_step, run_count, member = self.runs.long()[run].unbind(-1)
        begin, end = torch.zeros_like(run_count), run_count
        for number, (low, high) in enumerate(self.bounds):
            own = member % 2 == number
            if low is not None:
                begin = torch.where(own, -(-(start[tile] + low - run_start).clamp(min=0) // run_step), begin)
            if high is not None:
                last = (start + (count - 1) * step)[tile] + high - run_start
                end = torch.where(own, torch.minimum(end, (last + run_step).clamp(min=0) // run_step), end)
        blocks = torch.zeros(len(self.tiles), dtype=torch.int64)
        return blocks.index_add_(0, tile, -(-(end - begin).clamp(min=0) // columns))

    def to(self, device: torch.device) -> WorkList:
        """The lists on a device, by one copy, in which each begins at a multiple of 16 bytes, as alone."""
        lists = self.tiles, self.runs, self.first_tile, self.kind_of
        wide = [pad(x.flatten(), (0, -x.numel() % 4)) for x in lists]
        parts = torch.split(torch.cat(wide).to(device), [len(x) for x in wide])
        tiles, runs, first_tile, kind_of = (part[: x.numel()].view(x.shape) for x, part in zip(lists, parts))
        return replace(self, tiles=tiles, runs=runs, first_tile=first_tile, kind_of=kind_of)


def work_list_of(problem: Problem, side: Side, block: int, lengths: tuple[int, ...] = ()) -> WorkList:
    """The work list with tiles of at most `block` rows, for Dense, Window and Dilated.

    Args:
        side: whether rows are queries or keys.
        lengths: of the documents of which each row of the batch consists, in tokens.
    """
    return make_plain(_work_list, problem, side, block, lengths)


def _work_list(problem: Problem, side: Side, block: int, lengths: tuple[int, ...]) -> WorkList:
    kinds, kind_of = _kinds(problem, side)
    found = tiled((_row_groups(problem, side, kind, lengths) for kind in kinds), block)
    tiles, runs, first_tile, kind = (x.int() for x in (*found, torch.tensor(kind_of)))
    return WorkList(tiles, runs, first_tile, kind, bounds(problem, side), int(found[2].diff().max()))


@lru_cache(maxsize=4096)
def covers(problem: Problem, side: Side, lengths: tuple[int, ...] = ()) -> bool:
    """Whether every row of every head is in a tile; other rows have no runs."""
    counts = make_plain(_row_counts, problem, side, lengths)
    return all(int(count.sum()) == _length(problem, side) for count in counts)


def largest_row_group(problem: Problem, side: Side, lengths: tuple[int, ...] = ()) -> int:
    """The most rows with the same runs: a larger tile would be partly empty."""
    counts = make_plain(_row_counts, problem, side, lengths)
    return max((int(count.max()) for count in counts if len(count)), default=0)


def _row_counts(problem: Problem, side: Side, lengths: tuple[int, ...]) -> list[Tensor]:
    """The number of rows of each row group, by kind of heads."""
    return [_row_groups(problem, side, kind, lengths).rows[:, 2] for kind in _kinds(problem, side)[0]]


def work_list_bytes(problem: Problem, side: Side, block: int) -> int:
    """Upper bound of the bytes of `work_list_of`, without building it."""
    kinds, kind_of = _kinds(problem, side)
    rows, entries = _length(problem, side), 1 + len(kind_of)
    for bands in (_bands(problem, kind) for kind in kinds):
        groups = most_row_groups(bands, rows)
        entries += min(rows, groups + rows // block) * TILE + groups * len(bands) * RUN + 1
    return 4 * entries


def bounds(problem: Problem, side: Side) -> tuple[Bounds, ...]:
    """The first and last column of a row, relative to the row's position; with sinks also those of their runs."""
    bands = _bands(problem, (problem.pattern.head_offsets(0, problem.heads),))
    # Bounds beyond both lengths are equivalent; clipped, their sums with positions fit 32 bits.
    far = problem.q_len + problem.k_len
    found: list[Bounds] = []
    for low, high in dict.fromkeys((band.low, band.high) for band in bands):  # equal in all branches
        low = None if low is None else max(low, -far)
        high = None if high is None else min(high, far)
        if side == "keys":
            low, high = None if high is None else -high, None if low is None else -low
        found.append((low, high))
    if len(found) == 1:
        return tuple(found)
    return tuple((-far if low is None else low, far if high is None else high) for low, high in found)


def _bands(problem: Problem, kind: Kind) -> list[Band]:
    """The bands of all query heads of a kind."""
    found = (problem.pattern.bands(problem.q_len, problem.k_len, offsets) for offsets in kind)
    return [band for bands in found for band in bands or ()]


def _length(problem: Problem, side: Side) -> int:
    return problem.q_len if side == "queries" else problem.k_len


def _kinds(problem: Problem, side: Side) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """The distinct kinds of heads, and the kind of each head."""
    return _kinds_of(problem.pattern, problem.heads, 1 if side == "queries" else problem.heads // problem.kv_heads)


@lru_cache(maxsize=256)
def _kinds_of(pattern: Pattern, heads: int, group: int) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    found = heads_by_kind(pattern, heads, group)
    kind_of = {head: number for number, members in enumerate(found.values()) for head in members}
    return tuple(found), tuple(kind_of[head] for head in range(heads // group))


def _row_groups(problem: Problem, side: Side, kind: Kind, lengths: tuple[int, ...]) -> RowGroups:
    return _row_groups_of(problem.pattern, problem.q_len, problem.k_len, side, kind, lengths)


@lru_cache(maxsize=256)
def _row_groups_of(
    pattern: Pattern, q_len: int, k_len: int, side: Side, kind: Kind, lengths: tuple[int, ...]
) -> RowGroups:
    """The row groups that have runs, whose last number is as in `WorkList`."""
    by_member = [pattern.bands(q_len, k_len, offsets) or () for offsets in kind]
    bands = [band for some in by_member for band in some]
    numbers = [2 * number + (band.stop is not None) for number, some in enumerate(by_member) for band in some]
    member = torch.tensor(numbers, dtype=torch.int64)
    # Tokens count from the first of all; rows or columns that are queries are the last of these, or begin before them.
    ahead = k_len - q_len
    borders = torch.tensor([min(0, ahead), *accumulate(lengths or (k_len,))])
    first = (ahead, 0) if side == "queries" else (0, ahead)
    rows, runs, counts = row_groups(bands, borders, *first, rows_are_keys=side == "keys")
    runs = torch.cat([runs[:, :3], member[runs[:, 3:]]], dim=1)
    return RowGroups(rows[counts > 0], runs, counts[counts > 0])


def heads_in_turn(problem: Problem, side: Side, l2_bytes: int) -> tuple[int, bool]:
    """The number of heads, of any batch rows, whose programs take turns, and whether longest first.

    As many heads as half of the L2 cache holds the columns of, and at least those that share columns. A head's tiles
    may start in any order if it holds all columns, or if all tiles read about the same.
    """
    share, columns = (
        (problem.heads // problem.kv_heads, problem.k_len)
        if side == "queries"
        else (1, problem.q_len * problem.heads // problem.kv_heads)
    )
    fitting = l2_bytes // 2 // max(1, 2 * columns * problem.head_dim * problem.dtype.itemsize)
    return share * max(1, fitting), bool(fitting) or not problem.pattern.branches


# --- keys of few queries, which `few_queries` reads in parts ----------------------------------------------------------

#: Queries by heads that share keys, up to which the keys are read in parts, of 16-bit numbers and of float32: more of
#: these do not fit every device's shared memory.
FEW_LANES, FEW_SINGLE = 64, 16
PART_BYTES = 2**14  #: of a block of keys, one of four that its loads keep in shared memory
PARTS_PER_PROCESSOR = 2  #: programs for each multiprocessor
INTERPRETED_PARTS = 5


class KeyParts(NamedTuple):
    """Keys `first` to `end` that a problem's few queries see, in `parts` parts of `share`, by blocks of `columns`.

    `rows` is a block's side for the queries by heads that share keys.
    """

    first: int
    end: int
    parts: int
    share: int
    columns: int
    rows: int
    low: int | None  #: bounds of key - query
    high: int | None


@lru_cache(maxsize=4096)
def key_parts(problem: Problem) -> KeyParts | None:
    """How the keys of few queries are read in parts; None where they are not."""
    lanes = problem.heads // problem.kv_heads * problem.q_len
    most = FEW_SINGLE if problem.dtype == torch.float32 else FEW_LANES
    if lanes > most or problem.k_len <= problem.q_len or not isinstance(problem.pattern, Dense | Window):
        return None
    band, *sinks = problem.pattern.bands(problem.q_len, problem.k_len, ())
    if sinks:
        return None
    first = 0 if band.low is None else min(max(0, band.low), problem.k_len)
    last = problem.k_len - 1 if band.high is None else min(problem.k_len - 1, problem.q_len - 1 + band.high)
    keys = last + 1 - first
    if keys <= 0:
        return None
    rows, bytes_of_key = padded(lanes), padded(problem.head_dim) * problem.dtype.itemsize
    columns = min(128, 4096 // rows, max(SMALLEST_SIDE, PART_BYTES // bytes_of_key))  # more columns of 64 rows spill
    if problem.device.type == "cpu":
        columns, wanted = SMALLEST_SIDE, INTERPRETED_PARTS
    else:
        processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
        wanted = -(-PARTS_PER_PROCESSOR * processors // (problem.batch * problem.kv_heads))
    blocks = -(-keys // columns)
    # With as many keys as rows, a part reads no fewer bytes of 16-bit keys and values than it writes sums.
    share = max(-(-blocks // wanted), -(-rows // columns)) * columns
    return KeyParts(first, last + 1, -(-keys // share), share, columns, rows, band.low, band.high)
