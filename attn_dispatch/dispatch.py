"""attend() and explain(): calls with a known route run it; others are rewritten (rewrites.py) and decided (routes.py).

A repeated call costs one table look-up by its settings and one comparison of the tensors with those of its route. The
operators of graphs do the same when they run: attend() on their tensors, decided then; and its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from attn_dispatch import recording
from attn_dispatch.calls import graph_runs
from attn_dispatch.calls.rewrites import REWRITES, explained
from attn_dispatch.calls.routes import new_route, route_of_data, routes
from attn_dispatch.decisions.call import NOT_WRAPPED
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.private import deterministic_or_warning, forward_ad, mode_count, only_warning, saving_tensors
from attn_dispatch.settings import asks_invariance
from attn_dispatch.spec import tracing
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Call
from attn_dispatch.spec.torch_settings import current_flash, matmul_precision

_grad_enabled, _threads = torch.is_grad_enabled, torch.get_num_threads  # looked up once


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
        pattern: `Dense`, `Window`, `Dilated`, `Neighborhood`, or `Reordered` around one; `Ranges` or `Blocks`, which
            hold tensors; or use the shorthands below, not both.
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
        key_lens: [batch] int32 or int64: each row's keys, of which the last is aligned with the last query, as in
            a cache whose rows are filled to different lengths. What follows them is not read. The host reads them
            unless they are on a GPU and a backend takes them there, which clamps them to 0..k_len.
        alignment: "lower_right", or "upper_left", which aligns the first query with the first key, for causal
            `Dense` and `Window`.
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
    if (
        is_dynamo_compiling() or mesh is not None or sink is not None or documents is not None or cu_seqlens is not None
        or key_lens is not None or alignment != "lower_right"
    ):  # fmt: skip
        key = route = None
    else:
        key = None
        try:
            route = routes.get(key := (
                q.shape, k.numel(), pattern, segment_lengths, dilation_rates, is_causal, dropout_p, scale, layout,
                backend, order, return_lse, first_head, all_heads,
                None if seq_lens is None else (seq_lens.shape, seq_lens.dtype, seq_lens.device, seq_lens.layout),
                None if key_mask is None else (key_mask.shape, key_mask.dtype, key_mask.device, key_mask.layout),
                (softcap is None and bias is None and alibi_slopes is None)
                or (softcap, _facts(bias), _facts(alibi_slopes)),
                _grad_enabled(), deterministic_or_warning() and not only_warning(), _threads(), mode_count(),
                saving_tensors(), current_flash(), asks_invariance(), forward_ad._current_level,
                functional.scaled_dot_product_attention,  # another function inside torch's context_parallel
            ))  # fmt: skip
            while route is not None and not (
                route.fits(q, k, v) and (route.precision is None or route.precision == matmul_precision())
            ):
                route = route.next_route
        except (TypeError, AttributeError, RuntimeError):
            # Decided outside the handler, so that exceptions are not chained to this one.
            key, route = key if isinstance(pattern, DataPattern) else None, None
    if route is None:
        call = Call(
            q, k, v, pattern, segment_lengths, dilation_rates, is_causal, seq_lens, key_mask, dropout_p, scale, layout,
            backend, order, mesh, return_lse, documents, cu_seqlens, sink, softcap, bias, alibi_slopes, key_lens,
            alignment, first_head, all_heads,
        )  # fmt: skip
        return _compiled(call) if is_dynamo_compiling() else _rewritten(call, key)
    if not route.direct:
        return route.prepared(
            q, k, v, return_lse, seq_lens=seq_lens, key_mask=key_mask, bias=bias, alibi_slopes=alibi_slopes
        )
    try:
        result = route.run(q, k, v, route.problem)
    except NOT_WRAPPED:
        raise
    except Exception as error:
        raise route.failure(error) from error
    if return_lse:
        return route.parts(result, True)
    if type(result) is tuple and len(result) == 2 and type(result[0]) is Tensor:  # without a function call
        return result[0]
    return result if isinstance(result, Tensor) else route.parts(result, False)[0]


def _facts(x: Tensor | None) -> Any:
    """What a route's key holds of a tensor that changes scores."""
    return None if x is None else (x.shape, x.dtype, x.device, x.layout, x.requires_grad)


def _rewritten(call: Call, key: Any = None) -> Any:
    """What `attend` returns for a call without a route; torch.compile traces this as far as the operator.

    Args:
        key: that of its route, once it has one.
    """
    if key is not None and isinstance(call.pattern, DataPattern):
        call, key, route = route_of_data(call, call.pattern, key)
        if route is not None:
            return route.attended(call)
    for rewrite in REWRITES:
        found = rewrite(call)
        if found is not None:
            return found.join([_run(each) for each in found.calls])
    return new_route(call, key, graph_runs.NodeRun if operators.is_node(call) else None).attended(call)


def _run(call: Call) -> Any:
    """What `attend` returns for a call."""
    return _rewritten(call) if is_dynamo_compiling() else attend(**call._asdict())


def _compiled(call: Call) -> Any:
    """attend in a compiled function: one operator; between its graphs with ranks, random numbers or inside torch.func's
    derivatives, whose tangents an operator would drop.
    """
    between = call.mesh is not None or call.dropout_p
    if between or tracing.is_dtensor(call.q) or tracing.differentiates():
        return torch.compiler.disable(_run)(call)  # type: ignore[no-untyped-call]
    return _rewritten(call)


def explain(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None = None, **arguments: Any) -> Explanation:
    """Explain which backend and order `attend` takes for these arguments, and why not the others. Runs nothing.

    A call that consists of several, with `documents` or `key_lens`, has the explanation of the first one, and `others`.
    Over a mesh nothing is sent. Meta tensors are explained for the CUDA device if there is one, else for the CPU.

    Raises:
        InvalidInput: an argument is wrong. NoBackend: over a mesh, no exchange can run the problem.
    """
    if unknown := arguments.keys() - set(Call._fields):
        raise TypeError(f"explain() got an unexpected keyword argument {min(unknown)!r}")
    first, *others = explained(Call(q, k, v, pattern, **arguments))
    return replace(first, others=tuple(others))


# --- what the operators of graphs run -------------------------------------------------------------------------


@torch.library.impl("attn_dispatch::attend", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    operators.refuse_tangents()
    *given, needs_grad, return_lse = rest
    with graph_runs.as_eager_call(q.device.type, needs_grad, given):
        call, _ = graph_runs.call_of((q, k, v), given, needs_grad, return_lse)
        out, lse = graph_runs.results(q, *_computed(call, needs_grad), needs_grad or return_lse)
        return out, lse, operators.seed_of(q, given)


@torch.library.impl("attn_dispatch::attend_backward", "default")
def _attend_backward(
    grad: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *given, return_lse = rest
    with graph_runs.as_eager_call(q.device.type, True, given):
        call, inputs = graph_runs.call_of((q, k, v), given, True, return_lse)
        return graph_runs.gradients_of(inputs, _computed(call, True, known=(out, lse)), (grad, grad_lse))


def _computed(call: Call, needs_grad: bool, known: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
    """out, and lse where it is known. Without gradients as attend() does it, which finds its routes sooner."""
    if needs_grad and (found := graph_runs.with_gradients(call, known)) is not None:
        return found
    found = _run(call)
    return found if call.return_lse else (found, None)


recording.record_by_environment()
