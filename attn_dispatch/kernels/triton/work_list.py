"""Work lists: the columns of each tile of rows, for a kernel that computes a whole pattern in one pass.

Rows are queries and columns keys, or vice versa for the gradients of keys. A *tile* is a set of rows with the same
*runs* of columns. Rows of a tile and columns of a run are arithmetic progressions of positions: nothing is gathered,
and no lane holds a row that its branches do not select. For causality and windows, a row at position p uses only
columns from `p + low` to `p + high`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import Kind, heads_by_kind
from attn_dispatch.spec.pattern import Dilated, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tracing import make_plain

Side = Literal["queries", "keys"]

TILE = 5  #: entries of a tile
RUN = 4  #: entries of a run


@dataclass(frozen=True, slots=True)
class WorkList:
    """The tiles of every kind of heads.

    Args:
        tiles: int32 [tiles, 5]; start, step and count of the rows, first run, end of the runs.
        runs: int32 [runs, 4]; start, step and count of the columns, and, where rows are keys, the number of the query
            head within the key head's group.
        first_tile: int32 [kinds + 1]; a kind's tiles are `tiles[first_tile[kind] : first_tile[kind + 1]]`.
        kind_of: int32 [heads], or [kv_heads] where rows are keys.
        low, high: a row at p uses columns `p + low` to `p + high`; None: no bound.
        most_tiles: the most tiles of a kind.
    """

    tiles: Tensor
    runs: Tensor
    first_tile: Tensor
    kind_of: Tensor
    low: int | None
    high: int | None
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
        run_start, run_step, run_count, _ = self.runs.long()[run].unbind(-1)
        begin, end = torch.zeros_like(run_count), run_count
        if self.low is not None:
            begin = _ceil_div((start[tile] + self.low - run_start).clamp(min=0), run_step)
        if self.high is not None:
            last = (start + (count - 1) * step)[tile] + self.high - run_start
            end = torch.minimum(end, (last + run_step).clamp(min=0) // run_step)
        blocks = torch.zeros(len(self.tiles), dtype=torch.int64)
        return blocks.index_add_(0, tile, _ceil_div((end - begin).clamp(min=0), torch.tensor(columns)))

    def to(self, device: torch.device) -> WorkList:
        lists = {name: getattr(self, name).to(device) for name in ("tiles", "runs", "first_tile", "kind_of")}
        return replace(self, **lists)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Groups of rows with the same runs.

    Args:
        rows: int64 [groups, 3]; start, step and count.
        runs: int64, as in `WorkList`, group by group.
        run_counts: int64 [groups].
    """

    rows: Tensor
    runs: Tensor
    run_counts: Tensor

    def split(self, block: int, first_run: int) -> Tensor:
        """The groups as tiles of at most `block` rows; their runs are numbered from `first_run` on."""
        start, step, count = self.rows.unbind(-1)
        end_run = first_run + self.run_counts.cumsum(0)
        pieces = _ceil_div(count, torch.tensor(block))
        group = torch.arange(len(pieces)).repeat_interleave(pieces)
        index = torch.arange(len(group)) - (pieces.cumsum(0) - pieces)[group]
        start, step, count = start[group] + index * block * step[group], step[group], count[group] - index * block
        return torch.stack(
            [start, step, count.clamp(max=block), (end_run - self.run_counts)[group], end_run[group]], dim=1
        )


def work_list_of(problem: Problem, side: Side, block: int) -> WorkList:
    """The work list with tiles of at most `block` rows, for Dense, Window and Dilated.

    Args:
        side: whether rows are queries or keys.
    """
    return make_plain(_work_list, problem, side, block)


def _work_list(problem: Problem, side: Side, block: int) -> WorkList:
    kinds, kind_of = _kinds(problem, side)
    tiles: list[Tensor] = []
    runs: list[Tensor] = []
    first_tile = [0]
    for kind in kinds:
        groups = _row_groups(problem, side, kind)
        tiles.append(groups.split(block, sum(len(each) for each in runs)))
        runs.append(groups.runs)
        first_tile.append(first_tile[-1] + len(tiles[-1]))
    return WorkList(
        torch.cat(tiles).to(torch.int32),
        torch.cat(runs).to(torch.int32),
        torch.tensor(first_tile, dtype=torch.int32),
        torch.tensor(kind_of, dtype=torch.int32),
        *bounds(problem, side),
        most_tiles=max(last - first for first, last in pairwise(first_tile)),
    )


