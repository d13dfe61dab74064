"""Autograd around a kernel that has a backward pass of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import checkpoint

from attn_dispatch.errors import BackendFailed, InvalidInput

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
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, grad_lse = grad_outputs
        return (*gradients(ctx.call, grad, grad_lse, ctx.saved_tensors), None)


def gradients(
    call: Call, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """`call.backward`, for use in an autograd.Function's backward: derivatives of its results raise BackendFailed."""
    if not torch.is_grad_enabled():  # the usual case: no graph of the gradients is asked for
        return call.backward(grad, grad_lse, saved)
    found: tuple[Tensor, Tensor, Tensor] = _Final.apply(  # type: ignore[no-untyped-call]
        lambda: call.backward(grad, grad_lse, saved), grad, grad_lse, *saved
    )
    return found


def once(*inputs: Tensor) -> tuple[Tensor, ...]:
    """`inputs`, for a function whose gradients autograd would take for constants: derivatives of them raise
    BackendFailed.
    """
    wanting = iter(_Once.apply(*(x for x in inputs if x.requires_grad)))  # type: ignore[no-untyped-call]
    return tuple(next(wanting) if x.requires_grad else x for x in inputs)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not torch.is_grad_enabled():
            return grads
        return _Final.apply(  # type: ignore[no-untyped-call]
            lambda: tuple(x.detach() for x in grads), *grads, *ctx.saved_tensors
        )


class _Final(torch.autograd.Function):
    """What `give` returns, which depends on `inputs`; derivatives raise.

    `once_differentiable` would not do: it forgets that gradients depend on what was saved, q, k and v.
    """

    @staticmethod
    def forward(ctx: Any, give: Callable[[], tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        return give()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise BackendFailed(
            "this backend has no second derivatives: a gradient of attend() was differentiated again; "
            "attend(..., backend='manual') has them, on one device"
        )
