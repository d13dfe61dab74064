"""The formula in float32, against itself in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_dispatch.kernels.formula import formula
from attn_dispatch.spec.pattern import Dense, Pattern, Window


def plain(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
    """As in PyTorch's documentation of scaled_dot_product_attention."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(counts == 0, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@pytest.mark.parametrize("pattern", [Dense(), Window(9, 0)], ids=str)
@pytest.mark.parametrize("size", [1.0, 200.0, 1e4])
def test_large_scores_cost_no_more_than_their_own_rounding(pattern: Pattern, size: float) -> None:
    """Whole numbers as scores are exact: what is left is the softmax's own error, as in PyTorch's formula."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (2, 64, 2, 8), generator=generator).float()
    k = torch.randint(-2, 3, (2, 64, 2, 8), generator=generator).float() + size / 8
    v, grad = (torch.randn(2, 64, 2, 8, generator=generator) for _ in range(2))
    counts = pattern.multiplicity(64, 64, 2)
    errors = []
    functions: tuple[Callable[..., Tensor], ...] = (
        lambda q, k, v: formula(q, k, v, counts, 1.0)[0],
        lambda q, k, v: plain(q, k, v, counts),
    )
    for function in functions:
        results = []
        for kind in (torch.float32, torch.float64):
            x = [each.to(kind).requires_grad_() for each in (q, k, v)]
            out = function(*x)
            results.append([out, *torch.autograd.grad(out, x, grad.to(kind))])
        errors.append([((one - other).abs().max() / other.abs().max()).item() for one, other in zip(*results)])
    mine, theirs = errors
    assert mine == theirs