@lru_cache(maxsize=4096)
def covers(problem: Problem, side: Side) -> bool:
    """Whether every row of every head is in a tile; other rows have no runs."""
    return make_plain(_covers, problem, side)


def _covers(problem: Problem, side: Side) -> bool:
    kinds, _ = _kinds(problem, side)
    return all(int(_row_groups(problem, side, kind).rows[:, 2].sum()) == _length(problem, side) for kind in kinds)


def largest_row_group(problem: Problem, side: Side) -> int:
    """The most rows with the same runs: a larger tile would be partly empty."""
    return make_plain(_largest_row_group, problem, side)


def _largest_row_group(problem: Problem, side: Side) -> int:
    groups = (_row_groups(problem, side, kind).rows[:, 2] for kind in _kinds(problem, side)[0])
    return max((int(count.max()) for count in groups if len(count)), default=0)


def work_list_bytes(problem: Problem, side: Side, block: int) -> int:
    """Upper bound of the bytes of `work_list_of`, without building it."""
    kinds, kind_of = _kinds(problem, side)
    branches = len(problem.pattern.branches) if isinstance(problem.pattern, Dilated) else 1
    runs = _most_row_groups(problem, side) * len(kinds[0]) * branches
    return 4 * (len(kinds) * (tiles_at_most(problem, side, block) * TILE + runs * RUN + 1) + 1 + len(kind_of))


