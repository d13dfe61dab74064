"""Finds the pairs of query and key tiles that may hold visible keys, and which of them look alike.

By the normal form (see `spec.reach`) a tile has a bounding box in each branch: a pair whose boxes do not intersect
holds no visible key. The mask of a pair depends on its queries' bounds relative to its keys' places alone: pairs in
which these are equal have equal masks, which is known without computing them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.spec.reach import Reach

PAST = 2**31 - 1  #: a place after every visible key
BOXES = 2**24  #: pairs of boxes; if there are more, groups of boxes are compared first
AT_ONCE = 2**17  #: pairs of boxes compared at once
GROUP = 16  #: boxes per group
NUMBERS = 2**18  #: entries of rows that are numbered at once
LARGEST = 2**62  #: a number that still fits an int64


@dataclass(frozen=True, slots=True)
class Branch:
    """A `spec.reach.Reach` by tiles, int32: `first`, `last` [axes, query tiles, tile], `at` [axes, key tiles, tile]."""

    first: Tensor
    last: Tensor
    at: Tensor

    @classmethod
    def of(cls, reach: Reach, q_pos: Tensor, k_pos: Tensor, k_len: int) -> Branch:
        places = torch.stack([at.int() for at in reach.at])[:, k_pos]
        places.flatten(1)[:, k_len:] = PAST  # a repeated key
        first, last = (torch.stack([x.int() for x in each])[:, q_pos] for each in (reach.first, reach.last))
        return cls(first, last, places)

    def to(self, device: torch.device) -> Branch:
        return Branch(self.first.to(device), self.last.to(device), self.at.to(device))

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query of a tile sees each key of another: bool [pairs, tile, tile]."""
        seen: Tensor | None = None
        for first, last, at in zip(self.first, self.last, self.at):
            place = at[keys][:, None, :]
            within = place >= first[queries][:, :, None]
            within &= place <= last[queries][:, :, None]
            seen = within if seen is None else seen.logical_and_(within)
        assert seen is not None  # a branch has an axis
        return seen

    def relative(self, queries: Tensor, keys: Tensor) -> list[Tensor]:
        """What the masks of these pairs depend on: int32 [pairs, tile] each. Equal entries, equal masks."""
        (first, last), place = (x[:, queries] for x in (self.first, self.last)), self.at[:, keys]
        low, high = place.amin(2, keepdim=True), place.amax(2, keepdim=True)
        empty = ((first > high) | (last < low) | (first > last)).any(0)
        firsts, lasts = (first.clamp(low, high) - low), (last.clamp(low, high) - low)
        return [*firsts.masked_fill_(empty, 1), *lasts.masked_fill_(empty, 0), *(place - low)]


