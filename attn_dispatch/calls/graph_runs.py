"""What the operators of graphs do when they run: attend() on their tensors, decided then; and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.calls.rewrites import run
from attn_dispatch.calls.widths import is_empty, unequal
from attn_dispatch.decisions.call import resolve
from attn_dispatch.decisions.graphs.encoding import Encoded, decoded
from attn_dispatch.decisions.graphs.operators import refuse_tangents
from attn_dispatch.errors import NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import gradients, result_known
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Call, Problem
from attn_dispatch.spec.tensors import autocast_dtype, check_seq_lens_values

_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name) for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")
]


@torch.library.impl("attn_dispatch::attend", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    refuse_tangents()
    *given, needs_grad, return_lse = rest
    with _as_eager_call(needs_grad):
        encoded, _ = _with_leaf(Encoded(*given), needs_grad)
        inputs = [x.detach().requires_grad_() if needs_grad else x for x in (q, k, v)]
        out, lse = _computed(decoded(inputs, encoded, return_lse), needs_grad)
    if lse is None or not (needs_grad or return_lse):
        shape = (q.shape[0], q.shape[2], q.shape[1]) if needs_grad or return_lse else (0,)
        lse = q.new_full(shape, torch.nan, dtype=sum_dtype(q.dtype))  # unknown: backward passes compute it again
    return out.detach().contiguous(), lse.detach().contiguous()


@torch.library.impl("attn_dispatch::attend_backward", "default")
def _attend_backward(
    grad: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *given, return_lse = rest
    with _as_eager_call(True):
        encoded, bias = _with_leaf(Encoded(*given), needs_grad=True)
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        inputs = leaves if bias is None else (*leaves, bias)
        found = _computed(decoded(leaves, encoded, return_lse), True, known=(out, lse))
        pairs = [(x, weight) for x, weight in zip(found, (grad, grad_lse)) if x is not None and weight is not None]
        grads = gradients([x for x, _ in pairs], inputs, [weight for _, weight in pairs], allow_unused=True)
    whole = (x.new_zeros(x.shape) if grad is None else grad for x, grad in zip(inputs, grads))
    results = tuple(grad.to(x.dtype).contiguous() for x, grad in zip(inputs, whole))
    return results if bias is not None else (*results, q.new_empty(0))


@contextmanager
def _as_eager_call(needs_grad: bool) -> Iterator[None]:
    """As where a user calls attend(): autograd's keys are in use, which an operator excludes; autocast is off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for each in _AUTOGRAD_KEYS:
        excluded = excluded.remove(each)
    with ExitStack() as stack:
        stack.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded))
        for device in ("cpu", "cuda"):
            if autocast_dtype(device) is not None:
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.set_grad_enabled(needs_grad))
        stack.enter_context(tracing.inside_operator())
        yield


def _with_leaf(given: Encoded, needs_grad: bool) -> tuple[Encoded, Tensor | None]:
    """An operator's arguments with the bias as a leaf that gets a gradient; and that bias, None without a gradient."""
    if given.bias is None or not (needs_grad and given.bias_needs_grad):
        return given, None
    bias = given.bias.detach().requires_grad_()
    return given._replace(bias=bias), bias


def _computed(call: Call, needs_grad: bool, known: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
    """out, and lse where it is known. Without gradients as attend() does it, which finds its routes sooner.

    Args:
        known: out and lse of the forward pass. They are computed again where it consisted of several calls, left lse
            out, or was traced without gradients.
    """
    if tracing.context_parallel() is not None:
        raise NoBackend("inside torch's context_parallel attend() cannot be part of a graph: call it between graphs")
    if not needs_grad or call.packs or unequal(call) or is_empty(call):
        found = run(call)
        return found if call.return_lse else (found, None)
    problem = Problem.of_call(call)
    if call.seq_lens is not None:
        check_seq_lens_values(call.seq_lens, problem.q_len)
    resolved = resolve(problem, call.backend, call.order)
    # lse is needed by the backward pass. What decides is the call without it, as where no graph is made.
    if not call.return_lse and _gives_lse(resolved.backend.split("@")[0], problem):
        resolved = replace(resolved, problem=replace(problem, return_lse=True))
    again = known is None or not known[1].numel() or problem in _without_lse
    with nullcontext() if known is None or again else result_known(call.k, call.v, *known):
        out, lse = resolved.result(*call.qkv, **call.tensors)
    if lse is None:
        _without_lse.add(problem)
    return out, lse


_without_lse: set[Problem] = set()  # problems of forward passes that left lse out


@lru_cache(4096)
def _gives_lse(backend: str, problem: Problem) -> bool:
    return not refusals_of(registry.load(backend), replace(problem, return_lse=True))


process_state.register(process_state.ROUTES, _gives_lse.cache_clear)
process_state.register(process_state.FACTS, _without_lse.clear)
