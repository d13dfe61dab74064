"""What the operators of graphs do around attend() when they run: its settings, its gradients.

Of calls that only saved-tensor hooks see, a node of autograd does the same, in less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.calls import packing
from attn_dispatch.decisions.call import ResolvedCall
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.decisions.graphs.encoding import TENSORS, Encoded, decoded
from attn_dispatch.decisions.trial_limits import without_saving_hooks
from attn_dispatch.errors import NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import gradients, result_known
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.kernels.dropout import given_seed
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.private import mode_count, with_autograd
from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Call, Problem
from attn_dispatch.spec.tensors import without_autocast


@contextmanager
def as_eager_call(device_type: str, needs_grad: bool, given: Sequence[Any]) -> Iterator[None]:
    """As where a user calls attend(): autograd's keys are in use, which an operator excludes; autocast is off.

    A checkpoint that replays an operator's results sees nothing that is saved inside it.
    """
    if tracing.context_parallel() is not None:
        raise NoBackend("inside torch's context_parallel attend() cannot be part of a graph: call it between graphs")
    token = given_seed.set(Encoded(*given).seed)
    try:
        with (
            with_autograd(),
            without_autocast("cpu"),
            without_autocast("cuda"),
            without_autocast(device_type),
            torch.set_grad_enabled(needs_grad),
            tracing.inside_operator(),
            without_saving_hooks(),
        ):
            yield
    finally:
        given_seed.reset(token)


def call_of(
    qkv: tuple[Tensor, Tensor, Tensor], given: Sequence[Any], needs_grad: bool, return_lse: bool
) -> tuple[Call, tuple[Tensor, ...]]:
    """The call that an operator computes; and its inputs, which are leaves where gradients are needed."""
    encoded, inputs = Encoded(*given), tuple(qkv)
    if needs_grad:
        inputs = tuple(x.detach().requires_grad_() for x in qkv)
        if encoded.bias is not None and encoded.bias_needs_grad:
            inputs = (*inputs, encoded.bias.detach().requires_grad_())
            encoded = encoded._replace(bias=inputs[3])
    call = decoded(inputs[:3], encoded, return_lse)
    if encoded.ranks is not None:
        from attn_dispatch.ring import over_mesh  # loads torch.distributed

        call = call._replace(mesh=over_mesh.mesh_of(encoded.ranks))
    return call, inputs


def results(q: Tensor, out: Tensor, lse: Tensor | None, with_lse: bool) -> tuple[Tensor, Tensor]:
    """out and lse as an operator returns them: of NaN where it is unknown, so that backward passes compute it again."""
    if lse is None or not with_lse:
        shape = (q.shape[0], q.shape[2], q.shape[1]) if with_lse else (0,)
        lse = q.new_full(shape, torch.nan, dtype=sum_dtype(q.dtype))
    return out.detach().contiguous(), lse.detach().contiguous()


def gradients_of(
    inputs: tuple[Tensor, ...], found: tuple[Tensor, Tensor | None], weights: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dbias, which is empty without one, from the gradients of out and lse."""
    pairs = [(x, weight) for x, weight in zip(found, weights) if x is not None and weight is not None]
    grads = gradients([x for x, _ in pairs], inputs, [weight for _, weight in pairs], allow_unused=True)
    whole = (x.new_zeros(x.shape) if grad is None else grad for x, grad in zip(inputs, grads))
    found_grads = tuple(grad.to(x.dtype).contiguous() for x, grad in zip(inputs, whole))
    return found_grads if len(inputs) == 4 else (*found_grads, inputs[0].new_empty(0))


def with_gradients(
    call: Call, known: tuple[Tensor, Tensor] | None = None, decided: ResolvedCall | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """out and lse of a call that a backend runs as one; None for others.

    Args:
        known: out and lse of the forward pass. They are computed again where this left lse out, or was traced without
            gradients.
        decided: what runs the call, where it is known.
    """
    if call.mesh is not None:
        from attn_dispatch.ring import over_mesh

        return over_mesh.out_and_lse(call, known)
    found = packing.decided(call) if decided is None else (call, None, decided.problem, decided)
    if found is None:
        return None
    call, given, problem, resolved = found
    if resolved is None:
        _without_lse.add(problem)
        return None
    known = None if known is None or not known[1].numel() or problem in _without_lse else known
    # lse is needed by the backward pass. What decides is the call without it, as where no graph is made.
    if not call.return_lse and _gives_lse(resolved.backend.split("@")[0], problem):
        resolved = replace(resolved, problem=replace(problem, return_lse=True))
    if given is not None:
        out, lse = packing.all_documents(resolved, call, given, known)
    else:
        with nullcontext() if known is None else result_known(call.k, call.v, *known):
            out, lse = resolved.result(*call.qkv, **call.tensors)
    if lse is None:
        _without_lse.add(problem)
    return out, lse


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What runs a decided call as one node of autograd: it saves what the operator saves, in the same order.

    Of a checkpoint's two forward passes a dispatch mode may see one, which is the operator then.
    """

    settings: tuple[Any, ...]  #: of `Encoded`
    resolved: ResolvedCall

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        return _Node.apply(self, q, k, v, *map(tensors.get, TENSORS))  # type: ignore[no-untyped-call]

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, *saved: Any) -> tuple[Tensor, ...]:
        q, k, v, out, lse, *given, return_lse = saved
        with as_eager_call(q.device.type, True, given):
            call, inputs = call_of((q, k, v), given, True, return_lse)
            found: Any = with_gradients(call, (out, lse), self.resolved)
            return gradients_of(inputs, found, (grad, grad_lse))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: NodeRun, *tensors: Any) -> tuple[Tensor, Tensor]:
        qkv, given, return_lse = tensors[:3], (*tensors[3:], *run.settings), run.resolved.problem.return_lse
        with as_eager_call(qkv[0].device.type, True, given):
            found: Any = with_gradients(call_of(qkv, given, True, return_lse)[0], decided=run.resolved)
            out, lse = results(qkv[0], found[0], found[1], True)
        operators.save(ctx, (*qkv, *given, True, return_lse), (out, lse, None))
        ctx.run = run
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        seen = torch.is_grad_enabled() or mode_count()  # by a second derivative, which is refused, or a mode
        backward = operators.backward if seen else ctx.run.backward
        return None, *operators.differentiate(ctx, *grad_outputs, run=backward)[: 3 + len(TENSORS)]


_without_lse: set[Problem] = set()  # problems of forward passes that left lse out


@lru_cache(4096)
def _gives_lse(backend: str, problem: Problem) -> bool:
    return not refusals_of(registry.load(backend), replace(problem, return_lse=True))


process_state.register(process_state.ROUTES, _gives_lse.cache_clear)
process_state.register(process_state.FACTS, _without_lse.clear)
