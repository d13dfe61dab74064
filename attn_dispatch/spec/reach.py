"""The normal form of a pattern: a sum of branches, each an interval of visible keys per query on one or more axes.

In a branch, query i sees key j where `first[i] <= at[j] <= last[i]` on every axis; the multiplicity is the number of
branches in which i sees j. `Reach` holds `first`, `last` and `at` as tensors. `Band` (on positions) and `Axis` (one
axis of a grid) describe them without tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Offsets = tuple[int | None, ...]  #: of one head, one per branch; None: not in the branch. (): all heads see the same


class Reach(NamedTuple):
    """One branch; per axis, int64 `first` and `last` [queries] and `at` [keys]."""

    first: tuple[Tensor, ...]
    last: tuple[Tensor, ...]
    at: tuple[Tensor, ...]

    def sees(self) -> Tensor:
        """Bool [queries, keys]."""
        seen = (self.first[0] == self.first[0])[:, None]
        for first, last, at in zip(self.first, self.last, self.at):
            seen = seen & (first[:, None] <= at) & (at <= last[:, None])
        return seen


class Band(NamedTuple):
    """One branch on positions: keys with `low <= key - query <= high`, both selected and in the same segment.

    Args:
        low, high: bounds; None: unbounded. Positions of queries and keys both count from 0.
        segment: tokens per segment; segment n starts at `n * segment`. None: one segment holds the sequence.
        rate, offset: token t is selected where `t % segment % rate == offset`.
        stop: end of the visible keys (exclusive); None: `k_len`.
        ahead: query i is token `i + ahead` of the segments; key j is token j.
    """

    low: int | None = None
    high: int | None = None
    segment: int | None = None
    rate: int = 1
    offset: int = 0
    stop: int | None = None
    ahead: int = 0

    def between(self, queries: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
        """The first and last visible key of each query, selected or not: int64 [queries]; `first > last` where none is.

        Args:
            queries: int64 positions.
        """
        import torch

        stop = k_len if self.stop is None else min(self.stop, k_len)
        start = torch.zeros_like(queries)
        if self.segment is not None:
            start = (queries + self.ahead) // self.segment * self.segment
        end = torch.full_like(queries, stop - 1)
        if self.segment is not None:
            end = end.minimum(start + (self.segment - 1))
        first = start if self.low is None else start.maximum(queries + self.low)
        return first, end if self.high is None else end.minimum(queries + self.high)

    def pairs(self, q_len: int, k_len: int) -> int:
        """Query-key pairs."""
        import torch

        queries = torch.arange(q_len)
        queries = queries if self.rate == 1 else queries[self.selected(queries + self.ahead)]
        first, last = self.between(queries, k_len)
        start = 0 if self.segment is None else (queries + self.ahead) // self.segment * self.segment
        # Selected tokens of the segment up to `last`, less those before `first`.
        to, before = ((x - start - self.offset).div(self.rate, rounding_mode="floor") for x in (last, first - 1))
        return int((to.clamp(min=-1) - before.clamp(min=-1)).clamp(min=0).sum())

    def selected(self, tokens: Tensor) -> Tensor:
        """Bool, one per token."""
        within = tokens if self.segment is None else tokens % self.segment
        return within % self.rate == self.offset

    def reach(self, queries: Tensor, keys: Tensor, k_len: int) -> Reach:
        """The normal form for queries and keys at these positions (int64)."""
        import torch

        first, last = self.between(queries, k_len)
        if self.rate == 1:
            return Reach((first,), (last,), (keys,))
        # Second axis: selected keys are at 0, which selected queries see; others see none.
        query, key = ((~self.selected(tokens)).long() for tokens in (queries + self.ahead, keys))
        return Reach((first, torch.zeros_like(query)), (last, -query), (keys, key))

    def run(self, queries: range, k_len: int) -> range:
        """The range from the first to the last key that consecutive queries see, selected or not."""
        start, stop = 0, k_len if self.stop is None else min(self.stop, k_len)
        if self.segment is not None:
            start = (queries.start + self.ahead) // self.segment * self.segment
            stop = min(stop, -(-(queries.stop + self.ahead) // self.segment) * self.segment)
        start = start if self.low is None else max(start, queries.start + self.low)
        return range(start, max(start, stop if self.high is None else min(stop, queries.stop + self.high)))

    def seen(self, queries: Tensor, k_len: int) -> Tensor:
        """Bool [k_len]: keys that at least one of these queries, int64 positions, sees."""
        import torch

        queries = queries if self.rate == 1 else queries[self.selected(queries + self.ahead)]
        first, last = self.between(queries, k_len)
        edges = torch.zeros(k_len + 1, dtype=torch.int64)
        one = (first <= last).long()
        found = edges.index_add_(0, first * one, one).index_add_(0, (last + 1) * one, -one)[:-1].cumsum(0) > 0
        return found if self.rate == 1 else found & self.selected(torch.arange(k_len))


class Axis(NamedTuple):
    """One axis of a neighbourhood's grid.

    Args:
        size, window, dilation: in tokens.
        is_causal: no key after the query on this axis.
        shift: at the border windows move inside; otherwise they are cut.
        stride: consecutive places of a residue class that share one window; more than 1 only with `shift`.
    """

    size: int
    window: int
    dilation: int
    is_causal: bool
    shift: bool
    stride: int = 1

    @property
    def sides(self) -> tuple[int, int]:
        """The most places of its residue class that a query sees before and after itself."""
        half = (self.window - 1) // 2
        far = self.window - 1 if self.shift else half
        return far, 0 if self.is_causal else far

    @property
    def inner_sides(self) -> tuple[int, int]:
        """`sides` of queries whose windows no border moves."""
        if not self.shift or self.is_causal:
            return self.sides
        before, after = self.window // 2, (self.window - 1) // 2
        return before + (self.stride - 1) // 2, after + self.stride // 2

    def places(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and last place in its residue class that each coordinate sees; outside the axis where windows are
        cut.
        """
        place, half = x // self.dilation, (self.window - 1) // 2
        if not self.shift:
            return place - half, place if self.is_causal else place + half
        low = self.starts(place, self._members(x))
        return low, place if self.is_causal else low + self.window - 1

    def starts(self, place: Tensor, members: Tensor) -> Tensor:
        """The first place that a query sees, where windows move inside; it does not fall as an argument grows.

        Args:
            place: of the query in its residue class.
            members: of that class.
        """
        leader = place // self.stride * self.stride if self.stride > 1 else place
        if self.is_causal:
            leader = (leader + self.stride - 1).minimum(members - 1) if self.stride > 1 else leader
            return leader - self.window + 1
        # No bound at the last member, which is the leader of a shorter group: its window already ends there.
        return (leader + self.stride // 2 - self.window // 2).clamp(min=0).minimum(members - self.window)

    def sees(self, x: Tensor, y: Tensor) -> Tensor:
        """Whether query coordinates see key coordinates, of shapes that broadcast."""
        (low, high), place = self.places(x), y // self.dilation
        found = (low <= place) & (place <= high)
        return found if self.dilation == 1 else found & (x % self.dilation == y % self.dilation)

    def counts(self) -> Tensor:
        """How many keys each coordinate sees: int64 [size]."""
        import torch

        low, high = self.bounds()
        return (high.minimum(self._members(torch.arange(self.size)) - 1) - low.clamp(min=0) + 1).clamp(min=0)

    def _members(self, x: Tensor) -> Tensor:
        """How many coordinates the residue class of each has."""
        return (self.size - x % self.dilation + self.dilation - 1) // self.dilation

    def bounds(self) -> tuple[Tensor, Tensor]:
        """`places` of every coordinate, int64 [size] each."""
        import torch

        return self.places(torch.arange(self.size))


def grid_reach(axes: tuple[Axis, ...], queries: Tensor, keys: Tensor) -> Reach:
    """The one branch of a neighbourhood. A dilated axis gives two: the residue class, which must be equal, and the
    place in the class.

    Args:
        axes: of the grid, row-major.
        queries, keys: int64 positions.
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    stride = 1
    for axis in reversed(axes):
        x, y = (positions // stride % axis.size for positions in (queries, keys))
        low, high = (each.to(x.device) for each in axis.bounds())
        found.append((low[x], high[x], y // axis.dilation))
        if axis.dilation > 1:
            found.append((x % axis.dilation, x % axis.dilation, y % axis.dilation))
        stride *= axis.size
    first, last, at = zip(*reversed(found))
    return Reach(first, last, at)


def grid_seen(axes: tuple[Axis, ...], queries: Tensor) -> Tensor:
    """Bool [tokens]: keys that at least one of these queries, int64 positions, sees; axis by axis."""
    import torch

    sizes = tuple(axis.size for axis in axes)
    found = torch.zeros(math.prod(sizes), dtype=torch.bool).index_fill_(0, queries, 1).view(sizes)
    for number, axis in enumerate(axes):
        low, high = axis.bounds()
        lines = found.movedim(number, -1).int()
        seen = torch.zeros(lines.shape, dtype=torch.bool)
        for start in range(min(axis.dilation, axis.size)):
            members = lines[..., start :: axis.dilation]
            count = members.shape[-1]
            edges = torch.zeros(*members.shape[:-1], count + 1, dtype=torch.int32)
            edges.index_add_(-1, low[start :: axis.dilation].clamp(min=0), members)
            edges.index_add_(-1, high[start :: axis.dilation].clamp(max=count - 1) + 1, -members)
            seen[..., start :: axis.dilation] = edges[..., :-1].cumsum(-1) > 0
        found = seen.movedim(-1, number)
    return found.reshape(-1)


def grid_pairs(axes: tuple[Axis, ...], q_len: int) -> int:
    """Query-key pairs of the last `q_len` tokens."""
    seen = axes[0].counts()
    for axis in axes[1:]:
        seen = (seen[:, None] * axis.counts()).flatten()
    return int(seen[-q_len:].sum())
