"""attend() as one operator of torch.library, for graphs and dispatch modes: torch.compile, torch.export, make_fx.

A graph holds `attn_dispatch::attend`, and in its backward pass `attn_dispatch::attend_backward`. They are decided when
the graph runs, as a plain call is: no graph holds a choice, and none is traced anew for another one. Patterns travel as
a text and integers that may be symbolic, so that another length, window or grid needs no other graph either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.decisions.call import resolve
from attn_dispatch.decisions.graphs.encoding import decoded, encoded_arguments
from attn_dispatch.decisions.graphs.flops import TENSORS, count_flops
from attn_dispatch.decisions.unmeasured import check_names
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import NO_TANGENTS, gradients, refuse_second, result_known
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec import tracing
from attn_dispatch.spec.checks import boolean, integer
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem, dropout
from attn_dispatch.spec.tensors import (
    LAYOUTS,
    autocast_dtype,
    check_alibi_slopes,
    check_seq_lens_values,
    common_dtype,
)

_ARGUMENTS = (
    "Tensor? seq_lens, Tensor? key_mask, Tensor? documents, Tensor? cu_seqlens, Tensor? alibi_slopes, Tensor? bias, "
    "str pattern, SymInt[] numbers, float? scale, float? softcap, str? backend, str? order, SymInt? first_head, "
    "SymInt? all_heads, bool bias_needs_grad"
)
#: Axes and kinds of the tensors among these. Their sizes, which a graph may not know, are checked when it runs.
_KINDS = (((1,), "integer"), ((2,), "bool"), ((2,), "integer"), ((1,), "integer"), ((1, 2), "float"), ((4,), "float"))
_CU_SEQLENS, _ALIBI_SLOPES, _BIAS, _BIAS_NEEDS_GRAD = 3, 4, 5, -1  #: places among these; `TENSORS` are tensors
_TAGS = [
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),  # from PyTorch 2.7 on
]
if hasattr(torch.Tag, "cudagraph_unsafe"):  # newer: a first call measures, which no graph's warm-up may
    _TAGS.append(torch.Tag.cudagraph_unsafe)
# `define` and `impl` instead of `custom_op`, whose checks take longer than a small attention.
torch.library.define(
    "attn_dispatch::attend",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}, bool needs_grad, bool return_lse) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    "attn_dispatch::attend_backward",
    "(Tensor? grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}, bool return_lse) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)
_forward_op = torch.ops.attn_dispatch.attend.default
_backward_op = torch.ops.attn_dispatch.attend_backward.default
_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name) for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")
]

#: attend(), which runs what is composed of several calls; dispatch.py sets it.
eager_attend: Callable[..., Any] | None = None


def applies(q: Any, k: Any, v: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call is to be the operator: it is traced or seen by a dispatch mode.

    It is not with dropout or over ranks. A forced backend that consists of PyTorch's operators is traced through, and
    inside transforms only the plain formula, which has all derivatives.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if not tracing.as_operator(q, k, v) or dropout(arguments["dropout_p"]) or arguments.get("mesh") is not None:
        return False
    backend = arguments["backend"]
    through = backend in registry.names() and registry.load(backend).traceable is not None
    if through and (backend == registry.LAST_RESORT or not tracing.is_transformed()):
        return False
    count_flops()
    return True


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | None = None,
    *,
    segment_lengths: Any = None,
    dilation_rates: Any = None,
    is_causal: bool = False,
    seq_lens: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    layout: str = "bnhd",
    backend: str | None = None,
    order: str | None = None,
    return_lse: bool = False,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    first_head: int | None = None,
    all_heads: int | None = None,
    dropout_p: float = 0.0,
    mesh: None = None,
) -> Any:
    """`attend` by the operator, with its arguments but `sink`; torch.compile traces this function.

    Raises:
        InvalidInput: of what the graph depends on. The rest is checked when the operator runs.
    """
    assert not dropout_p, "see applies()"
    assert mesh is None, "see applies()"
    check(q, k, v, layout)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float, torch.SymFloat))):
            raise InvalidInput(f"{name} must be a number, got {number!r}")
    if not all(isinstance(name, (str, type(None))) for name in (backend, order)):
        check_names(backend, order)  # raises
    boolean("return_lse", return_lse)
    first_head = None if first_head is None else integer("first_head", first_head, 0)
    all_heads = None if all_heads is None else integer("all_heads", all_heads, 1)
    tensors = {
        "seq_lens": seq_lens, "key_mask": key_mask, "documents": documents, "cu_seqlens": cu_seqlens,
        "alibi_slopes": alibi_slopes, "bias": bias,
    }  # fmt: skip
    for (name, given), (axes, kind) in zip(tensors.items(), _KINDS):
        if given is not None and not (isinstance(given, Tensor) and given.ndim in axes and _kind(given) == kind):
            got = f"{list(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else repr(given)
            raise InvalidInput(f"{name} must be a {kind} tensor with {' or '.join(map(str, axes))} axes, got {got}")
    code, numbers = encoded_arguments(pattern, segment_lengths, dilation_rates, is_causal)
    transformed = not torch.compiler.is_dynamo_compiling() and tracing.is_transformed()
    # Inside vmap a tensor does not tell whether autograd outside of it wants a gradient.
    biased = bias is not None and (bias.requires_grad or transformed)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        check_alibi_slopes(alibi_slopes, q.shape[0], alibi_slopes.shape[-1], q.device)  # raises
    wanted = q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    needs_grad = torch.is_grad_enabled() and wanted
    if layout == "bhnd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    cast = None if q.dtype == torch.float64 else autocast_dtype(q.device.type)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    run = _Transformed.apply if transformed else _forward_op
    out, lse = run(
        q, k, v, *tensors.values(), code, numbers, scale, softcap, backend, order, first_head, all_heads, biased,
        needs_grad, return_lse,
    )  # fmt: skip
    out = out.transpose(1, 2) if layout == "bhnd" else out
    return (out, lse) if return_lse else out


def check(q: Tensor, k: Tensor, v: Tensor, layout: object) -> None:
    """Check what a graph depends on. Raises InvalidInput."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            got = list(x.shape) if isinstance(x, Tensor) else x
            raise InvalidInput(f"{name} must be a tensor with 4 axes, got {got!r}")
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout must be one of {LAYOUTS}, got {layout!r}")
    common_dtype({"q": q, "k": k, "v": v})
    if not q.device == k.device == v.device:
        raise InvalidInput(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")


def _kind(x: Tensor) -> str:
    return "float" if x.is_floating_point() else "bool" if x.dtype == torch.bool else "integer"


# --- what the operators do when they run ------------------------------------------------------------------------------


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


def _computed(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None, key_mask: Tensor | None, documents: Tensor | None,
    cu_seqlens: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor | None, code: str, numbers: list[int],
    scale: float | None, softcap: float | None, backend: str | None, order: str | None, first_head: int | None,
    all_heads: int | None, bias_needs_grad: bool, return_lse: bool, *, needs_grad: bool,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out, and lse where it is known. Without gradients by attend(), which finds its routes sooner.

    Args:
        known: out and lse of the forward pass. They are computed again where it consisted of several calls, left lse
            out, or was traced without gradients.
    """
    if tracing.context_parallel() is not None:
        raise NoBackend("inside torch's context_parallel attend() cannot be part of a graph: call it between graphs")
    pattern = decoded(code, tuple(numbers))
    tensors = {"seq_lens": seq_lens, "key_mask": key_mask, "bias": bias, "alibi_slopes": alibi_slopes}
    common: dict[str, Any] = {
        **tensors, "scale": scale, "softcap": softcap, "return_lse": return_lse, "first_head": first_head,
        "all_heads": all_heads,
    }  # fmt: skip
    if documents is not None or cu_seqlens is not None or _is_composed(q, k, v) or not needs_grad:
        packed = {"documents": documents, "cu_seqlens": cu_seqlens, "backend": backend, "order": order}
        assert eager_attend is not None
        found = eager_attend(q, k, v, pattern, **common, **packed)
        return found if return_lse else (found, None)
    problem = Problem.of(q, k, v, pattern, **common)
    if seq_lens is not None:
        check_seq_lens_values(seq_lens, problem.q_len)
    resolved = resolve(problem, backend, order)
    # lse is needed by the backward pass. What decides is the call without it, as where no graph is made.
    if not return_lse and _gives_lse(resolved.backend.split("@")[0], problem):
        resolved = replace(resolved, problem=replace(problem, return_lse=True))
    again = known is None or not known[1].numel() or problem in _without_lse
    with nullcontext() if known is None or again else result_known(k, v, *known):
        out, lse = resolved.result(q, k, v, **tensors)
    if lse is None:
        _without_lse.add(problem)
    return out, lse


_without_lse: set[Problem] = set()  # problems of forward passes that left lse out


@lru_cache(4096)
def _gives_lse(backend: str, problem: Problem) -> bool:
    return not refusals_of(registry.load(backend), replace(problem, return_lse=True))


process_state.register(process_state.ROUTES, _gives_lse.cache_clear)
process_state.register(process_state.FACTS, _without_lse.clear)


def _is_composed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether attend() changes the tensors of a call: values of another width than keys, or nothing to compute."""
    return k.shape[-1] != v.shape[-1] or 0 in (q.numel(), k.numel())


def _refuse_tangents() -> None:
    """An operator does not see which of its inputs had tangents, which PyTorch drops without a word."""
    if tracing.forward_ad._current_level >= 0:
        raise BackendFailed(NO_TANGENTS.format("attn_dispatch::attend in a graph"))


@torch.library.impl("attn_dispatch::attend", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _refuse_tangents()
    *arguments, needs_grad, return_lse = rest
    with _as_eager_call(needs_grad):
        inputs = (x.detach().requires_grad_() if needs_grad else x for x in (q, k, v))
        given: list[Any] = [*inputs, *_with_leaf(arguments, needs_grad)[0], return_lse]
        out, lse = _computed(*given, needs_grad=needs_grad)
    if lse is None or not (needs_grad or return_lse):
        shape = (q.shape[0], q.shape[2], q.shape[1]) if needs_grad or return_lse else (0,)
        lse = q.new_full(shape, torch.nan, dtype=sum_dtype(q.dtype))  # unknown: backward passes compute it again
    return out.detach().contiguous(), lse.detach().contiguous()


@torch.library.register_fake("attn_dispatch::attend")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _refuse_tangents()
    *_, needs_grad, return_lse = rest
    batch, q_len, heads, _ = q.shape
    shape = (batch, heads, q_len) if needs_grad or return_lse else (0,)
    return q.new_empty((batch, q_len, heads, v.shape[-1])), q.new_empty(shape, dtype=sum_dtype(q.dtype))


@torch.library.impl("attn_dispatch::attend_backward", "default")
def _attend_backward(
    grad: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    with _as_eager_call(True):
        *arguments, return_lse = rest
        arguments, bias = _with_leaf(arguments, needs_grad=True)
        leaves: Any = tuple(x.detach().requires_grad_() for x in (q, k, v))
        inputs = leaves if bias is None else (*leaves, bias)
        given: list[Any] = [*leaves, *arguments, return_lse]
        found = _computed(*given, needs_grad=True, known=(out, lse))
        pairs = [(x, weight) for x, weight in zip(found, (grad, grad_lse)) if x is not None and weight is not None]
        grads = gradients([x for x, _ in pairs], inputs, [weight for _, weight in pairs], allow_unused=True)
    whole = (x.new_zeros(x.shape) if grad is None else grad for x, grad in zip(inputs, grads))
    results = tuple(grad.to(x.dtype).contiguous() for x, grad in zip(inputs, whole))
    return results if bias is not None else (*results, q.new_empty(0))


def _with_leaf(arguments: list[Any], needs_grad: bool) -> tuple[list[Any], Tensor | None]:
    """The operator's arguments after q, k and v, with the bias as a leaf that gets a gradient; and that bias."""
    bias = arguments[_BIAS]
    if bias is None or not (needs_grad and arguments[_BIAS_NEEDS_GRAD]):
        return arguments, None
    bias = bias.detach().requires_grad_()
    return [*arguments[:_BIAS], bias, *arguments[_BIAS + 1 :]], bias


@torch.library.register_fake("attn_dispatch::attend_backward")  # type: ignore[untyped-decorator]
def _(grad: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    arguments = rest[2:-1]  # after out and lse
    bias = arguments[_BIAS] if arguments[_BIAS_NEEDS_GRAD] else None
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (q, k, v, *masks), rest = inputs[: 3 + TENSORS], inputs[3 + TENSORS :]
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, *masks)
    ctx.settings = (*rest[:-2], rest[-1])  # all but whether gradients are needed
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    before, after = (None,) * _BIAS, (None,) * (1 + len(ctx.settings))
    if not ctx.settings[-1]:  # nobody has lse: its gradient is None, or zeros in transforms
        grad_lse = None
    if grad is None and grad_lse is None:
        return (None, None, None, *before, None, *after)
    run = _TransformedBackward.apply if tracing.is_transformed() else _backward_op
    dq, dk, dv, dbias = run(grad, grad_lse, *ctx.saved_tensors, *ctx.settings)
    return (dq, dk, dv, *before, dbias if ctx.settings[_BIAS_NEEDS_GRAD - 1] else None, *after)


torch.library.register_autograd("attn_dispatch::attend", _differentiate, setup_context=_save)
torch.library.register_autograd("attn_dispatch::attend_backward", lambda ctx, *grads: refuse_second())


# --- transforms of torch.func -----------------------------------------------------------------------------------------


def _in_transforms(operator: Any, save: Any, differentiate: Any) -> Any:
    """The operator inside a transform of torch.func, which takes no function that `register_autograd` made."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda *args: operator(*args))
        setup_context = staticmethod(save)
        backward = staticmethod(differentiate)

    return Function


def _save_in_transforms(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs, output)
    ctx.set_materialize_grads(True)  # the rule of vmap that torch 2.6 generates takes no gradient of None


_Transformed = _in_transforms(_forward_op, _save_in_transforms, _differentiate)
_TransformedBackward = _in_transforms(
    _backward_op, lambda ctx, inputs, output: None, lambda ctx, *grads: refuse_second()
)


def _batching_rule(operator: Any, first: int) -> Callable[..., Any]:
    """The rule of vmap: the examples are part of the batch. `first`: the arguments before `_ARGUMENTS`, all tensors."""
    bias_place, tensors = first + _BIAS, first + TENSORS

    def rule(info: Any, dims: tuple[int | None, ...], *args: Any) -> Any:
        def unfolded(x: Tensor | None, dim: int | None) -> Any:
            if x is None or x.shape == (0,):  # an lse that was left out
                return x
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        if args[first + _CU_SEQLENS] is not None:
            raise NoBackend("cu_seqlens cannot be mapped by torch.vmap: give documents=")
        given = list(map(unfolded, args[:tensors], dims))
        q = given[0 if first == 3 else 2]  # after two gradients
        batch, bias, slopes = q.shape[1], given[bias_place], given[first + _ALIBI_SLOPES]
        shared = bias is not None and bias.shape[1] < batch  # by the rows of an example
        if bias is not None and bias.shape[1] == 1:
            given[bias_place] = bias.expand(-1, batch, -1, -1, -1)
        if slopes is not None and slopes.ndim == 2:  # of an example: [heads]
            given[first + _ALIBI_SLOPES] = slopes[:, None].expand(-1, batch, -1)
        folded = [x if x is None or x.shape == (0,) else x.flatten(0, 1) for x in given]
        found = operator(*folded, *args[tensors:])
        split = [x if x.shape == (0,) else x.unflatten(0, (info.batch_size, batch)) for x in found]
        if len(split) == 4 and shared and split[3].ndim > 1:
            split[3] = split[3].sum(1, keepdim=True)
        return tuple(split), tuple(None if x.shape == (0,) else 0 for x in found)

    return rule


torch.library.register_vmap("attn_dispatch::attend", _batching_rule(_forward_op, 3))
torch.library.register_vmap("attn_dispatch::attend_backward", _batching_rule(_backward_op, 7))


count_flops()
