"""attend() on DTensors: each rank computes its share of the batch, heads or tokens.

Batch and heads are computed where they are; a sharded sequence is computed over that dimension of the device mesh.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch.decisions.call import Rewritten
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.problem import Call, choose_pattern
from attn_dispatch.spec.tracing import is_dtensor

#: The axes of attend's other tensors: batch, heads, queries, keys; the last ones where a tensor has fewer.
_AXES = {"seq_lens": "b", "key_lens": "b", "key_mask": "bk", "documents": "bk"}
_AXES |= {"bias": "bhqk", "sink": "h", "alibi_slopes": "bh"}
_OF_TOKENS = "key_mask"  #: of which each rank gives its own part where the sequence is sharded


class Part(NamedTuple):
    """This rank's entries of an axis of `whole` entries."""

    start: int
    size: int
    whole: int


def of_dtensors(call: Call) -> Rewritten:
    """The call on this rank's parts; its out, and lse, are DTensors with the placements of q.

    q, k and v are DTensors of one mesh with equal placements: each `Replicate`, or `Shard` along batch, heads or
    tokens. Heads and tokens are split evenly. Other tensors hold those of all ranks; one that gets a gradient is a
    DTensor.

    Raises:
        InvalidInput: another placement, or an argument that such a call cannot take.
    """
    placements, mesh = _common(*call.qkv)
    axes = _axes(call)
    for name in ("mesh", "first_head", "all_heads"):
        if getattr(call, name) is not None:
            raise InvalidInput(f"{name} cannot be given with DTensors, whose placements say it")
    parts = _parts(call.q, call.k, placements, mesh, axes)
    changes = _of_heads_and_tokens(placements, mesh, axes, parts, call)
    if call.cu_seqlens is not None and parts["b"].size < parts["b"].whole:
        raise InvalidInput("cu_seqlens describe one row: DTensors that are sharded along the batch take documents")
    for name, letters in _AXES.items():
        if (x := getattr(call, name)) is not None:
            changes[name] = _local(name, x, letters, parts, placements, mesh)
    q, k, v = (x.to_local() for x in call.qkv)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return Rewritten([call._replace(q=q, k=k, v=v, **changes)], partial(_joined, call))


def _joined(call: Call, results: list[Any]) -> Any:
    """out, and lse, of all ranks from this rank's."""
    from torch.distributed.tensor import Shard

    q: Any
    q, (found,), axes = call.q, results, _axes(call)
    out, lse = found if call.return_lse else (found, None)
    result = _whole(out, q.device_mesh, list(q.placements), (*q.shape[:-1], call.v.shape[-1]))
    if lse is None:
        return result
    order = [axes["b"], axes["h"], axes["k"]]  # lse is [batch, heads, q_len]
    placed = [each if each.is_replicate() else Shard(order.index(each.dim)) for each in q.placements]
    return result, _whole(lse, q.device_mesh, placed, tuple(q.shape[axis] for axis in order))


def _axes(call: Call) -> dict[str, int]:
    """The axes of batch, heads and tokens."""
    heads_last = call.layout == "bnhd"
    return {"b": 0, "h": 2 if heads_last else 1, "k": 1 if heads_last else 2}


def _common(q: Any, k: Any, v: Any) -> tuple[tuple[Any, ...], Any]:
    """The placements and the mesh of all three."""
    if not all(is_dtensor(x) and x.ndim == 4 for x in (q, k, v)):
        kinds = ", ".join(f"{type(x).__name__} {list(getattr(x, 'shape', ()))}" for x in (q, k, v))
        raise InvalidInput(f"q, k and v must all be DTensors with 4 axes where one is, got {kinds}")
    if not q.device_mesh == k.device_mesh == v.device_mesh or not q.placements == k.placements == v.placements:
        texts = ", ".join(f"{list(x.placements)} on {x.device_mesh}" for x in (q, k, v))
        raise InvalidInput(f"q, k and v must be DTensors of one mesh with equal placements, got {texts}")
    return q.placements, q.device_mesh


