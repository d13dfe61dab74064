"""Rows that ranks need of one another, and query-key pairs, counted without listing them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.ring.engine.exchange import message_size
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.needs import Kind, kv_classes
from attn_dispatch.ring.rows.runs import seen_rows
from attn_dispatch.spec.orders import ULYSSES
from attn_dispatch.spec.pattern import Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Axis, Band

MAX_TOKENS = 2**30  #: of a sequence: counts of pairs are int64
MAX_CELLS = 2**24  #: of a grid: its rows are counted by masks with an entry per token

Table = tuple[tuple[int, ...], ...]  #: [receiver][sender]


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


@dataclass(frozen=True, slots=True)
class CountedProblem:
    """The problem of a whole sequence, its layout over ranks, and the counts for the layout."""

    problem: Problem
    layout: Layout
    counts: Counts

    @classmethod
    def of(cls, problem: Problem, layout: Layout) -> CountedProblem:
        return cls(problem, layout, count_layout(problem.pattern, layout, problem.heads, problem.kv_heads))

    @property
    def row_bytes(self) -> int:
        """Bytes of k and v of one row of one key head, for all batch rows."""
        return message_size(1, self.problem) * self.problem.dtype.itemsize

    @property
    def grad_row_bytes(self) -> int:
        """Bytes of the gradients of one row, which are sent in the dtype of sums."""
        return message_size(1, self.problem) * sum_dtype(self.problem.dtype).itemsize

    def sizes(self, tokens: int) -> tuple[int, int, int]:
        """Bytes that a number of tokens takes in q, in k and v together, and in lse."""
        problem = self.problem
        lse = tokens * problem.batch * problem.heads * sum_dtype(problem.dtype).itemsize
        return tokens * self.row_bytes * problem.heads // 2, tokens * self.row_bytes * problem.kv_heads, lse

    def bytes_sent(self, rank: int, exchange: str) -> tuple[int, int]:
        """What `Transport.bytes_sent` counts forward and backward, with an exchange that serves."""
        forward = self.counts.sent(rank) * self.row_bytes
        backward = forward + self.counts.received(rank) * self.grad_row_bytes
        if exchange == ULYSSES:
            # Of q, k and v this rank's tokens of the other ranks' heads, of the results the reverse.
            (q, kv, lse), ranks, own = self.sizes(1), self.layout.ranks, self.layout.lengths[rank]
            given, results = (q + kv) // ranks, (q + lse * self.problem.return_lse) // ranks
            away, back = own * (ranks - 1), self.layout.tokens - own
            forward, backward = given * away + results * back, results * away + given * back
        return forward, backward if self.problem.needs_grad else 0


@lru_cache(maxsize=64)
def count_layout(pattern: Pattern, layout: Layout, heads: int, kv_heads: int) -> Counts:
    """Exact counts for a layout; rows are those that `traffic.traffic_of` lists.

    Raises:
        InvalidInput: tokens are stored in another order, or there are over MAX_TOKENS, or MAX_CELLS on a grid.
    """
    if pattern is not pattern.natural:
        raise InvalidInput(f"pattern must be one in natural order to be counted, got {pattern}")
    what, most = ("grid", MAX_CELLS) if isinstance(pattern, Neighborhood) else ("sequence", MAX_TOKENS)
    if layout.tokens > most:
        raise InvalidInput(f"{what} must have at most {most} tokens to be counted, got {layout.tokens}")
    kinds = Counter[Kind]()
    for members, kind in kv_classes(pattern, heads, kv_heads):
        kinds[kind] += len(members)
    rows = [[0] * layout.ranks for _ in range(layout.ranks)]
    for (kind, times), (receiver, chunks) in product(kinds.items(), enumerate(layout.chunks)):
        seen = seen_rows(pattern, layout.tokens, chunks, kind)
        for sender, sent in enumerate(layout.chunks):
            if sender != receiver:
                rows[receiver][sender] += times * sum(each.count(chunk) for each in seen for chunk in sent)
    return Counts(tuple(map(tuple, rows)), _pairs(pattern, layout, heads))


def _pairs(pattern: Pattern, layout: Layout, heads: int) -> Table:
    """Those of two runs of tokens are differences of the pairs of all tokens before their ends."""
    runs = sorted((run.stop, rank) for rank, chunks in enumerate(layout.chunks) for run in chunks)
    owner = torch.tensor([rank for _, rank in runs])
    found = [[0] * layout.ranks for _ in range(layout.ranks)]
    for count, before in _before_ends(pattern, [0, *(stop for stop, _ in runs)], heads):
        table = torch.zeros(layout.ranks, layout.ranks, dtype=torch.int64)
        table.index_put_((owner[:, None], owner), before.diff(dim=0).diff(dim=1), accumulate=True)
        found = [[x + count * y for x, y in zip(*rows)] for rows in zip(found, table.tolist())]
    return tuple(map(tuple, found))


def _before_ends(pattern: Pattern, ends: Sequence[int], heads: int) -> Iterator[tuple[int, Tensor]]:
    """Each branch: the number of heads that have it, and its pairs [query end, key end] of tokens before both."""
    if isinstance(pattern, Neighborhood):
        yield heads, torch.tensor([[_on_grid(pattern, queries, keys) for keys in ends] for queries in ends])
        return
    tokens, at = ends[-1], torch.tensor(ends)
    offsets = (pattern.head_offsets(head, heads) for head in range(heads))
    bands = Counter(band for each in offsets for band in pattern.bands(tokens, tokens, each) or ())
    for band, count in bands.items():
        yield count, _in_band(band, at[:, None], at, tokens)


def _in_band(band: Band, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
    """Pairs of the first `queries` and `keys` of `tokens` tokens: those of whole segments, and of the last one."""
    keys = keys if band.stop is None else keys.clamp(max=band.stop)
    length = torch.tensor(band.segment or tokens)
    whole = queries.minimum(keys) // length
    of_queries, of_keys = (_selected(band, (x - whole * length).minimum(length)) for x in (queries, keys))
    each = _selected(band, length)
    return whole * _in_segment(band, each, each) + _in_segment(band, of_queries, of_keys)


def _selected(band: Band, tokens: Tensor) -> Tensor:
    """How many of a segment's first tokens are selected."""
    return (tokens - band.offset + band.rate - 1) // band.rate


