"""attend() and explain(): arguments become a Problem, the Problem a decision, the decision a backend's run.

A repeated call costs one table look-up by its settings and one comparison of the tensors with those of its route.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from attn_dispatch import packing, process_state, recording, widths
from attn_dispatch.decisions import decide, unmeasured
from attn_dispatch.decisions.call import NOT_WRAPPED, ResolvedCall, functions_of, notify, run_function
from attn_dispatch.decisions.decide import lock
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.decisions.trial_limits import cannot_measure
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import NO_TANGENTS
from attn_dispatch.spec import orders, tracing
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem, dropout
from attn_dispatch.spec.shapes import measured_for
from attn_dispatch.spec.tensors import autocast_dtype, check_seq_lens_values, check_sink
from attn_dispatch.spec.torch_settings import current_flash, deterministic_or_warning, matmul_precision, only_warning
from attn_dispatch.store.decision import Decision
from attn_dispatch.tensor_match import Fits, fits
from attn_dispatch.text import titled

MAX_ROUTES = 4096  #: entries of the table of routes, 5 to 20 KB each; past this the oldest is made anew if needed
MAX_CHAIN = 16  #: routes of one signature, which are searched one by one


@dataclass(frozen=True, slots=True)
class Route(ResolvedCall):
    """The cached decision for one call signature; valid while fits(q, k, v) and, for float32, `precision` is the same.

    `direct`: `run` takes the arguments as they are. `next_route`: another route of the same signature, `depth`: how
    many follow. `graphed`: the call is traced into a graph, so that values of tensors cannot be checked.
    """

    fits: Fits
    precision: str | None
    next_route: Route | None
    depth: int
    direct: bool
    transposed: bool
    cast: torch.dtype | None
    graphed: bool


_grad_enabled, _threads = torch.is_grad_enabled, torch.get_num_threads  # looked up once
# 0 in every stored signature: routes found without dispatch modes are not used under one. Nor are they where there may
# be tangents.
_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
_forward_ad = tracing.forward_ad
_routes: dict[Any, Route] = {}
process_state.register(process_state.ROUTES, _routes.clear)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | None = None,
    *,
    segment_lengths: Iterable[int] | None = None,
    dilation_rates: Iterable[int] | None = None,
    is_causal: bool = False,
    seq_lens: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: str = "bnhd",
    backend: str | None = None,
    order: str | None = None,
    mesh: object = None,
    return_lse: bool = False,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_lens: Tensor | None = None,
    alignment: str = "lower_right",
    first_head: int | None = None,
    all_heads: int | None = None,
) -> Any:
    """Attention by the fastest backend and token order known on this machine.

    The first call of a new problem measures the backends that can run it and stores the decision on disk; later calls,
    in this process and the next, use it. `$ATTN_DISPATCH_MODE` changes that.

    Args:
        q: [batch, q_len, heads, head_dim], float16, bfloat16, float32 or float64; any strides.
        k, v: [batch, k_len, kv_heads, head_dim]; kv_heads divides heads. v may have another head_dim, which out then
            has too.
        pattern: `Dense`, `Window`, `Dilated` or `Neighborhood`, or `Reordered` around one; or use the shorthands below,
            not both.
        segment_lengths, dilation_rates: tokens per segment and rate of each branch of `Dilated`.
        is_causal: mask keys after the query; the last query is aligned with the last key (`alignment`).
        seq_lens: [batch] int32 or int64: tokens from a row's length on are padding.
        key_mask: [batch, k_len] bool, True for keys that may be attended to.
        dropout_p: probability with which an attention weight is dropped; 0 <= dropout_p < 1.
        scale: factor of the scores; `head_dim ** -0.5` by default.
        layout: "bnhd", or "bhnd" for q, k, v and out with their middle axes swapped.
        backend, order: force a backend, a token order or both; the call fails if they cannot run it. Nothing is
            measured; of several candidates the best measured one is taken, else the static choice.
        mesh: 1-D DeviceMesh, process group or `Sharded` over whose ranks the sequence is sharded; q, k, v and key_mask
            are then this rank's shard, seq_lens are lengths of the whole sequence, and `order` is a way of exchanging
            rows: "local", "ring", "gather" or "ulysses".
        return_lse: also return lse.
        documents: [batch, len] int32 or int64: tokens with equal ids, which stand together, are one document. Each is
            computed as by a call of its own: positions and lengths are the document's.
        cu_seqlens: [documents + 1] int32 or int64, for a batch of one row, as flash-attn has it: where each document
            starts, and the end of the last. Both are read on the host.
        sink: [heads], floating point: the score, not scaled, of one more key for each head, whose value is
            0. It is part of lse, and gets a gradient.
        softcap: scaled scores s become `softcap * tanh(s / softcap)`, before a bias is added.
        bias: [1 or batch, 1 or heads, q_len, k_len], floating point, added to the scores; -inf hides a key.
        alibi_slopes: [heads] or [batch, heads], floating point: `slope * distance` in tokens is subtracted from the
            scores; the last query is aligned with the last key. They get no gradient.
        key_lens: [batch] int32 or int64, read on the host: each row's keys, of which the last is aligned with the last
            query, as in a cache whose rows are filled to different lengths. What follows them is not read.
        alignment: "lower_right", or "upper_left", which aligns the first query with the first key, for causal `Dense`.
        first_head, all_heads: where q, k and v hold a share of the heads, as on a rank of a program that shards them:
            the number of q's first head, and of all heads. Patterns that differ by head go by these numbers.

    Returns:
        out as q; or (out, lse) with lse [batch, heads, q_len], natural log, float32 (float64 for float64 inputs),
        -inf for a query without keys. Both are differentiable.

    Raises:
        InvalidInput: an argument is wrong. NoBackend: no backend can run the problem. BackendFailed: the chosen backend
        raised. NotDecided: locked mode without a stored decision. GroupMismatch: the ranks of a mesh pass different
        arguments. RankLost: a rank is gone, or did not take part within the group's time-out.
    """
    if is_dynamo_compiling():
        return _compiled(
            q, k, v, pattern, segment_lengths=segment_lengths, dilation_rates=dilation_rates, is_causal=is_causal,
            seq_lens=seq_lens, key_mask=key_mask, dropout_p=dropout_p, scale=scale, layout=layout, backend=backend,
            order=order, mesh=mesh, return_lse=return_lse, documents=documents, cu_seqlens=cu_seqlens, sink=sink,
            softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, key_lens=key_lens, alignment=alignment,
            first_head=first_head, all_heads=all_heads,
        )  # fmt: skip
    packs = documents is not None or cu_seqlens is not None or key_lens is not None
    if packs or sink is not None or alignment != "lower_right":
        return packing.composed(
            attend, q, k, v, documents, cu_seqlens, sink, layout, key_lens=key_lens, alignment=alignment,
            pattern=pattern, segment_lengths=_hashable(segment_lengths), dilation_rates=_hashable(dilation_rates),
            is_causal=is_causal, seq_lens=seq_lens, key_mask=key_mask,
            dropout_p=dropout_p, scale=scale, backend=backend, order=order, mesh=mesh, return_lse=return_lse,
            softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, first_head=first_head, all_heads=all_heads,
        )  # fmt: skip
    if mesh is not None:
        return _over_mesh(
            mesh, q, k, v, pattern=pattern, segment_lengths=_hashable(segment_lengths),
            dilation_rates=_hashable(dilation_rates), is_causal=is_causal, seq_lens=seq_lens, key_mask=key_mask,
            dropout_p=dropout_p, scale=scale, layout=layout, backend=backend, order=order, return_lse=return_lse,
            softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, first_head=first_head, all_heads=all_heads,
        )  # fmt: skip
    signature: Any = None
    try:
        signature = (
            q.shape, k.numel(), pattern, segment_lengths, dilation_rates, is_causal, dropout_p, scale, layout, backend,
            order, return_lse, first_head, all_heads,
            None if seq_lens is None else (seq_lens.shape, seq_lens.dtype, seq_lens.device),
            None if key_mask is None else (key_mask.shape, key_mask.dtype, key_mask.device),
            (softcap is None and bias is None and alibi_slopes is None)
            or (softcap, _facts(bias), _facts(alibi_slopes)),
            _grad_enabled(), deterministic_or_warning() and not only_warning(), _threads(), _mode_count(),
            current_flash(), _forward_ad._current_level,
            functional.scaled_dot_product_attention,  # another function inside torch's context_parallel
        )  # fmt: skip
        route = _routes.get(signature)
        while route is not None and not (
            route.fits(q, k, v) and (route.precision is None or route.precision == matmul_precision())
        ):
            route = route.next_route
    except (TypeError, AttributeError, RuntimeError):
        route = signature = None  # decided outside the handler, so that exceptions are not chained to this one
    if route is None:
        tracing.refuse_jit()
        arguments = {
            "segment_lengths": _hashable(segment_lengths), "dilation_rates": _hashable(dilation_rates),
            "is_causal": is_causal, "seq_lens": seq_lens, "key_mask": key_mask, "dropout_p": dropout_p,
            "scale": scale, "layout": layout, "return_lse": return_lse, "softcap": softcap, "bias": bias,
            "alibi_slopes": alibi_slopes, "first_head": first_head, "all_heads": all_heads,
        }  # fmt: skip
        if arguments["segment_lengths"] is not segment_lengths or arguments["dilation_rates"] is not dilation_rates:
            # Lists have no hash: repeat the call with tuples.
            return attend(q, k, v, pattern, backend=backend, order=order, **arguments)
        if operators.applies(q, k, v, {**arguments, "backend": backend}):
            return operators.call(q, k, v, pattern, backend=backend, order=order, **arguments)
        tracing.check_sizes(q=q, k=k, v=v)
        backend = _in_transforms(q, k, v, backend, arguments)
        if any(map(tracing.is_dtensor, (q, k, v))):
            return _over_mesh(None, q, k, v, pattern=pattern, backend=backend, order=order, **arguments)
        if (mesh := tracing.context_parallel()) is not None:
            return _over_mesh(mesh, q, k, v, pattern=pattern, backend=backend, order=order, **arguments)
        if widths.unequal_or_empty(q, k, v):
            return _resized(q, k, v, pattern, backend, order, arguments)
        problem = Problem.of(q, k, v, pattern, **arguments)
        route = _new_route(signature, (q, k, v), problem, layout, backend, order)
    if not route.direct:
        return _run_prepared(
            route, q, k, v, return_lse, seq_lens=seq_lens, key_mask=key_mask, bias=bias, alibi_slopes=alibi_slopes
        )
    try:
        result = route.run(q, k, v, route.problem)
    except NOT_WRAPPED:
        raise
    except Exception as error:
        raise route.failure(error) from error
    if return_lse:
        return route.with_lse(result)
    if type(result) is tuple and len(result) == 2 and type(result[0]) is Tensor:  # without a function call
        return result[0]
    return result if isinstance(result, Tensor) else route.parts(result)[0]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | None = None,
    *,
    backend: str | None = None,
    order: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Explain which backend and order `attend` takes for these arguments, and why not the others. Runs nothing.

    Takes no documents nor `key_lens`. Meta tensors are explained for the CUDA device if there is one, else for the CPU.

    Raises:
        InvalidInput: an argument is wrong. NoBackend: over a mesh, no exchange can run the problem.
    """
    if "device" in arguments:
        raise InvalidInput("explain takes attend's arguments, which have no device")
    if unknown := arguments.keys() - inspect.signature(attend).parameters.keys():
        raise TypeError(f"explain() got an unexpected keyword argument {min(unknown)!r}")
    if any(map(tracing.is_dtensor, (q, k, v))):
        from attn_dispatch.ring import dtensors

        local = dtensors.local(q, k, v, {**arguments, "pattern": pattern, "backend": backend, "order": order})
        return explain(*local[:3], **local[3])
    if (sink := arguments.pop("sink", None)) is not None:
        check_sink(sink, q, arguments.get("layout", "bnhd"))
        arguments["return_lse"] = True
    if any(arguments.pop(name, None) is not None for name in ("documents", "cu_seqlens", "key_lens")):
        raise InvalidInput("explain takes one document, and rows of one length: each is a call of its own")
    if arguments.get("alignment", "lower_right") != "lower_right":
        arguments["pattern"] = pattern
        q, k, v = widths.aligned(q, k, v, arguments.get("layout", "bnhd"), arguments)
        pattern = arguments.pop("pattern")
    arguments.pop("alignment", None)
    if (mesh := arguments.pop("mesh", None)) is None:
        mesh = tracing.context_parallel()
    if mesh is None and widths.unequal_or_empty(q, k, v) and q.numel() and k.numel():
        q, k, v = widths.padded(q, k, v, arguments)
    if mesh is not None:
        from attn_dispatch.ring import over_mesh, shards

        link, spread = shards.spread_of(mesh)
        if link.size > 1:
            given = {**over_mesh.scaled_only(arguments), "backend": backend, "order": order}
            return over_mesh.explain_over(link, spread.kind, q, k, v, pattern=pattern, **given)
        backend, order = over_mesh.alone(backend, order)
    return decide.explain_problem(Problem.of(q, k, v, pattern, **arguments), backend, order)


