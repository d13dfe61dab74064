"""PyTorch's fused attention kernels without a mask: dense, causal, and dilated branches as dense sub-problems."""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.branched import Branched, Variant
from attn_dispatch.kernels import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, CpuFlash, CudaEfficient, CudaFlash

BACKEND = Branched(
    "sdpa",
    (
        Variant(CPU_FLASH, lambda problem: CpuFlash()),
        Variant(CUDA_FLASH, lambda problem: CudaFlash(), "flash"),
        # With a mask it is a candidate of its own, sdpa_efficient.
        Variant(replace(CUDA_EFFICIENT, masks=False), lambda problem: CudaEfficient(), "memory-efficient"),
    ),
)

name, version, refusals = BACKEND.name, BACKEND.version, BACKEND.refusals
flops, workspace_bytes, run, partial = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.run, BACKEND.partial
