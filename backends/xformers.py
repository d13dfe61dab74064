"""xformers' memory-efficient attention, forward with lse and backward; xformers chooses among its kernels.

Source: xformers 0.0.35, ops/fmha.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import refuse_tangents
from attn_dispatch.kernels.branches.backend import Branched, Package, Variant, flash_version
from attn_dispatch.kernels.dense import DenseCall, Kernel, vector_aligned
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


class MemoryEfficient(Kernel):
    """`memory_efficient_attention_forward_requires_grad` and `memory_efficient_attention_backward`."""

    tokens_first = True

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        out, lse = self.bound(call.is_causal, call.scale)(*map(vector_aligned, call[:3]))
        # One of its kernels pads lse.
        return out[..., : call.q.shape[-1]], lse[:, :, : call.q.shape[1]]

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]]:
        ops = PACKAGE.load()
        op, bias = ops.memory_efficient_attention_forward_requires_grad, _bias(ops, is_causal)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            refuse_tangents("xformers", q, k, v)
            return op(q, k, v, bias, 0.0, scale)

        return run

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        ops = PACKAGE.load()
        # Its kernels ignore the row strides of lse and out and assume contiguous rows.
        grad, out, q, k, v = map(vector_aligned, (grad, out.contiguous(), *call[:3]))
        grads = ops.memory_efficient_attention_backward(
            grad, out, lse.contiguous(), q, k, v, _bias(ops, call.is_causal), 0.0, call.scale
        )
        return tuple(x[..., : call.q.shape[-1]] for x in grads)


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
        Variant(FLASH, lambda problem: MemoryEfficient(), "flash", PACKAGE),
        Variant(CUTLASS, lambda problem: MemoryEfficient(), "cutlass", PACKAGE),
    ),
    version,
)

name, refusals = BACKEND.name, BACKEND.refusals
flops, workspace_bytes = BACKEND.flops, BACKEND.workspace_bytes
run, specialized = BACKEND.run, BACKEND.specialized
