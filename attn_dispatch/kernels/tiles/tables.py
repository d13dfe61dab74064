"""Finds the pairs of query and key tiles that hold visible keys, for any token order, and their masks.

By the normal form (see `spec.reach`) a tile has a bounding box in each branch; masks are computed only for pairs of
tiles whose boxes intersect. A tile may hold any tokens, so every order works.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels import device_cache
from attn_dispatch.kernels.heads import head_classes
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles.pairs import Branch, Pairs, TileBlocks, each_row, pair_counts, pairs_of
from attn_dispatch.spec.data import FAR, Blocks, Ranges
from attn_dispatch.spec.orders import NATURAL, permutation, permutation_of_queries, token_order_of
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Reach

FULL = 0  #: the mask of a pair in which every query sees every key once
MASK_BYTES = 2**25  #: of distinct masks, one byte per entry; a table with more computes them in every call
ENTRIES = 2**18  #: mask entries computed at once
MAX_BRANCHES = 255  #: a multiplicity must fit into a byte

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """The tile pairs with visible keys, for heads that see the same keys. A tile is consecutive places of an order.

    Args:
        heads: the query heads, an arithmetic progression.
        q_pos, k_pos: int64 [tiles, tile], the row in q, k and v of each place. A short last tile repeats its last
            row: a repeated query is computed twice, a repeated key is never visible.
        first: int64 [query tiles + 1], the first pair of each query tile.
        near: int64 [query tiles], the key tiles whose boxes meet those of each query tile: it has no more pairs.
        keys: int64 [pairs], the key tile of each pair, ascending within a query tile.
        mask: int64 [pairs], the index in `masks`; where `masks` is None, FULL or any other number.
        masks: [masks, tile, tile], how many times each query sees each key, uint8 or as `blocks`; `masks[FULL]` is all
            1. None where they would take more than MASK_BYTES.
        bias: log of `masks`, in the dtype of scores.
        covered: whether every query is known to see a key.
        branches, blocks: from which `pair_counts` computes masks.
    """

    heads: range
    q_pos: Tensor
    k_pos: Tensor
    first: Tensor
    near: Tensor
    keys: Tensor
    mask: Tensor
    masks: Tensor | None
    bias: Tensor | None
    covered: bool
    branches: tuple[Branch, ...]
    blocks: TileBlocks | None = None

    @property
    def tile(self) -> int:
        return self.q_pos.shape[1]

    @property
    def pairs(self) -> int:
        return len(self.keys)

    def queries(self) -> Tensor:
        """The query tile of each pair, int64 [pairs]."""
        return torch.arange(len(self.q_pos), device=self.first.device).repeat_interleave(self.first.diff())

    def counts(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The masks of these pairs."""
        return pair_counts(self.branches, queries, keys, self.blocks)

    def to(self, device: torch.device) -> TileTable:
        moved = {name: getattr(self, name).to(device) for name in ("q_pos", "k_pos", "keys", "mask")}
        masks = {name: x.to(device) for name in ("masks", "bias", "blocks") if (x := getattr(self, name)) is not None}
        return replace(self, **moved, **masks, branches=tuple(branch.to(device) for branch in self.branches))


def cached_with(table: TileTable, key: Hashable, make: Callable[[], T]) -> T:
    """What is made from a table, cached as long as the table exists where that saves the device a wait."""
    device = table.keys.device
    if device.type == "cpu" and device.type not in device_cache.DEVICES:
        return make()
    return device_cache.derived_on(device, table.keys, key, lambda _: make())


def _key(problem: Problem, order: str, tile: int) -> Hashable:
    shape = problem.pattern, problem.q_len, problem.k_len, problem.heads
    return *shape, order, tile, sum_dtype(problem.dtype), problem.device


def _tables(problem: Problem, order: str, tile: int) -> tuple[TileTable, ...]:
    dtype, found = sum_dtype(problem.dtype), _branches(problem, order, tile)
    return _placed((_table(members, branches, *rows, dtype) for members, branches, rows in found), problem.device)


