"""PyTorch's attention kernels in float32 for half-precision inputs, converted piece by piece.

For devices with slow or without half-precision arithmetic. Partial results are merged in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch.kernels.branches.backend import Branched, Variant
from attn_dispatch.kernels.branches.plan import BranchPlan
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.kernels.dense import CPU_FLASH, CUDA_EFFICIENT, CpuFlash, CudaEfficient, DenseCall, Kernel
from attn_dispatch.kernels.limits import HALF
from attn_dispatch.spec.problem import Problem


class Widened(Kernel):
    """A kernel that converts its inputs to float32, and returns float32."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.grouped, self.masks = kernel, kernel.grouped, kernel.masks

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(_widened(call))

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return self.kernel.backward(_widened(call), grad.float(), out.float(), lse)


def _widened(call: DenseCall) -> DenseCall:
    return call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())


def not_half(problem: Problem) -> list[Refusal]:
    if problem.dtype in HALF:
        return []
    name = str(problem.dtype).removeprefix("torch.")
    return [Refusal("dtype", f"widens float16 and bfloat16 to float32, {name} is not half precision")]


def widened_bytes(problem: Problem, plan: BranchPlan) -> int:
    """Bytes of a piece's inputs and results in float32, for all query heads: keys may be copied to each."""
    q = max(b.q.stop - b.q.start for b in plan.blocks)
    k = max(b.k.stop - b.k.start for b in plan.blocks)
    rows: int = (4 * q + 4 * k) if problem.needs_grad else (2 * q + 2 * k)
    batch = min(plan.batch_step, problem.batch)
    return batch * rows * problem.heads * (problem.head_dim + 1) * torch.float32.itemsize


# The kernel computes in float32 whatever the input dtype.
_CUDA = CUDA_EFFICIENT._replace(dtypes=dict.fromkeys(CUDA_EFFICIENT.dtypes, CUDA_EFFICIENT.dtypes[torch.float32]))

BACKEND = Branched(
    "sdpa_float32",
    (
        Variant(CPU_FLASH, lambda problem: Widened(CpuFlash()), scratch=widened_bytes),
        Variant(_CUDA, lambda problem: Widened(CudaEfficient()), scratch=widened_bytes),
    ),
    also=not_half,
)

name, version, refusals = BACKEND.name, BACKEND.version, BACKEND.refusals
flops, workspace_bytes, run = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.run
