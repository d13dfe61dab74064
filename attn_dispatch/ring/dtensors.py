"""attend() on DTensors: each rank computes its share of the batch, heads or tokens.

Batch and heads are computed where they are; a sharded sequence is computed over that dimension of the device mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import SHORTHANDS, choose_pattern
from attn_dispatch.spec.tracing import is_dtensor

#: The axes of attend's other tensors: batch, heads, queries, keys; the last ones where a tensor has fewer.
_AXES = {
    "seq_lens": "b", "key_lens": "b", "key_mask": "bk", "documents": "bk", "bias": "bhqk", "sink": "h",
    "alibi_slopes": "bh",
}  # fmt: skip
_OF_TOKENS = ("key_mask",)  #: those of which each rank gives its own part where the sequence is sharded


class Part(NamedTuple):
    """This rank's entries of an axis of `whole` entries."""

    start: int
    size: int
    whole: int


def attend_local(attend: Callable[..., Any], q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Any:
    """attend() on this rank's parts; out, and lse, as DTensors with the placements of q.

    Args:
        q, k, v: DTensors of one mesh with equal placements: each `Replicate`, or `Shard` along batch, heads or tokens.
            Heads and tokens are split evenly.
        arguments: the others of attend; its tensors hold those of all ranks. One that gets a gradient is a DTensor.

    Raises:
        InvalidInput: another placement, or an argument that such a call cannot take.
    """
    from torch.distributed.tensor import DTensor, Shard

    placements, mesh = _common(q, k, v)
    layout = arguments.get("layout", "bnhd")
    axes = {"b": 0, "h": 2 if layout == "bnhd" else 1, "k": 1 if layout == "bnhd" else 2}
    for name in ("mesh", "first_head", "all_heads"):
        if arguments.get(name) is not None:
            raise InvalidInput(f"{name} cannot be given with DTensors, whose placements say it")
    given = dict(arguments)
    parts = {letter: Part(0, q.shape[axis], q.shape[axis]) for letter, axis in axes.items()}
    kv_sizes = {letter: k.shape[axis] for letter, axis in axes.items()}
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        letter = next((letter for letter, axis in axes.items() if placement == Shard(axis)), None)
        if letter is None:
            raise InvalidInput(f"DTensors must be sharded along batch, heads or tokens, or replicated, got {placement}")
        size, rank = mesh.size(dim), mesh.get_local_rank(dim)
        if letter == "k":
            if given.get("mesh") is not None:
                raise InvalidInput(f"DTensors must be sharded along tokens once, got {list(placements)}")
            given["mesh"] = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dim]] if mesh.mesh_dim_names else None
            if given["mesh"] is None:
                raise InvalidInput("a mesh of several dimensions needs mesh_dim_names where tokens are sharded")
        kv_sizes[letter], rest = divmod(kv_sizes[letter], size)
        if (letter != "b" and rest) or (parts[letter].size % size and letter != "b"):
            text = f"got {q.shape[axes[letter]]} and {k.shape[axes[letter]]} over {list(placements)} of {mesh}"
            raise InvalidInput(f"{'heads' if letter == 'h' else 'tokens'} of DTensors must be split evenly, {text}")
        parts[letter] = _narrower(parts[letter], size, rank)
    rows = math.prod(mesh.size(dim) for dim, each in enumerate(placements) if each == Shard(axes["b"]))
    if given.get("mesh") is not None and parts["b"].whole % rows:
        raise InvalidInput(
            f"the batch of DTensors sharded along tokens must be split evenly, got {parts['b'].whole} over {rows}"
        )
    if parts["h"].size < parts["h"].whole:
        kinds = (given.get(name, default) for name, default in SHORTHANDS.items())
        pattern = choose_pattern(given.get("pattern"), *kinds)
        if given.get("mesh") is None:
            given["first_head"], given["all_heads"] = parts["h"].start, parts["h"].whole
        elif pattern.head_offsets(0, parts["h"].whole):
            raise InvalidInput(
                f"DTensors sharded along heads and tokens take patterns alike for all heads, not {pattern}"
            )
    if given.get("cu_seqlens") is not None and parts["b"].size < parts["b"].whole:
        raise InvalidInput("cu_seqlens describe one row: DTensors that are sharded along the batch take documents")
    for name, letters in _AXES.items():
        if given.get(name) is not None:
            given[name] = _local(name, given[name], letters, parts, placements, mesh)
    found = attend(q.to_local(), k.to_local(), v.to_local(), **given)
    out, lse = found if isinstance(found, tuple) else (found, None)

    def whole(x: Tensor, shape: tuple[int, ...], placed: list[Any]) -> Any:
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), mesh, placed, run_check=False, shape=torch.Size(shape), stride=strides
        )

    result = whole(out, (*q.shape[:-1], v.shape[-1]), list(placements))
    if lse is None:
        return result
    order = [axes["b"], axes["h"], axes["k"]]  # lse is [batch, heads, q_len]
    placed = [each if each.is_replicate() else Shard(order.index(each.dim)) for each in placements]
    return result, whole(lse, tuple(q.shape[axis] for axis in order), placed)


def _common(q: Any, k: Any, v: Any) -> tuple[tuple[Any, ...], Any]:
    """The placements and the mesh of all three."""
    if not all(is_dtensor(x) and x.ndim == 4 for x in (q, k, v)):
        kinds = ", ".join(f"{type(x).__name__} {list(getattr(x, 'shape', ()))}" for x in (q, k, v))
        raise InvalidInput(f"q, k and v must all be DTensors with 4 axes where one is, got {kinds}")
    if not q.device_mesh == k.device_mesh == v.device_mesh or not q.placements == k.placements == v.placements:
        texts = ", ".join(f"{list(x.placements)} on {x.device_mesh}" for x in (q, k, v))
        raise InvalidInput(f"q, k and v must be DTensors of one mesh with equal placements, got {texts}")
    return q.placements, q.device_mesh


def _narrower(part: Part, size: int, rank: int) -> Part:
    """A rank's share of a part, as torch.chunk deals it."""
    each = -(-part.size // size)
    start = min(rank * each, part.size)
    return Part(part.start + start, min(each, part.size - start), part.whole)


def _local(name: str, x: Any, letters: str, parts: dict[str, Part], placements: Any, mesh: Any) -> Tensor:
    """This rank's part of a tensor of all ranks."""
    from torch.distributed.tensor import Partial, Replicate

    if is_dtensor(x):
        sums = [Replicate() if each.is_replicate() else Partial() for each in placements]
        x = x.redistribute(mesh, [Replicate()] * mesh.ndim).to_local(grad_placements=sums)
    elif not isinstance(x, Tensor):
        return x  # type: ignore[no-any-return]  # attend says what is wrong with it
    elif x.requires_grad and torch.is_grad_enabled():
        raise InvalidInput(f"{name} must be a DTensor where q is and it gets a gradient, which is summed over ranks")
    for axis, letter in enumerate(letters[-x.ndim :] if x.ndim else ""):
        part = parts.get(letter)
        if part is not None and x.shape[axis] == part.whole and (letter != "k" or name in _OF_TOKENS):
            x = x.narrow(axis, part.start, part.size)
    return x  # type: ignore[no-any-return]
