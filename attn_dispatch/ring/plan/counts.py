"""Runs of a row-major grid as boxes, and the query-key pairs of a neighborhood between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attn_dispatch.kernels.tiles.tables import axis_bounds
from attn_dispatch.spec.pattern import Neighborhood

Box = tuple[range, ...]  #: by axis


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
    low, high = axis_bounds(pattern, axis)
    step = pattern.dilation[axis]
    x = torch.arange(queries.start, queries.stop)
    residue = x % step
    # Places in the residue class: those of keys.start and after, and before keys.stop.
    first = torch.maximum(low[x], _divided_up(keys.start - residue, step))
    stop = torch.minimum(high[x] + 1, _divided_up(keys.stop - residue, step))
    return int((stop - first).clamp(min=0).sum())


def _divided_up(x: Tensor, by: int) -> Tensor:
    return -((-x).div(by, rounding_mode="floor"))
