"""Attention of some rows of q over some rows of k, by the position of each row: tables, and kernels that read them."""

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
from attn_dispatch.kernels.native.tables import NativeTables, neighbour_tables_at
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles import run as tiles
from attn_dispatch.kernels.tiles.tables import TileTable, tables_at
from attn_dispatch.spec.orders import HILBERT, permutation, places, serves, token_order_of
from attn_dispatch.spec.pattern import Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem

TILE = 64  #: rows of a tile

#: Builds the kernel call of a problem; the tensor is a mask of its keys.
Solve = Callable[[Problem, Tensor | None], Passes]


class PositionTables(Protocol):
    """Makes the tables of rows of q over given rows of k."""

    def order(self, queries: Tensor) -> Tensor:
        """The order in which tiles take these rows of q: int64 [rows], indices."""
        ...

    def build(self, queries: Tensor) -> tuple[Tensor, Solve]:
        """bool [tiles], whether a tile of these rows of q sees any key; and what builds the kernel call."""
        ...


def position_tables(problem: Problem, pattern: Pattern, which: range, keys: Tensor) -> PositionTables:
    """Tables of single keys for a neighborhood on the CPU, whose kernel reads them; else tables of key tiles.

    Args:
        problem: the whole sequence's. pattern: its pattern, or one branch of it.
        which: the query heads.
        keys: int64, the positions of the rows of k.
    """
    grid = pattern.natural
    if isinstance(grid, Neighborhood) and not registry.load("native").refusals(replace(problem, ranks=1)):
        at = permutation(token_order_of(pattern), grid, problem.q_len)
        return _KeyTables(grid, len(which), keys, at)
    return _TileTables(problem, pattern, which, keys)


@dataclass(frozen=True, slots=True)
class _KeyTables:
    """Args: at: the position in natural order of each stored token; None if tokens are stored in natural order."""

    grid: Neighborhood
    heads: int
    keys: Tensor
    at: Tensor | None

    def order(self, queries: Tensor) -> Tensor:
        grid = self.grid
        curve = permutation(HILBERT, grid, len(self._all)) if serves(HILBERT, grid) else None
        natural = self._natural(queries)
        return (natural if curve is None else places(curve)[natural]).argsort()

    def build(self, queries: Tensor) -> tuple[Tensor, Solve]:
        found = neighbour_tables_at(self.grid, self.heads, self._natural(queries), self._natural(self.keys))
        return found.tiles[:, 4] > 0, partial(_solve_by_keys, found)

    @property
    def _all(self) -> range:
        return range(torch.Size(self.grid.grid).numel())

    def _natural(self, positions: Tensor) -> Tensor:
        return positions if self.at is None else self.at[positions]


@dataclass(frozen=True, slots=True)
class _TileTables:
    problem: Problem
    pattern: Pattern
    which: range
    keys: Tensor

    def order(self, queries: Tensor) -> Tensor:
        return torch.arange(len(queries))

    def build(self, queries: Tensor) -> tuple[Tensor, Solve]:
        problem, dtype = self.problem, sum_dtype(self.problem.dtype)
        found = tables_at(self.pattern, problem.q_len, problem.heads, self.which, queries, self.keys, TILE, dtype)
        sees_any = torch.stack([table.first.diff() > 0 for table in found]).any(0)
        if problem.device.type != "cpu":
            found = tuple(table.to(problem.device) for table in found)
        return sees_any, partial(_solve_by_tiles, found)


def _solve_by_keys(tables: NativeTables, problem: Problem, key_mask: Tensor | None) -> Passes:
    return native.partial(problem, key_mask, tables)


def _solve_by_tiles(tables: tuple[TileTable, ...], problem: Problem, key_mask: Tensor | None) -> Passes:
    return tiles.partial(problem, tables, dense.kernel_of(problem), key_mask)
