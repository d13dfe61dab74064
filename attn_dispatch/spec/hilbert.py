"""The Hilbert curve through a grid of any sizes.

As in Cerveny's generalised curve, the curve crosses a box from a corner to the other end of one axis, and the box is
split into smaller boxes that are crossed in the same way, each starting next to the end of the previous one. A box can
be crossed in single steps if the size of that axis is even or all sizes are odd; parity decides where to split, so that
all parts are such boxes. Successive points are therefore neighbours on every grid, without diagonal steps. Boxes of
equal sizes are computed once, then rotated and reflected.

Source: J. Cerveny 2018, the generalised Hilbert curve; the parity of the cuts is ours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

Three: TypeAlias = tuple[int, int, int]
Sizes: TypeAlias = Three  #: of a box: of the crossed axis, of the longer of the others, of the third
Side: TypeAlias = Three  #: an axis of the whole box, and the first and last coordinate of a part along it
Part: TypeAlias = tuple[Side, Side, Side]
Points: TypeAlias = tuple[Tensor, ...]  #: one coordinate each, int32 [points]


@lru_cache(maxsize=16)
def curve(grid: tuple[int, ...]) -> Tensor:
    """Row-major positions in sequence along the curve, int64 [tokens] on the CPU. Do not write to it.

    Args:
        grid: one to three sizes >= 1. The curve starts at position 0; each step goes to a neighbour.
    """
    depth, height, width = (1, 1, *grid)[-3:]
    with torch.inference_mode(False):  # the cached tensor may index tensors that need gradients
        planes, rows, columns = _joined(_whole((depth, height, width)), {})
        return planes.to(torch.int64).mul_(height).add_(rows).mul_(width).add_(columns)


def _joined(parts: list[Part], known: dict[Sizes, Points]) -> Points:
    """The points of the parts in sequence, in coordinates of the whole box."""
    found: tuple[list[Tensor], ...] = ([], [], [])
    for crossed, *others in parts:
        sides = (crossed, *sorted(others, key=_size, reverse=True))
        w, h, d = map(_size, sides)
        for (axis, first, last), along in zip(sides, _points((w, h, d), known)):
            placed = along if first == 0 else first + along if first <= last else first - along
            found[axis].append(placed)
    return torch.cat([row for rows in found for row in rows]).view(3, -1).unbind()


def _points(sizes: Sizes, known: dict[Sizes, Points]) -> Points:
    if sizes not in known:
        known[sizes] = _line(sizes[0]) if sizes[1] == 1 else _joined(_parts(sizes), known)
    return known[sizes]


def _line(length: int) -> Points:
    zeros = torch.zeros(length, dtype=torch.int32, device="cpu")
    return torch.arange(length, dtype=torch.int32, device="cpu"), zeros, zeros


def _size(side: Side) -> int:
    return abs(side[2] - side[1]) + 1


def _whole(sizes: Sizes) -> list[Part]:
    """The grid as one box that can be crossed, or as two where the crossed axis is short and parts would be thin."""
    axes = sorted(range(3), key=lambda axis: -sizes[axis])
    longest, length = axes[0], sizes[axes[0]]
    across = next((axis for axis in axes if sizes[axis] % 2 == 0), longest)
    if 2 * sizes[across] >= length:
        return [_box(sizes, across)]
    # The far box is the last one, so that it may end anywhere.
    cut = length - 1 - sizes[across]
    return [_box(sizes, longest, (longest, 0, cut - 1)), _box(sizes, across, (longest, cut, length - 1))]


def _box(sizes: Sizes, across: int, changed: Side | None = None) -> Part:
    sides = [(axis, 0, size - 1) for axis, size in enumerate(sizes)]
    if changed:
        sides[changed[0]] = changed
    one, two, three = sorted(sides, key=lambda side: side[0] != across)
    return one, two, three


def _parts(sizes: Sizes) -> list[Part]:
    """Split a box so that its parts are no less cubic than the box."""
    w, h, d = sizes
    if 2 * w > 3 * h:
        i, rest = _half(w), ((1, 0, h - 1), (2, 0, d - 1))
        return [((0, 0, i - 1), *rest), ((0, i, w - 1), *rest)]
    if 3 * h > 4 * d or w % 2:
        return _in_three(sizes)
    return _in_five(sizes)


def _in_three(sizes: Sizes) -> list[Part]:
    """Forward along the second axis, across the far half, and back along the second axis."""
    w, h, d = sizes
    i, j = _half(w), _half(h)
    return [
        ((1, 0, j - 1), (2, 0, d - 1), (0, 0, i - 1)),
        ((0, 0, w - 1), (1, j, h - 1), (2, 0, d - 1)),
        ((1, j - 1, 0), (2, 0, d - 1), (0, w - 1, i)),
    ]


def _in_five(sizes: Sizes) -> list[Part]:
    """As Hilbert's curve through the eight octants of a cube, with three pairs of octants merged into one box each."""
    w = sizes[0]
    b, c = (2, 1) if sizes[1] % 2 == 0 and sizes[2] % 2 else (1, 2)
    h, d = sizes[b], sizes[c]
    i, j, k = _half(w), _half(h), _half(d)
    if d % 2 and i % 2 == 0:
        i -= 1  # two boxes are crossed along c: if d is odd, their other sizes must be odd
    return [
        ((b, 0, j - 1), (c, 0, k - 1), (0, 0, i - 1)),
        ((c, 0, d - 1), (0, 0, i - 1), (b, j, h - 1)),
        ((0, 0, w - 1), (b, j - 1, 0), (c, d - 1, k)),
        ((c, d - 1, 0), (0, w - 1, i), (b, j, h - 1)),
        ((b, j - 1, 0), (c, 0, k - 1), (0, w - 1, i)),
    ]


def _half(size: int) -> int:
    """About half of a size; even for a size above 2, so that the rest has the parity of the whole."""
    return size // 2 + size // 2 % 2 if size > 2 else 1
