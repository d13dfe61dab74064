"""The Hilbert curve through a grid."""

from __future__ import annotations

import torch
from torch import Tensor


def curve(grid: tuple[int, ...]) -> Tensor:
    """Row-major positions along the curve, int64 [tokens]. For now along the curve of the enclosing square or cube."""
    side = 1 << max(size - 1 for size in grid).bit_length()
    points = torch.arange(side ** len(grid))
    found = torch.zeros_like(points)
    for axis in range(len(grid)):  # Morton order stands in
        bits = torch.zeros_like(points)
        for bit in range(side.bit_length() - 1):
            bits |= (points >> (bit * len(grid) + len(grid) - 1 - axis) & 1) << bit
        found = torch.where(bits < grid[axis], found * grid[axis] + bits, torch.full_like(found, -(2**40)))
    return found[found >= 0]
