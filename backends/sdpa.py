"""PyTorch's fused attention kernels without a mask: dense, causal, and dilated branches as dense sub-problems."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch import branches
from attn_dispatch.contract import Refusal, refuse_device, refuse_dropout, refuse_dtype, refuse_ranks
from attn_dispatch.kernels import CUDA_HEAD_DIM, CpuFlash, CudaEfficient, CudaFlash, Kernel
from attn_dispatch.pattern import Dense, Dilated
from attn_dispatch.pieces import Plan, plan_of
from attn_dispatch.problem import DTYPES, Problem

name = "sdpa"

CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLASH_CAPABILITY = (8, 0)


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    found = refuse_ranks(problem) + refuse_dropout(problem) + refuse_device(problem, ("cpu", "cuda"))
    found += refuse_dtype(problem, DTYPES if problem.device.type == "cpu" else CUDA_DTYPES)
    if not isinstance(problem.pattern, Dense | Dilated):
        found.append(Refusal("pattern", f"{problem.pattern} is not made of dense sub-problems"))
    if problem.device.type == "cuda" and problem.masked:
        found.append(Refusal("mask", "seq_lens and key_mask need a mask, which its CUDA kernels do not take"))
    return found


def flops(problem: Problem) -> int:
    _, plan = _prepared(problem)
    return problem.batch * plan.pairs * problem.head_dim * (14 if problem.needs_grad else 4)


def workspace_bytes(problem: Problem) -> int:
    _, plan = _prepared(problem)
    return branches.workspace_bytes(problem, plan)


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    kernel, plan = _prepared(problem)
    return branches.run(q, k, v, problem, plan, kernel, tensors)


@lru_cache(maxsize=4096)
def _prepared(problem: Problem) -> tuple[Kernel, Plan]:
    kernel = _kernel(problem)
    plan = plan_of(problem, kernel.grouped)
    assert plan is not None  # refusals lets only such patterns through
    return kernel, plan


def _kernel(problem: Problem) -> Kernel:
    if problem.device.type == "cpu":
        return CpuFlash()
    # A gradient through lse takes one column more (see branches).
    columns = problem.head_dim + (problem.needs_grad and problem.return_lse)
    half = problem.dtype != torch.float32 and columns <= CUDA_HEAD_DIM
    if half and torch.cuda.get_device_capability(problem.device) >= FLASH_CAPABILITY:
        return CudaFlash()
    return CudaEfficient()
