"""Calls over many ranks: shards of whole tensors, a job that calls attend(), and joined results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_dispatch import Sharded, attend, shard
from attn_dispatch.kernels import registry
from attn_dispatch.ring.engine import parts, steps
from attn_dispatch.ring.rows import chunking
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.tuning.oracle import Oracle
from tests.support import interpreted, ring_ranks

Qkv = tuple[Tensor, Tensor, Tensor]

AXIS = {"lse": 2}  #: of tokens; 1 for everything else


def tensors(tokens: int = 48) -> Qkv:
    """The same whole q, k and v on every rank, [2, tokens, 4, 8]."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, tokens, 4, 8, generator=generator) for _ in range(3))
    return q, k, v


def changed(change: Callable[[Tensor], Tensor], three: Qkv) -> Qkv:
    q, k, v = map(change, three)
    return q, k, v


def part(mesh: object, tokens: int = 48, grads: str = "") -> Qkv:
    """In a job: this rank's shards of `tensors`; `grads` names those that need gradients."""
    q, k, v = (shard(x, mesh).requires_grad_(name in grads) for name, x in zip("qkv", tensors(tokens)))
    return q, k, v


def nothing() -> None:
    """In a job: for ranks on which nothing fails or changes."""


def cut(x: Tensor, layout: Layout, dim: int = 1) -> list[Tensor]:
    """The rows of each rank."""
    return [x.detach().index_select(dim, positions_of(layout, rank)) for rank in range(layout.ranks)]


def whole(found: Sequence[dict[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    """The results of all ranks, joined in the order of positions."""
    order = torch.cat([positions_of(layout, rank) for rank in range(layout.ranks)]).argsort()
    return {
        name: torch.cat([each[name] for each in found], AXIS.get(name, 1)).index_select(AXIS.get(name, 1), order)
        for name in found[0]
    }


def shards(gate: Oracle, layout: Layout) -> list[dict[str, Tensor]]:
    """The arguments of `attended` for each rank: q, k, v, gradients of the results, and masks."""
    example = gate.example
    rows: dict[str, list[Tensor]] = {name: cut(x, layout) for name, x in zip("qkv", (example.q, example.k, example.v))}
    if gate.grad is not None:
        rows["grad"] = cut(gate.grad, layout)
    if gate.grad_lse is not None:
        rows["grad_lse"] = cut(gate.grad_lse, layout, 2)
    if "key_mask" in example.masks:
        rows["key_mask"] = cut(example.masks["key_mask"], layout)
    found = [{name: parts[rank] for name, parts in rows.items()} for rank in range(layout.ranks)]
    if "seq_lens" in example.masks:
        found = [{**each, "seq_lens": example.masks["seq_lens"]} for each in found]
    return found


def attended(shard: dict[str, Tensor], kind: str, strides: Sequence[str], options: dict[str, Any]) -> dict[str, Tensor]:
    """A job: this rank's out and lse, and gradients through both if `shard` has gradients of results.

    Args:
        kind: of the shards.
        strides: the memory order of q, k and v, such as "bnhd".
        options: for `attend`.
    """
    tensors = [laid_out(shard[name], order) for name, order in zip("qkv", strides)]
    masks: dict[str, Any] = {name: shard[name] for name in ("seq_lens", "key_mask") if name in shard}
    q, k, v = (x.requires_grad_("grad" in shard) for x in tensors)
    out, lse = attend(q, k, v, **masks, **options, return_lse=True, mesh=Sharded(ring_ranks.group(), kind))
    found = {"out": out.detach(), "lse": lse.detach()}
    if "grad" in shard:
        results, weights = [out], [shard["grad"]]
        if "grad_lse" in shard:
            results, weights = [out, lse], [shard["grad"], shard["grad_lse"]]
        found.update(zip(("dq", "dk", "dv"), torch.autograd.grad(results, (q, k, v), weights)))
    return found


@contextmanager
def blocks_of(rows: int) -> Iterator[None]:
    """Split small sequences like long ones, into blocks of `rows` rows."""
    with mock.patch.dict(chunking.LEAST_ROWS, cpu=rows), mock.patch.dict(chunking.LEAST_WORK, cpu=1.0):
        steps.steps_of.cache_clear()
        yield
    steps.steps_of.cache_clear()


def attended_in_blocks(rows: int, *args: Any) -> dict[str, Tensor]:
    """A job: `attended`."""
    with blocks_of(rows):
        return attended(*args)


def attended_by(solver: str, *args: Any) -> tuple[dict[str, Tensor], bool]:
    """A job: `attended` with this backend for the parts that it can compute, and whether it computed any."""
    names, backend = {"cpu": (solver, "tiles")}, registry.load(solver)
    given = getattr(backend, "given", backend)  # its members are those of its module
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        mock.patch.dict(parts.SOLVERS, names),
        mock.patch.dict(parts.DENSE_SOLVERS, names),
        mock.patch.object(given, "partial", wraps=backend.partial) as partial,
    ):
        _forget_triton()
        steps.steps_of.cache_clear()
        found = attended(*args)
    steps.steps_of.cache_clear()
    return found, partial.called


def _forget_triton() -> None:
    """PyTorch's compiler has imported it in this process, without its switch."""
    if "attn_dispatch.kernels.triton.forward" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("triton") and not name.startswith("triton._C")]:
            del sys.modules[name]
        interpreted.load()


def laid_out(x: Tensor, order: str) -> Tensor:
    """The same values [batch, len, heads, head_dim] with their axes in another order in memory."""
    axes = ["bnhd".index(axis) for axis in order]
    return x.permute(axes).contiguous().permute([axes.index(axis) for axis in range(4)])
