"""The curve visits every point once and moves by single steps: on all small grids, and on random larger ones."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_dispatch.spec.hilbert import curve

Grid = tuple[int, ...]


def coordinates(positions: Tensor, grid: Grid) -> Tensor:
    """[tokens, axes]"""
    return torch.stack(torch.unravel_index(positions, grid), dim=1)


def faults(positions: Tensor, grid: Grid) -> list[str]:
    """The violations of a walk through the whole grid by single steps."""
    found = []
    visited = torch.zeros(math.prod(grid), dtype=torch.bool)
    visited[positions] = True
    if len(positions) != len(visited) or not visited.all():
        found.append(f"{grid}: not a permutation")
    elif int(positions[0]) != 0:
        found.append(f"{grid}: does not start at position 0")
    steps = coordinates(positions, grid).diff(dim=0).abs().sum(1)
    if (steps != 1).any():
        found.append(f"{grid}: {int((steps != 1).sum())} steps are not to a neighbour")
    return found


@pytest.mark.parametrize(("rank", "largest"), [(1, 100), (2, 20), (3, 7)])
def test_every_small_grid(rank: int, largest: int) -> None:
    grids = product(range(1, largest + 1), repeat=rank)
    assert [fault for grid in grids for fault in faults(curve(grid), grid)] == []


@given(st.one_of(st.tuples(*[st.integers(1, 300)] * 2), st.tuples(*[st.integers(1, 40)] * 3)))
def test_larger_grids(grid: Grid) -> None:
    assert faults(curve(grid), grid) == []


@pytest.mark.parametrize("grid", [(512, 511), (40001, 2), (2, 3, 9001), (63, 64, 65)])
def test_large_and_long_grids(grid: Grid) -> None:
    assert faults(curve(grid), grid) == []


def quarter_by_quarter(side: int) -> list[tuple[int, int]]:
    """Hilbert's curve by its definition: four curves of half the side, the first and the last transposed."""
    if side == 1:
        return [(0, 0)]
    half = side // 2
    inner = quarter_by_quarter(half)
    return [
        *((y, x) for x, y in inner),
        *((x, y + half) for x, y in inner),
        *((x + half, y + half) for x, y in inner),
        *((side - 1 - y, half - 1 - x) for x, y in inner),
    ]


@pytest.mark.parametrize("side", [2, 4, 32])
def test_powers_of_two_are_hilberts_curve(side: int) -> None:
    found = {
        tuple(map(tuple, coordinates(curve((side, side)), (side, side))[:, axes].tolist())) for axes in ([0, 1], [1, 0])
    }
    assert tuple(quarter_by_quarter(side)) in found


# --- locality ---------------------------------------------------------------------------------------------------------


def reached(positions: Tensor, grid: Grid, ahead: int, tile: int = 64) -> float:
    """Average points in the bounding box of a tile, extended by `ahead` each way, over all full tiles."""
    points = coordinates(positions, grid)
    tiles = points[: len(points) // tile * tile].view(-1, tile, len(grid))
    low = (tiles.amin(1) - ahead).clamp(min=0)
    high = torch.minimum(tiles.amax(1) + ahead, torch.tensor(grid) - 1)
    return float((high - low + 1).prod(1).double().mean())


@pytest.mark.parametrize(("grid", "edge"), [((64, 64), 8), ((256, 128), 8), ((16, 16, 16), 4), ((64, 32, 32), 4)])
def test_tiles_of_64_are_squares_and_cubes(grid: Grid, edge: int) -> None:
    tiles = coordinates(curve(grid), grid).view(-1, 64, len(grid))
    assert torch.equal(tiles.amax(1) - tiles.amin(1), torch.full((len(tiles), len(grid)), edge - 1))


@pytest.mark.parametrize("grid", [(63, 64), (101, 99), (100, 37), (50, 50), (33, 33), (33, 33, 33), (31, 30, 29)])
def test_tiles_reach_fewer_points_than_raster_does(grid: Grid) -> None:
    ahead = 6 if len(grid) == 2 else 3
    found = reached(curve(grid), grid, ahead)
    raster = torch.arange(math.prod(grid))
    for axes in permutations(range(len(grid))):
        assert found < reached(raster.view(grid).permute(axes).flatten(), grid, ahead)


@pytest.mark.parametrize("grid", [(301, 6), (6, 301), (300, 7), (301, 7), (301, 5, 6)])
def test_a_long_grid_is_walked_from_end_to_end(grid: Grid) -> None:
    length, width = max(grid), sorted(grid)[-2]
    along = coordinates(curve(grid), grid)[:, grid.index(length)]
    level = torch.linspace(0, length - 1, len(along))
    assert (along - level).abs().max() < 2 * width  # the longest possible box
