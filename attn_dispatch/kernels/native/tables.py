"""Builds the tables that attention.cpp reads: tiles of queries with common runs of visible keys.

A tile is a part of a row group (see `progressions`): it wastes no lane, and sums all its branches in one softmax. Of a
neighbourhood, tiles are queries consecutive in a token order, each with a list of visible keys: by position, each with
a bit mask of the queries that see it, the bitwise AND of one mask per axis. Keys visible to the same vectors of queries
are consecutive, so that the kernel skips the other vectors, and among them those that all these queries see.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.kernels.progressions import OPEN, RowGroups, most_row_groups, row_groups, tiled
from attn_dispatch.spec.orders import NATURAL, permutation, permutation_of_queries, places, token_order_of
from attn_dispatch.spec.pattern import Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band
from attn_dispatch.spec.tracing import make_plain

TILE = 64  #: queries per tile, T in attention.cpp
PERIOD_LIMIT = 64  #: least common multiple of the rates; above, tiles are mostly empty
ROW = 5  #: numbers in a row of a table
NEIGHBOURS = 2048  #: tokens
VECTOR = 16  #: queries that the kernel skips together
VECTORS = TILE // VECTOR
GROUPS = (VECTORS + 1) ** 2
NO_ROW = -1  #: marks keys that the tensors do not hold
CHUNK_BYTES = 2**25  #: of one temporary table
CHUNK_TEMPORARIES = 16  #: temporary tables of a chunk
KEY_BYTES = 28  #: of a listed key: position and bits, and while building its tile and group
COPIES = 4  #: of the lists, in which a key may be twice: in chunks, and concatenated


@dataclass(frozen=True, slots=True)
class NativeTables:
    """Tables for attention.cpp, int64 except where noted.

    Args:
        tiles: [tiles, 5]: first query, step, count, first run, number of runs. With step 0 the first query is an index
            into `order`, and the runs are listed.
        runs: [runs, 5]: first key, step, count, and the bounds `lo <= key - query <= hi` of visible keys. A listed run
            has: first index into `listed`, step 0, count, and the lanes [lo, hi) that see any of its keys.
        first_tile: [classes + 1]: the first tile of each class of heads.
        head_class: [heads]: the class of each head.
        order: int32 [q_len], the row of each query in tile order; None where tiles have steps.
        listed: int32, rows of keys; None where tiles have steps.
        lanes: int64, per listed key a bit for each query of the tile that sees it; None where tiles have steps.
        run_lanes: [runs], a bit for each lane of the tile that sees a run's keys; None where all do within its bounds.
            Lanes are queries, by heads that share keys: those of a query are neighbours.
    """

    tiles: Tensor
    runs: Tensor
    first_tile: Tensor
    head_class: Tensor
    order: Tensor | None = None
    listed: Tensor | None = None
    lanes: Tensor | None = None
    run_lanes: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        tables = (getattr(self, name) for name in self.__dataclass_fields__)
        return sum(0 if x is None else x.nbytes for x in tables)


def dilation_period(pattern: Pattern) -> int:
    """The least common multiple of all dilation rates, in tokens."""
    return math.lcm(*(rate for _, rate in pattern.branches))


def neighborhood_and_order(pattern: Pattern) -> tuple[Neighborhood | None, str]:
    """The pattern if it is a neighbourhood, else None; and the order in which the caller stores the tokens."""
    natural = pattern.natural
    return (natural, token_order_of(pattern)) if isinstance(natural, Neighborhood) else (None, NATURAL)


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
    return _in_steps(problem, torch.tensor([min(0, ahead), problem.k_len]), ahead)


def _in_steps(problem: Problem, borders: Tensor, ahead: int = 0) -> NativeTables:
    """The tables of documents that begin and end at `borders`; the queries are the tokens from `ahead` on."""
    head_class = torch.zeros(problem.heads, dtype=torch.int64)
    found: list[RowGroups] = []
    for number, (bands, members) in enumerate(_bands_by_heads(problem)):
        head_class[members] = number
        groups = row_groups(bands, borders, ahead)
        sides = ((-OPEN if each.low is None else each.low, OPEN if each.high is None else each.high) for each in bands)
        runs = torch.cat([groups.runs[:, :3], torch.tensor([*sides])[groups.runs[:, 3]]], dim=1)
        found.append(groups._replace(runs=runs))
    tiles, runs, first_tile = tiled(found, TILE)
    tiles[:, 4] -= tiles[:, 3]
    return NativeTables(tiles, runs, first_tile, head_class)


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


# --- neighbourhoods -------------------------------------------------------------------------------------------


def neighbour_tables(pattern: Neighborhood, q_len: int, heads: int, order: str, stored: str = NATURAL) -> NativeTables:
    """The tables of a neighbourhood with tiles of queries consecutive in `order`.

    Args:
        q_len: number of queries, the last tokens of the grid.
        stored: the order in which the caller stores the tokens; the tables refer to rows of the tensors.
    """
    length = math.prod(pattern.grid)
    queries = _queries(pattern, q_len, order)
    at = permutation(stored, pattern, length)
    rows = None if at is None else places(at)
    return _listed(pattern, heads, queries + (length - q_len), queries if rows is None else rows[queries], rows)


def neighbour_tables_at(pattern: Neighborhood, heads: int, queries: Tensor, keys: Tensor) -> NativeTables:
    """The tables of some queries and keys of a grid, for tensors that hold only these rows.

    Args:
        queries, keys: int64, the position of each row; tiles are consecutive queries.
    """
    rows = torch.full((math.prod(pattern.grid),), NO_ROW).index_copy_(0, keys, torch.arange(len(keys)))
    return _listed(pattern, heads, queries, torch.arange(len(queries)), rows)


def _listed(pattern: Neighborhood, heads: int, positions: Tensor, order: Tensor, rows: Tensor | None) -> NativeTables:
    """The tables of queries at these positions.

    Args:
        order: the row of each query.
        rows: the row of the key at each position; None: equal to the position.
    """
    length, queries = len(positions), _tiled(positions)
    in_range = (torch.arange(queries.numel()) < length).view_as(queries)
    keys, bits, tile, group = (torch.cat(each) for each in zip(*_chunks(pattern, queries, in_range, rows)))
    tiles, runs = _runs(tile, group, length)
    first_tile, head_class = torch.tensor([0, len(tiles)]), torch.zeros(heads, dtype=torch.int64)
    return NativeTables(tiles, runs, first_tile, head_class, order.to(torch.int32), keys, bits)


def _queries(pattern: Neighborhood, q_len: int, order: str) -> Tensor:
    found = permutation_of_queries(order, pattern, q_len, math.prod(pattern.grid))
    return torch.arange(q_len) if found is None else found


@lru_cache(maxsize=256)
def neighbour_table_bytes(pattern: Neighborhood, q_len: int, order: str) -> int:
    """Upper bound of the bytes of the tables and of building them, without building them."""
    tiles = _tiled(_queries(pattern, q_len, order) + (math.prod(pattern.grid) - q_len))
    boxes = _boxes(_bounds(pattern, tiles))
    chunk = min(_chunk_tiles(boxes), len(tiles)) * _tile_bytes(boxes)
    return (int(boxes.prod(1).sum()) + q_len) * KEY_BYTES * COPIES + CHUNK_TEMPORARIES * chunk


def _tiled(positions: Tensor) -> Tensor:
    """Positions as [tiles, TILE]; the last position is repeated to fill the last tile."""
    number = -(-len(positions) // TILE)
    return positions[torch.arange(number * TILE).clamp(max=len(positions) - 1)].view(number, TILE)


def _coordinates(pattern: Neighborhood, positions: Tensor) -> list[Tensor]:
    """The coordinates of positions, by axis."""
    strides = [math.prod(pattern.grid[axis + 1 :]) for axis in range(len(pattern.grid))]
    return [positions // stride % size for stride, size in zip(strides, pattern.grid)]


def _bounds(pattern: Neighborhood, queries: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per axis, the first and last coordinate that a query of each tile could see."""
    found = []
    for axis, x in zip(pattern.axes, _coordinates(pattern, queries)):
        back, front = (side * axis.dilation for side in axis.sides)
        found.append(((x.amin(1) - back).clamp(min=0), (x.amax(1) + front).clamp(max=axis.size - 1)))
    return found