def _placed(tables: Iterable[TileTable], device: torch.device) -> tuple[TileTable, ...]:
    return tuple(table if device.type == "cpu" else table.to(device) for table in tables)


def _branches(
    problem: Problem, order: str, tile: int
) -> Iterator[tuple[range, tuple[Branch, ...], tuple[Tensor, Tensor]]]:
    """The classes of heads, the branches of each by tiles, and the rows of tiles of queries and keys."""
    pattern, q_len, k_len = problem.pattern, problem.q_len, problem.k_len
    if permutation(token_order_of(pattern), pattern.natural, q_len) is not None:
        order = NATURAL  # tokens stored in another order are tiled as stored
    q_pos = k_pos = _tiled(permutation_of_queries(order, pattern.natural, q_len, k_len), q_len, tile)
    if q_len != k_len:
        k_pos = _tiled(permutation(order, pattern.natural, k_len), k_len, tile)
    for members, offsets in head_classes(pattern, problem.heads):
        reaches = pattern.reaches(torch.arange(q_len), torch.arange(k_len), q_len, k_len, offsets)
        yield members, tuple(Branch.of(reach, q_pos, k_pos, k_len) for reach in reaches), (q_pos, k_pos)


class Outline(NamedTuple):
    """What is known of the tables of all classes of heads before their masks are computed.

    Args:
        pairs: whose boxes meet. kinds: of these pairs, at least as many as there are masks.
        widest: the most key tiles of a query tile.
    """

    pairs: int
    kinds: int
    widest: int


def _outline(problem: Problem, order: str, tile: int) -> Outline:
    found = [pairs_of(branches) for _, branches, _ in _branches(problem, order, tile)]
    counts = [(len(x.queries), len(x.examples), int(x.queries.bincount(minlength=1).max())) for x in found]
    pairs, kinds, widest = zip(*counts)
    return Outline(sum(pairs), sum(kinds), max(widest))


#: The same, in a small part of the time.
outline_of = device_cache.DeviceCache(_outline, _key)

#: From a problem, order and tile a table for each class of heads, on the problem's device.
tables_of = device_cache.DeviceCache(_tables, _key)


def data_tables_of(problem: Problem, data: Tensor, tile: int) -> tuple[tuple[TileTable, ...], ...]:
    """The tables of a pattern's tensors for all rows of the batch or for each, kept as long as the tensors are.

    They are made on the CPU: of tensors on another device the first call waits for that.
    """

    def make(data: Tensor) -> tuple[tuple[TileTable, ...], ...]:
        return tuple(_placed(tables, problem.device) for tables in _data_tables(problem, data, tile))

    key = "tiles", tile, problem.q_len, problem.k_len, problem.heads, sum_dtype(problem.dtype)
    return device_cache.derived_on(problem.device, data, key, make)


def _data_tables(problem: Problem, data: Tensor, tile: int) -> tuple[tuple[TileTable, ...], ...]:
    pattern, dtype = problem.pattern.bound(data.cpu()), sum_dtype(problem.dtype)
    at = _tiled(None, problem.q_len, tile), _tiled(None, problem.k_len, tile)
    if isinstance(pattern, Ranges):
        return tuple((_table(range(problem.heads), each, *at, dtype),) for each in _of_ranges(pattern, *at, problem))
    assert isinstance(pattern, Blocks)
    return tuple(tuple(_of_blocks(row, pattern, *at, problem, dtype)) for row in pattern.block_counts(problem.k_len))


