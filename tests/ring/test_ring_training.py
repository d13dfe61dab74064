"""Sequences over many ranks with shards, checkpoints and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_dispatch import Sharded, attend, explain, shard, shard_positions, unshard, weights_of
from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring.engine.passes import RingCall
from attn_dispatch.spec.data import Ranges
from attn_dispatch.spec.orders import GATHER, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tests.support import ring_ranks
from tests.support.calls import close, formula
from tests.support.graphs import OP
from tests.support.pairwise import thinned
from tests.support.ring_calls import changed, part, tensors
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("short_trials", "no_trials")


# --- shards -----------------------------------------------------------------------------------------------------------


def round_trip(options: dict[str, Any], shape: tuple[int, ...], dim: int) -> tuple[Tensor, Tensor, bool, bool]:
    """A job: this rank's positions, its shard, and whether gradients are those of indexing."""
    spread = Sharded(ring_ranks.group(), **options)
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()
    at = shard_positions(shape[dim], spread)
    local = shard(x, spread, dim)
    assert local.is_contiguous()
    assert torch.equal(local, x.index_select(dim, at))
    back = unshard(local, spread, dim)
    assert torch.equal(back, x)
    weights = x.detach().cos()
    (grad,) = torch.autograd.grad((local * local * weights.index_select(dim, at)).sum(), x, retain_graph=True)
    indexed = torch.zeros_like(x).index_copy(dim, at, (2 * x * weights).index_select(dim, at))
    (whole,) = torch.autograd.grad((back * weights).sum(), local)
    return at, local, torch.allclose(grad, indexed), torch.equal(whole, weights.index_select(dim, at))


@pytest.mark.parametrize(
    ("options", "shape", "dim"),
    [
        ({}, (2, 9, 3), 1),
        ({"kind": "zigzag"}, (2, 10, 3), 1),
        ({"kind": "zigzag", "weights": (1.0, 3.0, 2.0)}, (2, 3, 17), -1),
        ({"weights": (5, 1, 1)}, (20,), 0),
        ({"multiple_of": 4}, (3, 2, 27, 1), 2),
        ({}, (1, 3), 1),
    ],
    ids=str,
)
def test_shards_and_back(ranks: Ranks, options: dict[str, Any], shape: tuple[int, ...], dim: int) -> None:
    found = ranks.everywhere(round_trip, options, shape, dim, ranks=3)
    assert [(x, y) for _, _, x, y in found] == [(True, True)] * 3
    assert torch.equal(torch.cat([at for at, _, _, _ in found]).sort().values, torch.arange(shape[dim]))
    assert all(len(at) % options.get("multiple_of", 1) == 0 for at, _, _, _ in found[:-1])


def unsharded(length: int) -> Tensor:
    """A job: unshard shards of arbitrary lengths."""
    return unshard(torch.full((2, length), float(ring_ranks.rank())), ring_ranks.group())


def test_unshard_takes_shards_of_any_lengths(ranks: Ranks) -> None:
    expected = torch.tensor([0.0, 1, 1, 1, 1, 2, 2]).expand(2, 7)
    assert all(torch.equal(found, expected) for found in ranks.each(unsharded, [(1,), (4,), (2,)]))


def weighted(each: float) -> tuple[float, ...]:
    mesh = ring_ranks.group()
    weights = weights_of(mesh, each)
    assert shard(torch.zeros(1, 60), Sharded(mesh, weights=weights)).shape[1] == round(60 * each / sum(weights))
    return weights


def test_weights_of_numbers_of_each_rank(ranks: Ranks) -> None:
    assert ranks.each(weighted, [(1.0,), (3,), (2.0,)]) == [(1.0, 3.0, 2.0)] * 3
    for wrong in (-3.0, "x", None):
        for error in ranks.outcomes(weighted, [(1.0,), (wrong,)]):
            assert isinstance(error, InvalidInput)
            assert f"got 1.0, {wrong!r}" in str(error)


def too_few() -> str:
    with pytest.raises(InvalidInput) as raised:
        shard(torch.zeros(1, 2), ring_ranks.group())
    return str(raised.value)


def test_fewer_tokens_than_ranks(ranks: Ranks) -> None:
    assert set(ranks.everywhere(too_few, ranks=3)) == {"2 tokens over 3 ranks leave rank 2 none"}


# --- modes and defaults -----------------------------------------------------------------------------------------------

PATTERNS = (Dense(True), Dilated((8, 16), (1, 2), True), Neighborhood((6, 8), (3, 3)))


def right(pattern: Pattern, order: str | None) -> bool:
    """Whether out, lse and gradients through both are those of float64."""
    mesh = ring_ranks.group()
    local, exact = part(mesh, grads="qkv"), changed(lambda x: x.double().requires_grad_(), tensors())
    out, lse = attend(*local, pattern=pattern, mesh=mesh, order=order, return_lse=True)
    expected, expected_lse = formula(*exact, pattern)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), local)
    wanted = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), exact)
    rows = [(out, expected, 1), (lse, expected_lse, 2), *((x, y, 1) for x, y in zip(grads, wanted))]
    return all(close(x, shard(y, mesh, dim)) for x, y, dim in rows)


def trained_after_inference(pattern: Pattern, order: str | None) -> bool:
    """A job: tensors cached by a call in inference mode must work in training."""
    with torch.inference_mode():
        attend(*part(ring_ranks.group()), pattern=pattern, mesh=ring_ranks.group(), order=order)
    return right(pattern, order)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "order"), [*zip(PATTERNS, (RING, GATHER, RING)), (PATTERNS[1], None), (Window(5, 0), ULYSSES)], ids=str
)
def test_training_after_inference_mode(
    ranks: Ranks, pattern: Pattern, order: str | None, set_mode: Callable[[str], None]
) -> None:
    set_mode("off" if order else "tune")
    assert ranks.everywhere(trained_after_inference, pattern, order, ranks=2) == [True] * 2


