"""Builds the native kernel's tables: tiles of queries in arithmetic progression with common runs of visible keys.

A tile is a part of a row group (see `progressions`): it wastes no lane, and sums all its branches in one softmax.
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
from attn_dispatch.kernels.progressions import OPEN, most_row_groups, row_groups
from attn_dispatch.spec.orders import NATURAL, Reordered
from attn_dispatch.spec.pattern import Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band
from attn_dispatch.spec.tracing import make_plain

PERIOD_LIMIT = 64  #: least common multiple of the rates; above, tiles are mostly empty
ROW = 5  #: numbers in a row of a table
NEIGHBOURS = 2048  #: tokens


def dilation_period(pattern: Pattern) -> int:
    """The least common multiple of all dilation rates, in tokens."""
    return math.lcm(*(rate for _, rate in pattern.branches))


def neighborhood_and_order(pattern: Pattern) -> tuple[Neighborhood | None, str]:
    """The pattern if it is a neighbourhood, else None; and the order in which the caller stores the tokens."""
    if isinstance(pattern, Reordered) and isinstance(pattern.pattern, Neighborhood):
        return pattern.pattern, pattern.order
    return (pattern if isinstance(pattern, Neighborhood) else None), NATURAL


def native_table_bytes(problem: Problem, order: str = NATURAL) -> int:
    """Upper bound of the bytes of `native_tables` and of building it, without building it."""
    grid, stored = neighborhood_and_order(problem.pattern)
    if grid is not None:
        return neighbour_table_bytes(grid, problem.q_len, order if stored == NATURAL else stored)
    rows = 0
    for bands, _ in _bands_by_heads(problem):
        groups = most_row_groups(bands, problem.q_len)
        rows += problem.q_len // TILE + groups * (1 + len(bands))
    return 3 * ROW * 8 * rows


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
    return make_plain(lambda: tuple(_in_steps(problem, torch.tensor(each)) for each in groups))


def _tables(problem: Problem, order: str) -> NativeTables:
    grid, stored = neighborhood_and_order(problem.pattern)
    if grid is not None:
        return neighbour_tables(grid, problem.q_len, problem.heads, order if stored == NATURAL else stored, stored)
    ahead = problem.k_len - problem.q_len
    return _in_steps(problem, torch.tensor([0, problem.k_len]), ahead)


def _in_steps(problem: Problem, borders: Tensor, ahead: int = 0) -> NativeTables:
    """Of documents that begin and end at `borders`; the queries are the tokens from `ahead` on."""
    head_class = torch.zeros(problem.heads, dtype=torch.int64)
    tiles: list[Tensor] = []
    runs: list[Tensor] = []
    first_tile = [0]
    for number, (bands, members) in enumerate(_bands_by_heads(problem)):
        head_class[members] = number
        groups = row_groups(bands, borders, ahead)
        table = groups.tiles(TILE, sum(len(before) for before in runs))
        table[:, 4] -= table[:, 3]
        tiles.append(table)
        sides = ((-OPEN if each.low is None else each.low, OPEN if each.high is None else each.high) for each in bands)
        runs.append(torch.cat([groups.runs[:, :3], torch.tensor([*sides])[groups.runs[:, 3]]], dim=1))
        first_tile.append(first_tile[-1] + len(table))
    return NativeTables(torch.cat(tiles), torch.cat(runs), torch.tensor(first_tile), head_class)


def _bands_by_heads(problem: Problem) -> list[tuple[tuple[Band, ...], list[int]]]:
    """The bands of each class of heads, and the heads."""
    kinds = heads_by_kind(problem.pattern, problem.heads).items()
    found = ((problem.pattern.bands(problem.q_len, problem.k_len, offsets), members) for (offsets,), members in kinds)
    return [(bands or (), members) for bands, members in found]


@lru_cache(maxsize=64)
def few_query_tables(problem: Problem) -> NativeTables:
    """The native tables with one tile for all queries of the heads that share keys, whose lanes may see different runs.

    Of few queries (`group * q_len` at most the lanes of a tile), which read each key once. Forward pass only.
    """
    tables = native_tables(problem)
    return tables if tables.order is not None or len(tables.tiles) == 1 else make_plain(_packed, tables, problem)


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
