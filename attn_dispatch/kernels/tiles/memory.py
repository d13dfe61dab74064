"""Upper bounds of what attention over tile pairs takes, from the problem and the keys that a tile of queries sees."""

from __future__ import annotations

import torch

from attn_dispatch.kernels.dense import CUDA_HEAD_ALIGN
from attn_dispatch.kernels.heads import head_classes
from attn_dispatch.kernels.hidden import copied_bytes
from attn_dispatch.kernels.numerics import SMALLEST_SCALE, kernel_bytes, sum_dtype
from attn_dispatch.kernels.tiles.estimates import outline, tile_table_bytes
from attn_dispatch.kernels.tiles.run import most_keys
from attn_dispatch.spec.problem import Problem


def workspace_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of what tables, `run` and its backward allocate besides q, k, v, out and their gradients."""
    seen = outline(problem, order, tile).widest * tile
    return call_bytes(problem, tile, seen) + tile_table_bytes(problem, order, tile)


def call_bytes(problem: Problem, tile: int, seen: int) -> int:
    """The same without tables, of tiles of queries that see up to `seen` keys each."""
    item, wide, grads = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize, problem.needs_grad
    d = -(-(problem.head_dim + 1) // CUDA_HEAD_ALIGN) * CUDA_HEAD_ALIGN  # a column for the gradient of lse
    classes = [len(each) for each, _ in head_classes(problem.pattern, problem.heads)]
    heads, spread = max(classes), len(classes) > 1 and problem.heads != problem.kv_heads
    q_tiles, seen = -(-problem.q_len // tile), min(seen, -(-problem.k_len // tile) * tile)
    keys = min(max(most_keys(problem, tile), seen), q_tiles * seen)  # gathered at once
    q, k = min(keys, q_tiles * tile) * heads, keys * (heads if spread else min(heads, problem.kv_heads))
    # What is gathered, and results; with gradients the operands and results of both passes, with the column, and sums.
    columns = grads * problem.return_lse
    rows = (2 + 3 * grads + 3 * columns) * q + (2 + 2 * grads + 2 * columns) * k + 2 * keys * problem.kv_heads * spread
    chunk = (rows * item + k * wide * grads) * d + keys * tile * (wide + 8)
    total = copied_bytes(problem, masked_keys=False) + kernel_bytes(problem, k)
    total += problem.batch * (problem.q_len + problem.k_len) * (3 * problem.heads * wide + 16)  # lse and masks
    flipped = problem.scale < SMALLEST_SCALE[sum_dtype(problem.dtype)]
    total += problem.batch * problem.q_len * problem.heads * d * item * flipped  # q with the scale's sign
    total += 2 * problem.batch * problem.k_len * problem.kv_heads * d * wide * grads
    if problem.device.type != "cpu":
        return total + 2 * chunk  # kernels copy rows that are not aligned
    return total + min(torch.get_num_threads(), problem.batch * -(-q_tiles * seen // keys)) * chunk
