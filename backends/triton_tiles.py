"""Fused Triton kernels over tile pairs with visible keys: Neighborhood, Dilated, and masks made of data.

Tokens are read by position, in any token order; nothing is gathered or permuted in memory. Besides results there are
lse, one more sum per query, and the lists of `kernels/tiles/tables`. The kernels are `forward` and `backward` in
`kernels/triton`. The lists of `Ranges` and `Blocks` are made on the CPU: the first call with a pattern's tensors waits
for the device, later ones do not.

The backend `triton` has no runs for Neighborhood, and with Dilated it reads a key once for each branch, this one once
for all. Tokens that the caller stores in another order are tiled as stored. Dense and Window are left to `triton`,
which computes the same tiles and needs no lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.autograd import differentiable, refuse_tangents
from attn_dispatch.kernels.contract import Refusal, Result
from attn_dispatch.kernels.device_cache import note
from attn_dispatch.kernels.heads import head_classes
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.tiles import estimates
from attn_dispatch.kernels.tiles.tables import MAX_BRANCHES, data_lists_of, forget_lists, tile_lists_of
from attn_dispatch.kernels.triton import passes, support
from attn_dispatch.kernels.triton.blocks import SMALLEST_SIDE, BlockConfig, clipped
from attn_dispatch.kernels.triton.passes import Lists, Tables, TritonPasses
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.orders import NATURAL, ORDERS, serves
from attn_dispatch.spec.pattern import Dilated, Neighborhood
from attn_dispatch.spec.problem import Problem

name, version = "triton_tiles", support.version
score_terms = ("softcap", "bias", "alibi_slopes")
takes_data = True
shares_builds = specialized_trains = True
all_orders = ORDERS

PATTERNS = (Dilated, Neighborhood)  #: also within Reordered
#: Tile sizes, and the assumed relative speed with each: 128 rows share what they read. Not measured.
TILES = {64: 1.0, 128: 1.2}
SINGLE_TILES = {32: 1.0}  #: for float32, which has no larger blocks
INTERPRETED_TILES = {64: 1.0}
LIST_LIMIT = 2**27  #: tile pairs of all heads; their blocks are numbered in 32 bits
# Positions take registers: by ptxas's report, eight warps where `triton` has four, and smaller blocks at the largest
# head_dim.
SINGLE = {64: [(32, 32, 8, 2)], 128: [(32, 32, 8, 2), (32, 16, 8, 2)], 256: [(16, 16, 8, 1)]}
#: What hides keys that the kernels read: where padding alone sees a key, the gradients' kernel uses it.
HIDING = ("seq_lens", "pattern_data")
BUILDING = 8  #: 64-bit temporaries for one list

FORWARD, BACKWARD_Q, BACKWARD_KV = KERNELS = support.kernels_of(SINGLE)


def refusals(problem: Problem) -> list[Refusal]:
    natural = problem.pattern.natural
    known = (Form,) if isinstance(natural, Form) else PATTERNS
    found = support.refusals(replace(problem, pattern=natural), known)
    if (branches := estimates.branch_count(problem)) > MAX_BRANCHES:
        found.append(Refusal("pattern", f"takes {MAX_BRANCHES} branches, not {branches}"))
    if not found:
        pairs = max(_pairs(problem, order) for order in orders(problem))
        every = pairs * len(head_classes(problem.pattern, problem.heads)) * estimates.tables_per_head(problem)
        if pairs > estimates.PAIR_LIMIT or every > LIST_LIMIT:
            text = f"{problem.pattern} makes about {pairs} pairs of tiles, over {estimates.PAIR_LIMIT}"
            if pairs <= estimates.PAIR_LIMIT:
                text = f"{problem.pattern} makes about {every} pairs of tiles for all heads, over {LIST_LIMIT}"
            found.append(Refusal("pattern", text))
    return found


def orders(problem: Problem) -> tuple[str, ...]:
    """Natural order, and orders in which there may be fewer tile pairs. `run` takes every token order."""
    return tuple(order for order in ORDERS if serves(order, problem.pattern))


def flops(problem: Problem, order: str = NATURAL) -> int:
    products = sum(each.products for each in support.needed(KERNELS, problem))
    products *= _pairs(problem, order) * tile_size(problem, order) ** 2
    return products * problem.batch * problem.heads * problem.head_dim * 2


def first_call_ms(problem: Problem) -> float:
    return support.first_call_ms(name, problem, tile_size(problem, NATURAL))


def workspace_bytes(problem: Problem) -> int:
    """The most bytes in any order of `orders`, lists included."""
    sums = copied_bytes(problem, masked_keys=False, padding=isinstance(problem.pattern, Form))
    sums += support.bytes_beside_lists(problem)
    return sums + max(_list_bytes(problem, order) for order in orders(problem))


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
    """Compute. `tile`: tokens per tile, a power of two; by default `tile_size`.

    Raises:
        InvalidInput: `order` or `tile` is not supported.
    """
    if order not in all_orders:
        raise InvalidInput(f"order must be one of {', '.join(map(repr, all_orders))}, got {order!r}")
    tile = tile_size(problem, order) if tile is None else tile
    if tile < SMALLEST_SIDE or tile & (tile - 1):
        raise InvalidInput(f"tile must be a power of two, {SMALLEST_SIDE} or more, got {tile}")
    refuse_tangents(name, q, k, v, *tensors.values())
    data, given = tensors.get("pattern_data"), support.Given.of(problem, tensors)
    hiding = {name: x for name, x in tensors.items() if data is not None and name in HIDING}
    call = Hidden.of(problem, hiding, masked_keys=False).around(_passes(problem, order, tile, data, given))
    found = differentiable(q, k, v, call, (*given, data)) if problem.needs_grad else call.forward(q, k, v)
    note(name, problem, tile)
    return found


def specialized(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, heads_first: bool = False
) -> Callable[..., Result] | None:
    tile = tile_size(problem, NATURAL)
    calls = _passes(problem, NATURAL, tile, None, support.NOTHING, True, True, {})
    return None if heads_first else passes.specialized(name, problem, calls, _list_bytes(problem, NATURAL))


forget = forget_lists


@lru_cache(maxsize=4096)
def tile_size(problem: Problem, order: str) -> int:
    """The tile size with the least estimated time, by the kernels' relative speed."""
    if problem.device.type == "cpu":
        tiles = INTERPRETED_TILES
    else:
        tiles = SINGLE_TILES if problem.dtype == torch.float32 else TILES
    return min(tiles, key=lambda tile: estimates.estimated_keys(problem, order, tile) / tiles[tile])


