"""Runs of a row-major grid as boxes, and the query-key pairs of a neighborhood between two runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.heads import heads_by_offset
from attn_dispatch.ring.rows.chunking import line_of
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.needs import Kind, kv_classes, seen_by
from attn_dispatch.ring.rows.runs import _cut, cells_of
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from attn_dispatch.spec.reach import Band

Box = tuple[range, ...]  #: by axis

MOST_CELLS = 2**24  #: of a grid: its rows are counted by masks of one entry per token

Table = tuple[tuple[int, ...], ...]  #: [receiver][sender]


def box_pairs(pattern: Neighborhood, queries: range, keys: range) -> int:
    """How many queries of one run see a key of the other, counted with each key: axis by axis, since a window on one
    axis does not depend on the place on another.
    """
    theirs = list(boxes(pattern.grid, keys))
    return sum(
        math.prod(_along(pattern, axis, xs, ys) for axis, (xs, ys) in enumerate(zip(mine, other)))
        for mine in boxes(pattern.grid, queries)
        for other in theirs
    )


def boxes(grid: tuple[int, ...], run: range) -> Iterator[Box]:
    """A run of places in row-major order, cut into boxes."""
    if len(grid) == 1:
        yield (run,)
        return
    row = math.prod(grid[1:])
    first, last = -(-run.start // row), run.stop // row
    if first > last:  # within one row, touching neither of its ends
        yield from _in_row(grid, last, run.start - last * row, run.stop - last * row)
        return
    if run.start < first * row:
        yield from _in_row(grid, first - 1, run.start - (first - 1) * row, row)
    if first < last:
        yield (range(first, last), *map(range, grid[1:]))
    if last * row < run.stop:
        yield from _in_row(grid, last, 0, run.stop - last * row)


def _in_row(grid: tuple[int, ...], place: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes(grid[1:], range(start, stop)):
        yield (range(place, place + 1), *box)


def _along(pattern: Neighborhood, axis: int, queries: range, keys: range) -> int:
    """Pairs of places on one axis."""
    low, high = pattern.axes[axis].bounds()
    step = pattern.dilation[axis]
    x = torch.arange(queries.start, queries.stop)
    residue = x % step
    # Places in the residue class: those of keys.start and after, and before keys.stop.
    first = torch.maximum(low[x], _divided_up(keys.start - residue, step))
    stop = torch.minimum(high[x] + 1, _divided_up(keys.stop - residue, step))
    return int((stop - first).clamp(min=0).sum())


def _divided_up(x: Tensor, by: int) -> Tensor:
    return -((-x).div(by, rounding_mode="floor"))


@dataclass(frozen=True, slots=True)
class Counts:
    """What ranks need of one another, for one batch row.

    Args:
        rows: of keys, counted once for each key head, that a rank must be sent by another; 0 from itself.
        pairs: of a query of one rank and a key of another, over all heads, as often as the pattern counts them.
    """

    rows: Table
    pairs: Table

    def received(self, rank: int) -> int:
        return sum(self.rows[rank])

    def sent(self, rank: int) -> int:
        return sum(row[rank] for row in self.rows)


@lru_cache(maxsize=64)
def counts_of(pattern: Pattern, layout: Layout, heads: int, kv_heads: int) -> Counts:
    """Count for a layout, exactly; rows are those that `traffic.traffic_of` lists.

    Raises:
        InvalidInput: tokens are kept in another order, or a grid has over MOST_CELLS cells.
    """
    if pattern is not pattern.natural:
        raise InvalidInput(f"pattern must be one in natural order to be counted, got {pattern}")
    if isinstance(pattern, Neighborhood) and layout.tokens > MOST_CELLS:
        raise InvalidInput(f"grid must have at most {MOST_CELLS} cells to be counted, got {layout.tokens}")
    kinds = Counter[Kind]()
    for members, kind in kv_classes(pattern, heads, kv_heads):
        kinds[kind] += len(members)
    rows = [[0] * layout.ranks for _ in range(layout.ranks)]
    for kind, times in kinds.items():
        for receiver, counted in enumerate(_rows(pattern, layout, kind)):
            for sender, count in enumerate(counted):
                rows[receiver][sender] += times * count
    return Counts(tuple(map(tuple, rows)), _pairs(pattern, layout, heads))


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(pattern: Pattern, layout: Layout, kind: Kind) -> Iterator[list[int]]:
    """For each receiver the rows of every sender, of one key head whose query heads have these offsets."""
    for receiver, chunks in enumerate(layout.chunks):
        if isinstance(pattern, Neighborhood):
            seen = seen_by(pattern, layout.tokens, chunks, kind)
            row = [sum(int(seen[c.start : c.stop].sum()) for c in theirs) for theirs in layout.chunks]
        else:
            cells = cells_of(pattern, layout.tokens, chunks, kind)
            row = [sum(cell.count(chunk) for chunk in theirs for cell in cells) for theirs in layout.chunks]
        row[receiver] = 0
        yield row


# --- pairs ------------------------------------------------------------------------------------------------------------


def _pairs(pattern: Pattern, layout: Layout, heads: int) -> Table:
    """[receiver][sender], over all heads."""
    branches, bands = _branches(pattern, layout.tokens, heads), line_of(pattern, layout.tokens) or ()

    def met(queries: range, keys: range) -> int:
        """Of two runs of positions, which are the same one or have nothing in common."""
        if isinstance(pattern, Neighborhood):
            return heads * box_pairs(pattern, queries, keys)
        if isinstance(pattern, Dilated):
            return sum(b.inside(queries) if queries == keys else b.across(queries, keys) for b in branches)
        return heads * sum(_within(band, layout.tokens, queries, keys) for band in bands)

    return tuple(
        tuple(sum(met(queries, keys) for queries in mine for keys in theirs) for theirs in layout.chunks)
        for mine in layout.chunks
    )


def _within(band: Band, tokens: int, queries: range, keys: range) -> int:
    keys = keys if band.stop is None else range(keys.start, max(keys.start, min(keys.stop, band.stop)))
    most = tokens if band.high is None else min(band.high, tokens)
    least = -tokens if band.low is None else max(band.low, -tokens)
    return _up_to(most, queries, keys) - _up_to(least - 1, queries, keys)


def _up_to(distance: int, queries: range, keys: range) -> int:
    """Pairs with key - query <= distance."""
    room = queries.stop + distance - keys.start
    m, n = len(queries), len(keys)
    return _triangle(room) - _triangle(room - m) - _triangle(room - n) + _triangle(room - m - n)


def _triangle(side: int) -> int:
    return side * (side + 1) // 2 if side > 0 else 0


def _branches(pattern: Pattern, tokens: int, heads: int) -> list[_Branch]:
    if not isinstance(pattern, Dilated):
        return []
    found = []
    for number, (length, rate) in enumerate(pattern.branches):
        offsets = {offset: len(members) for offset, members in heads_by_offset(pattern, number, heads).items()}
        found.append(_Branch(min(length, tokens), rate, tokens, pattern.is_causal, offsets))
    return found


@dataclass(frozen=True, slots=True)
class _Branch:
    """One branch. `offsets` says how many heads have each; `known` keeps what `_selected` found."""

    length: int
    rate: int
    tokens: int
    is_causal: bool
    offsets: dict[int, int]
    known: dict[tuple[int, int, int], list[int]] = field(default_factory=dict[tuple[int, int, int], list[int]])

    def inside(self, run: range) -> int:
        """Pairs with both in one run of positions."""
        first, last = run.start // self.length, (run.stop - 1) // self.length
        sides = [self._selected(number, run) for number in {first, last}]
        whole = [len(range(offset, self.length, self.rate)) for offset in self.offsets]
        ends = sum(map(self._squares, sides))
        return ends + max(0, last - first - 1) * self._squares(whole)  # those in between are whole

    def across(self, queries: range, keys: range) -> int:
        """Pairs of two runs of positions; they have one segment in common, or none."""
        low, high = (queries, keys) if queries.start < keys.start else (keys, queries)
        number = high.start // self.length
        if (low.stop - 1) // self.length != number or (self.is_causal and low is queries):
            return 0
        sides = self._selected(number, queries), self._selected(number, keys)
        return sum(members * m * n for members, m, n in zip(self.offsets.values(), *sides))

    def _squares(self, sides: list[int]) -> int:
        square = _triangle if self.is_causal else _square
        return sum(members * square(side) for members, side in zip(self.offsets.values(), sides))

    def _selected(self, number: int, run: range) -> list[int]:
        """How many positions of a run lie in a segment and are selected, for each offset."""
        key = number, run.start, run.stop
        if key not in self.known:
            start = number * self.length
            stop = min(start + self.length, self.tokens)
            self.known[key] = [len(_cut(range(start + each, stop, self.rate), run)) for each in self.offsets]
        return self.known[key]


def _square(side: int) -> int:
    return side * side
