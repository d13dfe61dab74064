"""The blocks of queries and keys that hold visible pairs, computed from the pattern without a mask of every pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from attn_dispatch.spec.reach import Band, Offsets


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bool tensors [heads, query blocks, key blocks], or [1, ...] where one entry stands for all heads.

    Args:
        nonempty: the block may hold a visible pair; where False it holds none.
        full: every pair of the block is visible to all its heads, and the block has full size.
    """

    nonempty: Tensor
    full: Tensor


def blocks_of(
    pattern: Pattern,
    q_len: int,
    k_len: int,
    heads: int,
    size: int,
    device: torch.device | str | None = None,
    positions: Tensor | None = None,
) -> Blocks:
    """The blocks of `size` x `size` tokens from token 0 on; the last ones may be shorter.

    Args:
        positions: int64 [q_len], natural positions of queries and keys in another order.

    Raises:
        TypeError: the pattern is not one of this package's.
    """
    q, k = _Runs.of(q_len, size, device), _Runs.of(k_len, size, device)
    if positions is not None:
        positions = positions.to(q.first.device)
        nonempty, full = _reordered(pattern, q, heads, size, positions)
        return Blocks(nonempty, full & (q.count == size)[:, None] & (k.count == size))
    if isinstance(pattern, Dilated):
        nonempty, full = _dilated(pattern, q, heads, size)
    elif isinstance(pattern, Neighborhood):
        nonempty, full = _neighborhood(pattern, q, _boxes(pattern, q))
    else:
        bands = pattern.bands(q_len, k_len, ())
        if bands is None:
            raise TypeError(f"no blocks for {pattern!r}")
        nonempty, full = (torch.stack(each).any(0) for each in zip(*(_band(band, q, k) for band in bands)))
    return Blocks(nonempty, full & (q.count == size)[:, None] & (k.count == size))


def distinct_heads(pattern: Pattern, heads: int, size: int, reordered: bool = False) -> int:
    """The length of `blocks_of`'s first axis: `heads`, or 1.

    Rates up to the block size select a token in every block of a segment whatever the offset, except in short last
    blocks; not so in another order.
    """
    if reordered:
        return 1 if isinstance(pattern, Neighborhood) else heads
    distinct = isinstance(pattern, Dilated) and (pattern.heads == "split" or max(pattern.dilation_rates) > size)
    return heads if distinct else 1


@dataclass(frozen=True, slots=True)
class _Runs:
    """The first and last token of each block."""

    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, length: int, size: int, device: torch.device | str | None) -> _Runs:
        first = torch.arange(0, length, size, device=device)
        return cls(first, (first + size).clamp(max=length) - 1)

    @property
    def count(self) -> Tensor:
        return self.last - self.first + 1


def _band(band: Band, q: _Runs, k: _Runs) -> tuple[Tensor, Tensor]:
    """Nonempty and full blocks of a band without segments."""
    nearest, farthest = k.first - q.last[:, None], k.last - q.first[:, None]
    nonempty = torch.ones_like(nearest, dtype=torch.bool)
    full = nonempty.clone()
    if band.low is not None:
        nonempty &= farthest >= band.low
        full &= nearest >= band.low
    if band.high is not None:
        nonempty &= nearest <= band.high
        full &= farthest <= band.high
    if band.stop is not None:
        nonempty &= k.first < band.stop
        full &= k.last < band.stop
    return nonempty[None], full[None]


def _dilated(pattern: Dilated, runs: _Runs, heads: int, size: int) -> tuple[Tensor, Tensor]:
    by_offsets = {offsets: _dilated_head(pattern, runs, offsets) for (offsets,) in heads_by_kind(pattern, heads)}
    if distinct_heads(pattern, heads, size) > 1:
        by_head = (by_offsets[pattern.head_offsets(head, heads)] for head in range(heads))
        nonempty, full = (torch.stack(each) for each in zip(*by_head))
        return nonempty, full
    found = iter(by_offsets.values())
    nonempty, full = next(found)
    for more, all_of in found:
        nonempty, full = nonempty | more, full & all_of
    return nonempty[None], full[None]