def _in_segment(band: Band, queries: Tensor, keys: Tensor) -> Tensor:
    """Pairs of the first selected queries and keys of a segment."""
    found = queries * keys if band.high is None else _up_to(band.high // band.rate, queries, keys)
    return found if band.low is None else found - _up_to(-(-band.low // band.rate) - 1, queries, keys)


def _up_to(distance: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Pairs with key - query <= distance."""
    room = queries + min(distance, MAX_TOKENS)
    return _triangle(room) - _triangle(room - queries) - _triangle(room - keys) + _triangle(room - queries - keys)


def _triangle(side: Tensor) -> Tensor:
    side = side.clamp(min=0)
    return side * (side + 1) // 2


def _on_grid(pattern: Neighborhood, queries: int, keys: int) -> int:
    """Pairs of the first `queries` and `keys` of a grid: in sub-grids, the product of those on each axis."""
    some = product(_sub_grids(pattern.grid, queries), _sub_grids(pattern.grid, keys))
    return sum(math.prod(map(_along, pattern.axes, xs, ys)) for xs, ys in some)


def _sub_grids(grid: tuple[int, ...], count: int) -> Iterator[tuple[range, ...]]:
    """The first `count` row-major positions: the range of each axis."""
    line: tuple[range, ...] = ()
    for axis in range(len(grid)):
        whole, count = divmod(count, math.prod(grid[axis + 1 :]))
        if whole:
            yield (*line, range(whole), *map(range, grid[axis + 1 :]))
        line = (*line, range(whole, whole + 1))


@lru_cache(maxsize=2**18)
def _along(axis: Axis, queries: range, keys: range) -> int:
    """Pairs of coordinates on one axis."""
    x, step = torch.arange(queries.start, queries.stop), axis.dilation
    low, high = axis.places(x)
    # Within a residue class: the first place from keys.start on, and the first from keys.stop on.
    first, stop = ((end - x % step + step - 1) // step for end in (keys.start, keys.stop))
    return int((stop.minimum(high + 1) - first.maximum(low)).clamp(min=0).sum())