def adopt(problem: Problem, decision: Decision) -> None:
    """Store a measured decision, and route calls by it from now on."""
    with lock:
        decide.replace_measured(problem, decision)
        process_state.forget(process_state.ROUTES)


def _new_route(
    signature: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    layout: str,
    backend: str | None,
    order: str | None,
) -> Route:
    q = tensors[0]
    if q.device.type == "meta":
        raise InvalidInput("q, k and v are on the meta device and hold no data; explain() takes them")
    if order is not None:
        orders.check(order)
    forgotten = process_state.forgotten
    notify(measured_for(problem))
    forced = backend is not None or order is not None
    graphed = tracing.graphed(*tensors)
    traced = graphed or tracing.is_traced()
    if forced:
        decision = decide.forced_decision(problem, backend, order)
        if graphed:
            unmeasured.check_traceable(problem, decision)
    else:
        decision = decide.decision_while_traced(problem) if traced else decide.decision_for(problem)
    cast = None if q.dtype == torch.float64 else autocast_dtype(q.device.type)
    transposed = layout == "bhnd"
    found = functions_of(problem, decision, None if cast or traced else tensors, layout)
    with lock:
        if not (forced or traced) and (latest := decide.latest(problem, decision)) is not decision:
            found = found if latest.chosen == decision.chosen else functions_of(problem, latest)
            decision = latest
        run, heads_first = run_function(problem, decision, traced, _drop_routes, found)
        next_route = _chain(signature)
        route = Route(
            fits=fits(*tensors),
            precision=matmul_precision() if q.dtype == torch.float32 else None,
            next_route=next_route,
            depth=0 if next_route is None else next_route.depth + 1,
            run=run,
            problem=problem,
            backend=titled(*decision.chosen),
            direct=transposed == heads_first and not (cast or problem.masked or problem.bias or problem.alibi_axes),
            transposed=transposed,
            cast=cast,
            graphed=graphed,
        )
        # Another thread may have replaced the decision meanwhile, or begun to observe.
        is_current = forgotten == process_state.forgotten
        odd = traced or _mode_count() or _forward_ad._current_level >= 0 or cannot_measure(problem.device)
        if is_current and signature is not None and not odd:
            _routes[signature] = route
            decide.drop_oldest(_routes, MAX_ROUTES)
    return route