def _of_ranges(pattern: Ranges, q_pos: Tensor, k_pos: Tensor, problem: Problem) -> Iterator[tuple[Branch, ...]]:
    """The branches of each row of the batch."""
    keys = torch.arange(problem.k_len)
    first, last = pattern.data
    none = first.clamp(min=0) > last.clamp(max=problem.k_len - 1)
    first, last = first.masked_fill(none, FAR), last.masked_fill(none, -1)  # so that boxes are those of the others
    for row in zip(first, last):
        reaches = (Reach((low,), (high,), (keys,)) for low, high in zip(*row))
        yield tuple(Branch.of(reach, q_pos, k_pos, problem.k_len) for reach in reaches)


def _of_blocks(
    counts: Tensor, pattern: Blocks, q_pos: Tensor, k_pos: Tensor, problem: Problem, dtype: torch.dtype
) -> Iterator[TileTable]:
    """The tables of a row of the batch, of counts [tables, q blocks, k blocks]."""
    q_len, k_len, group = problem.q_len, problem.k_len, problem.heads // len(counts)
    blocks = q_pos // pattern.size[0], k_pos // pattern.size[1]
    for first, table in zip(range(0, problem.heads, group), counts):
        for own, offsets in head_classes(pattern.within, problem.heads, range(first, first + group)):
            reaches = pattern.within.reaches(torch.arange(q_len), torch.arange(k_len), q_len, k_len, offsets)
            branches = tuple(Branch.of(reach, q_pos, k_pos, k_len) for reach in reaches)
            fits = not table.numel() or int(table.max()) * len(branches) <= MAX_BRANCHES
            times = TileBlocks(table.to(torch.uint8 if fits else torch.int32), *blocks)
            yield _table(range(own.start + first, own.stop + first, own.step), branches, q_pos, k_pos, dtype, times)


def tables_at(
    pattern: Pattern,
    length: int,
    heads: int,
    which: range,
    queries: Tensor,
    keys: Tensor,
    tile: int,
    dtype: torch.dtype,
) -> tuple[TileTable, ...]:
    """The tables of some queries and keys of a sequence, for tensors that hold only these rows and heads.

    Args:
        length: tokens in the whole sequence.
        heads: number of all query heads; `which` are those in the tensors.
        queries, keys: int64, the place of each row in the sequence.
        dtype: of sums.

    Returns:
        A table for each class of heads; heads and places are those of the tensors.
    """
    rows, found = (_tiled(None, len(queries), tile), _tiled(None, len(keys), tile)), []
    for members, offsets in head_classes(pattern, heads, which):
        reaches = pattern.reaches(queries, keys, length, length, offsets)
        branches = tuple(Branch.of(reach, *rows, len(keys)) for reach in reaches)
        found.append(_table(members, branches, *rows, dtype))
    return tuple(found)


