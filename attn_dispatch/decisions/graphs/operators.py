"""attend() as one operator of torch.library, for graphs and dispatch modes: torch.compile, torch.export, make_fx.

A graph holds `attn_dispatch::attend`, and in its backward pass `attn_dispatch::attend_backward`. They are decided when
the graph runs, as a plain call is: no graph holds a choice, and none is traced anew for another one. Patterns travel as
a text and integers that may be symbolic, so that another length, window or grid needs no other graph either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.decisions.graphs.encoding import SCHEMA, Encoded, decoded_pattern, encoded
from attn_dispatch.decisions.unmeasured import check_names
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import NO_TANGENTS, refuse_second
from attn_dispatch.kernels.dropout import drawn_seed
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.private import forward_ad, mode_count, modes, saving_tensors
from attn_dispatch.spec import tracing
from attn_dispatch.spec.checks import boolean
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.problem import Call, Problem, dropout
from attn_dispatch.spec.shapes import pair_count
from attn_dispatch.spec.tensors import LAYOUTS, autocast_dtype, check_alibi_slopes, common_dtype

_ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in SCHEMA.items())
#: Axes and kinds of the tensors among these. Their sizes, which a graph may not know, are checked when it runs.
_KINDS = {
    "seq_lens": ((1,), "integer"),
    "key_mask": ((2,), "bool"),
    "documents": ((2,), "integer"),
    "cu_seqlens": ((1,), "integer"),
    "alibi_slopes": ((1, 2), "float"),
    "bias": ((4,), "float"),
    "key_lens": ((1,), "integer"),
}
_TAGS = [
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),  # from PyTorch 2.7 on
]
if hasattr(torch.Tag, "cudagraph_unsafe"):  # newer: a first call measures, which no graph's warm-up may
    _TAGS.append(torch.Tag.cudagraph_unsafe)
# `define` and `impl` instead of `custom_op`, whose checks take longer than a small attention.
torch.library.define(
    "attn_dispatch::attend",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}, bool needs_grad, bool return_lse) "
    "-> (Tensor out, Tensor lse, Tensor seed)",
    tags=_TAGS,
)
torch.library.define(
    "attn_dispatch::attend_backward",
    "(Tensor? grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}, bool return_lse) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)
_forward = torch.ops.attn_dispatch.attend.default
backward = torch.ops.attn_dispatch.attend_backward.default


def applies(call: Call) -> bool:
    """Whether a call is to be the operator: it is traced or seen by a dispatch mode.

    It is not over ranks, nor traced with dropout. A forced backend of PyTorch's operators is traced through, and
    inside transforms and selective checkpoints only the plain formula, which has all derivatives.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if not tracing.as_operator(*call.qkv) or call.mesh is not None:
        return False
    through = call.backend in registry.names() and registry.load(call.backend).traceable is not None
    traced = tracing.is_traced(*call.qkv)
    if traced and dropout(call.dropout_p):
        return False
    if through and (call.backend == registry.LAST_RESORT or (traced and not tracing.is_transformed())):
        return False
    count_flops()
    return True


def is_node(call: Call) -> bool:
    """Whether a call is a node of autograd, not the operator: one problem that saved-tensor hooks alone see."""
    if torch.compiler.is_dynamo_compiling() or mode_count() or not saving_tensors() or not applies(call):
        return False
    wanting = [x for x in (*call.qkv, call.bias) if x is not None and x.requires_grad]
    several = call.packs or dropout(call.dropout_p) or isinstance(call.pattern, DataPattern)
    return bool(wanting) and torch.is_grad_enabled() and not several and not tracing.is_traced(*call.qkv)


def attend_by_operator(call: Call, ranks: str | None = None) -> Any:
    """`attend` for a call to which the operator `applies`, maybe over ranks; torch.compile traces this function.

    Raises:
        InvalidInput: of what the graph depends on. The rest is checked when the operator runs.
    """
    q, k, v = call.qkv
    check(q, k, v, call.layout)
    _check_arguments(call)
    transformed = not torch.compiler.is_dynamo_compiling() and tracing.is_transformed()
    bias, slopes = call.bias, call.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        check_alibi_slopes(slopes, q.shape[0], slopes.shape[-1], q.device)  # raises
    wanted = q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    needs_grad = torch.is_grad_enabled() and wanted
    # Inside vmap a tensor does not tell whether autograd outside of it wants a gradient.
    seed = drawn_seed(q.device) if call.dropout_p else None  # out here, so that a replay of the operator draws, too
    given = encoded(call, bias is not None and (bias.requires_grad or transformed), seed, ranks)
    if not torch.compiler.is_dynamo_compiling():
        _check_fake(call)
    q, k, v = call.tokens_first
    cast = None if q.dtype == torch.float64 else autocast_dtype(q.device.type)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    run = _Transformed.apply if transformed else _forward
    out, lse, _ = run(q, k, v, *given, needs_grad, call.return_lse)
    return call.returned(out, lse)


