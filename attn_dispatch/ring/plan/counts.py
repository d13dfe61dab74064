"""Rows that ranks need of one another, and query-key pairs, counted without listing them."""

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
from attn_dispatch.ring.rows.runs import _cut, seen_spans
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from attn_dispatch.spec.reach import Band

SubGrid = tuple[range, ...]  #: by axis

MAX_CELLS = 2**24  #: most tokens of a grid: its rows are counted by masks with an entry per token

Table = tuple[tuple[int, ...], ...]  #: [receiver][sender]


def grid_pairs(pattern: Neighborhood, queries: range, keys: range) -> int:
    """Query-key pairs of two runs of a grid: the product of the pairs on each axis, since a window on one axis does not
    depend on the coordinate on another.
    """
    key_grids = list(sub_grids(pattern.grid, keys))
    return sum(
        math.prod(_along(pattern, axis, xs, ys) for axis, (xs, ys) in enumerate(zip(query_grid, key_grid)))
        for query_grid in sub_grids(pattern.grid, queries)
        for key_grid in key_grids
    )


def sub_grids(grid: tuple[int, ...], run: range) -> Iterator[SubGrid]:
    """A run of row-major positions, split into sub-grids."""
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


def _in_row(grid: tuple[int, ...], place: int, start: int, stop: int) -> Iterator[SubGrid]:
    for part in sub_grids(grid[1:], range(start, stop)):
        yield (range(place, place + 1), *part)


def _along(pattern: Neighborhood, axis: int, queries: range, keys: range) -> int:
    """Query-key pairs of coordinates on one axis."""
    low, high = pattern.axes[axis].bounds()
    step = pattern.dilation[axis]
    x = torch.arange(queries.start, queries.stop)
    residue = x % step
    # Within a residue class: the first index from keys.start on, and the first from keys.stop on.
    first = torch.maximum(low[x], _divided_up(keys.start - residue, step))
    stop = torch.minimum(high[x] + 1, _divided_up(keys.stop - residue, step))
    return int((stop - first).clamp(min=0).sum())


def _divided_up(x: Tensor, by: int) -> Tensor:
    return -((-x).div(by, rounding_mode="floor"))


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows and pairs between ranks, for one batch row.

    Args:
        rows: key rows that a rank receives from another, counted once for each key head; 0 from itself.
        pairs: query-key pairs of a rank's queries and another's keys, over all heads, with multiplicity.
    """

    rows: Table
    pairs: Table

    def received(self, rank: int) -> int:
        return sum(self.rows[rank])

    def sent(self, rank: int) -> int:
        return sum(row[rank] for row in self.rows)


@lru_cache(maxsize=64)
def count_layout(pattern: Pattern, layout: Layout, heads: int, kv_heads: int) -> Counts:
    """Exact counts for a layout; rows are those that `traffic.traffic_of` lists.

    Raises:
        InvalidInput: tokens are stored in another order, or a grid has over MAX_CELLS cells.
    """
    if pattern is not pattern.natural:
        raise InvalidInput(f"pattern must be one in natural order to be counted, got {pattern}")
    if isinstance(pattern, Neighborhood) and layout.tokens > MAX_CELLS:
        raise InvalidInput(f"grid must have at most {MAX_CELLS} cells to be counted, got {layout.tokens}")
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
    """For each receiver, the rows of every sender, for one key head whose query heads have these offsets."""
    for receiver, chunks in enumerate(layout.chunks):
        if isinstance(pattern, Neighborhood):
            seen = seen_by(pattern, layout.tokens, chunks, kind)
            row = [sum(int(seen[c.start : c.stop].sum()) for c in sent) for sent in layout.chunks]
        else:
            spans = seen_spans(pattern, layout.tokens, chunks, kind)
            row = [sum(span.count(chunk) for chunk in sent for span in spans) for sent in layout.chunks]
        row[receiver] = 0
        yield row


# --- pairs ------------------------------------------------------------------------------------------------------------


def _pairs(pattern: Pattern, layout: Layout, heads: int) -> Table:
    """[receiver][sender], over all heads."""
    branches, bands = _branches(pattern, layout.tokens, heads), line_of(pattern, layout.tokens) or ()

    def between(queries: range, keys: range) -> int:
        """Pairs of two runs of positions, which are equal or disjoint."""
        if isinstance(pattern, Neighborhood):
            return heads * grid_pairs(pattern, queries, keys)
        if isinstance(pattern, Dilated):
            return sum(b.inside(queries) if queries == keys else b.across(queries, keys) for b in branches)
        return heads * sum(_within(band, layout.tokens, queries, keys) for band in bands)

    return tuple(
        tuple(sum(between(queries, keys) for queries in q_chunks for keys in k_chunks) for k_chunks in layout.chunks)
        for q_chunks in layout.chunks
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
    """One branch. `offsets`: number of heads with each offset; `selected`: results of `_selected`."""

    length: int
    rate: int
    tokens: int
    is_causal: bool
    offsets: dict[int, int]
    selected: dict[tuple[int, int, int], list[int]] = field(default_factory=dict[tuple[int, int, int], list[int]])

    def inside(self, run: range) -> int:
        """Pairs of queries and keys of one run of positions."""
        first, last = run.start // self.length, (run.stop - 1) // self.length
        sides = [self._selected(number, run) for number in {first, last}]
        whole = [len(range(offset, self.length, self.rate)) for offset in self.offsets]
        ends = sum(map(self._squares, sides))
        return ends + max(0, last - first - 1) * self._squares(whole)  # segments in between are whole

    def across(self, queries: range, keys: range) -> int:
        """Pairs of two disjoint runs of positions, which share one segment or none."""
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
        """Number of selected positions of a run in a segment, for each offset."""
        key = number, run.start, run.stop
        if key not in self.selected:
            start = number * self.length
            stop = min(start + self.length, self.tokens)
            self.selected[key] = [len(_cut(range(start + each, stop, self.rate), run)) for each in self.offsets]
        return self.selected[key]


def _square(side: int) -> int:
    return side * side