def _boxes(bounds: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[tiles, axes]: the number of coordinates within the bounds."""
    return torch.stack([high - low + 1 for low, high in bounds], dim=1)


def _tile_bytes(boxes: Tensor) -> int:
    """Bytes of one tile in a temporary table, at most."""
    return 8 * int(boxes.prod(1).max()) + 8 * TILE * int(boxes.max())


def _chunk_tiles(boxes: Tensor) -> int:
    return max(1, CHUNK_BYTES // _tile_bytes(boxes))


def _chunks(
    pattern: Neighborhood, queries: Tensor, in_range: Tensor, rows: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For some tiles at a time: the row, bits, tile and group of vectors of each visible key."""
    bounds = _bounds(pattern, queries)
    step = _chunk_tiles(_boxes(bounds))
    for first in range(0, len(queries), step):
        some = slice(first, first + step)
        masks, coordinates = [], []
        for axis, x, (low, high) in zip(pattern.axes, _coordinates(pattern, queries[some]), bounds):
            y = low[some, None] + torch.arange(int((high - low)[some].max()) + 1)
            near = axis.sees(x[:, :, None], y[:, None, :]) & (y <= high[some, None])[:, None, :]
            masks.append(_bits_of(near & in_range[some, :, None]))
            coordinates.append(y)
        tile, key, bits = _adjacent(*_product(pattern, masks, coordinates))
        if rows is not None:
            key = rows[key]
            tile, key, bits = (x[key != NO_ROW] for x in (tile, key, bits))
        group, full = group_of_vectors(bits)
        by_group = ((tile * GROUPS + group) * 2 + full).argsort(stable=True)
        yield key[by_group].to(torch.int32), bits[by_group], tile[by_group] + first, group[by_group]


def _bits_of(near: Tensor) -> Tensor:
    """Bool [tiles, queries, coordinates] packed into bits, int64 [tiles, coordinates]."""
    bits = torch.zeros(near.shape[0], near.shape[2], dtype=torch.int64)
    for lane in range(TILE):
        bits |= near[:, lane].long() << lane
    return bits


def _product(pattern: Neighborhood, masks: list[Tensor], coordinates: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Tile, position and bits of every visible key."""
    seen = masks[0]
    for mask in masks[1:]:
        seen = (seen[:, :, None] & mask[:, None, :]).flatten(1)
    tile, place = seen.nonzero(as_tuple=True)
    key, rest = torch.zeros_like(place), place
    for axis in reversed(range(len(masks))):
        size = masks[axis].shape[1]
        key += coordinates[axis][tile, rest % size] * math.prod(pattern.grid[axis + 1 :])
        rest = rest // size
    return tile, key, seen[tile, place]


def _by_vector(bits: Tensor) -> Tensor:
    return torch.stack([bits >> (VECTOR * n) & (1 << VECTOR) - 1 for n in range(VECTORS)])


def _adjacent(tile: Tensor, key: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that vectors see which are not adjacent are listed twice: the vectors between would be computed in vain."""
    sees = _by_vector(bits) != 0
    after = (sees.long().diff(dim=0) == -1).cumsum(0)  # of each vector but the first: whether a gap lies before it
    later = (sees[1:] & (after > 0)).any(0)
    low = torch.full_like(bits, -1)
    for n in range(VECTORS - 1, 0, -1):
        low = torch.where(after[n - 1] > 0, (1 << VECTOR * n) - 1, low)  # the bits below the first gap
    twice = later.nonzero()[:, 0]
    rest = bits[twice] & ~low[twice]
    return torch.cat([tile, tile[twice]]), torch.cat([key, key[twice]]), torch.cat([bits & low, rest])


def group_of_vectors(bits: Tensor) -> tuple[Tensor, Tensor]:
    """One number per key for the first and last vector that see it; and whether all queries between do, 0 or 1."""
    by_vector = _by_vector(bits)
    sees, numbers = by_vector != 0, torch.arange(VECTORS)[:, None]
    first = torch.where(sees, numbers, VECTORS).amin(0)
    last = torch.where(sees, numbers, -1).amax(0)
    full = ((by_vector == (1 << VECTOR) - 1) == sees).all(0) & (sees.sum(0) == last - first + 1)
    return first * (VECTORS + 1) + last + 1, full.long()


def runs_of(kind: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Where runs of keys of one kind and group start, and `runs` of the tables for them."""
    count = torch.unique_consecutive(kind, return_counts=True)[1]
    start = count.cumsum(0) - count
    low, high = group[start] // (VECTORS + 1) * VECTOR, group[start] % (VECTORS + 1) * VECTOR
    return start, torch.stack([start, torch.zeros_like(start), count, low, high], dim=1)


def _runs(tile: Tensor, group: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """`tiles` and `runs` of the tables: a run is consecutive keys of one tile and group."""
    start, runs = runs_of(tile * (VECTORS + 1) ** 2 + group, group)
    first = torch.arange(0, length, TILE)
    run_counts = torch.bincount(tile[start], minlength=len(first))
    queries = (length - first).clamp(max=TILE)
    return torch.stack(
        [first, torch.zeros_like(first), queries, run_counts.cumsum(0) - run_counts, run_counts], dim=1
    ), runs
