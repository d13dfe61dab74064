"""The definition in plain PyTorch: softmax weighted by the multiplicity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem


def formula(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, scale: float, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The formula of docs/semantics.md on whole tensors; differentiable by autograd.

    Args:
        q: [batch, queries, heads, head_dim]. k, v: [batch, keys, heads, head_dim].
        counts: the multiplicity, broadcastable to [batch, heads, queries, keys]; None: all 1.
        keep: dropout factors, 0 or 1 / (1 - p), shaped as the scores.

    Returns:
        out [batch, queries, heads, head_dim] and lse [batch, heads, queries].
    """
    p, lse = probabilities(q, k, counts, scale)
    p = p if keep is None else p * keep
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def probabilities(q: Tensor, k: Tensor, counts: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """`c * exp(s - lse)` [batch, heads, queries, keys], and lse [batch, heads, queries]."""
    return softmax(torch.einsum("bqhd,bkhd->bhqk", q * scale, k), counts)


def softmax(scores: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """`c * exp(s - lse)` and lse. A query without keys gives zeros and -inf, and gradients of zero, never NaN."""
    # Not exp(s - lse): where scores are large, so is lse, and its rounding is a relative error of all weights.
    if counts is None:
        return scores.softmax(-1), scores.logsumexp(-1)
    seen = (counts > 0).any(-1, keepdim=True)
    # A row of -inf alone has NaN gradients even if it is overwritten later: use a finite row instead.
    scores = scores + torch.where(seen, counts.to(scores.dtype).log(), 0.0)
    lse = scores.logsumexp(-1).masked_fill(~seen.squeeze(-1), -math.inf)
    return scores.softmax(-1).masked_fill(~seen, 0.0), lse


def multiplicity_of(
    problem: Problem, heads: Sequence[int], q_pos: Tensor, seq_lens: Tensor | None, key_mask: Tensor | None
) -> Tensor | None:
    """The multiplicity [(batch,) heads or 1, queries, keys] of these heads and queries, or None if it is all 1."""
    if problem.pattern == Dense() and seq_lens is None and key_mask is None:
        return None
    # Most patterns are equal for all heads: one logarithm is then enough.
    alike = not problem.pattern.head_offsets(0, problem.heads)
    return problem.pattern.multiplicity(
        problem.q_len,
        problem.k_len,
        problem.heads,
        seq_lens=seq_lens,
        key_mask=key_mask,
        h_pos=heads[:1] if alike else heads,
        q_pos=q_pos,
    )