def tiles_at_most(problem: Problem, side: Side, block: int) -> int:
    """Upper bound of the tiles of one head, without building them."""
    rows = _length(problem, side)
    return min(rows, _most_row_groups(problem, side) + rows // block)


def _most_row_groups(problem: Problem, side: Side) -> int:
    pattern, rows = problem.pattern, _length(problem, side)
    if not isinstance(pattern, Dilated):
        return 1
    lengths = [min(length, problem.k_len) for length in pattern.segment_lengths]
    intervals = sum(-(-rows // length) + 1 for length in lengths)
    classes = math.lcm(*(min(rate, length) for length, rate in zip(lengths, pattern.dilation_rates)))
    return min(rows, intervals * classes)


def bounds(problem: Problem, side: Side) -> tuple[int | None, int | None]:
    """The first and last column of a row, relative to the row's position."""
    offsets = problem.pattern.head_offsets(0, problem.heads)
    bands = problem.pattern.bands(problem.q_len, problem.k_len, offsets) or ()
    ((low, high),) = {(band.low, band.high) for band in bands}  # equal in all branches
    # Bounds beyond both lengths are equivalent; clipped, their sums with positions fit 32 bits.
    far = problem.q_len + problem.k_len
    low = None if low is None else max(low, -far)
    high = None if high is None else min(high, far)
    if side == "queries":
        return low, high
    return None if high is None else -high, None if low is None else -low


def _length(problem: Problem, side: Side) -> int:
    return problem.q_len if side == "queries" else problem.k_len


def _kinds(problem: Problem, side: Side) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """The distinct kinds of heads, and the kind of each head."""
    group = 1 if side == "queries" else problem.heads // problem.kv_heads
    return _kinds_of(problem.pattern, problem.heads, group)


@lru_cache(maxsize=256)
def _kinds_of(pattern: Pattern, heads: int, group: int) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    found = heads_by_kind(pattern, heads, group)
    kind_of = {head: number for number, members in enumerate(found.values()) for head in members}
    return tuple(found), tuple(kind_of[head] for head in range(heads // group))


def _row_groups(problem: Problem, side: Side, kind: Kind) -> RowGroups:
    if isinstance(problem.pattern, Dilated):
        ahead = problem.k_len - problem.q_len
        return _dilated_row_groups(
            problem.pattern, problem.k_len, kind, *((ahead, 0) if side == "queries" else (0, ahead))
        )
    rows = _length(problem, side)
    columns = problem.q_len + problem.k_len - rows
    runs = torch.tensor([[0, 1, columns, member] for member in range(len(kind))])
    return RowGroups(torch.tensor([[0, 1, rows]]), runs, torch.tensor([len(kind)]))


@lru_cache(maxsize=256)
def _dilated_row_groups(pattern: Dilated, length: int, kind: Kind, first_row: int, first_column: int) -> RowGroups:
    """The row groups of a dilated pattern on a sequence of `length` tokens, whose rows and columns are those from these
    tokens on.

    Between two consecutive segment borders of any branches, a row's residues decide which branches select it. Each such
    interval is split, by one prime factor of one rate at a time, until a branch selects all rows of a part or none.
    """
    branches = [(b, min(w, length), min(r, w, length)) for b, (w, r) in enumerate(pattern.branches)]
    borders = [torch.arange(min(length, -(-first_row // w) * w), length, w) for _, w, _ in branches]
    edges = torch.unique(torch.cat([torch.tensor([first_row]), *borders]))
    ends = torch.cat([edges[1:], torch.tensor([length])])
    # Rows from `start` in steps of `step`, below `end`; `origin` is where their interval starts.
    parts = torch.stack([edges, torch.ones_like(edges), ends, edges], dim=1)
    for b, w, r in branches:
        # An offset past a short segment selects nothing.
        for target in sorted({o for offsets in kind if (o := offsets[b]) is not None and o < r}):
            modulus = 1
            for prime in _prime_factors(r):
                modulus *= prime
                parts = _refine(parts, w, target, modulus, prime)
    start, step, end, origin = parts[parts[:, 0].argsort()].unbind(-1)
    runs = [
        _run(start, origin, length, w, r, offset, member, first_column)
        for member, offsets in enumerate(kind)
        for b, w, r in branches
        if (offset := offsets[b]) is not None and offset < r
    ]
    found = torch.stack(runs, dim=1) if runs else torch.zeros(len(start), 0, RUN, dtype=torch.int64)
    nonempty = found[..., 2] > 0
    rows, counts = torch.stack([start - first_row, step, _ceil_div(end - start, step)], dim=1), nonempty.sum(1)
    return RowGroups(rows[counts > 0], found[nonempty], counts[counts > 0])


def _refine(parts: Tensor, w: int, offset: int, modulus: int, prime: int) -> Tensor:
    """Split parts, by residues of `modulus`, of which a branch may select some rows only."""
    start, step, end, origin = parts.unbind(-1)
    target = origin // w * w + offset
    common = torch.gcd(step, torch.full_like(step, modulus))
    count = _ceil_div(end - start, step)
    mixed = ((start - target) % common == 0) & (step % modulus != 0) & (count > 1)
    pieces = torch.where(mixed, count.clamp(max=prime), 1)
    part = torch.arange(len(pieces)).repeat_interleave(pieces)
    index = torch.arange(len(part)) - (pieces.cumsum(0) - pieces)[part]
    finer = torch.where(mixed, step * prime, step)
    return torch.stack([start[part] + index * step[part], finer[part], end[part], origin[part]], dim=1)


def _run(
    start: Tensor, origin: Tensor, length: int, w: int, r: int, offset: int, member: int, first_column: int
) -> Tensor:
    """The run of a branch in each part's segment, [parts, 4]; count 0 where the branch does not select the part."""
    segment, rate = origin // w * w, torch.full_like(start, r)
    selected = (start - segment) % r == offset
    first = segment + offset
    first = first + _ceil_div((first_column - first).clamp(min=0), rate) * r
    count = _ceil_div((segment + w).clamp(max=length) - first, rate).clamp(min=0)
    head = torch.full_like(start, member)
    return torch.stack([first - first_column, rate, torch.where(selected, count, 0), head], dim=1)


def _ceil_div(a: Tensor, b: Tensor) -> Tensor:
    return (a + b - 1) // b


def _prime_factors(number: int) -> list[int]:
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found + [number] * (number > 1)
