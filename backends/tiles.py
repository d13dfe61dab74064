"""Tile-sparse attention by a dense kernel: any pattern, tokens in any order, only the pairs of tiles that meet."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_dispatch import tile_math
from attn_dispatch.branches import sum_dtype
from attn_dispatch.contract import Refusal, refuse_pattern
from attn_dispatch.kernels import CPU_FLASH, CUDA_EFFICIENT, CpuFlash, CudaEfficient, Kernel
from attn_dispatch.order import HILBERT, NATURAL, RESIDUE, TOKEN_ORDERS, check, serves
from attn_dispatch.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.problem import Problem
from attn_dispatch.recorded import Call
from attn_dispatch.reorder import Reordered, kept_in
from attn_dispatch.tiles import AT_ONCE, MASK_BYTES, MOST_BRANCHES, forget_tables, head_classes, tables_of

name = "tiles"
all_orders = TOKEN_ORDERS

PATTERNS = (Dense, Window, Dilated, Neighborhood, Reordered)
#: Tile sizes, and the rate that the dense kernel kept on them, gathering included (on a CPU: AVX-512, float32).
TILES = {16: 0.65, 32: 0.87, 64: 1.0, 128: 1.07}
PAIR_LIMIT = 2**24  #: of tiles
PAIR_BYTES, BOX_BYTES, POSITION_BYTES = 100, 32, 32  #: for each, or each axis of it, while a table is made


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    found = (CPU_FLASH if problem.device.type == "cpu" else CUDA_EFFICIENT).refusals(problem)
    other = refuse_pattern(problem, PATTERNS)
    if other:
        return found + other
    pairs = max(_pairs(problem, order) for order in orders(problem))
    if pairs > PAIR_LIMIT:
        found.append(Refusal("pattern", f"{problem.pattern} makes about {pairs} pairs of tiles, over {PAIR_LIMIT}"))
    pattern = problem.pattern.natural
    if isinstance(pattern, Dilated) and len(pattern.branches) > MOST_BRANCHES:
        text = f"takes {MOST_BRANCHES} branches, not {len(pattern.branches)}"
        found.append(Refusal("pattern", text))
    return found


def orders(problem: Problem) -> tuple[str, ...]:
    """The orders in which tiles could be fewer, and the natural one. `run` takes any other too."""
    return tuple(order for order in TOKEN_ORDERS if serves(order, problem.pattern))


def flops(problem: Problem, order: str = NATURAL) -> int:
    tile = tile_size(problem, order)
    products = _pairs(problem, order) * tile**2 * problem.batch * problem.heads
    return products * problem.head_dim * (14 if problem.needs_grad else 4)


def workspace_bytes(problem: Problem) -> int:
    """The most of any order that `orders` names, tables included."""
    return max(_workspace_bytes(problem, order) for order in orders(problem))


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
    """Compute. `tile` is the number of tokens in a tile, a multiple of 4; by default what `tile_size` says."""
    tables = tables_of(problem, check(order), tile or tile_size(problem, order))
    return tile_math.run(q, k, v, problem, tables, kernel_of(problem), **tensors)


def kernel_of(problem: Problem) -> Kernel:
    """The dense kernel that the tiles are given to."""
    return CpuFlash() if problem.device.type == "cpu" else CudaEfficient()


def partial(problem: Problem, key_mask: Tensor | None = None) -> Call:
    """The passes of queries that see keys elsewhere too (see `contract`)."""
    return tile_math.partial(
        problem, tables_of(problem, NATURAL, tile_size(problem, NATURAL)), kernel_of(problem), key_mask
    )


def forget(problem: Problem) -> None:
    """Drop the tables, of other problems too: they are made again when they are needed."""
    forget_tables()


def tile_size(problem: Problem, order: str) -> int:
    """The tile with the least work, at the rate that the kernel keeps on it."""
    return min(TILES, key=lambda tile: _keys_met(problem, order, tile) / TILES[tile])


# --- estimates --------------------------------------------------------------------------------------------------------


def _keys_met(problem: Problem, order: str, tile: int) -> int:
    """About how many keys a tile of queries meets, in whole tiles, where tiles are aligned."""
    pattern, most = problem.pattern.natural, -(-problem.k_len // tile) * tile
    order = order if problem.pattern is pattern else kept_in(problem.pattern)
    if order == HILBERT and not isinstance(pattern, Neighborhood):
        return most  # what is folded meets keys from everywhere
    if isinstance(pattern, Neighborhood):
        most = min(most, math.prod(_spans(pattern, order, tile)))
    elif isinstance(pattern, Window):
        sides = (problem.k_len if side is None else side for side in (pattern.left, pattern.right))
        most = min(most, tile + sum(-(-side // tile) * tile for side in sides))
    elif isinstance(pattern, Dilated):
        lengths = [min(length, problem.k_len) for length in pattern.segment_lengths]
        if order == RESIDUE:
            lengths = [sum(-(-length // rate) for length, rate in zip(lengths, pattern.dilation_rates))]
        most = min(most, -(-max(lengths) // tile) * tile)
    return max(most, tile)


def _spans(pattern: Neighborhood, order: str, tile: int) -> list[int]:
    """On each axis, the places that a tile and the windows around it take."""
    found = []
    axes = zip(pattern.grid, pattern.window, pattern.dilation, pattern.is_causal, _sides(pattern, order, tile))
    for size, width, step, is_causal, side in axes:
        reach = (width - 1) // 2
        if order == NATURAL and side > 1:
            reach *= step  # tokens side by side are of all residues; elsewhere a tile keeps to one of them
        else:
            size = -(-size // step)
        span = side * (1 + -(-reach // side) * (1 if is_causal else 2))
        found.append(min(span, -(-size // side) * side))
    return found


def _sides(pattern: Neighborhood, order: str, tile: int) -> list[int]:
    """The shape of a tile: a part of a row, or rows, in the natural order; else as near to a cube as may be."""
    sides = [1] * len(pattern.grid)
    if order == NATURAL:
        for axis in reversed(range(len(sides))):
            sides[axis] = min(pattern.grid[axis], max(1, tile // math.prod(sides)))
        return sides
    members = [-(-size // step) for size, step in zip(pattern.grid, pattern.dilation)]
    while math.prod(sides) < tile and any(side < size for side, size in zip(sides, members)):
        axis = min((side, -axis) for axis, (side, size) in enumerate(zip(sides, members)) if side < size)[1]
        sides[-axis] *= 2
    return sides


def _pairs(problem: Problem, order: str) -> int:
    """Pairs of tiles for one head, about."""
    tile = tile_size(problem, order)
    return -(-problem.q_len // tile) * (_keys_met(problem, order, tile) // tile)


def _workspace_bytes(problem: Problem, order: str) -> int:
    return tile_math.workspace_bytes(problem, tile_size(problem, order)) + _table_bytes(problem, order)


def _table_bytes(problem: Problem, order: str) -> int:
    tile, pattern = tile_size(problem, order), problem.pattern.natural
    boxes = -(-problem.q_len // tile) * -(-problem.k_len // tile)
    pairs = min(boxes, 2 * _pairs(problem, order))
    axes = 2 * (len(pattern.branches) if isinstance(pattern, Dilated) else len(getattr(pattern, "grid", "-")))
    masks = min(pairs * tile**2, MASK_BYTES) * (3 + sum_dtype(problem.dtype).itemsize)
    one = pairs * PAIR_BYTES + masks + POSITION_BYTES * axes * (problem.q_len + problem.k_len)
    return one * len(head_classes(pattern, problem.heads)) + min(boxes, AT_ONCE) * BOX_BYTES * axes