def _in_transforms(q: Tensor, k: Tensor, v: Tensor, backend: str | None, arguments: dict[str, Any]) -> str | None:
    """The backend to force: the plain formula for tangents, and for dropout where transforms or modes see the call.

    Raises:
        NoBackend: dropout inside torch.vmap. BackendFailed: the forced backend has no forward-mode derivatives.
    """
    dropped = bool(dropout(arguments["dropout_p"])) and tracing.is_traced(q, k, v) and not tracing.graphed(q, k, v)
    if dropped and tracing.is_mapped():
        what = "inside torch.vmap, which jacfwd and hessian use"
        raise NoBackend(f"dropout_p cannot be given {what}: let the examples be rows of one batch")
    if not tracing.has_tangents(q, k, v, arguments["bias"], arguments["alibi_slopes"]):
        return registry.LAST_RESORT if dropped and backend is None else backend
    if backend in registry.names() and registry.load(backend).traceable is None:
        raise BackendFailed(NO_TANGENTS.format(backend))
    return registry.LAST_RESORT if backend is None else backend


def _drop_routes(problem: Problem) -> None:
    """Forget the routes of a problem, and those that were found with them."""
    with lock:
        for signature, route in list(_routes.items()):
            found: Route | None = route
            while found is not None and problem not in (found.problem, measured_for(found.problem)):
                found = found.next_route
            if found is not None:
                del _routes[signature]