def _check_fake(call: Call) -> None:
    """PyTorch's own error names neither the pattern nor what to do."""
    mode, data = getattr(call.q, "fake_mode", None), call.tensors.get("pattern_data")
    if mode is None or data is None or mode.allow_non_fake_inputs or getattr(data, "fake_mode", None) is not None:
        return
    how = "make it inside the traced function, of its arguments"
    raise InvalidInput(f"pattern must hold fake tensors, as q is one, got {call.pattern}: {how}")


def _check_arguments(call: Call) -> None:
    for name in ("scale", "softcap"):
        number = getattr(call, name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float, torch.SymFloat))):
            raise InvalidInput(f"{name} must be a number, got {number!r}")
    if not all(isinstance(name, (str, type(None))) for name in (call.backend, call.order)):
        check_names(call.backend, call.order)  # raises
    boolean("return_lse", call.return_lse)
    for name, (axes, kind) in _KINDS.items():
        given = getattr(call, name)
        if given is not None and not (isinstance(given, Tensor) and given.ndim in axes and _kind(given) == kind):
            got = f"{list(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else repr(given)
            raise InvalidInput(f"{name} must be a {kind} tensor with {' or '.join(map(str, axes))} axes, got {got}")


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


# --- shapes and derivatives -----------------------------------------------------------------------------------


def refuse_tangents() -> None:
    """An operator does not see which of its inputs had tangents, which PyTorch drops without a word."""
    if forward_ad._current_level >= 0:
        raise BackendFailed(NO_TANGENTS.format("attn_dispatch::attend in a graph"))


@torch.library.register_fake("attn_dispatch::attend")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    refuse_tangents()
    *_, needs_grad, return_lse = rest
    batch, q_len, heads, _ = q.shape
    shape = (batch, heads, q_len) if needs_grad or return_lse else (0,)
    out, lse = q.new_empty((batch, q_len, heads, v.shape[-1])), q.new_empty(shape, dtype=sum_dtype(q.dtype))
    return out, lse, seed_of(q, rest)


def seed_of(q: Tensor, rest: Sequence[Any]) -> Tensor:
    """The seed as a result of the operator, which is stored and replayed with the others; without dropout, empty."""
    seed = Encoded.first_of(rest).seed
    return q.new_empty(0, dtype=torch.int64) if seed is None else seed.clone()


@torch.library.register_fake("attn_dispatch::attend_backward")  # type: ignore[untyped-decorator]
def _(
    grad: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    given = Encoded.first_of(rest)
    bias = given.bias if given.bias_needs_grad else None
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    (q, k, v, *rest), (out, lse, seed) = inputs, output
    given = Encoded.first_of(rest)
    given = given if given.seed is None else given._replace(seed=seed)  # of replayed results that of their time
    ctx.save_for_backward(q, k, v, out, lse, *given.tensors)
    ctx.settings, (_, ctx.return_lse) = given.settings, rest[len(given) :]
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, *grads: Tensor | None, run: Any = backward) -> tuple[Any, ...]:
    """The gradients of an operator's inputs from those of its results, by its other operator or by `run`."""
    grad, grad_lse = grads[:2]
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    given, nothing = Encoded(*tensors, *ctx.settings), Encoded(*[None] * len(SCHEMA))  # type: ignore[arg-type]
    if not ctx.return_lse:  # nobody has lse: its gradient is None, or zeros in transforms
        grad_lse = None
    if grad is None and grad_lse is None:
        return (None, None, None, *nothing, None, None)
    run = _TransformedBackward.apply if tracing.is_transformed() else run
    dq, dk, dv, dbias = run(grad, grad_lse, q, k, v, out, lse, *given, ctx.return_lse)
    return (dq, dk, dv, *nothing._replace(bias=dbias if given.bias_needs_grad else None), None, None)


torch.library.register_autograd("attn_dispatch::attend", differentiate, setup_context=save)
torch.library.register_autograd("attn_dispatch::attend_backward", lambda ctx, *grads: refuse_second())


# --- transforms of torch.func ---------------------------------------------------------------------------------


