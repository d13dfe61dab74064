"""Estimates the tile pairs of a pattern, the bytes of their table and of a call, without building it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_dispatch.kernels.dense import CUDA_HEAD_ALIGN
from attn_dispatch.kernels.heads import head_classes, heads_by_kind
from attn_dispatch.kernels.hidden import copied_bytes
from attn_dispatch.kernels.numerics import SMALLEST_SCALE, kernel_bytes, sum_dtype
from attn_dispatch.kernels.tiles.pairs import AT_ONCE
from attn_dispatch.kernels.tiles.run import most_keys
from attn_dispatch.kernels.tiles.tables import MASK_BYTES, PAIR, SPAN, Outline, outline_of
from attn_dispatch.machine.devices import KNOWN
from attn_dispatch.spec.data import BlocksForm, Form
from attn_dispatch.spec.orders import HILBERT, NATURAL, RESIDUE, token_order_of
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Axis, Band

PAIR_LIMIT = 2**24  #: of tile pairs
OUTLINED_TOKENS, OUTLINED_PAIRS = 2**20, 2**18  #: of all classes of heads; more take long to look at
PAIR_BYTES, BOX_BYTES, POSITION_BYTES = 200, 32, 32  #: of tables and while they are built; boxes, positions per axis
SCORES = 5  #: matrices of them alive at once: scores, exponentials, weights, and two gradients
BLOCK_BYTES = 32  #: of each count of blocks, and while pairs are found by them
ROUNDED = 1.2  #: a density is rounded to half octaves


def estimated_keys(problem: Problem, order: str, tile: int) -> int:
    """Estimated keys in the key tiles that one query tile reads, if tiles are aligned with segments and windows."""
    pattern, most = problem.pattern.natural, -(-problem.k_len // tile) * tile
    if isinstance(pattern, Form):
        keys = _share(problem, tile) * estimated_keys(_without_data(problem), NATURAL, tile)
        return max(tile, -(-math.ceil(keys) // tile) * tile)
    order = order if problem.pattern is pattern else token_order_of(problem.pattern)
    if order == HILBERT and not pattern.axes:
        return most  # a folded sequence mixes distant tokens in each tile
    if pattern.axes:
        most = min(most, math.prod(_spans(pattern.axes, order, tile)))
    elif pattern.branches:
        cuts = [(min(length, problem.k_len), rate) for length, rate in pattern.branches]
        widest = sum(-(-length // rate) for length, rate in cuts) if order == RESIDUE else max(cuts)[0]
        most = min(most, -(-widest // tile) * tile)
    else:
        most = min(most, sum(_keys_of_band(band, problem, tile) for band in _bands(problem)))
    return max(most, tile)


def _without_data(problem: Problem) -> Problem:
    """The problem of the pattern that a form's tensors cut."""
    return replace(problem, pattern=getattr(problem.pattern, "within", Dense()))