def _chain(signature: Any) -> Route | None:
    """The routes of a signature, for a new route to precede; None if there are `MAX_CHAIN` already."""
    found = _routes.get(signature)
    return found if found is not None and found.depth < MAX_CHAIN - 1 else None


def _facts(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.dtype, x.device, x.requires_grad)


def _run_prepared(route: Route, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, **tensors: Tensor | None) -> Any:
    """Run a route with further tensors, layout "bhnd" or autocast."""
    seq_lens = tensors["seq_lens"]
    if seq_lens is not None and not route.graphed:
        check_seq_lens_values(seq_lens, route.problem.q_len)
    if route.transposed:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if route.cast is None:
        out, lse = route.result(q, k, v, **tensors)
    else:
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = q.to(route.cast), k.to(route.cast), v.to(route.cast)
            out, lse = route.result(q, k, v, **tensors)
    out = out.transpose(1, 2) if route.transposed else out
    return (out, lse) if return_lse else out


def _resized(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None, backend: Any, order: Any, arguments: dict[str, Any]
) -> Any:
    """attend with values of another width than keys, or with an empty result."""
    if 0 in (q.numel(), k.numel()):
        unmeasured.check_names(backend, order)
        found = widths.empty_result(q, k, v, pattern, arguments)
        return found if arguments["return_lse"] else found[0]
    result = attend(*widths.padded(q, k, v, arguments), pattern, backend=backend, order=order, **arguments)
    width = v.shape[-1]
    return (result[0][..., :width], result[1]) if arguments["return_lse"] else result[..., :width]


