"""oracle(): float64 by another way, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import InvalidInput, Window, attend
from attn_dispatch.testing import oracle

GENERATOR = torch.Generator().manual_seed(0)
CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "window": {"pattern": Window(5, 0)},
    "dilated": {"segment_lengths": (8, 16), "dilation_rates": (1, 2), "is_causal": True},
    "masks": {"key_mask": torch.rand(2, 24, generator=GENERATOR) < 0.7, "seq_lens": torch.tensor([24, 9])},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "slopes": {"alibi_slopes": torch.rand(4, generator=GENERATOR), "is_causal": True},
}


def tensors(dtype: torch.dtype, *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (2, 24, 4, 8), (2, 24, 2, 8), (2, 24, 2, 8)
    q, k, v = (torch.randn(size, generator=generator).to(dtype).requires_grad_(grad) for size in sizes)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_attend_is_within_the_tolerances(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """And `manual` in float64 gives the values themselves."""
    q, k, v = tensors(dtype, grad=True)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    grad_lse = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(3))
    expected = oracle(q, k, v, grad=grad, grad_lse=grad_lse, **arguments)
    assert expected.keys() == {"out", "lse", "dq", "dk", "dv"}
    for wide in (False, True):
        inputs: list[Any] = [x.detach().to(torch.float64 if wide else dtype).requires_grad_() for x in (q, k, v)]
        out, lse = attend(*inputs, backend="manual", return_lse=True, **arguments)
        weights = lse.detach().isfinite()
        loss = (out * grad).sum() + (lse * grad_lse)[weights].sum()
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss, inputs)))
        found |= {"out": out.detach(), "lse": lse.detach()}
        for name, each in expected.items():
            assert each.value.dtype == torch.float64
            same = found[name].double() == each.value  # -inf
            error = torch.where(same, 0.0, (found[name].double() - each.value).abs()).max()
            assert float(error) <= (1e-9 if wide else each.tolerance), name


def test_a_bias_that_is_trained() -> None:
    q, k, v = tensors(torch.float32)
    bias = torch.randn(1, 4, 24, 24, generator=torch.Generator().manual_seed(4)).requires_grad_()
    assert oracle(q, k, v, bias=bias).keys() == {"out", "lse"}
    grad = torch.ones_like(q)
    expected = oracle(q, k, v, bias=bias, grad=grad)["dbias"]
    (dbias,) = torch.autograd.grad(attend(q, k, v, bias=bias, backend="manual"), [bias], grad)
    assert float((dbias - expected.value).abs().max()) <= expected.tolerance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad": torch.ones(2, 24, 4, 9)}, r"grad must have shape \[2, 24, 4, 8\], got \[2, 24, 4, 9\]"),
        ({"grad_lse": torch.ones(2, 4, 24)}, "grad_lse was given without grad"),
        ({"grad": torch.ones(2, 24, 4, 8), "grad_lse": torch.ones(2, 24, 4)}, r"grad_lse must have shape \[2, 4, 24\]"),
        ({"layout": "bhnd"}, "oracle has no layout"),
        ({"dropout_p": 0.1}, "oracle has no dropout_p"),
        ({"is_causal": 3}, "is_causal must be True or False"),
    ],
    ids=["grad", "lse alone", "grad_lse", "layout", "dropout", "pattern"],
)
def test_what_it_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        oracle(*tensors(torch.float32), **arguments)
