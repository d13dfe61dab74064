"""Finds the pairs of query and key tiles that hold visible keys, for any token order, and their masks.

By the normal form (see `spec.reach`) a tile has a bounding box in each branch; masks are computed only for pairs of
tiles whose boxes intersect. A tile may hold any tokens, so every order works.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import head_classes
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.orders import NATURAL, permutation, permutation_of_queries
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Reach
from attn_dispatch.spec.reordered import token_order_of
from attn_dispatch.spec.tracing import make_plain

FULL = 0  #: the mask of a pair in which every query sees every key once
MASK_BYTES = 2**25  #: of distinct masks, one byte per entry; a table with more computes them in every call
CACHED = 4  #: problems whose tables are cached
PAST = 2**31 - 1  #: a place after every visible key
AT_ONCE = 2**20  #: pairs of boxes compared at once; if there are more, groups of boxes are compared first
GROUP = 16  #: boxes per group
ENTRIES = 2**20  #: mask entries computed at once
MAX_BRANCHES = 255  #: a multiplicity must fit into a byte

CACHED_ON = ("cuda",)  #: devices for which `cached_with` caches what is made: making it waits for the device

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TileTable:
    """The tile pairs with visible keys, for heads that see the same keys. A tile is consecutive places of an order.

    Args:
        heads: the query heads, an arithmetic progression.
        q_pos, k_pos: int64 [tiles, tile], the row in q, k and v of each place. A short last tile repeats its last
            row: a repeated query is computed twice, a repeated key is never visible.
        first: int64 [query tiles + 1], the first pair of each query tile.
        keys: int64 [pairs], the key tile of each pair, ascending within a query tile.
        mask: int64 [pairs], the index in `masks`; where `masks` is None, FULL or any other number.
        masks: uint8 [masks, tile, tile], how many times each query sees each key; `masks[FULL]` is all 1. None where
            they would take more than MASK_BYTES.
        bias: log of `masks`, in the dtype of scores.
        covered: whether every query is known to see a key.
        branches: from which `pair_counts` computes masks.
    """

    heads: range
    q_pos: Tensor
    k_pos: Tensor
    first: Tensor
    keys: Tensor
    mask: Tensor
    masks: Tensor | None
    bias: Tensor | None
    covered: bool
    branches: tuple[Branch, ...]

    @property
    def tile(self) -> int:
        return self.q_pos.shape[1]

    @property
    def pairs(self) -> int:
        return len(self.keys)

    def queries(self) -> Tensor:
        """The query tile of each pair, int64 [pairs]."""
        return torch.arange(len(self.q_pos), device=self.first.device).repeat_interleave(self.first.diff())

    def to(self, device: torch.device) -> TileTable:
        moved = {name: getattr(self, name).to(device) for name in ("q_pos", "k_pos", "keys", "mask")}
        masks = {name: x.to(device) for name in ("masks", "bias") if (x := getattr(self, name)) is not None}
        return replace(self, **moved, **masks, branches=tuple(branch.to(device) for branch in self.branches))


@dataclass(frozen=True, slots=True)
class Branch:
    """A `spec.reach.Reach` by tiles, int32: `first`, `last` [axes, query tiles, tile], `at` [axes, key tiles, tile]."""

    first: Tensor
    last: Tensor
    at: Tensor

    def to(self, device: torch.device) -> Branch:
        return Branch(self.first.to(device), self.last.to(device), self.at.to(device))

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query of a tile sees each key of another: bool [pairs, tile, tile]."""
        seen = torch.ones((), dtype=torch.bool, device=self.at.device)
        for first, last, at in zip(self.first, self.last, self.at):
            place = at[keys][:, None, :]
            seen = seen & (place >= first[queries][:, :, None]) & (place <= last[queries][:, :, None])
        return seen


_cached: WeakKeyDictionary[TileTable, dict[Any, Any]] = WeakKeyDictionary()


def cached_with(table: TileTable, key: object, make: Callable[[], T]) -> T:
    """What is made from a table, cached as long as the table exists where that saves the device a wait."""
    device = table.keys.device
    if device.type not in CACHED_ON:
        return make()
    found = _cached.setdefault(table, {})
    if key not in found:
        with torch.inference_mode(False):  # the next call may be in another mode
            made = make()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # another stream may read it next
        found[key] = made
    result: T = found[key]
    return result


