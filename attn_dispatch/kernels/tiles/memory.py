"""What attention over tile pairs takes: the sizes of what `run` and PyTorch's kernel for CPUs allocate, by steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from attn_dispatch.kernels.dense import CpuFlash
from attn_dispatch.kernels.heads import head_classes, kv_heads_of
from attn_dispatch.kernels.hidden import copied_bytes
from attn_dispatch.kernels.numerics import SMALLEST_SCALE, THREAD_BYTES, sum_dtype
from attn_dispatch.kernels.scratch import backward_scratch, forward_scratch, packed_bytes
from attn_dispatch.kernels.tiles.estimates import estimated_pairs, tile_table_bytes
from attn_dispatch.kernels.tiles.run import most_keys, tiles_at_once
from attn_dispatch.kernels.tiles.tables import MASK_BYTES, Outline, outlines_of
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.spec.problem import Problem

OUTLINED_TOKENS = 2**20  #: of queries and keys: more take long to look at
OUTLINED_PAIRS = 2**18  #: of tile pairs, in each branch and class of heads; about 0.1 s
BUILDING = 2**23  #: bytes of slices, while a table is built
PAIR, PAIR_AXIS = 120, 12  #: bytes of a pair while a table is built, and more of them for each axis
KEPT_PAIR, KEPT_TILE = 16, 16  #: bytes in a table
PLACE, PLACE_AXIS = 16, 48  #: bytes of a token while a table is built, and more of them for each axis
KEPT_PLACE, KEPT_PLACE_AXIS = 16, 4  #: bytes in a table and in the order; more of a bound, or of a place, on each axis
MASK, KIND_AXIS = 200, 12  #: bytes of a numbered row beyond its entries; of an entry of a kind on each axis
INDEX = 8  #: bytes
MASK_ENTRY = 8  #: bytes of a token's mask and its copies
SCALARS = 2**12  #: bytes of tensors with a few entries


class _Chunk(NamedTuple):
    """What is computed at once in a thread, in rows.

    Args:
        q, k: query rows and key rows of all query tiles.
        heads, kv_heads: of the query rows, and of the gathered key rows.
        spread: keys are copied to each query head.
        one: the keys of a query tile.
        biased: scores have a bias.
        computed: which is computed in each call.
    """

    q: int
    k: int
    heads: int
    kv_heads: int
    spread: bool
    one: int
    biased: bool
    computed: bool


def any_workspace_bytes(problem: Problem, tile: int) -> int:
    """Upper bound of what `run` and its backward allocate besides q, k, v, out, their gradients, and tables.

    On any device, for any pattern: a query tile may see all keys.
    """
    item, wide = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize
    q_tiles, padded = -(-problem.q_len // tile), -(-problem.k_len // tile) * tile
    keys = min(max(most_keys(problem, tile), padded), q_tiles * padded)
    row = problem.heads * (problem.head_dim + 1)
    # k and v: gathered, copied to each query head, and aligned or with one more column.
    chunk = keys * (2 * 3 * row * item + 64) + min(keys, q_tiles * tile) * 10 * row * item
    chunk += keys * tile * (3 * wide + 2 * item + 8)  # multiplicity, bias and mask
    total = problem.batch * problem.q_len * row * (item * (problem.scale <= 0) + 1)
    total += copied_bytes(problem, masked_keys=False)
    if problem.needs_grad:
        chunk += keys * 2 * row * (2 * item + 2 * wide)  # dk and dv, also widened
        total += problem.batch * problem.q_len * row * (item + 1)  # zeros, where out has no gradient
        total += 2 * problem.batch * problem.k_len * problem.kv_heads * problem.head_dim * wide
    threads = torch.get_num_threads() if problem.device.type == "cpu" else 1
    groups = problem.batch * -(-q_tiles * padded // keys)
    lse = 4 * problem.batch * problem.q_len * problem.heads * wide
    return total + lse + threads * THREAD_BYTES + min(threads, groups) * chunk


def cpu_workspace_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of what tables, `run` and its backward allocate on a CPU besides q, k, v, out and their gradients."""
    tokens, pattern = problem.q_len + problem.k_len, problem.pattern
    branches = len(pattern.natural.branches) if isinstance(pattern.natural, Dilated) else 1
    pairs = estimated_pairs(problem, order, tile) * len(head_classes(pattern, problem.heads)) * branches
    if tokens > OUTLINED_TOKENS or pairs > OUTLINED_PAIRS:
        return any_workspace_bytes(problem, tile) + tile_table_bytes(problem, order, tile)
    outlines = outlines_of(pattern, problem.q_len, problem.k_len, problem.heads, order, tile)
    kept = KEPT_PLACE * tokens + sum(_kept(problem, tile, each) for each in outlines)
    built = kept + max(_building(problem, tile, each) for each in outlines)
    grouped = 2 * INDEX * max(int(each.near.sum()) for each in outlines)  # the key tile and the mask of each pair
    whole = kept + grouped + _whole(problem)
    classes = [_chunks(problem, tile, each) for each in outlines]
    forward = max(_parallel(problem, tile, chunks, _forward_buffers, _forward) for chunks in classes)
    if not problem.needs_grad:
        return max(built - problem.result_bytes, whole + forward)
    backward = max(_parallel(problem, tile, chunks, _backward_buffers, _backward) for chunks in classes)
    item, wide = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize
    q, kv = _entries(problem)
    sums = 2 * kv * (wide - item)  # of dk and dv, until they are rounded: then one of them is there twice
    backward = max(sums + backward, (2 * wide - item) * kv * (wide != item))
    lse = problem.batch * problem.q_len * problem.heads * (wide + 1)  # without -inf
    # A forward pass is over before the three gradients exist.
    return max(built - problem.result_bytes, whole + max(forward - (q + 2 * kv) * item, lse + backward))