def _parts(q: Any, k: Any, placements: Any, mesh: Any, axes: dict[str, int]) -> dict[str, Part]:
    """This rank's entries of batch, heads and tokens of q."""
    from torch.distributed.tensor import Shard

    parts = {letter: Part(0, q.shape[axis], q.shape[axis]) for letter, axis in axes.items()}
    for letter, axis in axes.items():
        dims = [dim for dim, placement in enumerate(placements) if placement == Shard(axis)]
        ranks = math.prod(mesh.size(dim) for dim in dims)
        if letter != "b" and (q.shape[axis] % ranks or k.shape[axis] % ranks):
            text = f"got {q.shape[axis]} and {k.shape[axis]} over {ranks} ranks"
            raise InvalidInput(f"{'heads' if letter == 'h' else 'tokens'} of DTensors must be split evenly, {text}")
        for dim in dims:  # as torch.chunk deals it
            part = parts[letter]
            each = -(-part.size // mesh.size(dim))
            start = min(mesh.get_local_rank(dim) * each, part.size)
            parts[letter] = Part(part.start + start, min(each, part.size - start), part.whole)
    return parts


def _of_heads_and_tokens(
    placements: Any, mesh: Any, axes: dict[str, int], parts: dict[str, Part], call: Call
) -> dict[str, Any]:
    """The arguments of attend that say which heads and tokens this rank has: `first_head`, `all_heads`, `mesh`."""
    from torch.distributed.tensor import Shard

    for placement in placements:
        if not placement.is_replicate() and placement not in [Shard(axis) for axis in axes.values()]:
            raise InvalidInput(f"DTensors must be sharded along batch, heads or tokens, or replicated, got {placement}")
    heads, dims = parts["h"], [dim for dim, each in enumerate(placements) if each == Shard(axes["k"])]
    pattern: Any = choose_pattern(call)
    if holds := isinstance(pattern, DataPattern):
        pattern = pattern.form(None, heads.whole, heads.whole)
    if heads.size < heads.whole and (holds or len(dims) == 1) and pattern.head_offsets(0, heads.whole):
        text = f"take patterns alike for all heads, not {pattern}"
        raise InvalidInput(f"DTensors sharded along heads{' and tokens' if dims else ''} {text}")
    if not dims:
        return {"first_head": heads.start, "all_heads": heads.whole} if heads.size < heads.whole else {}
    if len(dims) > 1:
        raise InvalidInput(f"DTensors must be sharded along tokens once, got {list(placements)}")
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise InvalidInput("a mesh of several dimensions needs mesh_dim_names where tokens are sharded")
    rows = math.prod(mesh.size(dim) for dim, each in enumerate(placements) if each == Shard(axes["b"]))
    if parts["b"].whole % rows:
        text = f"got {parts['b'].whole} over {rows} ranks"
        raise InvalidInput(f"the batch of DTensors sharded along tokens must be split evenly, {text}")
    return {"mesh": mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dims[0]]]}


def _whole(x: Tensor, mesh: Any, placements: list[Any], shape: tuple[int, ...]) -> Any:
    """The DTensor of this rank's part x."""
    from torch.distributed.tensor import DTensor

    size, strides = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x.contiguous(), mesh, placements, run_check=False, shape=size, stride=strides)


def _local(name: str, x: Any, letters: str, parts: dict[str, Part], placements: Any, mesh: Any) -> Tensor:
    """This rank's part of a tensor of all ranks."""
    from torch.distributed.tensor import Partial, Replicate

    if is_dtensor(x):
        sums = [Replicate() if each.is_replicate() else Partial() for each in placements]
        whole = [Replicate()] * mesh.ndim
        if [*x.placements, *sums] != whole * 2:  # else torch 2.6 fails in the backward pass, with nothing to do
            x = x.redistribute(mesh, whole)
        x = x.to_local(grad_placements=sums)
    elif not isinstance(x, Tensor):
        return x  # type: ignore[no-any-return]  # attend says what is wrong with it
    elif x.requires_grad and torch.is_grad_enabled():
        raise InvalidInput(f"{name} must be a DTensor where q is and it gets a gradient, which is summed over ranks")
    for axis, letter in enumerate(letters[-x.ndim :] if x.ndim else ""):
        part = parts.get(letter)
        if part is not None and x.shape[axis] == part.whole and (letter != "k" or name == _OF_TOKENS):
            x = x.narrow(axis, part.start, part.size)
    return x  # type: ignore[no-any-return]
