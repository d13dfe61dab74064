"""Orders in which a kernel's programs compute (head, tile) pairs, and which programs reverse their columns.

The order changes results by rounding only: tiles and their columns are the same. It changes which columns are in the
cache when the next program reads them.

Source: Zhu, Pan & Ding 2026, sawtooth wavefront reordering.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_dispatch.kernels.triton.work_list import Side, WorkList, bounds, tiles_at_most
from attn_dispatch.spec.hilbert import curve
from attn_dispatch.spec.orders import GROUPED, HILBERT_VISITS, NATURAL, SAWTOOTH, VISIT_ORDERS
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tracing import make_plain

LAUNCH = 3  #: entries of a launch
WARPS = 8  #: per multiprocessor at the most registers per thread, which the kernels use


@dataclass(frozen=True, slots=True)
class L2Cache:
    """Bytes of a GPU's L2 cache, and the number of multiprocessors that share it."""

    l2_bytes: int
    multiprocessors: int


def launch_order_of(problem: Problem, side: Side, work: WorkList, order: str, cache: L2Cache, warps: int) -> Tensor:
    """Every (head, tile) pair once, in launch order.

    Args:
        work: the work list of that side of the problem.
        order: a visit order.
        warps: per program.

    Returns:
        int32 [pairs, 3]; the head, the index in `work.tiles`, and 1 where columns go in reverse.
    """
    return make_plain(_launch_order, problem, side, work, order, cache, warps)


def _launch_order(problem: Problem, side: Side, work: WorkList, order: str, cache: L2Cache, warps: int) -> Tensor:
    kind = work.kind_of.long()
    first, tiles = work.first_tile.long()[kind], work.first_tile.long().diff()[kind]
    together = heads_together(problem, side, order, cache)
    head, place = _side_by_side(len(kind), work.most_tiles, together, order == HILBERT_VISITS).to(kind.device)
    exists = place < tiles[head]
    head, place = head[exists], place[exists]
    return torch.stack([head, first[head] + place, _rounds(len(head), cache, warps, kind.device) % 2], dim=1).int()


def launch_order_bytes(problem: Problem, side: Side, block: int) -> int:
    """Upper bound of the bytes of `launch_order_of` for tiles of at most `block` rows, without listing them."""
    heads = problem.heads if side == "queries" else problem.kv_heads
    return 4 * LAUNCH * heads * tiles_at_most(problem, side, block)


def offered_orders(problem: Problem, cache: L2Cache, tiles: int) -> tuple[str, ...]:
    """The orders that may change the speed, natural order first.

    Args:
        tiles: query tiles per head.
    """
    sides: tuple[Side, ...] = ("queries", "keys") if problem.needs_grad else ("queries",)
    everything = problem.batch * problem.kv_heads * max(columns_bytes(problem, side) for side in sides)
    if everything <= cache.l2_bytes or problem.batch * problem.heads * tiles <= cache.multiprocessors:
        return (NATURAL,)
    if all(heads_together(problem, side, GROUPED, cache) == 1 for side in sides):
        return (NATURAL, SAWTOOTH)
    return (NATURAL, *VISIT_ORDERS)


def heads_together(problem: Problem, side: Side, order: str, cache: L2Cache) -> int:
    """The number of heads computed together: all that share columns, and more while their columns fit the cache.

    Query heads, or key heads where rows are keys.
    """
    if order not in (GROUPED, HILBERT_VISITS):
        return 1
    share = problem.heads // problem.kv_heads if side == "queries" else 1
    return share * max(1, min(problem.kv_heads, cache.l2_bytes // max(1, columns_bytes(problem, side))))


def heads_in_turn(problem: Problem, side: Side, cache: L2Cache) -> tuple[int, bool]:
    """The number of heads, of any batch rows, whose programs take turns in natural order, and whether longest first.

    As many heads as half of the L2 cache holds the columns of, and at least those that share columns. A head's tiles
    may start in any order if it holds all columns, or if all tiles read about the same.
    """
    share, columns = (
        (problem.heads // problem.kv_heads, problem.k_len)
        if side == "queries"
        else (1, problem.q_len * problem.heads // problem.kv_heads)
    )
    fitting = cache.l2_bytes // 2 // max(1, 2 * columns * problem.head_dim * problem.dtype.itemsize)
    return share * max(1, fitting), bool(fitting) or not isinstance(problem.pattern, Dilated)


def columns_bytes(problem: Problem, side: Side) -> int:
    """Bytes that a tile reads per key head: keys and values, or queries and gradients of all its query heads."""
    columns = problem.k_len if side == "queries" else problem.q_len
    low, high = bounds(problem, side)
    if isinstance(problem.pattern, Dilated):
        columns = min(columns, max(problem.pattern.segment_lengths))
    elif low is not None and high is not None:
        columns = min(columns, high - low + 1)
    heads = 1 if side == "queries" else problem.heads // problem.kv_heads
    return 2 * heads * columns * problem.head_dim * problem.dtype.itemsize


def _side_by_side(heads: int, tiles: int, together: int, curved: bool) -> Tensor:
    """Every head and the number of its tile, int64 [2, heads * tiles]: groups of `together` heads in sequence."""
    found = []
    for first in range(0, heads, together):
        size = min(together, heads - first)
        points = curve((tiles, size)) if curved and size > 1 else torch.arange(tiles * size)
        found.append(torch.stack([first + points % size, points // size]))
    return torch.cat(found, dim=1)


def _rounds(programs: int, cache: L2Cache, warps: int, device: torch.device) -> Tensor:
    """The round of each program; programs of one round run at about the same time."""
    at_once = cache.multiprocessors * max(1, WARPS // warps)
    return torch.arange(programs, device=device) // at_once