def _entries(problem: Problem) -> tuple[int, int]:
    q, kv = problem.q_len * problem.heads, problem.k_len * problem.kv_heads
    return problem.batch * problem.head_dim * q, problem.batch * problem.head_dim * kv


def _whole(problem: Problem) -> int:
    """Bytes beside the chunks in both passes: lse, masks and copies."""
    wide = sum_dtype(problem.dtype).itemsize
    total = SCALARS + problem.batch * problem.q_len * problem.heads * wide
    total += copied_bytes(problem, masked_keys=False)
    total += problem.batch * (problem.q_len + problem.k_len) * MASK_ENTRY * problem.masked
    if problem.scale < SMALLEST_SCALE[sum_dtype(problem.dtype)]:
        total += _entries(problem)[0] * problem.dtype.itemsize  # q times the scale's sign
    return total


# --- tables -----------------------------------------------------------------------------------------------------------


def _kept(problem: Problem, tile: int, outline: Outline) -> int:
    """Bytes of a table beside its places."""
    bounds = KEPT_PLACE_AXIS * outline.axes * tile * (2 * len(outline.near) + -(-problem.k_len // tile))
    return bounds + KEPT_PAIR * int(outline.near.sum()) + KEPT_TILE * len(outline.near) + _masks(problem, tile, outline)


def _masks(problem: Problem, tile: int, outline: Outline) -> int:
    cells = (outline.kinds + 1) * tile**2
    return min(cells, MASK_BYTES + tile**2) * (1 + sum_dtype(problem.dtype).itemsize)


def _building(problem: Problem, tile: int, outline: Outline) -> int:
    """The most bytes beside the table while it is built."""
    pairs = int(outline.near.sum()) * (PAIR + PAIR_AXIS * outline.axes)
    places = (problem.q_len + problem.k_len) * (PLACE + PLACE_AXIS * outline.axes)
    masks = min(outline.kinds * tile**2, MASK_BYTES) + outline.kinds * MASK
    return BUILDING + pairs + places + max(masks, outline.kinds * (MASK + KIND_AXIS * outline.axes * tile))


# --- chunks -----------------------------------------------------------------------------------------------------------


def _chunks(problem: Problem, tile: int, outline: Outline) -> list[_Chunk]:
    """For each number of key tiles, the largest chunk of the query tiles that have no more of them."""
    read = kv_heads_of(outline.heads, problem, CpuFlash.grouped)
    kv_heads = len(range(problem.kv_heads)[read]) if isinstance(read, slice) else problem.kv_heads
    heads = (len(outline.heads), kv_heads, not isinstance(read, slice))
    bias = (problem.masked or outline.partial > 0, outline.kinds * tile**2 > MASK_BYTES)
    sizes, counts = torch.unique(outline.near, return_counts=True)
    found = []
    for size, count in zip(sizes.tolist(), counts.cumsum(0).tolist()):
        tiles = min(count, tiles_at_once(problem, tile, max(1, size)))
        found.append(_Chunk(tiles * tile, tiles * size * tile, *heads, size * tile, *bias))
    return found


def _parallel(
    problem: Problem,
    tile: int,
    chunks: list[_Chunk],
    buffers: Callable[[Problem, _Chunk], int],
    rest: Callable[[Problem, int, _Chunk], int],
) -> int:
    """Bytes of the chunks computed at the same time. Buffers stay from chunk to chunk, the rest is freed."""
    threads = min(torch.get_num_threads(), problem.batch * -(-problem.q_len // tile))
    # The most queries and the most keys may be those of different chunks.
    largest = chunks[-1]._replace(q=max(each.q for each in chunks), k=max(each.k for each in chunks))
    most = buffers(problem, largest) + max(rest(problem, tile, each) for each in chunks)
    return threads * most + INDEX * (problem.q_len + tile)  # and the positions of all queries


def _forward_buffers(problem: Problem, chunk: _Chunk) -> int:
    return (chunk.q * chunk.heads + 2 * chunk.k * chunk.kv_heads) * problem.head_dim * problem.dtype.itemsize


def _backward_buffers(problem: Problem, chunk: _Chunk) -> int:
    """With the gradient, out and lse."""
    item, wide = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize
    more = 2 * chunk.q * chunk.heads * problem.head_dim * item
    return _forward_buffers(problem, chunk) + more + chunk.q * chunk.heads * wide * (1 + problem.return_lse)


def _read(problem: Problem, tile: int, chunk: _Chunk) -> tuple[int, int]:
    """Bytes of keys copied to each query head, of the bias and of indices; and while the bias is made."""
    wide = sum_dtype(problem.dtype).itemsize
    copied = 2 * chunk.k * chunk.heads * problem.head_dim * problem.dtype.itemsize * chunk.spread
    held = copied + chunk.k * (INDEX + 2 * problem.masked) + tile * chunk.k * wide * chunk.biased
    cells = tile * chunk.k
    made = max(6 * cells, cells * (1 + wide)) * chunk.computed + INDEX * chunk.k
    return held, made


def _forward(problem: Problem, tile: int, chunk: _Chunk) -> int:
    wide = sum_dtype(problem.dtype).itemsize
    held, made = _read(problem, tile, chunk)
    results = chunk.q * chunk.heads * (problem.head_dim * problem.dtype.itemsize + wide)
    scratch = _alone(problem, tile) * forward_scratch(problem, tile, chunk.one) + _packed(problem, chunk)
    seen = (chunk.k * tile + chunk.q * (1 + chunk.heads * wide)) * chunk.biased  # lse of rows that see no key
    return max(made, held + results + max(scratch, seen))


def _backward(problem: Problem, tile: int, chunk: _Chunk) -> int:
    item, wide = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize
    d, kv_heads = problem.head_dim + problem.return_lse, chunk.heads if chunk.spread else chunk.kv_heads
    q, k = chunk.q * chunk.heads, chunk.k * kv_heads
    held, made = _read(problem, tile, chunk)
    # With one more column for the gradient of lse.
    held += ((3 * q + 2 * k) * d * item + 3 * q * wide) * problem.return_lse
    grads = (q + 2 * k) * d * item
    scratch = _alone(problem, tile) * backward_scratch(problem, tile, chunk.one) + _packed(problem, chunk)
    contiguous = q * (d * item + wide)  # the kernel wants a contiguous gradient and lse
    added = (k + chunk.k * chunk.kv_heads * chunk.spread) * problem.head_dim * wide
    return max(made, held + grads + max(scratch + contiguous, q * problem.head_dim * item, added))


def _alone(problem: Problem, tile: int) -> int:
    """Threads of the kernel in a call."""
    return torch.get_num_threads() if problem.batch * -(-problem.q_len // tile) < 2 * torch.get_num_threads() else 1


def _packed(problem: Problem, chunk: _Chunk) -> int:
    return packed_bytes(problem, chunk.k * (chunk.heads if chunk.spread else chunk.kv_heads))