@lru_cache(maxsize=4096)
def block_configs(each: support.TritonKernel, problem: Problem, tile: int) -> tuple[BlockConfig, ...]:
    """The blocks to try, in order of preference; their sides divide the tile."""
    return tuple(dict.fromkeys(clipped(block, tile, tile) for block in support.fitting_blocks(each, problem)))


def _passes(problem: Problem, order: str, tile: int, data: Tensor | None, *more: Any) -> TritonPasses:
    blocks, lists = (lambda each: block_configs(each, problem, tile)), partial(_lists, problem, order, tile, data)
    return TritonPasses(problem, KERNELS, blocks, lists, *more)


def _lists(
    problem: Problem, order: str, tile: int, data: Tensor | None, each: support.TritonKernel, block: BlockConfig
) -> Lists:
    found = tile_lists_of(problem, order, tile) if data is None else data_lists_of(problem, data, tile)
    side, rows, columns = found.keys, found.k_pos, found.q_pos
    if each.side == "queries":
        side, rows, columns = found.queries, columns, rows
    assert side is not None
    masks = found.masks, found.reach, found.counts, found.block_at
    tables = Tables(side.spans, side.pairs, None, found.kind_of, rows, columns, *masks)
    return Lists(len(rows) // block.rows, 1, tables, tile=tile, by_row=len(found.kind_of) > problem.heads)


def _pairs(problem: Problem, order: str) -> int:
    """Estimated tile pairs of one head."""
    return estimates.estimated_pairs(problem, order, tile_size(problem, order))


def _list_bytes(problem: Problem, order: str) -> int:
    tile = tile_size(problem, order)
    held = estimates.tile_lists_bytes(problem, order, tile)
    # On a CPU the memory for building them counts too.
    return held if problem.device.type != "cpu" else BUILDING * held + estimates.tile_table_bytes(problem, order, tile)
