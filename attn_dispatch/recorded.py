"""Autograd around a kernel that has a backward pass of its own."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import checkpoint

from attn_dispatch.errors import InvalidInput

#: How checkpointing ends a recomputation early; where this torch does not, what is passed on anyway.
STOPPED: type[Exception] = getattr(checkpoint, "_StopRecomputationError", InvalidInput)


class Call(Protocol):
    """What is computed, but for q, k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        ...

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv; None is a gradient of zeros. `saved` is q, k, v, out and lse."""
        ...


def recorded(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out and lse, with gradients through both."""
    out, lse = _Recorded.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return out, lse


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, grad_lse = grad_outputs
        return (*ctx.call.backward(grad, grad_lse, ctx.saved_tensors), None)
