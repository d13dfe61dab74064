"""In which order a kernel's programs take (head, tile), and which of them go through their columns backwards.

A result depends on this by no more than rounding: the tiles are the same, and so are the columns that each meets. What
changes is which columns are still in the cache when the next program asks for them.

Source: Zhu, Pan & Ding 2026, sawtooth wavefront reordering.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_dispatch.kernels.triton.work_list import Side, Visits, bounds, tiles_at_most
from attn_dispatch.spec.hilbert import curve
from attn_dispatch.spec.orders import GROUPED, HILBERT_VISITS, NATURAL, SAWTOOTH, VISIT_ORDERS
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.spec.problem import Problem

LAUNCH = 3  #: entries of a launch
WARPS = 8  #: whose registers fill a multiprocessor: the kernels take as many as a thread may have


@dataclass(frozen=True, slots=True)
class Chip:
    """What bounds reuse: bytes of L2 cache, and the multiprocessors that share it."""

    l2_bytes: int
    multiprocessors: int


def launches_of(problem: Problem, side: Side, visits: Visits, order: str, chip: Chip, warps: int) -> Tensor:
    """Each head and tile once, in the order of launch. The order is one of visits.

    Args:
        visits: the tiles of that side of the problem.
        warps: of one program.

    Returns:
        int32 [pairs, 3]; the head, which of `visits.tiles`, and 1 where its columns are met from the last to the first.
    """
    kind = visits.kind_of.long()
    first, tiles = visits.first_tile.long()[kind], visits.first_tile.long().diff()[kind]
    together = heads_together(problem, side, order, chip)
    head, place = _side_by_side(len(kind), visits.most_tiles, together, order == HILBERT_VISITS).to(kind.device)
    there = place < tiles[head]
    head, place = head[there], place[there]
    return torch.stack([head, first[head] + place, _rounds(len(head), chip, warps, kind.device) % 2], dim=1).int()


def launches_bytes(problem: Problem, side: Side, block: int) -> int:
    """Upper bound of what `launches_of` gives for tiles of at most `block` rows, without listing them."""
    heads = problem.heads if side == "queries" else problem.kv_heads
    return 4 * LAUNCH * heads * tiles_at_most(problem, side, block)


def offered(problem: Problem, chip: Chip, tiles: int) -> tuple[str, ...]:
    """The orders that may make a difference, the natural one first.

    Args:
        tiles: of one head's queries.
    """
    sides: tuple[Side, ...] = ("queries", "keys") if problem.needs_grad else ("queries",)
    everything = problem.batch * problem.kv_heads * max(columns_bytes(problem, side) for side in sides)
    if everything <= chip.l2_bytes or problem.batch * problem.heads * tiles <= chip.multiprocessors:
        return (NATURAL,)
    if all(heads_together(problem, side, GROUPED, chip) == 1 for side in sides):
        return (NATURAL, SAWTOOTH)
    return (NATURAL, *VISIT_ORDERS)


def heads_together(problem: Problem, side: Side, order: str, chip: Chip) -> int:
    """How many heads run side by side: those that share their columns, and more while all columns fit into the cache.

    Heads of queries, or of keys where rows are keys.
    """
    if order not in (GROUPED, HILBERT_VISITS):
        return 1
    share = problem.heads // problem.kv_heads if side == "queries" else 1
    return share * max(1, min(problem.kv_heads, chip.l2_bytes // max(1, columns_bytes(problem, side))))


def columns_bytes(problem: Problem, side: Side) -> int:
    """Of what a tile goes through for one head of keys: K and V, or the queries and gradients of all heads on it."""
    columns = problem.k_len if side == "queries" else problem.q_len
    low, high = bounds(problem, side)
    if isinstance(problem.pattern, Dilated):
        columns = min(columns, max(problem.pattern.segment_lengths))
    elif low is not None and high is not None:
        columns = min(columns, high - low + 1)
    heads = 1 if side == "queries" else problem.heads // problem.kv_heads
    return 2 * heads * columns * problem.head_dim * problem.dtype.itemsize


def _side_by_side(heads: int, tiles: int, together: int, curved: bool) -> Tensor:
    """Every head and place of a tile within it, int64 [2, heads * tiles]: a group of heads after the other."""
    found = []
    for first in range(0, heads, together):
        size = min(together, heads - first)
        points = curve((tiles, size)) if curved and size > 1 else torch.arange(tiles * size)
        found.append(torch.stack([first + points % size, points // size]))
    return torch.cat(found, dim=1)


def _rounds(programs: int, chip: Chip, warps: int, device: torch.device) -> Tensor:
    """Which round each program is launched in: those of a round run at about the same time."""
    at_once = chip.multiprocessors * max(1, WARPS // warps)
    return torch.arange(programs, device=device) // at_once
