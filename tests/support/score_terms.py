"""Calls with a softcap, a bias or ALiBi, and what should come out of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.pattern import Pattern
from tests.support.calls import formula

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 36, 4, 2, 16
PATTERNS: tuple[Pattern, ...] = (
    Dense(),
    Dense(is_causal=True),
    Window(9, 0, sinks=2),
    Dilated((8, 16), (1, 2), is_causal=True),
    Neighborhood((6, 6), (3, 3)),
)
#: Shapes of the bias' first axes, axes of alibi_slopes, and softcap.
TERMS = {
    "softcap": ((), 0, 2.0),
    "large softcap": ((), 0, 300.0),
    "bias of heads": ((1, HEADS), 0, None),
    "bias of rows": ((BATCH, 1), 0, None),
    "slopes of heads": ((), 1, None),
    "slopes of rows": ((), 2, None),
    "bias and slopes": ((BATCH, HEADS), 1, None),
    "softcap and bias": ((1, HEADS), 0, 2.0),
    "all": ((1, 1), 2, 5.0),
}
Three = tuple[Tensor, Tensor, Tensor]
expected = formula


def tensors(dtype: torch.dtype = torch.float64, q_len: int = LENGTH, k_len: int = LENGTH) -> Three:
    generator = torch.Generator().manual_seed(q_len)
    sizes = ((q_len, HEADS), (k_len, KV_HEADS), (k_len, KV_HEADS))
    q, k, v = (torch.randn(BATCH, *size, HEAD_DIM, generator=generator).to(dtype).requires_grad_() for size in sizes)
    return q, k, v


def terms(name: str, dtype: torch.dtype = torch.float64, q_len: int = LENGTH, k_len: int = LENGTH) -> dict[str, Any]:
    sizes, axes, softcap = TERMS[name]
    generator = torch.Generator().manual_seed(len(name))
    found: dict[str, Any] = {"softcap": softcap}
    if sizes:
        bias = torch.randn(*sizes, q_len, k_len, generator=generator)
        bias[torch.rand(bias.shape, generator=generator) < 0.2] = -math.inf
        bias[..., 3, :] = -math.inf
        found["bias"] = bias.to(dtype).requires_grad_()
    if axes:
        found["alibi_slopes"] = torch.rand([BATCH, HEADS][-axes:], generator=generator)
    return found


def agree(found: Any, exact: Any, rtol: float = 1e-9) -> bool:
    return all(torch.allclose(x.double(), y, rtol=rtol, atol=rtol) for x, y in zip(found, exact, strict=True))


def inputs_of(given: dict[str, Any], *others: Tensor) -> list[Tensor]:
    return [*others, *(given[name] for name in ("bias",) if name in given)]