def _hashable(value: Any) -> Any:
    """Convert lists, arrays and iterators to tuples, which have a hash and can be iterated again."""
    if value is None or isinstance(value, tuple | str | bytes | int):
        return value
    if isinstance(value, Tensor):
        value = packing.read_on_host("segment_lengths and dilation_rates", value)
    plain = value.tolist() if hasattr(value, "tolist") else value
    try:
        return tuple(plain)
    except TypeError:
        return plain


def _over_mesh(mesh: object, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    if tracing.graphed(*(x for x in (q, k, v) if not tracing.is_dtensor(x))):
        raise NoBackend("over a mesh attend() cannot be traced: call it outside of torch.export and make_fx")
    from attn_dispatch.ring import over_mesh  # loads torch.distributed

    return over_mesh.attend_on(attend, mesh, q, k, v, arguments)


def _compiled(q: Tensor, k: Tensor, v: Tensor, pattern: Any, *, sink: Any, **arguments: Any) -> Any:
    """attend in a compiled function: one operator; between its graphs with ranks, random numbers, `key_lens` or inside
    torch.func's derivatives, whose tangents an operator would drop.
    """
    between = (arguments["mesh"], arguments["key_lens"], arguments["dropout_p"] or None)
    if between != (None, None, None) or tracing.is_dtensor(q) or tracing.differentiates():
        return torch.compiler.disable(attend)(q, k, v, pattern, sink=sink, **arguments)  # type: ignore[no-untyped-call]
    if sink is not None or arguments["alignment"] != "lower_right":
        return packing.composed(attend, q, k, v, sink=sink, pattern=pattern, **arguments)
    del arguments["key_lens"], arguments["alignment"]
    return operators.call(q, k, v, pattern, **arguments)


operators.eager_attend = attend
recording.record_by_environment()
