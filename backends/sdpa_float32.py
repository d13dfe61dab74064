"""PyTorch's attention kernels in float32 for half-precision inputs, converted piece by piece.

For devices with slow or without half-precision arithmetic. Partial results are merged in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch.kernels.branches.backend import Branched, Variant
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


# The kernel computes in float32 whatever the input dtype.
_CUDA = CUDA_EFFICIENT._replace(dtypes=dict.fromkeys(CUDA_EFFICIENT.dtypes, CUDA_EFFICIENT.dtypes[torch.float32]))

BACKEND = Branched(
    "sdpa_float32",
    (
        Variant(CPU_FLASH, lambda problem: Widened(CpuFlash())),
        Variant(_CUDA, lambda problem: Widened(CudaEfficient())),
    ),
    also=not_half,
)

name, version, refusals = BACKEND.name, BACKEND.version, BACKEND.refusals
flops, workspace_bytes, run = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.run