def pair_counts(branches: Sequence[Branch], queries: Tensor, keys: Tensor) -> Tensor:
    """How many times each query of a tile sees each key of another: uint8 [pairs, tile, tile]."""
    found = branches[0].sees(queries, keys).to(torch.uint8)
    for branch in branches[1:]:
        found += branch.sees(queries, keys)
    return found


def tables_of(problem: Problem, order: str, tile: int) -> tuple[TileTable, ...]:
    """A table for each class of heads, on the problem's device."""
    shape = problem.q_len, problem.k_len, problem.heads
    return _tables(problem.pattern, *shape, order, tile, sum_dtype(problem.dtype), problem.device)


@lru_cache(maxsize=CACHED)
def _tables(
    pattern: Pattern,
    q_len: int,
    k_len: int,
    heads: int,
    order: str,
    tile: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[TileTable, ...]:
    made = make_plain(_built, pattern, q_len, k_len, heads, order, tile, dtype)
    return tuple(table if device.type == "cpu" else table.to(device) for table in made)


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
    q_rows, k_rows = _tiled(None, len(queries), tile), _tiled(None, len(keys), tile)
    found = []
    for members, offsets in head_classes(pattern, heads, which):
        branches = _branches(pattern.reaches(queries, keys, length, length, offsets), q_rows, k_rows, len(keys))
        found.append(_table(members, branches, q_rows, k_rows, dtype))
    return tuple(found)


def forget_tables() -> None:
    """Free the cached tables."""
    _tables.cache_clear()


def _built(
    pattern: Pattern, q_len: int, k_len: int, heads: int, order: str, tile: int, dtype: torch.dtype
) -> tuple[TileTable, ...]:
    if permutation(token_order_of(pattern), pattern.natural, q_len) is not None:
        order = NATURAL  # tokens stored in another order are tiled as stored
    q_pos = _tiled(permutation_of_queries(order, pattern.natural, q_len, k_len), q_len, tile)
    k_pos = q_pos if q_len == k_len else _tiled(permutation(order, pattern.natural, k_len), k_len, tile)
    found = []
    for members, offsets in head_classes(pattern, heads):
        reaches = pattern.reaches(torch.arange(q_len), torch.arange(k_len), q_len, k_len, offsets)
        branches = _branches(reaches, q_pos, k_pos, k_len)
        found.append(_table(members, branches, q_pos, k_pos, dtype))
    return tuple(found)


def _tiled(permuted: Tensor | None, length: int, tile: int) -> Tensor:
    """Places as [tiles, tile]; the last place is repeated to fill the last tile."""
    places = torch.arange(-(-length // tile) * tile).clamp_(max=length - 1)
    return (places if permuted is None else permuted[places]).view(-1, tile)


def _branches(reaches: Sequence[Reach], q_pos: Tensor, k_pos: Tensor, k_len: int) -> tuple[Branch, ...]:
    """The branches by tiles."""
    return tuple(_branch(reach, q_pos, k_pos, k_len) for reach in reaches)


def _branch(reach: Reach, q_pos: Tensor, k_pos: Tensor, k_len: int) -> Branch:
    places = torch.stack(reach.at).int()[:, k_pos]
    places.flatten(1)[:, k_len:] = PAST  # a repeated key
    return Branch(torch.stack(reach.first).int()[:, q_pos], torch.stack(reach.last).int()[:, q_pos], places)


# --- pairs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Bounding boxes: the lowest and highest value on each axis, int32 [axes, tiles]."""

    low: Tensor
    high: Tensor

    def __len__(self) -> int:
        return self.low.shape[1]

    def some(self, which: Tensor) -> _Boxes:
        return _Boxes(self.low[:, which], self.high[:, which])

    def grouped(self) -> _Boxes:
        last = torch.arange(-(-len(self) // GROUP) * GROUP).clamp_(max=len(self) - 1)
        low, high = (x[:, last].view(len(x), -1, GROUP) for x in (self.low, self.high))
        return _Boxes(low.amin(2), high.amax(2))


def _intersect(q: _Boxes, k: _Boxes) -> Tensor:
    """Whether boxes intersect: bool; the shapes after the first axis broadcast."""
    return ((q.low <= k.high) & (q.high >= k.low)).all(0)


def _candidates(q: _Boxes, k: _Boxes) -> Tensor:
    """The pairs of boxes that intersect, [pairs, 2]."""
    if len(q) * len(k) <= AT_ONCE:
        across = _Boxes(q.low[:, :, None], q.high[:, :, None])
        return _intersect(across, _Boxes(k.low[:, None], k.high[:, None])).nonzero()
    within = torch.cartesian_prod(torch.arange(GROUP), torch.arange(GROUP))
    found = []
    for coarse in torch.split(_candidates(q.grouped(), k.grouped()), AT_ONCE // GROUP**2):
        pairs = (coarse[:, None] * GROUP + within).flatten(0, 1)
        pairs = pairs[(pairs[:, 0] < len(q)) & (pairs[:, 1] < len(k))]
        found.append(pairs[_intersect(q.some(pairs[:, 0]), k.some(pairs[:, 1]))])
    return torch.cat(found)


def _boxes(branch: Branch) -> tuple[_Boxes, _Boxes, _Boxes]:
    """Boxes of what any query of a tile sees, of what all its queries see, and of the keys of a tile."""
    some = _Boxes(branch.first.amin(2), branch.last.amax(2))
    every = _Boxes(branch.first.amax(2), branch.last.amin(2))
    return some, every, _Boxes(branch.at.amin(2), branch.at.amax(2))


def _pairs(branches: Sequence[Branch], width: int) -> tuple[Tensor, Tensor]:
    """Sorted pairs that may hold visible keys, as `query tile * width + key tile`; and whether each is full."""
    near, whole = [], []
    for branch in branches:
        some, every, place = _boxes(branch)
        pairs = _candidates(some, place)
        reach, keys = every.some(pairs[:, 0]), place.some(pairs[:, 1])
        near.append(pairs[:, 0] * width + pairs[:, 1])
        whole.append(((reach.low <= keys.low) & (reach.high >= keys.high)).all(0))
    pairs, inverse, times = torch.unique(torch.cat(near), return_inverse=True, return_counts=True)
    full = torch.zeros_like(pairs, dtype=torch.bool)
    full[inverse[torch.cat(whole)]] = True
    return pairs, full & (times == 1)


def _table(heads: range, branches: tuple[Branch, ...], q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype) -> TileTable:
    pairs, full = _pairs(branches, len(k_pos))
    queries, keys = pairs // len(k_pos), pairs % len(k_pos)
    found = _masks(branches, queries, keys, full, q_pos.shape[1])
    masks, bias, mask, covered = None, None, torch.where(full, FULL, FULL + 1), False
    if found is not None:
        masks, mask = found
        queries, keys, mask = (x[mask >= 0] for x in (queries, keys, mask))
        sees = torch.zeros(q_pos.shape, dtype=torch.int32).index_add_(0, queries, masks.any(2).int()[mask])
        bias, covered = masks.to(dtype).log_(), bool(sees.all())
    first = torch.searchsorted(queries, torch.arange(len(q_pos) + 1))
    return TileTable(heads, q_pos, k_pos, first, keys, mask, masks, bias, covered, branches)


def _masks(
    branches: Sequence[Branch], queries: Tensor, keys: Tensor, full: Tensor, tile: int
) -> tuple[Tensor, Tensor] | None:
    """The distinct masks, and the index of each pair's mask, -1 if no key is visible; None: over MASK_BYTES."""
    cells = tile**2
    known: dict[bytes, int] = {bytes([0]) * cells: -1, bytes([1]) * cells: FULL}
    place = torch.full_like(queries, FULL)
    for some in torch.split((~full).nonzero().flatten(), max(1, ENTRIES // cells)):
        found = _each(pair_counts(branches, queries[some], keys[some]))
        place[some] = torch.tensor([known.setdefault(each, len(known) - 1) for each in found], dtype=torch.int64)
        if (len(known) - 1) * cells > MASK_BYTES:
            return None
    del known[bytes([0]) * cells]
    return torch.frombuffer(bytearray().join(known), dtype=torch.uint8).view(-1, tile, tile), place


def _each(masks: Tensor) -> Iterator[bytes]:
    size = masks.shape[1] * masks.shape[2]
    memory = ctypes.string_at(masks.data_ptr(), masks.numel())
    return (memory[start : start + size] for start in range(0, len(memory), size))
