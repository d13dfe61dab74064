"""xformers' memory-efficient attention, forward with lse and backward; xformers chooses among its kernels.

Source: xformers 0.0.35, ops/fmha.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import refuse_tangents
from attn_dispatch.kernels.branches.backend import Branched, Package, Variant, flash_version, gradient_scratch
from attn_dispatch.kernels.dense import vector_aligned
from attn_dispatch.kernels.limits import HALF, LARGEST_GRID, Limits
from attn_dispatch.machine.environment import installed

FLASH = Limits("cuda", dict.fromkeys(HALF, (8, 0)), head_dim=256, repeatable_head_dim=0, most_rows=LARGEST_GRID)
CUTLASS = Limits(
    "cuda",
    {torch.float16: (5, 0), torch.float32: (5, 0), torch.bfloat16: (8, 0)},
    highest=(9, 0),
    head_dim=65536,
    most_rows=LARGEST_GRID,
)


class MemoryEfficient:
    """`memory_efficient_attention_forward_requires_grad` and `memory_efficient_attention_backward`."""

    grouped = False
    masks = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        refuse_tangents("xformers", q, k, v)
        d, q_len = q.shape[-1], q.shape[1]
        ops = PACKAGE.load()
        out, lse = ops.memory_efficient_attention_forward_requires_grad(
            vector_aligned(q), vector_aligned(k), vector_aligned(v), _bias(ops, is_causal), 0.0, scale
        )
        # One of its kernels pads lse.
        return out[..., :d], lse[:, :, :q_len]

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d = q.shape[-1]
        ops = PACKAGE.load()
        # Its kernels ignore the row strides of lse and out and assume contiguous rows.
        grad, q, k, v, out = (vector_aligned(x) for x in (grad, q, k, v, out.contiguous()))
        grads = ops.memory_efficient_attention_backward(
            grad, out, lse.contiguous(), q, k, v, _bias(ops, is_causal), 0.0, scale
        )
        dq, dk, dv = (x[..., :d] for x in grads)
        return dq, dk, dv


def _bias(ops: Any, is_causal: bool) -> Any:
    # It aligns the first query with the first key; causal pieces are square, so the last ones are aligned too.
    return ops.LowerTriangularMask() if is_causal else None


def not_built(ops: Any) -> str:
    """Without its compiled part every kernel refuses CUDA, those too that are PyTorch's own (ops/fmha/common.py)."""
    built = getattr(importlib.import_module("xformers"), "_has_cpp_library", True)
    return "" if built else "its compiled part does not fit this PyTorch, and without it no kernel runs on CUDA"


# xformers.ops: it may fail to import where xformers does not, as beside another release of flash-attn.
PACKAGE = Package("xformers", "pip install 'attn-dispatch[xformers]'", "xformers.ops", (0, 0, 29), not_built)

CALLED = ("flash-attn", "flash_attn_3")  #: ops/fmha/flash.py takes the first before PyTorch's, flash3.py the second


def version() -> str:
    """The versions of xformers and of those whose kernels it may call: PyTorch and what it finds at its import.

    Raises:
        PackageNotFoundError: xformers is not installed.
    """
    others = [f"{name} {version}" for name in CALLED if (version := installed(name))]
    return " ".join((PACKAGE.version(), "torch", flash_version(), *others))


BACKEND = Branched(
    "xformers",
    (
        Variant(FLASH, lambda problem: MemoryEfficient(), "flash", PACKAGE, scratch=gradient_scratch),
        Variant(CUTLASS, lambda problem: MemoryEfficient(), "cutlass", PACKAGE, scratch=gradient_scratch),
    ),
    version,
)

name, refusals = BACKEND.name, BACKEND.refusals
flops, workspace_bytes, run = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.run
