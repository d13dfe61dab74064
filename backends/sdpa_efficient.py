"""PyTorch's memory-efficient attention kernel on CUDA, where `sdpa` uses another kernel; also with masked keys."""

from __future__ import annotations

from attn_dispatch.kernels.branches.backend import Branched, Variant
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.kernels.dense import CUDA_EFFICIENT, CUDA_FLASH, CudaEfficient
from attn_dispatch.spec.problem import Problem


def measured_as_sdpa(problem: Problem) -> list[Refusal]:
    """Refuses problems for which `sdpa` runs the same kernel."""
    why = CUDA_FLASH.refusals(problem)
    if problem.device.type != "cuda" or problem.masked or not why:
        return []
    reasons = "; ".join(refusal.text for refusal in why)
    return [Refusal("same_kernel", f"sdpa runs this kernel here, since PyTorch's flash kernel {reasons}")]


LIMITS = CUDA_EFFICIENT._replace(dropout=True)
BACKEND = Branched("sdpa_efficient", (Variant(LIMITS, lambda problem: CudaEfficient()),), also=measured_as_sdpa)

name, version, refusals = BACKEND.name, BACKEND.version, BACKEND.refusals
flops, workspace_bytes, run = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.run
specialized, specialized_trains = BACKEND.specialized, True
