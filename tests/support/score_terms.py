"""Calls with a softcap, a bias or ALiBi, and what should come out of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.pattern import Pattern

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
    "all": ((1, 1), 2, 5.0),
}
Three = tuple[Tensor, Tensor, Tensor]


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


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse by the formula, in the tensors' dtype; `seen` [batch, k_len] hides keys."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * HEAD_DIM**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        at = torch.arange(k.shape[1] - q.shape[1], k.shape[1])
        distance = (at[:, None] - torch.arange(k.shape[1])).abs()
        scores = scores - alibi_slopes.to(scores.dtype).view(-1, HEADS, 1, 1) * distance
    counts = pattern.multiplicity(q.shape[1], k.shape[1], HEADS).to(scores.dtype)
    counts = counts if seen is None else counts * seen[:, None, None]
    weights = counts * scores.exp()  # small scores: nothing overflows
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total.where(total > 0, 1.0), values)
    return out, total.squeeze(-1).where(total.squeeze(-1) > 0, 1.0).log() - torch.where(total > 0, 0.0, math.inf)[
        ..., 0
    ]


def agree(found: Any, exact: Any, rtol: float = 1e-9) -> bool:
    return all(torch.allclose(x.double(), y, rtol=rtol, atol=rtol) for x, y in zip(found, exact, strict=True))


def inputs_of(given: dict[str, Any], *others: Tensor) -> list[Tensor]:
    return [*others, *(given[name] for name in ("bias",) if name in given)]
