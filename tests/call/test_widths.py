"""Values of another width than keys, as in multi-head latent attention, and empty batches and sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Neighborhood, Window, attend, explain
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Pattern
from tests.support.pairwise import crossed

pytestmark = pytest.mark.usefixtures("short_trials")

Three = tuple[Tensor, Tensor, Tensor]


def tensors(width: int, *, batch: int = 2, q_len: int = 20, k_len: int = 20, layout: str = "bnhd") -> Three:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, q_len, 4, 24), (batch, k_len, 2, 24), (batch, k_len, 2, width)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    if layout == "bhnd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@crossed(
    pattern=(Dense(is_causal=True), Window(3, 0), Dilated((8, 20), (1, 2))),
    scale=(None, 0.3),
    layout=("bnhd", "bhnd"),
    width=(1, 16, 40),
)
def test_values_of_another_width(pattern: Pattern, scale: float | None, layout: str, width: int) -> None:
    q, k, v = tensors(width, layout=layout)
    more: Any = {"scale": scale, "layout": layout, "backend": "manual"}
    out, lse = attend(q, k, v, pattern, return_lse=True, **more)
    torch.testing.assert_close(attend(q, k, v, pattern, **more), out)
    a, b, c = (x.transpose(1, 2) if layout == "bnhd" else x for x in (q, k, v))
    counts = pattern.multiplicity(20, heads=4).double()
    scores = (24**-0.5 if scale is None else scale) * a @ b.repeat_interleave(2, 1).mT + counts.log()
    right = scores.softmax(-1) @ c.repeat_interleave(2, 1)
    torch.testing.assert_close((out.transpose(1, 2) if layout == "bnhd" else out, lse), (right, scores.logsumexp(-1)))
    found = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    expected = torch.autograd.grad(right.square().sum() + scores.logsumexp(-1).sum(), (q, k, v))
    torch.testing.assert_close(found, expected)


def test_explained_as_computed() -> None:
    q, k, v = (x.detach() for x in tensors(40))
    attend(q, k, v)
    found = explain(q, k, v)
    assert (found.source, "[2, 20, 4, 40]" in found.problem) == ("measured", True)


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"k_len": 0}, {"q_len": 0, "k_len": 0}], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_nothing_to_compute(sizes: dict[str, Any], layout: str, with_sink: bool) -> None:
    """As PyTorch's attention has it: empty results, and zeros without keys; -inf, or the sink, in lse."""
    q, k, v = tensors(16, layout=layout, **sizes)
    sink = torch.full((4,), 0.25, dtype=torch.float64) if with_sink else None
    out, lse = attend(q, k, v, Dense(), layout=layout, sink=sink, return_lse=True)
    assert out.shape == (*q.shape[:-1], 16)
    assert lse.shape == (q.shape[0], 4, q.shape[1 if layout == "bnhd" else 2])
    assert not out.any()
    assert (lse == (-math.inf if sink is None else 0.25)).all()
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize(
    ("q", "k", "arguments", "message"),
    [
        ((0, 5, 4, 8), (2, 5, 4, 8), {}, "q and k must have one batch size, got 0 and 2"),
        ((0, 5, 4, 8), (0, 5, 3, 8), {}, "the heads of k and v must divide those of q, got 3 and 4"),
        ((0, 5, 4, 8), (0, 5, 4, 6), {}, "q and k must have one head_dim, got 8 and 6"),
        ((2, 5, 0, 8), (2, 5, 0, 8), {}, "q must have at least one entry on every axis"),
        ((2, 5, 4, 0), (2, 5, 4, 0), {}, "q must have at least one entry on every axis"),
        ((2, 5, 4, 8), (2, 0, 4, 8), {"pattern": Neighborhood((5,), (3,))}, "Neighborhood needs q_len <= k_len"),
        ((2, 0, 4, 8), (2, 0, 4, 8), {"segment_lengths": 4}, "dilation_rates is None"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"scale": math.nan}, "scale must be a finite number"),
        ((2, 0, 4, 8), (2, 5, 4, 8), {"order": "random"}, "order must be None or one of"),
        ((2, 5, 4, 8), (2, 0, 4, 8), {"backend": "abacus"}, "backend must be None or one of"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"key_mask": "x"}, "key_mask must be a bool tensor"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"documents": torch.zeros(0, 4).long()}, "documents must have shape"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"key_lens": torch.zeros(1).long()}, "key_lens must have shape"),
    ],
)
def test_wrong_arguments(q: tuple[int, ...], k: tuple[int, ...], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        attend(torch.zeros(q), torch.zeros(k), torch.zeros(k), **arguments)
    assert message in str(raised.value)


def test_values_are_checked_though_their_width_differs_and_nothing_is_computed() -> None:
    x, values = torch.zeros(1, 5, 4, 8), torch.zeros(1, 5, 4, 6).long()
    upper: dict[str, Any] = {"is_causal": True, "alignment": "upper_left"}
    several: list[dict[str, Any]] = [{}, upper, {"key_lens": torch.tensor([0])}]
    for given in several:
        with pytest.raises(InvalidInput, match=r"v must be one of torch\.float16"):
            attend(x[:, :0], x, values, **given)


@pytest.mark.parametrize("width", [8, 64])
def test_widths_of_q_and_k_are_named_as_they_were_given(width: int) -> None:
    with pytest.raises(InvalidInput, match="q and k must have one head_dim, got 32 and 16"):
        attend(torch.zeros(1, 5, 4, 32), torch.zeros(1, 5, 4, 16), torch.zeros(1, 5, 4, width))
