"""How many key rows a rank needs of each other one, and how many query-key pairs it works on: by arithmetic on runs of
positions, so that half a billion tokens over many ranks are counted in seconds. Nothing here has an entry per token,
neighborhoods aside.

A run of queries sees a few arithmetic progressions of keys. Between two positions where some of them begin or end, a
key is seen if it has one of their residues.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring.plan.counts import box_pairs
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.needs import Kind, Offsets, kv_classes, seen_by
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window

if TYPE_CHECKING:
    from torch import Tensor

MOST_CELLS = 2**24  #: of a grid: its rows are counted by masks of one entry per token

Table = tuple[tuple[int, ...], ...]  #: [receiver][sender]
Class = tuple[int, int]  #: the positions with one residue: step, residue
Classes = frozenset[Class]


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
    if not isinstance(pattern, Dense | Window | Dilated | Neighborhood):
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


class _Run(NamedTuple):
    """Every `step`-th position from `start` on and before `stop`, those with this residue."""

    start: int
    stop: int
    step: int = 1
    residue: int = 0


def _seen(pattern: Pattern, tokens: int, chunk: range, kind: Kind) -> Iterator[_Run]:
    """What queries of a run of positions see, but for keys that lie in the run itself."""
    if isinstance(pattern, Dense):
        yield _Run(0, chunk.stop if pattern.is_causal else tokens)
    elif isinstance(pattern, Window):
        first = 0 if pattern.left is None else max(0, chunk.start - pattern.left)
        yield _Run(first, tokens if pattern.right is None else min(tokens, chunk.stop + pattern.right))
    elif isinstance(pattern, Dilated):
        for offsets in kind:
            yield from _selected(pattern, tokens, chunk, offsets)


def _selected(pattern: Dilated, tokens: int, chunk: range, offsets: Offsets) -> Iterator[_Run]:
    """Of the segments that reach past a run of positions: there are at most two for each branch."""
    for (length, rate), offset in zip(pattern.branches, offsets):
        if offset is None:
            continue
        length = min(length, tokens)
        for number in {chunk.start // length, (chunk.stop - 1) // length}:
            start, stop = number * length, min((number + 1) * length, tokens)
            if _cut(range(start + offset, stop, rate), chunk):
                yield _Run(start, min(stop, chunk.stop) if pattern.is_causal else stop, rate, (start + offset) % rate)


class Cell(NamedTuple):
    """Between two positions: what has one of some residues."""

    start: int
    stop: int
    classes: Classes

    def count(self, chunk: range) -> int:
        """Those in a run of positions."""
        start, stop = max(self.start, chunk.start), min(self.stop, chunk.stop)
        return _below(self.classes, stop) - _below(self.classes, start) if start < stop else 0

    def positions(self, chunk: range) -> Tensor:
        """Those themselves, int64, ascending."""
        import torch

        start, stop = max(self.start, chunk.start), min(self.stop, chunk.stop)
        if start >= stop:
            return torch.empty(0, dtype=torch.int64)
        if len(self.classes) == 1:
            ((step, residue),) = self.classes
            first = start + (residue - start) % step
            return torch.arange(first, max(first, stop), step)
        taken = torch.zeros(stop - start, dtype=torch.bool)
        for step, residue in self.classes:
            taken[(residue - start) % step :: step] = True
        return taken.nonzero().flatten().add_(start)


def cells_of(pattern: Pattern, tokens: int, chunks: tuple[range, ...], kind: Kind) -> list[Cell]:
    """What queries of these runs of positions see elsewhere; the pattern is Dense, Window or Dilated."""
    # Cut where a progression begins or ends: in between, only residues count.
    runs = {run for chunk in chunks for run in _seen(pattern, tokens, chunk, kind)}
    edges = sorted({edge for run in runs for edge in run[:2]})
    found = []
    for start, stop in pairwise(edges):
        classes = frozenset((run.step, run.residue) for run in runs if run.start <= start and stop <= run.stop)
        found += [Cell(start, stop, classes)] if classes else []
    return found


@lru_cache(maxsize=2**16)
def _below(classes: Classes, end: int) -> int:
    """How many positions before `end` have one of these residues."""
    return sum(sign * -((residue - end) // step) for (step, residue), sign in _terms(classes) if residue < end)


@lru_cache(maxsize=2**16)
def _terms(classes: Classes) -> tuple[tuple[Class, int], ...]:
    """Inclusion and exclusion: how often each progression is to be added for everything to count once."""
    found, kept = Counter[Class](), list[Class]()
    for each in sorted(classes):  # the dense ones first, so that those which lie in another are found at once
        common = frozenset(both for other in kept if (both := _common(each, other)) is not None)
        if each not in common:
            kept.append(each)
            found[each] += 1
            found.subtract(dict(_terms(common)))
    return tuple((each, sign) for each, sign in found.items() if sign)


def _common(a: Class, b: Class) -> Class | None:
    """What has both residues: again one class, by the Chinese remainder theorem."""
    shared = math.gcd(a[0], b[0])
    apart, rest = divmod(b[1] - a[1], shared)
    if rest:
        return None
    step, modulus = a[0] * b[0] // shared, b[0] // shared
    return step, (a[1] + a[0] * (apart * pow(a[0] // shared, -1, modulus) % modulus)) % step


# --- pairs ------------------------------------------------------------------------------------------------------------


def _pairs(pattern: Pattern, layout: Layout, heads: int) -> Table:
    """[receiver][sender], over all heads."""
    branches = _branches(pattern, layout.tokens, heads)

    def met(queries: range, keys: range) -> int:
        """Of two runs of positions, which are the same one or have nothing in common."""
        if isinstance(pattern, Neighborhood):
            return heads * box_pairs(pattern, queries, keys)
        if isinstance(pattern, Dilated):
            return sum(b.inside(queries) if queries == keys else b.across(queries, keys) for b in branches)
        return heads * _within(pattern, layout.tokens, queries, keys)

    return tuple(
        tuple(sum(met(queries, keys) for queries in mine for keys in theirs) for theirs in layout.chunks)
        for mine in layout.chunks
    )


def _within(pattern: Pattern, tokens: int, queries: range, keys: range) -> int:
    if isinstance(pattern, Dense):
        pattern = Window(None, 0 if pattern.is_causal else None)
    assert isinstance(pattern, Window)
    most = tokens if pattern.right is None else min(pattern.right, tokens)
    least = tokens if pattern.left is None else min(pattern.left, tokens)
    return _up_to(most, queries, keys) - _up_to(-least - 1, queries, keys)


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
        taken = Counter(pattern.head_offset(number, head, heads) for head in range(heads))
        offsets = {offset: members for offset, members in taken.items() if offset is not None}
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


def _cut(run: range, within: range) -> range:
    """The part of a progression that lies in a run of positions."""
    skipped = max(0, -(-(within.start - run.start) // run.step))
    return range(run.start + skipped * run.step, min(run.stop, within.stop), run.step)
