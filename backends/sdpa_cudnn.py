"""cuDNN's attention kernel, called by PyTorch's op. Without masks: with a mask, gradients have been NaN.

Source: pytorch/pytorch issue 196678 (the mask), and PyTorch's own checks in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels import dense
from attn_dispatch.kernels.branches.backend import Branched, Variant, torch_version
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.kernels.dense import DenseCall, Kernel, aten, binding, heads_first, tokens_first, vector_aligned
from attn_dispatch.kernels.limits import HALF, LARGEST_GRID, Limits, lacking
from attn_dispatch.spec.problem import Problem

LONGER_LSE = (2, 9)  #: torch, from which on the op's lse is [batch, heads, q_len, 1]
OLDEST = 90000  #: cuDNN version as major * 10000 + minor * 100 + patch

LIMITS = Limits(
    "cuda",
    dict.fromkeys(HALF, (8, 0)),
    highest=(12, 1),
    head_dim=128,  # more needs Hopper or Blackwell, cuDNN 9.22 and, for gradients, exactly 256
    repeatable_head_dim=0,
    dropout=True,
    fewest_keys=2,
    most_rows=LARGEST_GRID,
    lacks=lacking("_scaled_dot_product_cudnn_attention"),
)


class Cudnn(Kernel):
    """`_scaled_dot_product_cudnn_attention`."""

    grouped = True  # PyTorch's op hands its plan the heads of k and v
    differentiates = True
    state_at = 4, 5

    def bound(self, is_causal: bool, scale: float) -> Callable[..., tuple[Tensor, ...]]:
        op = binding("_scaled_dot_product_cudnn_attention")
        fixed = {"attn_bias": None, "compute_log_sumexp": True, "dropout_p": 0.0, "return_debug_mask": False}
        return partial(op, is_causal=is_causal, scale=scale, **fixed)

    def _taken(self, strides: tuple[int, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return _laid_out_as(strides, grads[0]), *grads[1:]  # see `backward`

    def backward(
        self, call: DenseCall, grad: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        grad, q, k, v, out = (heads_first(vector_aligned(x)) for x in (grad, *call[:3], out))
        # PyTorch caches cuDNN plans by the shapes and strides of q, k and v alone, so the strides of the other
        # arguments must be a function of those.
        strides = torch.empty_like(q).stride()  # those that PyTorch gives out
        grad, out = _laid_out_as(strides, grad), _laid_out_as(strides, out)
        lse = lse.contiguous().unsqueeze(-1) if dense.VERSION >= LONGER_LSE else lse.contiguous()
        p, *drew = self._dropped(call)
        saved = q, k, v, out, lse, *drew, None, None, None, q.shape[2], k.shape[2]
        grads = aten._scaled_dot_product_cudnn_attention_backward(grad, *saved, p, call.is_causal, scale=call.scale)
        return tokens_first(call.q.shape[-1], *grads)


def _laid_out_as(strides: tuple[int, ...], x: Tensor) -> Tensor:
    """x with these strides, in whole vectors."""
    if x.stride() == strides and vector_aligned(x) is x:
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def cudnn_version() -> int | None:
    cudnn: Any = torch.backends.cudnn
    found: int | None = cudnn.version() if cudnn.is_available() else None
    return found


def version() -> str:
    found = cudnn_version()
    return torch_version() if found is None else f"{torch_version()} cuDNN {found}"


def refuse_old_cudnn(problem: Problem) -> list[Refusal]:
    found = cudnn_version()
    if problem.device.type != "cuda" or (found is not None and found >= OLDEST):
        return []
    return [Refusal("version", f"needs cuDNN {OLDEST} or newer, this PyTorch has {found}")]


BACKEND = Branched("sdpa_cudnn", (Variant(LIMITS, lambda problem: Cudnn()),), version, refuse_old_cudnn)

name, refusals = BACKEND.name, BACKEND.refusals
flops, workspace_bytes, run = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.run
specialized, specialized_trains = BACKEND.specialized, True