def _share(problem: Problem, tile: int) -> float:
    """Estimated share of the tile pairs that a pattern's tensors see; of blocks it is the most at their density."""
    form = problem.pattern
    assert isinstance(form, Form)
    share = math.exp2((form.density or 0) / 2)
    for side, length in _blocks(problem):
        tiles = -(-side // tile) + (side % tile > 0 and tile % side > 0)  # of a block
        share *= -(-length // side) * tiles / -(-length // tile)
    return min(1.0, share + 2 * getattr(form, "intervals", 0) * tile / problem.k_len)


def _blocks(problem: Problem) -> list[tuple[int, int]]:
    """The sides of blocks, and the lengths that they divide: of queries and of keys. Empty where there are none."""
    size = problem.pattern.size if isinstance(problem.pattern, BlocksForm) else ()
    return list(zip(size, (problem.q_len, problem.k_len)))


def tables_per_head(problem: Problem) -> int:
    """How many rows of the batch have tables of their own."""
    return problem.batch if getattr(problem.pattern, "by_row", False) else 1


def branch_count(problem: Problem) -> int:
    """The branches of a head, at most."""
    pattern = problem.pattern.natural
    return getattr(pattern, "intervals", 0) + len(getattr(pattern, "within", pattern).branches)


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


def _spans(axes: tuple[Axis, ...], order: str, tile: int) -> list[int]:
    """Per axis, the places that a tile and its windows span."""
    found = []
    for axis, side in zip(axes, _sides(axes, order, tile)):
        size, reaches = axis.size, axis.inner_sides
        if order == NATURAL and side > 1:
            # Adjacent tokens have all residues; elsewhere a tile has tokens of one residue.
            reaches = (reaches[0] * axis.dilation, reaches[1] * axis.dilation)
        else:
            size = -(-size // axis.dilation)
        span = side * (1 + sum(-(-reach // side) for reach in reaches))
        found.append(min(span, -(-size // side) * side))
    return found


def _sides(axes: tuple[Axis, ...], order: str, tile: int) -> list[int]:
    """The shape of a tile: in natural order a part of a row, or several rows; else as close to a cube as possible."""
    sides = [1] * len(axes)
    if order == NATURAL:
        for number in reversed(range(len(axes))):
            sides[number] = min(axes[number].size, max(1, tile // math.prod(sides)))
        return sides
    members = [-(-axis.size // axis.dilation) for axis in axes]
    while math.prod(sides) < tile and any(side < size for side, size in zip(sides, members)):
        axis = min((side, -axis) for axis, (side, size) in enumerate(zip(sides, members)) if side < size)[1]
        sides[-axis] *= 2
    return sides


def estimated_pairs(problem: Problem, order: str, tile: int) -> int:
    """Estimated tile pairs of one head."""
    return -(-problem.q_len // tile) * (estimated_keys(problem, order, tile) // tile)


def most_pairs(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of the tile pairs of one head, whether or not tiles are aligned; of blocks, of the mean head."""
    every = -(-problem.q_len // tile) * -(-problem.k_len // tile)
    if isinstance(problem.pattern, Form):
        return min(every, math.ceil(ROUNDED * every * _share(problem, tile))) if _blocks(problem) else every
    return min(every, 2 * estimated_pairs(problem, order, tile))


def most_axes(problem: Problem) -> int:
    """Upper bound of the axes of all branches."""
    if isinstance(problem.pattern, Form):
        return max(branch_count(problem), most_axes(_without_data(problem)))
    return 2 * len(_bands(problem) or problem.pattern.natural.axes)


def outline(problem: Problem, order: str, tile: int) -> Outline:
    """The outline of the tables; of long sequences an upper bound."""
    pairs = most_pairs(problem, order, tile) * _tables(problem)
    if isinstance(problem.pattern, Form):
        return Outline(pairs, pairs, -(-problem.k_len // tile))
    if problem.q_len + problem.k_len <= OUTLINED_TOKENS and pairs <= OUTLINED_PAIRS:
        return outline_of(replace(problem, device=torch.device("cpu")), order, tile)
    # Tiles that are not aligned, or of other shapes along a curve, see more than is estimated.
    return Outline(pairs, pairs, 4 * estimated_keys(problem, order, tile) // tile)


def _tables(problem: Problem) -> int:
    return tables_per_head(problem) * len(head_classes(problem.pattern, problem.heads))


def _mask_bytes(problem: Problem, pairs: int, tile: int) -> int:
    counted = 4 if getattr(problem.pattern, "is_list", False) else 1  # an entry may stand more than 255 times
    return min(pairs * tile**2 * counted, MASK_BYTES * _tables(problem))


def _block_counts(problem: Problem) -> int:
    """The counts of blocks of all tables."""
    counts = [-(-length // side) for side, length in _blocks(problem)]
    return _tables(problem) * math.prod(counts) * bool(counts)


def tile_table_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of the bytes of the tables of all classes of heads, and of building them."""
    found, axes, classes = outline(problem, order, tile), most_axes(problem), _tables(problem)
    masks = _mask_bytes(problem, found.kinds, tile) * (3 + sum_dtype(problem.dtype).itemsize)
    compared_blocks = [-(-tile // side) + 1 for side, _ in _blocks(problem)]  # of a pair
    pairs = found.pairs * (PAIR_BYTES + BLOCK_BYTES * math.prod(compared_blocks) * bool(compared_blocks))
    compared = min(-(-problem.q_len // tile) * -(-problem.k_len // tile), AT_ONCE)
    places = POSITION_BYTES * (1 + classes) * (problem.q_len + problem.k_len)
    return pairs + masks + BLOCK_BYTES * _block_counts(problem) + axes * (places + BOX_BYTES * compared)


def workspace_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of what tables, `run` and its backward allocate besides q, k, v, out and their gradients."""
    seen = outline(problem, order, tile).widest * tile
    return call_bytes(problem, tile, seen) + tile_table_bytes(problem, order, tile)


def call_bytes(problem: Problem, tile: int, seen: int) -> int:
    """`workspace_bytes` without tables, of tiles of queries that see up to `seen` keys each."""
    item, wide, grads = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize, problem.needs_grad
    d = -(-(problem.head_dim + 1) // CUDA_HEAD_ALIGN) * CUDA_HEAD_ALIGN  # a column for the gradient of lse
    classes = [len(each) for each, _ in head_classes(problem.pattern, problem.heads)]
    shared = problem.heads // problem.kv_heads * (getattr(problem.pattern, "heads", "") == "kv_heads")
    heads, spread = max(*classes, shared), len(classes) > 1 and problem.heads != problem.kv_heads
    q_tiles, seen = -(-problem.q_len // tile), min(seen, -(-problem.k_len // tile) * tile)
    keys = min(max(most_keys(problem, tile), seen), q_tiles * seen)  # gathered at once
    q, k = min(keys, q_tiles * tile) * heads, keys * (heads if spread else min(heads, problem.kv_heads))
    # What is gathered, and results; with gradients the operands and results of both passes, with the column, and sums.
    columns = grads * problem.return_lse
    rows = (2 + 3 * grads + 3 * columns) * q + (2 + 2 * grads + 2 * columns) * k + 2 * keys * problem.kv_heads * spread
    scores = 0 if problem.device.type in KNOWN else SCORES * heads  # of `Products`
    chunk = (rows * item + k * wide * grads) * d + keys * tile * ((1 + scores) * wide + 8)
    total = copied_bytes(problem, masked_keys=False) + kernel_bytes(problem, k)
    total += problem.batch * (problem.q_len + problem.k_len) * (3 * problem.heads * wide + 16)  # lse and masks
    flipped = problem.scale < SMALLEST_SCALE[sum_dtype(problem.dtype)]
    total += problem.batch * problem.q_len * problem.heads * d * item * flipped  # q with the scale's sign
    total += 2 * problem.batch * problem.k_len * problem.kv_heads * d * wide * grads
    if problem.device.type != "cpu":
        return total + 2 * chunk  # kernels copy rows that are not aligned
    return total + min(torch.get_num_threads(), problem.batch * -(-q_tiles * seen // keys)) * chunk


def tile_lists_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of the bytes of `tile_lists_of` on the problem's device, without building the lists."""
    tables, blocks = _tables(problem), _block_counts(problem)
    tiles = -(-problem.q_len // tile) + -(-problem.k_len // tile)
    pairs = tables * most_pairs(problem, order, tile)
    masks = _mask_bytes(problem, pairs, tile)
    reach = 4 * tables * most_axes(problem) * 2 * tiles * tile + 4 * blocks + 8 * tables * tiles * tile * (blocks > 0)
    return masks + reach + 4 * (2 * PAIR * pairs + tables * (SPAN * tiles + problem.heads) + tiles * tile)