@dataclass(frozen=True, slots=True)
class TileBlocks:
    """How often blocks of queries see blocks of keys, by which a pair's counts are multiplied (see `spec.data.Blocks`).

    Args:
        counts: uint8 or int32 [q blocks, k blocks].
        queries, keys: int64 [tiles, tile], the block of each place, ascending.
    """

    counts: Tensor
    queries: Tensor
    keys: Tensor

    def to(self, device: torch.device) -> TileBlocks:
        return TileBlocks(self.counts.to(device), self.queries.to(device), self.keys.to(device))

    def at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The counts of each query of a tile with each key of another: [pairs, tile, tile]."""
        return self.counts[self.queries[queries][:, :, None], self.keys[keys][:, None, :]]

    def candidates(self) -> Tensor:
        """The pairs of tiles in which a block sees another, [pairs, 2]."""
        rows, columns = _spanned(self.queries), _spanned(self.keys)
        return (self.counts > 0)[rows].any(1)[:, columns].any(2).nonzero()

    def of_tiles(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The counts of all blocks in which a pair of tiles lies, [pairs, blocks]."""
        rows, columns = _spanned(self.queries)[queries], _spanned(self.keys)[keys]
        return self.counts[rows[:, :, None], columns[:, None, :]].flatten(1)

    def kinds(self, kinds: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """As `_kinds`, of pairs that have these kinds without blocks."""
        layouts = (_numbered([[x - x[:, :1]]])[at] for x, at in ((self.queries, queries), (self.keys, keys)))
        found = _numbered([[torch.stack([kinds, *layouts], dim=1), self.of_tiles(queries, keys)]])
        return found, _examples(found, torch.arange(len(found)))


def _spanned(blocks: Tensor) -> Tensor:
    """The blocks in which each tile has places: int64 [tiles, blocks]; the last is repeated."""
    first, last = blocks[:, :1], blocks[:, -1:]
    return (first + torch.arange(int((last - first).max()) + 1)).minimum(last)


class Pairs(NamedTuple):
    """The pairs of a class of heads whose boxes intersect, sorted by query tile, then by key tile.

    Args:
        queries, keys: int64 [pairs], the tiles.
        full: bool [pairs], whether every query surely sees every key once.
        alike: int64 [pairs], a number for each kind of pair: pairs with the same number have equal masks. -1: full.
        examples: int64 [kinds], a pair of each kind.
    """

    queries: Tensor
    keys: Tensor
    full: Tensor
    alike: Tensor
    examples: Tensor


def pairs_of(branches: Sequence[Branch], blocks: TileBlocks | None = None) -> Pairs:
    width = branches[0].at.shape[1]
    pairs, full = _near(branches, width, None if blocks is None else blocks.candidates())
    queries, keys = pairs // width, pairs % width
    if blocks is not None:
        full &= (blocks.of_tiles(queries, keys) == 1).all(1)
    alike, partial = torch.full_like(queries, -1), (~full).nonzero().flatten()
    kinds, examples = _kinds(branches, queries[partial], keys[partial])
    if blocks is not None:
        kinds, examples = blocks.kinds(kinds, queries[partial], keys[partial])
    alike[partial] = kinds
    return Pairs(queries, keys, full, alike, partial[examples])


def pair_counts(branches: Sequence[Branch], queries: Tensor, keys: Tensor, blocks: TileBlocks | None = None) -> Tensor:
    """How many times each query of a tile sees each key of another: [pairs, tile, tile], uint8 or as `blocks`."""
    found = branches[0].sees(queries, keys).view(torch.uint8)
    for branch in branches[1:]:
        found += branch.sees(queries, keys)
    return found if blocks is None else found * blocks.at(queries, keys)


# --- boxes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Bounding boxes: the lowest and highest value on each axis, int32 [axes, tiles]."""

    low: Tensor
    high: Tensor

    def __len__(self) -> int:
        return self.low.shape[1]

    def some(self, which: Tensor | slice) -> _Boxes:
        return _Boxes(self.low[:, which], self.high[:, which])

    def grouped(self) -> _Boxes:
        last = torch.arange(-(-len(self) // GROUP) * GROUP).clamp_(max=len(self) - 1)
        low, high = (x[:, last].view(len(x), -1, GROUP) for x in (self.low, self.high))
        return _Boxes(low.amin(2), high.amax(2))


def _intersect(q: _Boxes, k: _Boxes) -> Tensor:
    """Whether boxes intersect: bool; the shapes after the first axis broadcast."""
    found: Tensor | None = None
    for q_low, q_high, k_low, k_high in zip(q.low, q.high, k.low, k.high):
        meets = q_low <= k_high
        meets &= q_high >= k_low
        found = meets if found is None else found.logical_and_(meets)
    assert found is not None
    return found


def _candidates(q: _Boxes, k: _Boxes) -> Tensor:
    """The pairs of boxes that intersect, [pairs, 2]."""
    found = []
    if len(q) * len(k) <= BOXES:
        across, step = _Boxes(k.low[:, None], k.high[:, None]), max(1, AT_ONCE // len(k))
        for start in range(0, len(q), step):
            some = q.some(slice(start, start + step))
            pairs = _intersect(_Boxes(some.low[:, :, None], some.high[:, :, None]), across).nonzero()
            pairs[:, 0] += start
            found.append(pairs)
        return torch.cat(found)
    within = torch.cartesian_prod(torch.arange(GROUP), torch.arange(GROUP))
    for coarse in torch.split(_candidates(q.grouped(), k.grouped()), max(1, AT_ONCE // GROUP**2)):
        pairs = (coarse[:, None] * GROUP + within).flatten(0, 1)
        pairs = pairs[(pairs[:, 0] < len(q)) & (pairs[:, 1] < len(k))]
        found.append(pairs[_intersect(q.some(pairs[:, 0]), k.some(pairs[:, 1]))])
    return torch.cat(found)


def _boxes(branch: Branch) -> tuple[_Boxes, _Boxes, _Boxes]:
    """Boxes of what any query of a tile sees, of what all its queries see, and of the keys of a tile."""
    some = _Boxes(branch.first.amin(2), branch.last.amax(2))
    every = _Boxes(branch.first.amax(2), branch.last.amin(2))
    return some, every, _Boxes(branch.at.amin(2), branch.at.amax(2))


def _near(branches: Sequence[Branch], width: int, listed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sorted pairs that may hold visible keys, as `query tile * width + key tile`; and whether each is full.

    Args:
        listed: the pairs to look at, [pairs, 2]; None: all.
    """
    near, whole = [], []
    for branch in branches:
        some, every, place = _boxes(branch)
        if listed is None:
            pairs = _candidates(some, place)
        else:
            pairs = listed[_intersect(some.some(listed[:, 0]), place.some(listed[:, 1]))]
        reach, keys = every.some(pairs[:, 0]), place.some(pairs[:, 1])
        near.append(pairs[:, 0] * width + pairs[:, 1])
        whole.append(((reach.low <= keys.low) & (reach.high >= keys.high)).all(0))
    pairs, inverse, times = torch.unique(torch.cat(near), return_inverse=True, return_counts=True)
    full = torch.zeros_like(pairs, dtype=torch.bool)
    full[inverse[torch.cat(whole)]] = True
    return pairs, full & (times == 1)


# --- kinds of pairs -------------------------------------------------------------------------------------------


def _kinds(branches: Sequence[Branch], queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The kind of each pair, and a pair of each kind.

    First by two tiles' distance and what each is apart from its place: only of such groups the rows are compared.
    """
    if not len(queries):
        return queries, queries
    sides = [(first, last) for branch in branches for first, last in zip(branch.first, branch.last)]
    places = [at for branch in branches for at in branch.at]
    columns = [at[:, 0][keys] - last[:, 0][queries] for (_, last), at in zip(sides, places)]
    columns.append(_numbered([[x - last[:, :1] for first, last in sides for x in (first, last)]])[queries])
    columns.append(_numbered([[at - at[:, :1] for at in places]])[keys])
    groups, of_pair = _together(columns)
    some = torch.empty(groups, dtype=torch.int64).scatter_(0, of_pair, torch.arange(len(queries)))
    parts = torch.split(some, max(1, NUMBERS // (3 * len(places) * places[0].shape[1])))
    found = _numbered([x for each in branches for x in each.relative(queries[part], keys[part])] for part in parts)
    return found[of_pair], _examples(found, some)


def _examples(kinds: Tensor, of: Tensor) -> Tensor:
    """An element of `of` for each kind."""
    return torch.empty(int(kinds.max()) + 1 if len(kinds) else 0, dtype=torch.int64).scatter_(0, kinds, of)


def _numbered(parts: Iterable[list[Tensor]]) -> Tensor:
    """A number for each row of [rows, ...] tensors side by side, equal where rows are: int64 [rows]."""
    known: dict[bytes, int] = {}
    rows = (row for part in parts for row in each_row(torch.cat(part, dim=1)))
    return torch.tensor([known.setdefault(row, len(known)) for row in rows], dtype=torch.int64)


def each_row(x: Tensor) -> Iterator[bytes]:
    """The bytes of each row of a contiguous tensor."""
    size = max(1, x.nbytes // max(1, len(x)))
    memory = ctypes.string_at(x.data_ptr(), x.nbytes)
    return (memory[start : start + size] for start in range(0, len(memory), size))


def _together(columns: Sequence[Tensor]) -> tuple[int, Tensor]:
    """How many different combinations of integers there are, and the number of each row's: int64 [rows]."""
    found, count = torch.zeros_like(columns[0]), 1
    for column in columns:
        low, span = int(column.min()), int(column.max() - column.min()) + 1
        if count * span > LARGEST:
            values, found = torch.unique(found, return_inverse=True)
            count = len(values)
        found, count = found * span + (column.long() - low), count * span
    values, found = torch.unique(found, return_inverse=True)
    return len(values), found