def with_another_default(pattern: Pattern, order: str | None) -> bool:
    """A job: whether results are bit-identical with another default device of torch."""
    mesh = Sharded(ring_ranks.group(), "zigzag")
    local = part(mesh)
    with torch.device("meta"):
        found = attend(*local, pattern=pattern, mesh=mesh, order=order)
        again = shard(unshard(found, mesh), mesh)
    order = order or explain(*local, pattern=pattern, mesh=mesh).order
    ring_ranks.forget()
    expected = attend(*local, pattern=pattern, mesh=mesh, order=order)
    return torch.equal(found, expected) and torch.equal(again, expected)


@pytest.mark.parametrize(("pattern", "order"), [(PATTERNS[0], None), *((each, GATHER) for each in PATTERNS)], ids=str)
def test_a_default_device(ranks: Ranks, pattern: Pattern, order: str | None, set_mode: Callable[[str], None]) -> None:
    set_mode("off" if order else "tune")
    assert ranks.everywhere(with_another_default, pattern, order, ranks=2) == [True] * 2


def checkpointed(order: str, layer: str) -> tuple[bool, bool]:
    """A job: whether gradients are bit-identical with a checkpoint around the call, and whether they are nonzero."""
    mesh = Sharded(ring_ranks.group(), "zigzag")

    def last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The recomputation ends inside the call: nothing after it is saved for the backward pass."""
        found: Tensor = attend(q.sin(), k, v, mesh=mesh, order=order, is_causal=True)
        return found

    def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return last(q, k, v).sin() * q

    run = {"last": last, "first": first}[layer]
    local = part(mesh, grads="qkv")
    expected = torch.autograd.grad(run(*local).square().sum(), local)
    found = torch.autograd.grad(checkpoint(run, *local, use_reentrant=False).square().sum(), local)
    return all(map(torch.equal, found, expected)), all(bool(x.any()) for x in found)


@pytest.mark.parametrize("order", [RING, GATHER, ULYSSES])
@pytest.mark.parametrize("layer", ["last", "first"])
def test_checkpoints(ranks: Ranks, order: str, layer: str) -> None:
    assert ranks.everywhere(checkpointed, order, layer, ranks=2) == [(True, True)] * 2


CALLS: dict[str, Callable[..., Tensor]] = {
    "mask": lambda q, k, v, **how: attend(q, k, v, key_mask=torch.arange(24).expand(2, -1) % 5 != 2, **how),
    "lse": lambda q, k, v, **how: attend(q, k, v, Window(9, 0), return_lse=True, **how)[1],
    "lengths": lambda q, k, v, **how: attend(
        *(x.transpose(1, 2) for x in (q, k, v)), layout="bhnd", is_causal=True, seq_lens=torch.tensor([48, 30]), **how
    ),
    "data": lambda q, k, v, **how: attend(q, k, v, Ranges.spans(torch.arange(48)[None] // 10, left=3), **how),
}
SAVED: dict[str, Any] = {"attention": [OP], "products": [torch.ops.aten.mm.default], "all": None}


def everything(*args: Any, **more: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def computed(order: str, name: str, saved: str) -> tuple[int, int, bool]:
    """A job: forward passes without and with a checkpoint, and whether gradients have the same bits."""
    mesh, counted, forward, found = Sharded(ring_ranks.group(), "zigzag"), list[int](), RingCall.forward, list[Any]()
    contexts: Any = partial(create_selective_checkpoint_contexts, SAVED[saved] or everything)

    def counting(call: RingCall, *qkv: Tensor) -> Any:
        counted.append(1)
        return forward(call, *qkv)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return CALLS[name](q.sin(), k, v, mesh=mesh, order=order).sin()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RingCall, "forward", counting)
        for around in (run, partial(checkpoint, run, use_reentrant=False, context_fn=contexts)):
            local = part(mesh, grads="qkv")
            counted.clear()
            grads = torch.autograd.grad(around(*local).square().sum(), local)
            found.append((len(counted), grads))
    (once, expected), (often, grads) = found
    return once, often, all(map(torch.equal, grads, expected)) and all(bool(x.any()) for x in grads[:2])


@thinned(("order", "name", "saved"), [*product((RING, GATHER, ULYSSES), CALLS, SAVED)], 12)
def test_selective_checkpoints(ranks: Ranks, order: str, name: str, saved: str) -> None:
    """What a policy saves of attention is not computed again, whatever the exchange."""
    often = 2 if saved == "products" else 1
    assert ranks.everywhere(computed, order, name, saved, ranks=2) == [(1, often, True)] * 2


class Block(nn.Module):
    """Attention with projections, over a mesh."""

    def __init__(self, mesh: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.mesh = nn.Linear(8, 24), nn.Linear(8, 8), mesh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        projected: Tensor = self.out(attend(q, k, v, is_causal=True, mesh=self.mesh).flatten(2))
        return projected


def compiled() -> tuple[bool, bool]:
    """A job: whether a compiled model gives bit-identical results and gradients."""
    mesh = Sharded(ring_ranks.group(), "zigzag")
    plain = Block(mesh)
    fast = torch.compile(plain, backend="eager")
    x = shard(torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1)), mesh)
    out, same = plain(x), fast(x)
    grads, also = (torch.autograd.grad(y.square().sum(), list(plain.parameters())) for y in (out, same))
    return torch.equal(out, same), all(map(torch.equal, grads, also))


def test_attention_between_compiled_regions(ranks: Ranks) -> None:
    assert ranks.everywhere(compiled, ranks=2) == [(True, True)] * 2