def _dilated_head(pattern: Dilated, runs: _Runs, offsets: Offsets) -> tuple[Tensor, Tensor]:
    """Nonempty and full blocks of the heads with these offsets.

    Two different blocks share at most the segment in which the earlier one ends and the later one begins.
    """
    earlier = runs.first[:, None] > runs.first
    same = torch.eye(len(runs.first), dtype=torch.bool, device=runs.first.device)
    nonempty, full = torch.zeros_like(same), torch.zeros_like(same)
    for (segment, rate), offset in zip(pattern.branches, offsets):
        if offset is None:
            continue
        segment = min(segment, int(runs.last[-1]) + 1)
        begins, ends = runs.first // segment, runs.last // segment
        head = _selects(begins, runs, segment, rate, offset)
        tail = _selects(ends, runs, segment, rate, offset)
        inner = _selects((begins + 1).minimum(ends), runs, segment, rate, offset)  # all inner segments are equal
        meet = (begins[:, None] == ends) & head[:, None] & tail & earlier
        nonempty |= meet | (same & (head | tail | inner))
        if not pattern.is_causal:
            nonempty |= meet.T
        if rate == 1:
            within = (begins == ends)[:, None] & (begins == ends) & (begins[:, None] == begins)
            full |= within & earlier if pattern.is_causal else within
    return nonempty, full


def _selects(which: Tensor, runs: _Runs, segment: int, rate: int, offset: int) -> Tensor:
    """Whether each block holds a selected token of its segment `which`."""
    start = which * segment
    first, last = runs.first.maximum(start), runs.last.minimum(start + segment - 1)
    skipped = (first - start - offset + rate - 1).clamp(min=0) // rate
    return start + offset + skipped * rate <= last


def _reordered(pattern: Pattern, runs: _Runs, heads: int, size: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(pattern, Neighborhood):
        return _neighborhood(pattern, runs, _boxes_of(pattern, runs, size, positions))
    nonempty, full = [], []
    for first, last in zip(runs.first.tolist(), runs.last.tolist()):
        rows = positions[first : last + 1]
        seen = pattern.multiplicity(len(positions), heads=heads, q_pos=rows, k_pos=positions) > 0
        by_key = torch.stack([seen.any(1), seen.all(1)])
        padded = torch.nn.functional.pad(by_key, (0, -len(positions) % size)).view(2, len(seen), -1, size)
        nonempty.append(padded[0].any(-1))
        full.append(padded[1].all(-1))
    return torch.stack(nonempty, 1), torch.stack(full, 1)


def _neighborhood(
    pattern: Neighborhood, runs: _Runs, boxes: Iterable[tuple[int, Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Nonempty and full blocks, by the bounding box of each block in the grid."""
    nonempty = torch.ones(len(runs.first), len(runs.first), dtype=torch.bool, device=runs.first.device)
    full = nonempty.clone()
    for axis, low, high in boxes:
        near, covered = _axis(pattern, axis, low, high)
        nonempty &= near
        full &= covered
    return nonempty[None], full[None]


def _boxes(pattern: Neighborhood, runs: _Runs) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each axis with the lowest and highest coordinate of every block."""
    stride = 1
    for axis in reversed(range(len(pattern.grid))):
        size = pattern.grid[axis]
        first, last = runs.first // stride, runs.last // stride
        wraps = first // size != last // size
        yield axis, (first % size).masked_fill(wraps, 0), (last % size).masked_fill(wraps, size - 1)
        stride *= size


def _boxes_of(pattern: Neighborhood, runs: _Runs, size: int, positions: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """`_boxes` of blocks in another order."""
    blocks = positions[torch.arange(len(runs.first) * size, device=positions.device).clamp(max=len(positions) - 1)]
    stride = 1
    for axis in reversed(range(len(pattern.grid))):
        place = blocks.view(-1, size) // stride % pattern.grid[axis]
        yield axis, place.amin(1), place.amax(1)
        stride *= pattern.grid[axis]


def _axis(pattern: Neighborhood, axis: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """For coordinate ranges of query and key blocks: whether any coordinate sees any, and whether all see all."""
    size, step, along = pattern.grid[axis], pattern.dilation[axis], pattern.axes[axis]
    q_low, q_high, k_low, k_high = (low // step)[:, None], (high // step)[:, None], low // step, high // step
    if along.shift:
        # Residue classes differ by at most one member: the shorter bounds a window from below.
        lowest = along.starts(q_low, torch.full_like(q_low, size // step))
        highest = along.starts(q_high, torch.full_like(q_high, -(-size // step)))
        ends = (q_low, q_high) if along.is_causal else (lowest + along.window - 1, highest + along.window - 1)
        nonempty = (k_high >= lowest) & (k_low <= ends[1])
        full = (k_low >= highest) & (k_high <= ends[0])
    else:
        back, front = along.sides
        nonempty = (q_low - k_high <= back) & (k_low - q_high <= front)
        full = (q_high - k_low <= back) & (k_high - q_low <= front)
    return nonempty, full if step == 1 else torch.zeros_like(full)