def _tiled(permuted: Tensor | None, length: int, tile: int) -> Tensor:
    """Places as [tiles, tile]; the last place is repeated to fill the last tile."""
    places = torch.arange(-(-length // tile) * tile).clamp_(max=length - 1)
    return (places if permuted is None else permuted[places]).view(-1, tile)


def _table(
    heads: range,
    branches: tuple[Branch, ...],
    q_pos: Tensor,
    k_pos: Tensor,
    dtype: torch.dtype,
    blocks: TileBlocks | None = None,
) -> TileTable:
    queries, keys, full, *_ = pairs = pairs_of(branches, blocks)
    near = torch.bincount(queries, minlength=len(q_pos))
    found = _masks(branches, blocks, pairs, q_pos.shape[1])
    masks, bias, mask, covered = None, None, torch.where(full, FULL, FULL + 1), False
    if found is not None:
        masks, mask = found
        queries, keys, mask = (x[mask >= 0] for x in (queries, keys, mask))
        sees, any_key = torch.zeros(q_pos.shape, dtype=torch.int32), masks.any(2).int()
        step = max(1, ENTRIES // q_pos.shape[1])
        for some, of in zip(torch.split(queries, step), torch.split(mask, step)):
            sees.index_add_(0, some, any_key[of])
        bias, covered = masks.to(dtype).log_(), bool(sees.all())
    first = torch.searchsorted(queries, torch.arange(len(q_pos) + 1))
    return TileTable(heads, q_pos, k_pos, first, near, keys, mask, masks, bias, covered, branches, blocks)


def _masks(
    branches: Sequence[Branch], blocks: TileBlocks | None, pairs: Pairs, tile: int
) -> tuple[Tensor, Tensor] | None:
    """The distinct masks, and the index of each pair's mask, -1 if no key is visible; None: over MASK_BYTES."""
    cells, dtype = tile**2, torch.uint8 if blocks is None else blocks.counts.dtype
    none, full = each_row(torch.tensor([[0], [1]], dtype=dtype).repeat(1, cells))
    known, found = {none: -1, full: FULL}, [FULL]
    for some in torch.split(pairs.examples, max(1, ENTRIES // cells)):
        counts = pair_counts(branches, pairs.queries[some], pairs.keys[some], blocks)
        found += [known.setdefault(each, len(known) - 1) for each in each_row(counts)]
        if (len(known) - 1) * len(full) > MASK_BYTES:
            return None
    del known[none]
    masks = torch.frombuffer(bytearray().join(known), dtype=dtype).view(-1, tile, tile)
    return masks, torch.tensor(found)[pairs.alike + 1]


# --- lists: the pairs as Triton kernels read them, all classes of heads together, by query and by key tile ------------

SPAN, PAIR = 3, 2  #: entries of a span, and of a pair
NEVER = (1, 0, 0)  #: first, last and at of a branch without visible keys
ALWAYS = (0, 0, 0)  #: first, last and at of an axis that hides no key


@dataclass(frozen=True, slots=True)
class PairLists:
    """The pairs of each query tile, or of each key tile.

    Args:
        spans: int32 [tables, tiles, SPAN]; a tile's first pair, its first FULL pair, and the end of its pairs.
        pairs: int32 [pairs, PAIR]; the tile on the other side, and the index of the mask.
    """

    spans: Tensor
    pairs: Tensor


@dataclass(frozen=True, slots=True)
class TileLists:
    """The tile pairs of one problem, on its device.

    Args:
        q_pos, k_pos: int32 [tiles * tile], as in `TileTable`.
        kind_of: int32 [heads], the table of each head; [batch * heads] where each row of the batch has its own.
        queries: the pairs of query tiles. keys: the pairs of key tiles; None where no gradient is needed.
        masks: [masks, tile, tile], how many times each query sees each key. None: too many, see `reach`.
        reach: int32 [tables, branches, axes, 2 * query places + key places], `first`, `last` and `at` of each branch,
            from which kernels compute the masks. None where `masks` holds them.
        counts, block_at: what they are multiplied by, or None: `TileBlocks.counts` of all tables, flat, and the entry
            there of each query and key, which is the sum of theirs, int64 [tables, query places + key places].
    """

    q_pos: Tensor
    k_pos: Tensor
    kind_of: Tensor
    queries: PairLists
    keys: PairLists | None
    masks: Tensor | None
    reach: Tensor | None
    counts: Tensor | None = None
    block_at: Tensor | None = None


def forget_lists(problem: Problem) -> None:
    """Free the lists of one problem, and the tables that they were made from."""
    tile_lists_of.forget(problem)
    tables_of.forget(_on_cpu(problem))


def _on_cpu(problem: Problem) -> Problem:
    return replace(problem, device=torch.device("cpu"))


def _lists(problem: Problem, order: str, tile: int) -> TileLists:
    return _of_tables(problem, (tables_of(_on_cpu(problem), order, tile),))


def data_lists_of(problem: Problem, data: Tensor, tile: int) -> TileLists:
    """As `data_tables_of`."""
    key = "lists", tile, problem.q_len, problem.k_len, problem.heads, problem.needs_grad

    def make(data: Tensor) -> TileLists:
        return _of_tables(problem, _data_tables(problem, data, tile))

    return device_cache.derived_on(problem.device, data, key, make)


def _of_tables(problem: Problem, by_row: Sequence[Sequence[TileTable]]) -> TileLists:
    tables = [table for row in by_row for table in row]
    device, table = problem.device, tables[0]
    kind_of = torch.empty(len(by_row), problem.heads, dtype=torch.int32)
    for kind, (row, each) in enumerate((row, each) for row, some in zip(kind_of, by_row) for each in some):
        row[each.heads.start : each.heads.stop : each.heads.step] = kind
    kept = [each.masks for each in tables if each.masks is not None]
    whole = len(kept) == len(tables)
    rows, columns = [each.queries() for each in tables], [each.keys for each in tables]
    which = _numbered(tables)
    queries = _side(rows, columns, which, len(table.q_pos), device)
    keys = _side(columns, rows, which, len(table.k_pos), device) if problem.needs_grad else None
    masks = torch.cat([kept[0], *(masks[1:] for masks in kept[1:])]).to(device) if whole else None
    reach = None if whole else _reach(tables).to(device)
    q_pos, k_pos = (x.flatten().int().to(device) for x in (table.q_pos, table.k_pos))
    factors = () if whole else (None if x is None else x.to(device) for x in _factors(tables))
    return TileLists(q_pos, k_pos, kind_of.flatten().to(device), queries, keys, masks, reach, *factors)


tile_lists_of = device_cache.DeviceCache(_lists)


def _numbered(tables: Sequence[TileTable]) -> list[Tensor]:
    """The mask index of each pair in the concatenated masks; all tables share the first mask, FULL."""
    found, before = [], 0
    for table in tables:
        found.append(torch.where(table.mask == FULL, FULL, table.mask + before))
        before += 0 if table.masks is None else len(table.masks) - 1
    return found


def _side(
    rows: Sequence[Tensor], columns: Sequence[Tensor], masks: Sequence[Tensor], tiles: int, device: torch.device
) -> PairLists:
    spans, pairs, before = [], [], 0
    for row, column, mask in zip(rows, columns, masks):
        key = 2 * row + (mask == FULL)
        order = key.argsort(stable=True)
        ends = pad(torch.bincount(key, minlength=2 * tiles).cumsum(0), (1, 0)) + before
        spans.append(torch.stack([ends[:-1:2], ends[1::2], ends[2::2]], dim=1))
        pairs.append(torch.stack([column[order], mask[order]], dim=1))
        before += len(row)
    return PairLists(torch.stack(spans).int().to(device), torch.cat(pairs).int().contiguous().to(device))


def _factors(tables: Sequence[TileTable]) -> tuple[Tensor | None, Tensor | None]:
    """`TileLists.counts` and `block_at`."""
    blocks = [table.blocks for table in tables if table.blocks is not None]
    at, before = [], 0
    for each in blocks:
        at.append(torch.cat([before + each.queries.flatten() * each.counts.shape[1], each.keys.flatten()]))
        before += each.counts.numel()
    return (torch.cat([each.counts.flatten() for each in blocks]), torch.stack(at)) if blocks else (None, None)


def _reach(tables: Sequence[TileTable]) -> Tensor:
    """`TileLists.reach`; tables with fewer branches are padded with branches without visible keys."""
    branches = max(len(table.branches) for table in tables)
    axes = max(len(branch.at) for table in tables for branch in table.branches)
    places = tables[0].q_pos.numel(), tables[0].q_pos.numel(), tables[0].k_pos.numel()
    empty, rest = (torch.cat([torch.full((n,), x) for n, x in zip(places, by)]) for by in (NEVER, ALWAYS))
    found = empty.int().repeat(len(tables), branches, axes, 1)
    for kind, table in enumerate(tables):
        for number, branch in enumerate(table.branches):
            found[kind, number] = rest
            parts = [x.flatten(1) for x in (branch.first, branch.last, branch.at)]
            found[kind, number, : len(branch.at)] = torch.cat(parts, dim=1)
    return found
