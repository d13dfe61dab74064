"""Tile-sparse attention by a dense kernel: any pattern and token order, only tile pairs with visible keys."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Passes
from attn_dispatch.kernels.contract import Refusal, refuse_pattern
from attn_dispatch.kernels.dense import Products, kernel_of
from attn_dispatch.kernels.hidden import Hidden
from attn_dispatch.kernels.tiles import estimates
from attn_dispatch.kernels.tiles import run as tile_math
from attn_dispatch.kernels.tiles.estimates import PAIR_LIMIT, estimated_keys, estimated_pairs
from attn_dispatch.kernels.tiles.tables import MAX_BRANCHES, data_tables_of, tables_of
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.orders import NATURAL, ORDERS, Reordered, check, serves
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem

name = "tiles"
takes_data = True
all_orders = ORDERS

PATTERNS = (Dense, Window, Dilated, Neighborhood, Reordered)
#: Tile sizes, and the dense kernel's relative speed with each, gathering included (measured on AVX-512, float32).
TILES = {16: 0.65, 32: 0.87, 64: 1.0, 128: 1.07}


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    found = kernel_of(problem, Products).limits.refusals(problem)
    other = refuse_pattern(problem, (*PATTERNS, Form))
    if other:
        return found + other
    pairs = max(_pairs(problem, order) for order in orders(problem))
    if pairs > PAIR_LIMIT:
        found.append(Refusal("pattern", f"{problem.pattern} makes about {pairs} pairs of tiles, over {PAIR_LIMIT}"))
    if (branches := estimates.branch_count(problem)) > MAX_BRANCHES:
        found.append(Refusal("pattern", f"takes {MAX_BRANCHES} branches, not {branches}"))
    return found


def orders(problem: Problem) -> tuple[str, ...]:
    """Natural order, and orders in which there may be fewer tile pairs. `run` takes every token order."""
    return tuple(order for order in ORDERS if serves(order, problem.pattern))


def flops(problem: Problem, order: str = NATURAL) -> int:
    tile = tile_size(problem, order)
    products = _pairs(problem, order) * tile**2 * problem.batch * problem.heads
    return products * problem.head_dim * (14 if problem.needs_grad else 4)


def workspace_bytes(problem: Problem) -> int:
    """The most bytes in any order of `orders`, tables included."""
    return max(estimates.workspace_bytes(problem, order, tile_size(problem, order)) for order in orders(problem))


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    order: str = NATURAL,
    tile: int | None = None,
    **tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute. `tile`: tokens per tile, a multiple of 4; by default `tile_size`. Masks made of data have one order."""
    size, data = tile or tile_size(problem, check(order)), tensors.get("pattern_data")
    tables = (tables_of(problem, order, size),) if data is None else data_tables_of(problem, data, size)
    return tile_math.run(q, k, v, problem, tables, kernel_of(problem, Products), **tensors)


def partial(problem: Problem, key_mask: Tensor | None = None) -> Passes:
    """The passes for queries that also see other keys (see `contract.Backend`)."""
    tables = tables_of(problem, NATURAL, tile_size(problem, NATURAL))
    return Hidden.of(problem).around(tile_math.partial(problem, tables, kernel_of(problem, Products), key_mask))


forget = tables_of.forget


def tile_size(problem: Problem, order: str) -> int:
    """The tile size with the least estimated time, by the kernel's relative speed."""
    return min(TILES, key=lambda tile: estimated_keys(problem, order, tile) / TILES[tile])


# --- estimates ------------------------------------------------------------------------------------------------


def _pairs(problem: Problem, order: str) -> int:
    """Estimated tile pairs of one head."""
    return estimated_pairs(problem, order, tile_size(problem, order))
