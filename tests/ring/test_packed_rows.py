"""Packed rows over ranks: each rank's rows are those of one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Neighborhood, Sharded, Window, attend, shard
from attn_dispatch.errors import GroupMismatch, InvalidInput
from attn_dispatch.ring.packed_rows import pieces
from attn_dispatch.spec.pattern import Pattern
from tests.call.test_packing import HEADS, IDS, LENGTH, expected, tensors
from tests.support import ring_ranks
from tests.support.pairwise import parameters
from tests.support.ring_ranks import Ranks

PATTERNS: tuple[Pattern, ...] = (
    Dense(),
    Dense(is_causal=True),
    Window(6, 0),
    Window(4, 3),
    Window(None, 2),
    Window(3, 0, sinks=2),
    Window(2, 5, sinks=3),
    Dilated((8, 16), (1, 2), is_causal=True),
    Dilated((8, 64), (1, 3), is_causal=True, offsets="block"),
)
DOCUMENTS = {
    "apart": IDS,
    "alike": IDS[:1].expand(2, -1),
    "one": torch.zeros_like(IDS),
    "whole": torch.arange(LENGTH).div(15, rounding_mode="floor").expand(2, -1),
}

pytestmark = pytest.mark.usefixtures("short_trials", "no_trials")


def right(
    pattern: Pattern, kind: str, ids: Tensor, masked: bool, layout: str, weights: tuple[float, ...] | None
) -> list[bool]:
    """A job: whether out, lse and gradients are this rank's part of the formula's."""
    mesh = Sharded(ring_ranks.group(), kind, weights)
    q, k, v = tensors()
    mask = torch.arange(LENGTH).expand(2, -1) % 7 != 2 if masked else None
    generator = torch.Generator().manual_seed(1)
    out_weight, lse_weight = (torch.randn(size, generator=generator) for size in (q.shape, (2, HEADS, LENGTH)))
    local = [shard(x.detach(), mesh).requires_grad_() for x in (q, k, v)]
    given: Any = local if layout == "bnhd" else [x.transpose(1, 2) for x in local]
    own = None if mask is None else shard(mask, mesh)
    more: Any = {"documents": ids, "key_mask": own, "layout": layout, "mesh": mesh, "return_lse": True}
    out, lse = attend(given[0], given[1], given[2], pattern, **more)
    out = out if layout == "bnhd" else out.transpose(1, 2)
    wanted, wanted_lse = expected(q, k, v, pattern, ids, None, mask)
    grads = torch.autograd.grad((out, lse), local, (shard(out_weight, mesh), shard(lse_weight, mesh, 2)))
    exact = torch.autograd.grad((wanted, wanted_lse), (q, k, v), (out_weight.double(), lse_weight.double()))
    pairs = [(out, shard(wanted, mesh)), (lse, shard(wanted_lse, mesh, 2))]
    pairs += [(x, shard(y, mesh)) for x, y in zip(grads, exact)]
    return [torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in pairs]


SHARED = ("pattern", "kind", "ids", "masked", "layout", "weights")
KINDS, LAYOUTS, WEIGHTS = ("contiguous", "zigzag"), ("bnhd", "bhnd"), (None, (5.0, 1.0, 2.0))
EVERY = product(PATTERNS, KINDS, DOCUMENTS, (False, True), LAYOUTS, WEIGHTS)
#: With other patterns a mask leaves rows without keys, which the plain formula has no value for.
ROWS = [row for row in EVERY if row[0] == Dense() or not row[3]]


@pytest.mark.parametrize(SHARED, parameters(ROWS, lambda pattern, *way: dict(zip(SHARED, (type(pattern), *way)))))
def test_each_rank_has_its_rows(
    ranks: Ranks, pattern: Pattern, kind: str, ids: str, masked: bool, layout: str, weights: Any
) -> None:
    found = ranks.everywhere(right, pattern, kind, DOCUMENTS[ids], masked, layout, weights, ranks=3)
    assert found == [[True] * 5] * 3


def of_starts() -> list[bool]:
    """A job: `cu_seqlens`, a sink, values of another width, and bfloat16."""
    mesh = ring_ranks.group()
    starts, q, k, v = torch.tensor([0, 25, 25, 26, 60]), *tensors(batch=1)
    sink = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    narrow = v[..., :5]
    more: Any = {"cu_seqlens": starts, "is_causal": True, "sink": sink}
    whole = attend(q, k, narrow, backend="manual", **more)
    found = attend(shard(q, mesh), shard(k, mesh), shard(narrow, mesh), mesh=mesh, **more)
    half: Any = [x.bfloat16() for x in (q, k, v)]
    one = attend(*half, is_causal=True, cu_seqlens=starts, backend="manual")
    mine: Any = [shard(x, mesh) for x in half]
    many = attend(*mine, is_causal=True, cu_seqlens=starts, mesh=mesh)
    return [
        torch.allclose(found, shard(whole, mesh), rtol=1e-9, atol=1e-11),
        torch.allclose(many.float(), shard(one, mesh).float(), rtol=2**-7, atol=2**-7),
    ]


def test_starts_a_sink_and_narrow_values(ranks: Ranks) -> None:
    assert ranks.everywhere(of_starts, ranks=4) == [[True] * 2] * 4


def with_unused(ids: Tensor) -> bool:
    """A job: the loss is of lse alone on each rank, and only some ranks see keys of others."""
    mesh = ring_ranks.group()
    local: Any = [shard(x.detach(), mesh).requires_grad_() for x in tensors()]
    _, lse = attend(*local, is_causal=True, documents=ids, mesh=mesh, return_lse=True)
    q, k, v = tensors()
    wanted = expected(q, k, v, Dense(is_causal=True), ids, None, None)[1]
    found = torch.autograd.grad(lse.sum(), local[:2])
    exact = torch.autograd.grad(wanted.sum(), (q, k))
    return all(torch.allclose(x, shard(y, mesh)) for x, y in zip(found, exact))


def test_a_loss_of_lse_alone(ranks: Ranks) -> None:
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([22, 8, 15, 15])).expand(2, -1)
    assert ranks.everywhere(with_unused, ids, ranks=4) == [True] * 4


def refused(case: str) -> str:
    """A job: the error of every rank."""
    mesh, ids = ring_ranks.group(), IDS
    every: dict[str, dict[str, Any]] = {
        "grid": {"pattern": Neighborhood((6, 10), (3, 3))},
        "dilated": {"pattern": Dilated((8,), (2,))},
        "dropout": {"dropout_p": 0.1},
        "softcap": {"softcap": 5.0},
        "order": {"order": "ring"},
        "local ids": {},
        "different": {},
    }
    more = every[case]
    if case == "local ids":
        ids = IDS[:, :15]
    if case == "different":
        ids = IDS + ring_ranks.rank() % 2
    local: Any = [shard(x, mesh) for x in tensors()]
    with pytest.raises((InvalidInput, GroupMismatch)) as raised:
        attend(*local, documents=ids, mesh=mesh, **more)
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("grid", "documents over a mesh take Dense, Window and causal Dilated patterns, not Neighborhood"),
        ("dilated", "documents over a mesh take Dense, Window and causal Dilated patterns, not Dilated"),
        ("dropout", "documents over a mesh take no dropout, got 0.1"),
        ("softcap", "softcap cannot be given with mesh"),
        ("order", "order must be None or 'gather' with documents over a mesh, got 'ring'"),
        ("local ids", "documents must have shape [batch, len] = [2, 60], got [2, 15]"),
        ("different", "documents"),
    ],
)
def test_what_is_refused(ranks: Ranks, case: str, message: str) -> None:
    for found in ranks.everywhere(refused, case, ranks=4):
        assert message in found


def test_pieces_of_a_run() -> None:
    causal, borders = Dense(is_causal=True), [0, 10, 20, 40]
    assert pieces(causal, range(15), borders) == [(0, 10, 0, 10, None), (10, 15, 10, 15, None)]
    assert pieces(causal, range(15, 30), borders) == [(15, 20, 10, 20, causal), (20, 30, 20, 30, None)]
    assert pieces(Dense(), range(15, 30), borders) == [(15, 20, 10, 20, Dense()), (20, 30, 20, 40, Dense())]
    assert pieces(Window(3, 2), range(25, 30), borders) == [(25, 30, 22, 32, Window(5, 0))]
    assert pieces(Window(3, 2), range(36, 39), borders) == [(36, 39, 33, 40, Window(4, 1))]
