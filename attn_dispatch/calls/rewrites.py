"""Rewriters: each makes other calls of a call, until a call is one problem, which a backend computes.

Their order in `REWRITES` says how arguments combine: an earlier one sees all arguments, a later one what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from attn_dispatch.calls import packing, widths
from attn_dispatch.decisions.call import Rewritten, only
from attn_dispatch.decisions.decide import explain_problem
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.errors import BackendFailed, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import NO_TANGENTS
from attn_dispatch.settings import asks_invariance
from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Call, Problem, dropout
from attn_dispatch.spec.tensors import check_layout


def shorthands(call: Call) -> Rewritten | None:
    """Lists, arrays and iterators become tuples, which have a hash. Raises InvalidInput for sparse tensors."""
    for name in call._fields:
        check_layout(name, getattr(call, name))
    lengths, rates = call.segment_lengths, call.dilation_rates
    if (lengths is None and rates is None) or is_dynamo_compiling():
        return None
    plain = _tuple(lengths), _tuple(rates)
    same = plain[0] is lengths and plain[1] is rates
    return None if same else Rewritten([call._replace(segment_lengths=plain[0], dilation_rates=plain[1])], only)


def _tuple(value: Any) -> Any:
    if value is None or isinstance(value, tuple | str | bytes | int):
        return value
    if isinstance(value, Tensor):
        value = packing.read_on_host("segment_lengths and dilation_rates", value)
    plain = value.tolist() if hasattr(value, "tolist") else value
    try:
        return tuple(plain)
    except TypeError:
        return plain


def of_dtensors(call: Call) -> Rewritten | None:
    """DTensors: the call on this rank's parts."""
    if not any(map(tracing.is_dtensor, call.qkv)):
        return None
    _refuse_graphs()
    from attn_dispatch.ring import dtensors  # loads torch.distributed

    return dtensors.of_dtensors(call)


def in_context_parallel(call: Call) -> Rewritten | None:
    """Inside torch's context_parallel: over its mesh."""
    mesh = None if call.mesh is not None or is_dynamo_compiling() else tracing.context_parallel()
    return None if mesh is None else Rewritten([call._replace(mesh=mesh)], only)


def as_operator(call: Call) -> Rewritten | None:
    """Where a call is traced, or a dispatch mode sees it: one operator, which is this call when it runs.

    Selective checkpoints see one for each run of a backend: of several, a backward pass would compute again what
    was saved.
    """
    if operators.applies(call):
        one = call if tracing.is_traced(*call.qkv) else packing.as_one(call)
        if one is not None and not operators.is_node(one):
            return Rewritten([], lambda _: operators.attend_by_operator(one))
    tracing.refuse_jit()
    tracing.check_sizes(q=call.q, k=call.k, v=call.v)
    return None


def over_mesh(call: Call) -> Rewritten | None:
    """Over ranks: a collective, or where there is one rank, the call on one device."""
    if call.mesh is None:
        return None
    if asks_invariance():
        raise NoBackend("batch_invariant: over a mesh, sums are joined in an order that depends on the ranks")
    _refuse_graphs(*call.qkv)
    from attn_dispatch.ring import over_mesh, packed_rows, shards  # loads torch.distributed

    if call.packs:
        packing.check_alone(call)
        if shards.spread_of(call.mesh)[0].size > 1:
            return packed_rows.rows_over_mesh(call, lambda batch, n: packing.lengths_of(call, batch, n, n))
    return over_mesh.over_mesh(call)


def _refuse_graphs(*tensors: Tensor) -> None:
    if tracing.graphed(*tensors):
        raise NoBackend("over a mesh attend() cannot be traced: call it outside of torch.export and make_fx")


def in_transforms(call: Call) -> Rewritten | None:
    """The plain formula for tangents, and for dropout where transforms or modes see the call.

    Raises:
        NoBackend: dropout inside torch.vmap. BackendFailed: the forced backend has no forward-mode derivatives.
    """
    dropped = bool(dropout(call.dropout_p)) and tracing.is_traced(*call.qkv) and not tracing.graphed(*call.qkv)
    if dropped and tracing.is_mapped():
        what = "inside torch.vmap, which jacfwd and hessian use"
        raise NoBackend(f"dropout_p cannot be given {what}: let the examples be rows of one batch")
    tangents = tracing.has_tangents(*call.qkv, call.bias, call.alibi_slopes)
    if tangents and call.backend in registry.names() and registry.load(call.backend).traceable is None:
        raise BackendFailed(NO_TANGENTS.format(call.backend))
    if call.backend is not None or not (tangents or dropped):
        return None
    return Rewritten([call._replace(backend=registry.LAST_RESORT)], only)


REWRITES: tuple[Callable[[Call], Rewritten | None], ...] = (
    shorthands,
    of_dtensors,
    in_context_parallel,
    packing.sink,
    widths.alignment,
    as_operator,
    packing.of_data,
    widths.without_tensors,
    packing.key_lens,
    widths.widths,
    over_mesh,
    packing.documents,
    in_transforms,
    widths.empty,
)


def explained(call: Call) -> list[Explanation]:
    """One explanation for each different problem and choice of the calls that this call consists of."""
    for rewrite in REWRITES:
        found = None if rewrite is as_operator else rewrite(call)
        parts = None if found is None else found.calls if found.explained is None else found.explained()
        if parts:
            listed = list(parts)
            full = [x for x in listed if isinstance(x, Explanation) or not widths.is_empty(x)] or listed
            each = [explained(part) if isinstance(part, Call) else [part] for part in full]
            return list({(one.key, one.choice, one.order): one for some in each for one in some}.values())
    return [explain_problem(Problem.of_call(call), call.backend, call.order)]
