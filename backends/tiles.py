"""Tile-sparse attention by a dense kernel: any pattern, tokens in any order, only the pairs of tiles that meet."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch import tile_math
from attn_dispatch.contract import Refusal
from attn_dispatch.kernels import CPU_FLASH, CUDA_EFFICIENT, CpuFlash, CudaEfficient, Kernel
from attn_dispatch.order import NATURAL, check
from attn_dispatch.problem import Problem
from attn_dispatch.tiles import tables_of

name = "tiles"
TILE = 64


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    return (CPU_FLASH if problem.device.type == "cpu" else CUDA_EFFICIENT).refusals(problem)


def workspace_bytes(problem: Problem) -> int:
    return 2**40


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
    kernel: Kernel = CpuFlash() if problem.device.type == "cpu" else CudaEfficient()
    tables = tables_of(problem, check(order), tile or TILE)
    return tile_math.run(q, k, v, problem, tables, kernel, **tensors)
