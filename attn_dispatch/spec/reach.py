"""The normal form of a pattern: a sum of branches, each with axes on which a query sees keys from here to there.

In a branch query i sees key j where `first[i] <= at[j] <= last[i]` on every axis; the multiplicity counts the branches
that show it. `Reach` holds those numbers. A `Band` is a branch on the line of positions, as a rule without tensors; an
`Axis` is one axis of a grid, likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Offsets = tuple[int | None, ...]  #: of one head, by branch; None where it takes no part. () where all heads are alike


@dataclass(frozen=True, slots=True)
class Reach:
    """One branch: int64, `first` and `last` [queries] and `at` [keys] on each axis."""

    first: tuple[Tensor, ...]
    last: tuple[Tensor, ...]
    at: tuple[Tensor, ...]

    def sees(self) -> Tensor:
        """Bool [queries, keys]."""
        seen = (self.first[0] == self.first[0])[:, None]
        for first, last, at in zip(self.first, self.last, self.at):
            seen = seen & (first[:, None] <= at) & (at <= last[:, None])
        return seen


@dataclass(frozen=True, slots=True)
class Band:
    """Keys with `low <= key - query <= high`, where both are selected and lie in one segment.

    Args:
        low, high: None: no bound. Positions of queries and keys both count from 0.
        segment: tokens; segment n starts at `n * segment`. None: the sequence is one.
        rate, offset: position p is selected where `p % segment % rate == offset`.
        stop: only keys before this position are seen; None: all.
    """

    low: int | None = None
    high: int | None = None
    segment: int | None = None
    rate: int = 1
    offset: int = 0
    stop: int | None = None

    def between(self, queries: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
        """The first and the last key that queries see, selected or not, int64 [queries]; `first > last` where none.

        Args:
            queries: int64, their positions.
        """
        import torch

        stop = k_len if self.stop is None else min(self.stop, k_len)
        start = torch.zeros_like(queries) if self.segment is None else queries // self.segment * self.segment
        end = torch.full_like(queries, stop - 1)
        if self.segment is not None:
            end = end.minimum(start + (self.segment - 1))
        first = start if self.low is None else start.maximum(queries + self.low)
        return first, end if self.high is None else end.minimum(queries + self.high)

    def selected(self, positions: Tensor) -> Tensor:
        """Bool, for each position."""
        within = positions if self.segment is None else positions % self.segment
        return within % self.rate == self.offset

    def reach(self, queries: Tensor, keys: Tensor, k_len: int) -> Reach:
        """For queries and keys at these positions, int64."""
        first, last = self.between(queries, k_len)
        if self.rate == 1:
            return Reach((first,), (last,), (keys,))
        # The second axis is 0 where a token is selected, and elsewhere what no other token has.
        query, key = ((~self.selected(positions)).long() for positions in (queries, keys))
        return Reach((first, query), (last, query), (keys, 2 * key))

    def run(self, queries: range, k_len: int) -> range:
        """From the first to the last key that a run of queries sees, selected or not."""
        start, stop = 0, k_len if self.stop is None else min(self.stop, k_len)
        if self.segment is not None:
            start = queries.start // self.segment * self.segment
            stop = min(stop, -(-queries.stop // self.segment) * self.segment)
        start = start if self.low is None else max(start, queries.start + self.low)
        return range(start, max(start, stop if self.high is None else min(stop, queries.stop + self.high)))

    def seen(self, queries: Tensor, k_len: int) -> Tensor:
        """Bool [k_len]: the keys that some of these queries see.

        Args:
            queries: int64, positions.
        """
        import torch

        queries = queries if self.rate == 1 else queries[self.selected(queries)]
        first, last = self.between(queries, k_len)
        edges = torch.zeros(k_len + 1, dtype=torch.int64)
        one = (first <= last).long()
        found = edges.index_add_(0, first * one, one).index_add_(0, (last + 1) * one, -one)[:-1].cumsum(0) > 0
        return found if self.rate == 1 else found & self.selected(torch.arange(k_len))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a neighbourhood's grid.

    Args:
        size, window, dilation: of the axis, in tokens.
        is_causal: no key after the query, on this axis.
        shift: windows move inside at the border instead of being cut.
    """

    size: int
    window: int
    dilation: int
    is_causal: bool
    shift: bool

    @property
    def sides(self) -> tuple[int, int]:
        """Places of its residue class that a query sees before and after it, at most."""
        half = (self.window - 1) // 2
        far = self.window - 1 if self.shift else half
        return far, 0 if self.is_causal else far

    def bounds(self) -> tuple[Tensor, Tensor]:
        """From which place to which in its residue class each coordinate sees, int64 [size] both; past the ends where
        windows are cut.
        """
        import torch

        x = torch.arange(self.size)
        place, half = x // self.dilation, (self.window - 1) // 2
        if not self.shift:
            return place - half, place if self.is_causal else place + half
        if self.is_causal:
            return place - self.window + 1, place
        members = (self.size - x % self.dilation + self.dilation - 1) // self.dilation
        low = (place - half).clamp(min=0).minimum(members - self.window)
        return low, low + self.window - 1


def grid_reach(axes: tuple[Axis, ...], queries: Tensor, keys: Tensor) -> Reach:
    """The one branch of a neighbourhood: two axes for one that is dilated, of places in a residue class, and of the
    class, which must be the same.

    Args:
        axes: of the grid, row-major.
        queries, keys: int64, positions.
    """
    first: list[Tensor] = []
    last: list[Tensor] = []
    at: list[Tensor] = []
    stride = 1
    for axis in reversed(axes):
        x, y = (positions // stride % axis.size for positions in (queries, keys))
        low, high = (each.to(x.device) for each in axis.bounds())
        first, last, at = [low[x], *first], [high[x], *last], [y // axis.dilation, *at]
        if axis.dilation > 1:
            residue = x % axis.dilation
            first, last, at = [residue, *first], [residue, *last], [y % axis.dilation, *at]
        stride *= axis.size
    return Reach(tuple(first), tuple(last), tuple(at))
