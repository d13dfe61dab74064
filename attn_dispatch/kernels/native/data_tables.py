"""Tables for attention.cpp of masks made of data: `Ranges` and `Blocks`. What no lane of a tile sees is not listed.

A tile is `TILE` consecutive queries. Where many keys in a row are seen by the same lanes they are a run with a bit mask
of these lanes; the few keys between, at the edges of intervals, are listed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Passes
from attn_dispatch.kernels.contract import Result
from attn_dispatch.kernels.native import run
from attn_dispatch.kernels.native.tables import TILE, VECTORS, NativeTables, group_of_vectors, runs_of
from attn_dispatch.kernels.progressions import OPEN
from attn_dispatch.spec.data import Blocks, BlocksForm, DataPattern, Ranges, RangesForm, derived
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band
from attn_dispatch.spec.tracing import make_plain

LONG = 24  #: keys in a row from which a run of their own is faster than a list
FEW = 16  #: queries of a tile up to which the kernel takes no listed keys, FEW in attention/vectors.h
AT_A_TIME = 192  #: keys, KEYS in attention/vectors.h: as many listed keys are computed at once
MOST_LISTED = 2**22  #: keys of blocks
LISTED_BYTES = 120  #: of a listed key, while the tables are made
COSTS = {TILE: 1.0, TILE // 2: 1.25, TILE // 4: 1.5}  #: of a query and key, by queries of a tile: a vector at least
AT_ONCE = 2**25  #: entries of a temporary table

#: Runs by columns: the tile among those of all tables, first key, number of keys, bounds, lanes.
Runs = tuple[Tensor, ...]


class Sizes(NamedTuple):
    """What tables depend on besides the data; `packed_heads` share a tile, query by query."""

    q_len: int
    k_len: int
    heads: int
    packed_heads: int
    tile: int = TILE  #: queries


def _tables(pattern: DataPattern, row: int, sizes: Sizes) -> NativeTables:
    if isinstance(pattern, Ranges):
        return _of_intervals([pattern.data[:, row]], sizes)
    assert isinstance(pattern, Blocks)
    bands = pattern.within.bands(sizes.q_len, sizes.k_len, ())
    assert bands is not None  # see `refused_within`
    counts = pattern.block_counts(sizes.k_len)[row]
    if sizes.packed_heads == 1:
        sizes = sizes._replace(tile=_tile_of(counts, pattern.size[0], sizes.q_len))
    tables = min(len(counts), sizes.heads // sizes.packed_heads)
    return _joined(*_of_blocks(counts, pattern.size, sizes, bands), tables, sizes)


def interval_tables(intervals: Sequence[Tensor], k_len: int, heads: int) -> NativeTables:
    """The tables of intervals of keys [2, intervals, q_len]: for all heads, or for equal runs of heads."""
    return _of_intervals(intervals, Sizes(intervals[0].shape[2], k_len, heads, 1))


def _of_intervals(intervals: Sequence[Tensor], sizes: Sizes) -> NativeTables:
    parts, tiles = list[list[Runs]](), -(-sizes.q_len // TILE)
    for number, each in enumerate(intervals):
        parts.append([(tile + number * tiles, *rest) for tile, *rest in _of_ranges(each, sizes)])
    runs, listed = (tuple(map(torch.cat, zip(*some))) for some in zip(*parts))
    return _joined(runs, listed, len(intervals), sizes)


class Prepared(NamedTuple):
    """What a call needs besides its tensors: a problem of each row with its own tables, or of all rows."""

    problem: Problem
    rows: tuple[run.ForwardArguments, ...]


def _prepared(problem: Problem, data: Tensor, threads: int) -> Prepared:
    pattern = problem.pattern.bound(data)
    assert isinstance(pattern, DataPattern)
    rows = pattern.data.shape[1 if isinstance(pattern, Ranges) else 0]
    if rows > 1:
        problem = replace(problem, batch=1, bias=(1, *problem.bias[1:]) if problem.bias else ())
    return Prepared(problem, tuple(_arguments(pattern, problem, row, threads) for row in range(rows)))


def _arguments(pattern: DataPattern, problem: Problem, row: int, threads: int) -> run.ForwardArguments:
    packed_heads = problem.heads // problem.kv_heads if run.packs_heads(problem) and not problem.needs_grad else 1
    sizes = Sizes(problem.q_len, problem.k_len, problem.heads, packed_heads)
    tables = derived(pattern.data, ("native tables", row, sizes), lambda: _tables(pattern, row, sizes))
    if tables.listed is not None:
        return run.arguments_in_units(problem, tables, run.WorkUnits(1, 1, 1, 0), threads)
    keys = torch.zeros(len(tables.tiles), dtype=torch.int64)
    keys.index_add_(0, torch.repeat_interleave(tables.tiles[:, 4]), tables.runs[:, 2])
    units = run.units_of(problem, tables, packed_heads, int(keys.max()), threads)
    return run.arguments_in_units(problem, tables, units, threads)


def specialized(problem: Problem, data: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Result] | None:
    """A forward pass of q, k and v like these, as `run.specialized` makes; None for tables by row too."""
    threads = torch.get_num_threads()
    like = tuple((type(x), x.stride(), x.is_neg()) for x in (q, k, v))

    def made() -> Callable[..., Result] | None:
        _, rows = _once(problem, data, threads)
        return run.forward_with(rows[0], problem, q, k, v) if len(rows) == 1 else None

    return derived(data, ("native call", problem, threads, like), made)


def _once(problem: Problem, data: Tensor, threads: int) -> Prepared:
    return derived(data, ("native", problem, threads), lambda: make_plain(_prepared, problem, data, threads))


def passes_of(
    problem: Problem,
    data: Tensor,
    seen: Tensor | None,
    seq_lens: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    seed: int,
) -> Passes:
    """The passes of a problem, with tables for each row of the batch where the pattern has tensors by row."""
    inner, rows = _once(problem, data, torch.get_num_threads())
    if len(rows) == 1:
        return run.NativePasses(inner, rows[0].tables, seen, seq_lens, bias, slopes, made=rows[0], seed=seed)
    found = list[run.NativePasses]()
    for row, made in enumerate(rows):
        own_seen, own_lens = (None if x is None else x[row : row + 1] for x in (seen, seq_lens))
        own_bias = bias if bias is None or len(bias) == 1 else bias[row : row + 1]
        own_slopes = slopes if slopes is None or slopes.ndim == 1 else slopes[row : row + 1]
        of_row = inner, made.tables, own_seen, own_lens, own_bias, own_slopes
        found.append(run.NativePasses(*of_row, made=made, seed=seed, first_row=row))
    return ByRow(tuple(found), problem.bias[:1] == (1,))


@dataclass(frozen=True, slots=True)
class ByRow:
    """The passes of each row of the batch; `shared`: whether they share a bias."""

    rows: tuple[Passes, ...]
    shared: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = [row.forward(*each) for row, *each in zip(self.rows, *(torch.split(x, 1) for x in (q, k, v)))]
        out, lse = map(torch.cat, zip(*found))
        return out, lse

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        grads = ([None] * len(self.rows) if x is None else torch.split(x, 1) for x in (grad, grad_lse))
        each = zip(self.rows, *grads, zip(*(torch.split(x, 1) for x in saved)))
        found = [torch.cat(x) for x in zip(*(row.backward(*rest) for row, *rest in each))]
        return (*found[:3], *(x.sum(0, keepdim=True) if self.shared else x for x in found[3:]))


def table_bytes(problem: Problem) -> int:
    """Upper bound of the bytes of the tables and of making them, without the data."""
    tiles = -(-problem.q_len // TILE)
    form = problem.pattern
    if isinstance(form, BlocksForm):
        tiles = tiles if form.size[0] % TILE == 0 else -(-problem.q_len // min(COSTS))
        tables = problem.heads if form.heads == "heads" else problem.kv_heads if form.heads == "kv_heads" else 1
        per_row = 24 * 8 * tables * tiles * -(-problem.k_len // form.size[1])
        per_row += LISTED_BYTES * min(MOST_LISTED, tables * tiles * problem.k_len) * (form.size[1] < AT_A_TIME)
    else:
        assert isinstance(form, RangesForm)
        # Edges of intervals, and in the worst case a list of all keys.
        per_row = form.intervals * tiles * (2 * TILE * TILE + 4 * 24 * min(problem.k_len, 2 * TILE * LONG))
    return per_row * (problem.batch if form.by_row else 1)


def refused_within(within: Pattern) -> bool:
    """Whether runs of keys cannot be cut by this pattern: it has segments, or a grid."""
    return bool(within.branches) or bool(within.axes)


def _joined(runs: Runs, listed: Runs, tables: int, sizes: Sizes) -> NativeTables:
    """The tables of runs with bounds, and of listed keys (tile, key, lanes, interval), which follow them in each tile.

    The kernel adds to several rows of dk at once: a listed run has no key twice.
    """
    tile, key, count, low, high, lanes = runs
    table = torch.stack([key, torch.ones_like(key), count, low, high], dim=1)
    keys = bits = None
    if len(listed[0]):
        at, keys, bits, interval = listed
        group, full = group_of_vectors(bits)
        kind = (at * (int(interval.max()) + 1) + interval) * (VECTORS + 1) ** 2 + group
        order = (2 * kind + full).argsort(stable=True)
        at, keys, bits, group, kind = (x[order] for x in (at, keys.to(torch.int32), bits, group, kind))
        start, of_lists = runs_of(kind, group)
        table = torch.cat([table, of_lists])
        tile, lanes = torch.cat([tile, at[start]]), torch.cat([lanes, torch.full_like(start, -1)])
        order = tile.argsort(stable=True)
        table, tile, lanes = table[order], tile[order], lanes[order]
    q_len, heads, packed_heads = sizes.q_len, sizes.heads, sizes.packed_heads
    each = -(-q_len // sizes.tile)
    used = q_len * packed_heads if packed_heads > 1 else sizes.tile
    # Lanes that no query has are set: the kernel asks whether all see a run.
    lanes = lanes | -1 << used if used < TILE else lanes
    number = torch.bincount(tile, minlength=tables * each)
    query = torch.arange(0, q_len, sizes.tile).repeat(tables)
    of_tile = [query, torch.ones_like(query), (q_len - query).clamp(max=sizes.tile), number.cumsum(0) - number, number]
    first_tile = torch.arange(tables + 1) * each
    head_class = torch.arange(heads) * tables // heads
    mask = None if bool((lanes == -1).all()) else lanes
    return NativeTables(torch.stack(of_tile, dim=1), table, first_tile, head_class, None, keys, bits, mask)


def _bit_sum(seen: Tensor, dim: int) -> Tensor:
    """Bool with an axis of lanes as bits."""
    shape = [1] * seen.ndim
    shape[dim] = -1
    return (seen.long() << torch.arange(seen.shape[dim]).view(shape)).sum(dim)


def _packed(lanes: Tensor, sizes: Sizes) -> Tensor:
    """The lanes of heads [.., 1 or packed_heads] as those of one tile, where those of a query are neighbours."""
    query, head = torch.arange(sizes.q_len)[:, None], torch.arange(sizes.packed_heads)
    return ((lanes[..., None, :] >> query & 1) << query * sizes.packed_heads + head).sum((-2, -1))


def _of_ranges(data: Tensor, sizes: Sizes) -> tuple[Runs, Runs]:
    """Runs and listed keys of the intervals [2, intervals, q_len]."""
    k_len = sizes.k_len
    first, stop = data[0].long().clamp(min=0), (data[1].long() + 1).clamp(max=k_len)
    none = first >= stop
    first, stop = first.masked_fill(none, 0), stop.masked_fill(none, 0)
    # The last query fills the last tile: its lanes are dropped.
    at = torch.arange(-(-first.shape[1] // TILE) * TILE).clamp(max=first.shape[1] - 1)
    runs, listed = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
    few = sizes.packed_heads > 1 or first.shape[1] % TILE in range(1, FEW + 1)
    short = (first.shape[1] - 1) // TILE if few else -1  # the last tile
    for interval, (begins, ends) in enumerate(zip(first[:, at], stop[:, at])):
        for tile, key, count, lanes in _stretches(begins.view(-1, TILE), ends.view(-1, TILE)):
            long = (count >= LONG) | (tile == short)
            runs.append((tile[long], key[long], count[long], lanes[long]))
            listed.append(_one_by_one(tile[~long], key[~long], count[~long], lanes[~long], interval))
    tile, key, count, lanes = (torch.cat(each) for each in zip(*runs))
    lanes = _packed(lanes[:, None], sizes) if sizes.packed_heads > 1 else lanes
    low, high = torch.full_like(key, -OPEN), torch.full_like(key, OPEN)
    order = tile.argsort(stable=True)
    found = tuple(x[order] for x in (tile, key, count, low, high, lanes))
    return found, tuple(torch.cat(each) for each in zip(*listed))


def _one_by_one(tile: Tensor, key: Tensor, count: Tensor, lanes: Tensor, interval: int) -> Runs:
    """The keys of runs, listed."""
    keys = torch.repeat_interleave(key - (count.cumsum(0) - count), count)
    keys = keys + torch.arange(len(keys))
    return tile.repeat_interleave(count), keys, lanes.repeat_interleave(count), torch.full_like(keys, interval)


def _stretches(begins: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Keys in a row that the same lanes see: tile, first key, number, lanes. Of intervals [tiles, TILE]."""
    step = max(1, AT_ONCE // (2 * TILE * TILE))
    for start in range(0, len(begins), step):
        low, high = begins[start : start + step], ends[start : start + step]
        edges = torch.cat([low, high], dim=1).sort(dim=1).values
        count, edge = edges.diff(dim=1), edges[:, :-1]
        tile, at = (count > 0).nonzero(as_tuple=True)
        key = edge[tile, at]
        lanes = _bit_sum((low[tile] <= key[:, None]) & (key[:, None] < high[tile]), 1)
        seen = lanes != 0
        yield tile[seen] + start, key[seen], count[tile, at][seen], lanes[seen]


def _tile_of(counts: Tensor, qb: int, q_len: int) -> int:
    """The fastest number of queries in a tile, which reads what any of them sees."""
    upto = torch.nn.functional.pad((counts > 0).int().cumsum(1), (0, 0, 1, 0))

    def cost(tile: int) -> float:
        first = torch.arange(0, q_len, tile)
        last = (first + tile - 1).clamp(max=q_len - 1)
        return COSTS[tile] * float((upto[:, last // qb + 1] > upto[:, first // qb]).float().mean())

    return min(COSTS, key=cost)


def _of_blocks(counts: Tensor, size: tuple[int, int], sizes: Sizes, bands: Sequence[Band]) -> tuple[Runs, Runs]:
    """Runs and listed keys of blocks seen `counts` [tables, q blocks, k blocks] times, each cut by these bands."""
    (qb, kb), (q_len, k_len, heads, packed_heads, size_of_tile) = size, sizes
    each = -(-q_len // size_of_tile)
    query = torch.arange(each * size_of_tile).clamp(max=q_len - 1).view(each, size_of_tile)
    block, found, listed = query // qb, list[tuple[Tensor, ...]](), list[Runs]()
    tiny = each - 1 if (q_len - 1) % size_of_tile < FEW else -1  # a last tile that takes no listed keys
    for times in range(1, int(counts.max()) + 1 if counts.numel() else 1):
        seen = counts >= times
        lanes = torch.zeros(len(counts), each, counts.shape[2], dtype=torch.int64)
        for n in range(int((block[:, -1] - block[:, 0]).max()) + 1):
            own = _bit_sum(block == block[:, :1] + n, 1)  # lanes of each tile's n-th block
            rows = (block[:, 0] + n).clamp(max=counts.shape[1] - 1)
            lanes |= torch.where(seen[:, rows], own[:, None], 0)
        if packed_heads > 1:
            lanes = lanes.view(-1, packed_heads if len(counts) == heads else 1, 1, lanes.shape[2])
            lanes = _packed(lanes.permute(0, 2, 3, 1), sizes)
        lanes = lanes.flatten(0, 1)
        changed = torch.ones_like(lanes, dtype=torch.bool)
        changed[:, 1:] = lanes[:, 1:] != lanes[:, :-1]
        tile, start = changed.nonzero(as_tuple=True)
        after = torch.where(tile.diff(append=tile.new_tensor([-1])) == 0, start.roll(-1), counts.shape[2])
        own = lanes[tile, start]
        some = own != 0
        tile, key, own = tile[some], start[some] * kb, own[some]
        stop = (after[some] * kb).clamp(max=k_len)
        for band in bands:
            end = stop if band.stop is None else stop.clamp(max=band.stop)
            there = end > key
            few = there & (end - key < AT_A_TIME) & (tile % each != tiny)
            lists = band.low is None and band.high is None and q_len > TILE and size_of_tile > FEW
            if lists and int((end - key)[few].sum()) <= MOST_LISTED:
                listed.append(_one_by_one(tile[few], key[few], (end - key)[few], own[few], len(listed)))
                there &= ~few
            low = torch.full_like(key, -OPEN if band.low is None else band.low)
            high = torch.full_like(key, OPEN if band.high is None else band.high)
            found.append(tuple(x[there] for x in (tile, key, end - key, low, high, own)))
    tile, *rest = (torch.cat(x) for x in zip(*found)) if found else torch.zeros(6, 0, dtype=torch.int64)
    order = tile.argsort(stable=True)
    keys = tuple(torch.cat(x) for x in zip(*listed)) if listed else tuple(torch.zeros(4, 0, dtype=torch.int64))
    return (tile[order], *(x[order] for x in rest)), keys