def _in_transforms(operator: Any, save: Any, differentiate: Any) -> Any:
    """The operator inside a transform of torch.func, which takes no function that `register_autograd` made."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda *args: operator(*args))
        setup_context = staticmethod(save)
        backward = staticmethod(differentiate)

    return Function


def _save_in_transforms(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    save(ctx, inputs, output)
    ctx.set_materialize_grads(True)  # the rule of vmap that torch 2.6 generates takes no gradient of None


_Transformed = _in_transforms(_forward, _save_in_transforms, differentiate)
_TransformedBackward = _in_transforms(backward, lambda ctx, inputs, output: None, lambda ctx, *grads: refuse_second())


def _batching_rule(operator: Any, first: int) -> Callable[..., Any]:
    """The rule of vmap: the examples are part of the batch. `first`: the arguments before `Encoded`, all tensors."""

    def rule(info: Any, dims: tuple[int | None, ...], *args: Any) -> Any:
        def unfolded(x: Tensor | None, dim: int | None) -> Any:
            if x is None or x.shape == (0,):  # an lse that was left out
                return x
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        given = Encoded.first_of(args[first:])
        if given.pattern_data is not None:
            raise NoBackend(
                "a pattern that holds tensors cannot be mapped by torch.vmap: give the examples as one batch"
            )
        if given.cu_seqlens is not None:
            raise NoBackend("cu_seqlens cannot be mapped by torch.vmap: give documents=")
        before = list(map(unfolded, args[:first], dims))
        given = Encoded(*map(unfolded, given.tensors, dims[first:]), *given.settings)
        q = before[0 if first == 3 else 2]  # after two gradients
        batch, bias, slopes = q.shape[1], given.bias, given.alibi_slopes
        shared = bias is not None and bias.shape[1] < batch  # by the rows of an example
        if bias is not None and bias.shape[1] == 1:
            given = given._replace(bias=bias.expand(-1, batch, -1, -1, -1))
        if slopes is not None and slopes.ndim == 2:  # of an example: [heads]
            given = given._replace(alibi_slopes=slopes[:, None].expand(-1, batch, -1))
        folded = [x if x is None or x.shape == (0,) else x.flatten(0, 1) for x in (*before, *given.tensors)]
        found = operator(*folded, *given.settings, *args[first + len(given) :])
        split = [x if x.shape == (0,) else x.unflatten(0, (info.batch_size, batch)) for x in found]
        if len(split) == 4 and shared and split[3].ndim > 1:
            split[3] = split[3].sum(1, keepdim=True)
        return tuple(split), tuple(None if x.shape == (0,) else 0 for x in found)

    return rule


torch.library.register_vmap("attn_dispatch::attend", _batching_rule(_forward, 3))
torch.library.register_vmap("attn_dispatch::attend_backward", _batching_rule(backward, 7))


# --- operations, for torch.utils.flop_counter -----------------------------------------------------------------


def count_flops() -> None:
    """Let FlopCounterMode count the operators, where a program has loaded it: to import it takes long."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    ops = torch.ops.attn_dispatch
    for packet, formula in {ops.attend: _forward_flops, ops.attend_backward: _backward_flops}.items():
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet)(formula)
        for mode in modes():  # those that were entered before
            formulas = getattr(getattr(mode, "counter", mode), "flop_registry", None)
            if formulas is not None:
                formulas.setdefault(packet, counter.flop_registry[packet])


def _pairs(q: Any, k: Any, rest: tuple[Any, ...]) -> int:
    given = Encoded.first_of(rest)
    pattern = decoded_pattern(given.pattern, tuple(map(int, given.numbers)))
    return int(q[0]) * pair_count(pattern, int(q[1]), int(k[1]), int(q[2]))


def _forward_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products for each pair that the pattern has, whatever masks and documents hide."""
    return 2 * (int(q[3]) + int(v[3])) * _pairs(q, k, rest)


def _backward_flops(
    grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, out_shape: Any = None, **more: Any
) -> int:
    """Five products: the scores again, the weights' gradients, and dq, dk and dv."""
    return 2 * (3 * int(q[3]) + 2 * int(v[3])) * _pairs(q, k, rest)


count_flops()


def check_whole(call: Call) -> None:
    """Check tensors that are about to be cut. Raises InvalidInput."""
    if not tracing.graphed(*call.qkv):
        masks = {name: getattr(call, name) for name in ("layout", "key_mask", "bias", "alibi_slopes")}
        Problem.of_call(Call(call.q, call.k, _as_wide(call), **masks), may_be_empty=True)
        return
    check(*call.qkv, call.layout)  # the operator checks the rest when it runs
    k_len = call.k.shape[call.layout.index("n")]
    for name, axis in (("v", call.layout.index("n")), ("key_mask", -1), ("bias", -1)):
        x: Any = getattr(call, name)
        if x is not None and not (isinstance(x, Tensor) and x.ndim and x.shape[axis] == k_len):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"{name} must be a tensor with the {k_len} keys of k, got {got}")


def _as_wide(call: Call) -> Any:
    """A tensor like v with k's shape where they differ in width alone, so that everything else can be checked."""
    k, v = call.k, call.v
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (k, v)) or k.shape[:-1] != v.shape[:-1]:
        return v
    return v.new_empty(()).expand(k.shape)
