"""Fused Triton kernels over the pairs of tiles that meet: Neighborhood and Dilated, tokens in any order.

Tokens are read by their positions, nothing is gathered or permuted in memory: beyond the results there are lse, one
more sum per query, and the lists of `tile_lists`. The kernels are in `triton_tile_kernels` and `triton_tile_gradients`.

Neighborhood, because `triton` has no runs for it; Dilated, because a key that several branches see is met once here,
and once for each of them there. Tokens that the caller keeps in another order are tiles as they lie. Dense and Window
are left to `triton`, which meets the same tiles and needs no lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.autograd import recorded
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.kernels.heads import head_classes
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.tiles.estimates import PAIR_LIMIT, keys_met, pairs_met, table_bytes
from attn_dispatch.kernels.tiles.lists import lists_bytes, lists_of
from attn_dispatch.kernels.tiles.tables import MOST_BRANCHES, forget_tables
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.support import (
    SMALLEST_SIDE,
    Block,
    Pass,
    block_d,
    cut,
    fitting,
    float32,
    given,
    launch,
    passes_of,
    precision,
)
from attn_dispatch.spec.orders import NATURAL, TOKEN_ORDERS, serves
from attn_dispatch.spec.pattern import Dilated, Neighborhood
from attn_dispatch.spec.problem import Problem

name = "triton_tiles"
all_orders = TOKEN_ORDERS

PATTERNS = (Dilated, Neighborhood)  #: and those, Reordered
#: Tile sizes, and the rate that the kernels are taken to keep on them: what 128 rows read, they share. Not measured.
TILES = {64: 1.0, 128: 1.2}
SINGLE_TILES = {32: 1.0}  #: for float32, whose blocks are no larger
INTERPRETED_TILES = {64: 1.0}
INTERPRETED = Block(64, 64, 4, 1)
LIST_LIMIT = 2**27  #: pairs for all heads; blocks of them are counted in 32 bits
# Positions that are read take registers: eight warps where `triton` has four, and smaller blocks at the largest
# head_dim, after what ptxas reports.
SINGLE = {
    64: (Block(32, 32, 8, 2),),
    128: (Block(32, 32, 8, 2), Block(32, 16, 8, 2)),
    256: (Block(16, 16, 8, 1),),
}
BUILDING = 8  #: 64-bit temporaries for one list

FORWARD, BACKWARD_Q, BACKWARD_KV = passes_of("tile_forward", "tile_backward", SINGLE)


def version() -> str:
    return support.version()


def refusals(problem: Problem) -> list[Refusal]:
    natural = problem.pattern.natural
    found = support.refusals(replace(problem, pattern=natural), PATTERNS)
    if isinstance(natural, Dilated) and len(natural.branches) > MOST_BRANCHES:
        text = f"takes {MOST_BRANCHES} branches, not {len(natural.branches)}"
        found.append(Refusal("pattern", text))
    if not found:
        pairs = max(_pairs(problem, order) for order in orders(problem))
        every = pairs * len(head_classes(problem.pattern, problem.heads))
        if pairs > PAIR_LIMIT or every > LIST_LIMIT:
            text = f"{problem.pattern} makes about {pairs} pairs of tiles, over {PAIR_LIMIT}"
            if pairs <= PAIR_LIMIT:
                text = f"{problem.pattern} makes about {every} pairs of tiles for all heads, over {LIST_LIMIT}"
            found.append(Refusal("pattern", text))
    return found


def orders(problem: Problem) -> tuple[str, ...]:
    """The orders in which tiles could be fewer, and the natural one. `run` takes any other too."""
    return tuple(order for order in TOKEN_ORDERS if serves(order, problem.pattern))


def flops(problem: Problem, order: str = NATURAL) -> int:
    products = _pairs(problem, order) * tile_size(problem, order) ** 2 * sum(each.products for each in _passes(problem))
    return products * problem.batch * problem.heads * problem.head_dim * 2


def workspace_bytes(problem: Problem) -> int:
    """The most of any order that `orders` names, lists included."""
    # lse; then delta, and the gradient of lse made contiguous.
    sums = (3 if problem.needs_grad else 1) * problem.batch * problem.heads * problem.q_len * 4
    sums += copied_bytes(problem, masked_keys=False, padding=False)
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
    """Compute. `tile` is the number of tokens in a tile, a power of two; by default what `tile_size` says.

    Raises:
        InvalidInput: there is no such order, or no such tile.
    """
    if order not in all_orders:
        raise InvalidInput(f"order must be one of {', '.join(map(repr, all_orders))}, got {order!r}")
    tile = tile_size(problem, order) if tile is None else tile
    if tile < SMALLEST_SIDE or tile & (tile - 1):
        raise InvalidInput(f"tile must be a power of two, {SMALLEST_SIDE} or more, got {tile}")
    key_mask = tensors.get("key_mask")
    hidden = tensors.get("seq_lens"), None if key_mask is None else key_mask.view(torch.uint8)
    call = Hidden.of(problem).around(_Call(problem, order, tile, *hidden))
    return recorded(q, k, v, call) if problem.needs_grad else call.forward(q, k, v)


def forget(problem: Problem) -> None:
    """Drop the lists, of other problems too: they are made again when they are needed."""
    lists_of.cache_clear()
    forget_tables()


@lru_cache(maxsize=4096)
def tile_size(problem: Problem, order: str) -> int:
    """The tile with the least work, at the rate that the kernels keep on it."""
    if problem.device.type == "cpu":
        tiles = INTERPRETED_TILES
    else:
        tiles = SINGLE_TILES if problem.dtype == torch.float32 else TILES
    return min(tiles, key=lambda tile: keys_met(problem, order, tile) / tiles[tile])


@lru_cache(maxsize=4096)
def blocks(each: Pass, problem: Problem, tile: int) -> tuple[Block, ...]:
    """The blocks to try, the preferred first; their sides divide a tile."""
    found = (INTERPRETED,) if problem.device.type == "cpu" else fitting(each, problem)
    return tuple(dict.fromkeys(cut(block, tile, tile) for block in found))


@dataclass(frozen=True, slots=True)
class _Call:
    """A problem with its masks; `key_mask` is uint8, 0 where a key is taken away."""

    problem: Problem
    order: str
    tile: int
    seq_lens: Tensor | None
    key_mask: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        problem = self.problem
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32, device=q.device)
        _launch(FORWARD, self, (q, k, v, out, lse), (q, k, v), {})
        return out, lse

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        grad, grad_lse = given(grad, out), None if grad_lse is None else grad_lse.contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        delta, strided = torch.empty_like(lse), (q, k, v, grad)
        tensors = (q, k, v, out, grad, lse, grad_lse, delta, dq)
        _launch(BACKWARD_Q, self, tensors, strided, {"GRAD_LSE": grad_lse is not None})
        _launch(BACKWARD_KV, self, (q, k, v, grad, lse, delta, dk, dv), strided, {})
        return dq, dk, dv


def _launch(
    each: Pass,
    call: _Call,
    tensors: Sequence[Tensor | None],
    strided: Sequence[Tensor],
    constants: Mapping[str, bool],
) -> None:
    problem, mask, tile = call.problem, call.key_mask, call.tile
    kernel, lists = each.load(), lists_of(problem, call.order, tile)
    side, heads = (lists.queries, problem.heads) if each.side == "queries" else (lists.keys, problem.kv_heads)
    assert side is not None
    places = lists.q_pos if each.side == "queries" else lists.k_pos
    branches, axes = (0, 0) if lists.reach is None else lists.reach.shape[1:3]

    def start(block: Block) -> None:
        kernel[(len(places) // block.rows * heads * problem.batch,)](
            *tensors,
            call.seq_lens,
            mask,
            lists.q_pos,
            lists.k_pos,
            lists.kind_of,
            side.spans,
            side.pairs,
            lists.masks,
            lists.reach,
            *(stride for x in strided for stride in x.stride()),
            *((0, 0) if mask is None else mask.stride()),
            heads,
            len(lists.q_pos) // tile,
            len(lists.k_pos) // tile,
            problem.q_len,
            problem.k_len,
            float32(problem.scale),
            GROUP=problem.heads // problem.kv_heads,
            HEAD_DIM=problem.head_dim,
            BLOCK_D=block_d(problem),
            TILE=tile,
            ROWS=block.rows,
            COLUMNS=block.columns,
            BRANCHES=branches,
            AXES=axes,
            SEQ_LENS=call.seq_lens is not None,
            KEY_MASK=mask is not None,
            PRECISION=precision(problem),
            num_warps=block.warps,
            num_stages=block.stages,
            **constants,
        )

    launch(each.kernel, blocks(each, problem, tile), problem.device, start)


def _passes(problem: Problem) -> tuple[Pass, ...]:
    return (FORWARD, BACKWARD_Q, BACKWARD_KV) if problem.needs_grad else (FORWARD,)


def _pairs(problem: Problem, order: str) -> int:
    """Pairs of tiles for one head, about."""
    return pairs_met(problem, order, tile_size(problem, order))


def _list_bytes(problem: Problem, order: str) -> int:
    tile = tile_size(problem, order)
    kept = lists_bytes(problem, order, tile)
    # On a CPU they are made in the same memory.
    return kept if problem.device.type != "cpu" else BUILDING * kept + table_bytes(problem, order, tile)
