"""Tables of some rows of q over some rows of k, by the position of each, and who goes by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from attn_dispatch.kernels import dense, registry
from attn_dispatch.kernels.autograd import Passes
from attn_dispatch.kernels.native import run as native
from attn_dispatch.kernels.native.neighbours import neighbour_tables_at
from attn_dispatch.kernels.native.tables import NativeTables
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles import run as tiles
from attn_dispatch.kernels.tiles.tables import TileTable, tables_at
from attn_dispatch.spec.orders import HILBERT, permutation, places, serves
from attn_dispatch.spec.pattern import Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reordered import token_order_of

TILE = 64  #: rows of a tile

Solve = Callable[[Problem, Tensor | None], Passes]  #: from a problem and a mask of its keys, or None, to its passes


class Listing(Protocol):
    """How tables of rows of q over given rows of k are made."""

    def arranged(self, queries: Tensor) -> Tensor:
        """Rows of q at these positions, in the order that tiles shall have them."""
        ...

    def tables(self, queries: Tensor) -> tuple[Tensor, Solve]:
        """Which tiles of rows at these positions meet any key, bool [tiles], and who solves it."""
        ...


def listing_of(problem: Problem, pattern: Pattern, which: range, keys: Tensor) -> Listing:
    """A grid on a CPU has a kernel of its own, single key by single key; the rest goes by tiles of keys.

    Args:
        problem: the whole sequence's. pattern: its own, or a branch of it.
        which: the query heads that the rows are of.
        keys: int64, the positions of the rows of k.
    """
    grid = pattern.natural
    if isinstance(grid, Neighborhood) and not registry.load("native").refusals(replace(problem, ranks=1)):
        at = permutation(token_order_of(pattern), grid, problem.q_len)
        return _Keys(grid, len(which), keys, at)
    return _Tiles(problem, pattern, which, keys)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Args: at: the position in natural order at each place; None where places are positions."""

    grid: Neighborhood
    heads: int
    keys: Tensor
    at: Tensor | None

    def arranged(self, queries: Tensor) -> Tensor:
        grid = self.grid
        curve = permutation(HILBERT, grid, len(self._all)) if serves(HILBERT, grid) else None
        there = self._natural(queries)
        return (there if curve is None else places(curve)[there]).argsort()

    def tables(self, queries: Tensor) -> tuple[Tensor, Solve]:
        found = neighbour_tables_at(self.grid, self.heads, self._natural(queries), self._natural(self.keys))
        return found.tiles[:, 4] > 0, partial(_by_keys, found)

    @property
    def _all(self) -> range:
        return range(torch.Size(self.grid.grid).numel())

    def _natural(self, positions: Tensor) -> Tensor:
        return positions if self.at is None else self.at[positions]


@dataclass(frozen=True, slots=True)
class _Tiles:
    problem: Problem
    pattern: Pattern
    which: range
    keys: Tensor

    def arranged(self, queries: Tensor) -> Tensor:
        return torch.arange(len(queries))

    def tables(self, queries: Tensor) -> tuple[Tensor, Solve]:
        problem, dtype = self.problem, sum_dtype(self.problem.dtype)
        found = tables_at(self.pattern, problem.q_len, problem.heads, self.which, queries, self.keys, TILE, dtype)
        meets = torch.stack([table.first.diff() > 0 for table in found]).any(0)
        if problem.device.type != "cpu":
            found = tuple(table.to(problem.device) for table in found)
        return meets, partial(_by_tiles, found)


def _by_keys(found: NativeTables, problem: Problem, key_mask: Tensor | None) -> Passes:
    return native.partial(problem, key_mask, found)


def _by_tiles(found: tuple[TileTable, ...], problem: Problem, key_mask: Tensor | None) -> Passes:
    return tiles.partial(problem, found, dense.kernel_of(problem), key_mask)
