"""Estimates the tile pairs of a pattern and the bytes of their table, without building it."""

from __future__ import annotations

import math

from attn_dispatch.kernels.heads import head_classes, heads_by_kind
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles.pairs import AT_ONCE
from attn_dispatch.kernels.tiles.tables import MASK_BYTES, Outline, outline_of
from attn_dispatch.spec.orders import HILBERT, NATURAL, RESIDUE
from attn_dispatch.spec.pattern import Dilated, Neighborhood
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band
from attn_dispatch.spec.reordered import token_order_of

PAIR_LIMIT = 2**24  #: of tile pairs
PAIR_BYTES, BOX_BYTES, POSITION_BYTES = 200, 32, 32  #: of tables and while they are built; boxes, positions per axis
OUTLINED_TOKENS = 2**20  #: of queries and keys: more take long to look at
OUTLINED_PAIRS = 2**18  #: of tile pairs, of all classes of heads; about 0.1 s


def estimated_keys(problem: Problem, order: str, tile: int) -> int:
    """Estimated keys in the key tiles that one query tile reads, if tiles are aligned with segments and windows."""
    pattern, most = problem.pattern.natural, -(-problem.k_len // tile) * tile
    order = order if problem.pattern is pattern else token_order_of(problem.pattern)
    if order == HILBERT and not isinstance(pattern, Neighborhood):
        return most  # a folded sequence mixes distant tokens in each tile
    if isinstance(pattern, Neighborhood):
        most = min(most, math.prod(_spans(pattern, order, tile)))
    elif isinstance(pattern, Dilated):
        lengths = [min(length, problem.k_len) for length in pattern.segment_lengths]
        if order == RESIDUE:
            lengths = [sum(-(-length // rate) for length, rate in zip(lengths, pattern.dilation_rates))]
        most = min(most, -(-max(lengths) // tile) * tile)
    else:
        most = min(most, sum(_keys_of_band(band, problem, tile) for band in _bands(problem)))
    return max(most, tile)


def _keys_of_band(band: Band, problem: Problem, tile: int) -> int:
    """Estimated keys of a branch without segments: the query's own tile and those on both sides, or the first keys."""
    ahead = problem.k_len - problem.q_len
    before = problem.k_len if band.low is None else ahead - band.low
    after = problem.k_len if band.high is None else band.high - ahead
    sides = (before, after) if band.stop is None else (band.stop,)
    return tile * ((band.stop is None) + sum(-(-side // tile) for side in sides))


def _bands(problem: Problem) -> list[Band]:
    """The bands of the heads with the most bands."""
    pattern = problem.pattern.natural
    kinds = heads_by_kind(pattern, problem.heads)
    found = [list(pattern.bands(problem.q_len, problem.k_len, offsets) or ()) for (offsets,) in kinds]
    return max(found, key=len)


def _spans(pattern: Neighborhood, order: str, tile: int) -> list[int]:
    """Per axis, the places that a tile and its windows span."""
    found = []
    for axis, side in zip(pattern.axes, _sides(pattern, order, tile)):
        size, reaches = axis.size, axis.inner_sides
        if order == NATURAL and side > 1:
            # Adjacent tokens have all residues; elsewhere a tile has tokens of one residue.
            reaches = (reaches[0] * axis.dilation, reaches[1] * axis.dilation)
        else:
            size = -(-size // axis.dilation)
        span = side * (1 + sum(-(-reach // side) for reach in reaches))
        found.append(min(span, -(-size // side) * side))
    return found


def _sides(pattern: Neighborhood, order: str, tile: int) -> list[int]:
    """The shape of a tile: in natural order a part of a row, or several rows; else as close to a cube as possible."""
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


def estimated_pairs(problem: Problem, order: str, tile: int) -> int:
    """Estimated tile pairs of one head."""
    return -(-problem.q_len // tile) * (estimated_keys(problem, order, tile) // tile)


def most_pairs(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of the tile pairs of one head, whether or not tiles are aligned."""
    return min(-(-problem.q_len // tile) * -(-problem.k_len // tile), 2 * estimated_pairs(problem, order, tile))


def most_axes(problem: Problem) -> int:
    """Upper bound of the axes of all branches."""
    return 2 * len(_bands(problem) or getattr(problem.pattern.natural, "grid", "-"))


def outline(problem: Problem, order: str, tile: int) -> Outline:
    """The outline of the tables; of long sequences an upper bound."""
    pairs = most_pairs(problem, order, tile) * len(head_classes(problem.pattern, problem.heads))
    if problem.q_len + problem.k_len <= OUTLINED_TOKENS and pairs <= OUTLINED_PAIRS:
        return outline_of(problem.pattern, problem.q_len, problem.k_len, problem.heads, order, tile)
    # Tiles that are not aligned, or of other shapes along a curve, see more than is estimated.
    return Outline(pairs, pairs, min(-(-problem.k_len // tile), 4 * estimated_keys(problem, order, tile) // tile))


def tile_table_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of the bytes of the tables of all classes of heads, and of building them."""
    found, axes = outline(problem, order, tile), most_axes(problem)
    classes = len(head_classes(problem.pattern, problem.heads))
    masks = min(found.kinds * tile**2, MASK_BYTES * classes) * (3 + sum_dtype(problem.dtype).itemsize)
    compared = min(-(-problem.q_len // tile) * -(-problem.k_len // tile), AT_ONCE) * axes
    places = POSITION_BYTES * axes * (1 + classes) * (problem.q_len + problem.k_len)
    return found.pairs * PAIR_BYTES + masks + places + BOX_BYTES * compared
