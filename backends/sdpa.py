"""PyTorch's fused attention kernels without a mask: dense, causal, and dilated branches as dense sub-problems."""

from __future__ import annotations

from attn_dispatch.kernels import dense
from attn_dispatch.kernels.branches.backend import Branched, Variant, flash_version
from attn_dispatch.kernels.branches.plan import plan_of
from attn_dispatch.spec.pattern import Dense, Dilated
from attn_dispatch.spec.problem import Problem

BACKEND = Branched(
    "sdpa",
    (
        Variant(dense.CPU_FLASH, lambda problem: dense.CpuFlash()),
        Variant(dense.CUDA_FLASH, lambda problem: dense.CudaFlash(), "flash"),
        # With masks this kernel is the candidate sdpa_efficient.
        Variant(
            dense.CUDA_EFFICIENT._replace(masks=False, dropout=True),
            lambda problem: dense.CudaEfficient(),
            "memory-efficient",
        ),
        Variant(dense.ANY_SDPA, lambda problem: dense.Sdpa()),
    ),
    flash_version,
)


def traceable(problem: Problem) -> bool:
    """True where one call of PyTorch's CPU operator computes the problem.

    Merging needs lse, which autograd takes for a constant; on CUDA, alignment is decided by addresses while tracing.
    """
    plan = plan_of(problem, grouped=True) if isinstance(problem.pattern, Dense | Dilated) else None
    alone = plan is not None and plan.single is not None
    return alone and problem.device.type == "cpu" and not problem.return_lse and not problem.masked


name, version, refusals = BACKEND.name, BACKEND.version, BACKEND.refusals
flops, workspace_bytes, partial = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.partial
run, specialized, specialized_trains = BACKEND.run, BACKEND.specialized, True
