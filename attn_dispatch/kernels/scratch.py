"""The scratch memory of PyTorch's attention kernel for CPUs."""

from __future__ import annotations

import torch

from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.problem import Problem

#: Of the kernel's tiles: (queries of a problem, queries of its tile), the first that fits; and keys of a tile.
#: Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
Q_TILES, K_TILE = ((768, 256), (192, 64), (0, 32)), 512
GEMM_BYTES = 2**16  #: beyond its packed operands, of a bfloat16 matrix product in a thread
PACKED = 64  #: entries of a row to a multiple of which AMX's operands are padded


def forward_scratch(problem: Problem, queries: int, keys: int) -> int:
    """Bytes of the scores, weights and sums of the kernel's tiles in one thread.

    Args:
        queries, keys: of each of the kernel's problems.
    """
    queries, keys = _tile(queries, keys)
    half = problem.dtype.itemsize * queries * keys * (problem.dtype.itemsize < 4)
    one = sum_dtype(problem.dtype).itemsize * queries * (keys + 2 + problem.head_dim) + half
    return one + _gemm(problem, queries, keys)


def backward_scratch(problem: Problem, queries: int, keys: int) -> int:
    """Likewise, of the scores and their gradients."""
    queries, keys = _tile(queries, keys)
    half = 2 * problem.dtype.itemsize * queries * keys * (problem.dtype.itemsize < 4)
    one = sum_dtype(problem.dtype).itemsize * queries * (2 * keys + 1) + half
    return one + _gemm(problem, queries, keys)


def packed_bytes(problem: Problem, rows: int) -> int:
    """Bytes that packing keys and values for AMX takes, for this number of rows of all heads."""
    if problem.dtype.itemsize >= 4 or not _has_amx():
        return 0
    return 2 * rows * -(-problem.head_dim // PACKED) * PACKED * problem.dtype.itemsize


def _tile(queries: int, keys: int) -> tuple[int, int]:
    """Queries and keys of the kernel's tiles."""
    return min(queries, next(tile for least, tile in Q_TILES if queries >= least)), min(keys, K_TILE)


def _gemm(problem: Problem, queries: int, keys: int) -> int:
    """Bytes that a product of tiles takes in a thread: oneDNN packs operands of bfloat16."""
    if problem.dtype != torch.bfloat16:
        return 0
    return 4 * (queries + keys) * max(problem.head_dim, PACKED) + GEMM_BYTES


def _has_amx() -> bool:
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return asked is None or bool(asked())
