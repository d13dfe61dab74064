"""Builds the native kernel's tables: tiles of queries in arithmetic progression with common runs of visible keys.

Inside one segment of every branch, queries whose distance is a common multiple of all rates are selected by the same
branches. Tiles of such queries waste no lane, and sum all their branches in one softmax.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.kernels.native.neighbours import neighbour_table_bytes, neighbour_tables
from attn_dispatch.kernels.native.tables import TILE, NativeTables
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band, Offsets
from attn_dispatch.spec.reordered import Reordered
from attn_dispatch.spec.tracing import make_plain

PERIOD_LIMIT = 64  #: least common multiple of the rates; above, tiles are mostly empty
ROW = 5  #: numbers in a row of a table
NEIGHBOURS = 2048  #: tokens
OPEN = 2**40  #: stands for no bound; larger than any distance of positions


def dilation_period(pattern: Pattern) -> int:
    """The least common multiple of all dilation rates, in tokens."""
    return math.lcm(*pattern.dilation_rates) if isinstance(pattern, Dilated) else 1


def neighborhood_and_order(pattern: Pattern) -> tuple[Neighborhood | None, str]:
    """The pattern if it is a neighbourhood, else None; and the order in which the caller stores the tokens."""
    if isinstance(pattern, Reordered) and isinstance(pattern.pattern, Neighborhood):
        return pattern.pattern, pattern.order
    return (pattern if isinstance(pattern, Neighborhood) else None), NATURAL


def native_table_bytes(problem: Problem, order: str = NATURAL) -> int:
    """Upper bound of the bytes of `native_tables` and of building it, without building it."""
    pattern, item = problem.pattern, ROW * 8
    grid, stored = neighborhood_and_order(pattern)
    if grid is not None:
        return neighbour_table_bytes(grid, problem.q_len, order if stored == NATURAL else stored)
    if not isinstance(pattern, Dilated):
        return 3 * item * -(-problem.q_len // TILE) * (1 + len(_bands(problem)))
    intervals = min(problem.q_len, sum(-(-problem.q_len // w) + 1 for w, _ in pattern.branches))
    rows = min(problem.q_len, intervals * dilation_period(pattern))
    tiles, runs = problem.q_len // TILE + rows, rows * len(pattern.branches)
    return 3 * item * (tiles + runs) * len(heads_by_kind(pattern, problem.heads))


def native_tables(problem: Problem, order: str = NATURAL) -> NativeTables:
    """The tables of a pattern, made once; neighbourhoods take any token order, other patterns the natural one."""
    return _made_once(problem, order)


@lru_cache(maxsize=64)
def _made_once(problem: Problem, order: str) -> NativeTables:
    return make_plain(_tables, problem, order)


@lru_cache(maxsize=64)
def document_tables(problem: Problem, lengths: tuple[int, ...]) -> tuple[NativeTables, ...]:
    """The tables of a row of documents, each with the problem's pattern; `lengths` are theirs in tokens, 1 or more.

    Neighbouring documents of up to `NEIGHBOURS` tokens share tables: the kernel takes one head after the other, and
    what it reads for one is nearby in memory for the next.
    """
    groups: list[list[int]] = [[0]]
    for end in accumulate(lengths):
        if len(groups[-1]) > 1 and end - groups[-1][0] > NEIGHBOURS:
            groups.append([groups[-1][-1]])
        groups[-1].append(end)
    return make_plain(lambda: tuple(_of_documents(problem, torch.tensor(each)) for each in groups))


def _of_documents(problem: Problem, borders: Tensor) -> NativeTables:
    if isinstance(problem.pattern, Dilated):
        return _dilated(problem.pattern, problem.heads, 0, borders)
    starts, each = borders[:-1], borders.diff()
    tiles = _cut(starts, each, 1, torch.zeros_like(starts), torch.zeros_like(starts))
    row = torch.repeat_interleave(torch.arange(len(starts)), (each + TILE - 1) // TILE)
    return _banded(problem, tiles[:, 0], tiles[:, 2], starts[row], borders[1:][row])


def _tables(problem: Problem, order: str) -> NativeTables:
    pattern = problem.pattern
    grid, stored = neighborhood_and_order(pattern)
    if grid is not None:
        return neighbour_tables(grid, problem.q_len, problem.heads, order if stored == NATURAL else stored, stored)
    if isinstance(pattern, Dilated):
        return _dilated(pattern, problem.heads, problem.k_len - problem.q_len, torch.tensor([0, problem.k_len]))
    first = torch.arange(0, problem.q_len, TILE)
    count = (problem.q_len - first).clamp(max=TILE)
    return _banded(problem, first, count, torch.zeros_like(first), torch.full_like(first, problem.k_len))


def _banded(problem: Problem, first: Tensor, count: Tensor, start: Tensor, end: Tensor) -> NativeTables:
    """Of a pattern without segments: tiles of `count` queries from `first` on, whose keys lie in `start` to `end`."""
    one, number, bands = torch.ones_like(first), torch.arange(len(first)), _bands(problem)
    runs = []
    for band in bands:
        lo = -OPEN if band.low is None else band.low
        hi = OPEN if band.high is None else band.high
        stop = end if band.stop is None else end.minimum(start + band.stop)
        begin = (first + lo).maximum(start).minimum(stop)
        beyond = (first + count + hi).maximum(start).minimum(stop)
        runs.append(torch.stack([begin, one, (beyond - begin).clamp(min=0), one * lo, one * hi], dim=1))
    tiles = torch.stack([first, one, count, number * len(bands), one * len(bands)], dim=1)
    by_tile = torch.stack(runs, dim=1).flatten(0, 1)
    return NativeTables(tiles, by_tile, torch.tensor([0, len(first)]), torch.zeros(problem.heads, dtype=torch.int64))


def _bands(problem: Problem) -> tuple[Band, ...]:
    """The bands of a pattern without segments."""
    bands = problem.pattern.bands(problem.q_len, problem.k_len, ())
    assert bands
    return bands


def _dilated(pattern: Dilated, heads: int, ahead: int, borders: Tensor) -> NativeTables:
    """Of documents that begin and end at `borders`; the queries are the tokens from `ahead` on."""
    head_class = torch.zeros(heads, dtype=torch.int64)
    tiles: list[Tensor] = []
    runs: list[Tensor] = []
    first_tile = [0]
    for number, ((offsets,), members) in enumerate(heads_by_kind(pattern, heads).items()):
        head_class[members] = number
        some_tiles, some_runs = _class_tiles(pattern, offsets, ahead, borders)
        some_tiles[:, 3] += sum(len(before) for before in runs)
        tiles.append(some_tiles)
        runs.append(some_runs)
        first_tile.append(first_tile[-1] + len(some_tiles))
    return NativeTables(torch.cat(tiles), torch.cat(runs), torch.tensor(first_tile), head_class)


@lru_cache(maxsize=64)
def few_query_tables(problem: Problem) -> NativeTables:
    """The native tables with one tile for all queries of the heads that share keys, whose lanes may see different runs.

    Of few queries (`group * q_len` at most the lanes of a tile), which read each key once. Forward pass only.
    """
    tables = native_tables(problem)
    return make_plain(_packed, tables, problem) if isinstance(problem.pattern, Dilated) else tables


def _packed(tables: NativeTables, problem: Problem) -> NativeTables:
    group = problem.heads // problem.kv_heads
    seen: list[dict[tuple[int, ...], int]] = []  # by class: the lanes of one head that see a run, as bits
    for first, last in zip(tables.first_tile[:-1].tolist(), tables.first_tile[1:].tolist()):
        lanes: dict[tuple[int, ...], int] = {}
        for query, step, count, run, number in tables.tiles[first:last].tolist():
            bits = sum(1 << (query + i * step) * group for i in range(count))
            alike: Counter[tuple[int, ...]] = Counter()  # branches may have the same keys: each counts
            for each in map(tuple, tables.runs[run : run + number].tolist()):
                alike[each] += 1
                lanes[*each, alike[each]] = lanes.get((*each, alike[each]), 0) | bits
        seen.append(lanes)
    tiles: list[list[int]] = []
    runs: list[tuple[int, ...]] = []
    run_lanes: list[int] = []
    of_group: list[int] = []
    kinds: dict[tuple[int, ...], int] = {}
    for heads in map(tuple, tables.head_class.view(-1, group).tolist()):
        of_group.append(kinds.setdefault(heads, len(kinds)))
        if of_group[-1] < len(tiles):
            continue
        together: dict[tuple[int, ...], int] = {}
        for number, kind in enumerate(heads):
            for each, bits in seen[kind].items():
                together[each] = together.get(each, 0) | bits << number
        tiles.append([0, 1, problem.q_len, len(runs), len(together)])
        runs += [each[:ROW] for each in together]
        run_lanes += together.values()
    head_class = torch.tensor(of_group).repeat_interleave(group)
    table, masks = torch.tensor(runs, dtype=torch.int64).view(-1, ROW), torch.tensor(run_lanes, dtype=torch.int64)
    return NativeTables(torch.tensor(tiles), table, torch.arange(len(tiles) + 1), head_class, run_lanes=masks)


def _class_tiles(pattern: Dilated, offsets: Offsets, ahead: int, borders: Tensor) -> tuple[Tensor, Tensor]:
    """The tiles and runs of the heads with these offsets, of documents that begin and end at `borders`.

    The queries are the tokens from `ahead` on.
    """
    step = dilation_period(pattern)
    begin = borders[:1] + ahead
    starts = torch.cat([begin, *(_segment_starts(borders, w) for w, _ in pattern.branches)])
    starts = torch.unique(starts[starts >= begin])
    ends = torch.cat([starts[1:], borders[-1:]])
    # One row of queries per residue in each interval between segment borders.
    residues = min(step, int((ends - starts).max()))
    first = (starts[:, None] + torch.arange(residues)).flatten()
    end = ends.repeat_interleave(residues)
    first, end = first[first < end], end[first < end]
    document = torch.searchsorted(borders, first, right=True)
    base, limit = borders[document - 1], borders[document]
    found = []
    for (w, r), offset in zip(pattern.branches, offsets):
        begin = base + (first - base) // w * w
        length = (begin + w).minimum(limit) - begin
        if offset is None:
            selected = torch.zeros_like(first, dtype=torch.bool)
            offset = 0
        else:
            selected = (first - begin) % r == offset
        found.append((selected, begin + offset, (length - offset + r - 1) // r, r))
    selected = torch.stack([one for one, _, _, _ in found], dim=1)
    keys = torch.stack([torch.stack([k, torch.full_like(k, r), n], dim=1) for _, k, n, r in found], dim=1)
    runs = keys[selected]
    hi = ahead if pattern.is_causal else OPEN
    runs = torch.cat([runs, torch.tensor([[-OPEN, hi]]).expand(len(runs), 2)], dim=1)
    number = selected.sum(dim=1)
    first_run = number.cumsum(0) - number
    return _cut(first - ahead, (end - first + step - 1) // step, step, first_run, number), runs


def _segment_starts(borders: Tensor, length: int) -> Tensor:
    """Where segments of this length start, in documents that begin and end at `borders`."""
    segments = (borders.diff() + length - 1) // length
    document = torch.repeat_interleave(torch.arange(len(segments)), segments)
    return borders[document] + (torch.arange(len(document)) - (segments.cumsum(0) - segments)[document]) * length


def _cut(first: Tensor, count: Tensor, step: int, first_run: Tensor, runs: Tensor) -> Tensor:
    """`tiles` of the tables: rows of queries cut into tiles."""
    pieces = (count + TILE - 1) // TILE
    row = torch.repeat_interleave(torch.arange(len(first)), pieces)
    before = (torch.arange(len(row)) - (pieces.cumsum(0) - pieces)[row]) * TILE
    size = (count[row] - before).clamp(max=TILE)
    return torch.stack([first[row] + before * step, torch.full_like(row, step), size, first_run[row], runs[row]], dim=1)
