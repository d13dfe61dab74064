"""Autograd for kernels with their own backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_dispatch.errors import BackendFailed
from attn_dispatch.private import forward_ad
from attn_dispatch.spec import tracing
from attn_dispatch.spec.torch_settings import deterministic, settings


class Passes(Protocol):
    """The forward and backward pass of one call: everything but q, k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        ...

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """dq, dk, dv and, if the bias needs it, dbias; a gradient of None is zero. `saved` is (q, k, v, out, lse)."""
        ...


def gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], *, allow_unused: bool = False
) -> tuple[Tensor, ...]:
    """What `torch.autograd.grad(results, inputs, weights, allow_unused=...)` returns and raises.

    That imports SymPy at the first weights of a process: half a second, which a program may never need.
    """
    with torch.enable_grad():
        total = _Weighted.apply(tuple(weights), *results)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(total, inputs, allow_unused=allow_unused)


class _Weighted(torch.autograd.Function):
    """A scalar that stands for the weighted sum of `results`: their gradients are the weights themselves."""

    @staticmethod
    def forward(ctx: Any, weights: tuple[Tensor, ...], *results: Tensor) -> Tensor:
        ctx.weights = weights
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.weights


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, passes: Passes, masks: tuple[Tensor | None, ...] = ()
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable once by autograd.

    Args:
        masks: tensors that `passes.backward` reads: autograd raises where they were changed in place before it. A bias
            that needs a gradient comes first.
    """
    known: _Known | None = getattr(_results, "known", None)
    if known is not None and k is known.k and v is known.v:
        passes = _KnownForward(passes, known)
    out, lse = _PassesFunction.apply(q, k, v, passes, *masks)  # type: ignore[no-untyped-call]
    return out, lse


@dataclass(frozen=True, slots=True)
class _Known:
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


_results = threading.local()


@contextmanager
def result_known(k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Iterator[None]:
    """Inside, a call of `differentiable` with these very k and v computes nothing: its out and lse are known."""
    _results.known = _Known(k, v, out, lse)
    try:
        yield
    finally:
        _results.known = None


def is_result_known() -> bool:
    """Whether the call that runs is one whose result is known: its time says nothing."""
    return getattr(_results, "known", None) is not None


@dataclass(frozen=True, slots=True)
class _KnownForward:
    """Passes of which only the backward one is computed."""

    passes: Passes
    known: _Known

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.known.out.detach(), self.known.lse.detach()

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.passes.backward(grad, grad_lse, saved)


class _PassesFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, passes: Passes, *masks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = passes.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, *masks)
        ctx.passes, ctx.deterministic = passes, deterministic()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, grad_lse = grad_outputs
        q, k, v, out, lse, *masks = ctx.saved_tensors
        # PyTorch's kernels ask for its setting now; compat's functions set it for their forward pass alone.
        with settings(True) if ctx.deterministic and not deterministic() else nullcontext():
            dq, dk, dv, *others = _gradients(ctx.passes, grad, grad_lse, (q, k, v, out, lse))
        return dq, dk, dv, None, *others, *(None for _ in masks[len(others) :])


def _gradients(
    passes: Passes, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """`passes.backward`; differentiating its results raises BackendFailed."""
    if not torch.is_grad_enabled():  # the usual case: no create_graph
        return passes.backward(grad, grad_lse, saved)
    found: tuple[Tensor, ...] = _NotDifferentiable.apply(  # type: ignore[no-untyped-call]
        lambda: passes.backward(grad, grad_lse, saved), grad, grad_lse, *saved
    )
    return found


NO_TANGENTS = "{} has no forward-mode derivatives; backend='manual' has"


def refuse_tangents(backend: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError for tangents of forward-mode differentiation, which autograd does not see dropped."""
    if forward_ad._current_level >= 0 and tracing.has_tangents(*tensors):
        raise NotImplementedError(NO_TANGENTS.format(backend))


def refuse_second_derivatives(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Return `inputs` such that differentiating their gradients raises BackendFailed.

    For functions whose gradients autograd would take for constants.
    """
    wanting = iter(_FirstDerivativesOnly.apply(*(x for x in inputs if x.requires_grad)))  # type: ignore[no-untyped-call]
    return tuple(next(wanting) if x.requires_grad else x for x in inputs)


def once_differentiable(grads: tuple[Tensor | None, ...], others: tuple[Tensor | None, ...]) -> Any:
    """Gradients that depend on `others`, such that differentiating them raises BackendFailed. A hook of nodes."""
    if not torch.is_grad_enabled():  # the usual case: no create_graph
        return grads
    found = [x for x in grads if x is not None]
    same = _NotDifferentiable.apply(  # type: ignore[no-untyped-call]
        lambda: tuple(x.detach() for x in found), *found, *others
    )
    refusing = iter(same)
    return tuple(None if x is None else next(refusing) for x in grads)


class _FirstDerivativesOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return once_differentiable(grads, ctx.saved_tensors)


class _NotDifferentiable(torch.autograd.Function):
    """The result of `compute()`, recorded as depending on `inputs`; its backward raises.

    `once_differentiable` does not record the dependence on the saved q, k and v.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        return compute()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second()


def refuse_second() -> Any:
    """Raise BackendFailed for a second derivative."""
    raise BackendFailed(
        "this backend has no second derivatives: a gradient of attend() was differentiated again; "
        "attend(..., backend='manual') has them, on one device"
    )
