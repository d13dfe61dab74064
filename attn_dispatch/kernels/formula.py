"""The definition in plain PyTorch: softmax weighted by the multiplicity, of scores that may be capped and biased."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.numerics import rows_of_bias, sum_dtype
from attn_dispatch.spec.problem import Problem


class ScoreTerms(NamedTuple):
    """What a call does to the scores after scaling them: `softcap * tanh(score / softcap) + added`.

    Args:
        softcap: 0 for none.
        added: the finite part of the bias and ALiBi's terms, broadcastable to the scores; None for none.
    """

    softcap: float = 0.0
    added: Tensor | None = None

    def of(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """The changed scores, and their derivatives; None where these are 1."""
        slope = None
        if self.softcap:
            capped = (scores / self.softcap).tanh()
            scores, slope = capped * self.softcap, 1 - capped.square()
        return (scores if self.added is None else scores + self.added), slope


LARGEST_BIAS = 1e30  #: absolute value; kernels divide by the scale, which must not make it infinite
AS_THEY_ARE = ScoreTerms()


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    scale: float,
    keep: Tensor | None = None,
    terms: ScoreTerms = AS_THEY_ARE,
) -> tuple[Tensor, Tensor]:
    """The formula of docs/semantics.md on whole tensors; differentiable by autograd.

    Args:
        q: [batch, queries, heads, head_dim]. k, v: [batch, keys, heads, head_dim].
        counts: the multiplicity, broadcastable to [batch, heads, queries, keys]; None: all 1.
        keep: dropout factors, 0 or 1 / (1 - p), shaped as the scores.

    Returns:
        out [batch, queries, heads, head_dim] and lse [batch, heads, queries].
    """
    p, lse, _ = probabilities(q, k, counts, scale, terms)
    p = p if keep is None else p * keep
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def probabilities(
    q: Tensor, k: Tensor, counts: Tensor | None, scale: float, terms: ScoreTerms = AS_THEY_ARE
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`c * exp(s - lse)` [batch, heads, queries, keys], lse [batch, heads, queries], and the derivatives of `terms`."""
    scores, slope = terms.of(torch.einsum("bqhd,bkhd->bhqk", q * scale, k))
    return *softmax(scores, counts), slope


def softmax(scores: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """`c * exp(s - lse)` and lse. A query without keys gives zeros and -inf, and gradients of zero, never NaN."""
    # Not exp(s - lse): where scores are large, so is lse, and its rounding is a relative error of all weights.
    if counts is None:
        return scores.softmax(-1), scores.logsumexp(-1)
    hidden = counts <= 0
    seen = ~hidden.all(-1, keepdim=True)
    scores = scores + counts.to(scores.dtype).log().clamp(min=0.0)
    # A row of -inf alone has NaN gradients even if it is overwritten later: use a finite row instead. Hidden scores may
    # be NaN, of a bias.
    scores = scores.masked_fill(hidden & seen, -math.inf).masked_fill(hidden & ~seen, 0.0)
    lse = scores.logsumexp(-1).masked_fill(~seen.squeeze(-1), -math.inf)
    return scores.softmax(-1).masked_fill(~seen, 0.0), lse


def score_terms_of(
    problem: Problem, heads: Sequence[int], q_pos: Tensor, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> ScoreTerms:
    """The terms of these heads and queries in a dtype; `tensors` as for `multiplicity_of`."""
    added, bias, slopes = None, tensors.get("bias"), tensors.get("alibi_slopes")
    if bias is not None:
        added = bounded(rows_of_bias(bias, heads, q_pos), dtype)
        added = added.masked_fill(added == -math.inf, 0.0)
    if slopes is not None:
        keys = torch.arange(problem.k_len, device=q_pos.device)
        distance = (q_pos[:, None] + (problem.k_len - problem.q_len) - keys).abs()
        of_heads = slopes[..., torch.as_tensor(heads, device=slopes.device)].to(dtype)
        alibi = of_heads.view(-1, len(heads), 1, 1) * -distance
        added = alibi if added is None else added + alibi
    return ScoreTerms(problem.softcap, added)


def bounded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in a dtype, its finite entries within `LARGEST_BIAS`, so that none becomes infinite."""
    most = min(LARGEST_BIAS, torch.finfo(bias.dtype).max)
    within = bias.clamp(-most, most)
    return torch.where(bias == -math.inf, bias, within).to(dtype)


# --- rounding ---------------------------------------------------------------------------------------------------------


def rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    scale: float,
    keep: Tensor | None = None,
    terms: ScoreTerms = AS_THEY_ARE,
) -> tuple[Tensor, Tensor]:
    """The formula in mixed precision: products in the inputs' dtype, the softmax in float32 or wider."""
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale).to(sum_dtype(q.dtype))
    p, lse = softmax(terms.of(scores)[0], counts)
    p = p if keep is None else p * keep
    return torch.einsum("bhqk,bkhd->bqhd", p.to(q.dtype), v), lse


def rounding_errors(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_index: Tensor,
    counts: Tensor | None,
    grad: Tensor | None,
    grad_lse: Tensor | None,
    terms: ScoreTerms,
    exact: Mapping[str, Tensor],
) -> dict[str, float]:
    """Bound the absolute error of each tensor of `exact` (out, lse, dq, ...) that rounding alone may cause.

    The result is rounded once, and so are the weights before they multiply v. Sums of head_dim and k_len terms, and
    scores before they are exponentiated, are rounded in the precision that kernels accumulate in. The bound is the
    formula with absolute values throughout, since terms may cancel. A backward pass gets an out that was already
    rounded.

    Args:
        q, grad: some rows and heads. k, v: the key heads that they read. kv_index: the head in k of each head in q.

    Source: Higham 2002, Accuracy and Stability of Numerical Algorithms, chapter 3; Higham & Mary 2019: rounding errors
    of a sum of n terms grow as the square root of n.
    """
    last, wide = torch.finfo(problem.dtype).eps, sum_dtype(problem.dtype)
    q, keys, values = (x.to(wide) for x in (q, k[:, :, kv_index], v[:, :, kv_index]))
    p, _, _ = probabilities(q, keys, counts, problem.scale, terms)
    q, keys, values, scale = q.abs(), keys.abs(), values.abs(), abs(problem.scale)
    score = float(torch.einsum("bqhd,bkhd->bhqk", q * scale, keys).max())
    score += 0.0 if terms.added is None else float(terms.added.abs().max())
    sums, count = torch.finfo(wide).eps, math.sqrt(problem.head_dim + problem.k_len)
    # A score's products may all be rounded the same way, where the scale is multiplied into q or k beforehand.
    growth = last / 2 + sums * (count + (1 + math.sqrt(problem.head_dim)) * score)
    # Results so small that they underflow have an absolute error besides.
    least = count * last * torch.finfo(problem.dtype).smallest_normal
    found = {name: least + last * largest(value) for name, value in exact.items()}
    found["out"] += growth * largest(torch.einsum("bhqk,bkhd->bqhd", p, values))
    # Kernels that exponentiate to base 2 multiply scores by log2 e and lse by ln 2, which are rounded themselves.
    found["lse"] = growth + 2 * sums * largest(exact["lse"])
    if grad is None:
        return found

    def by_key_head(x: Tensor) -> float:
        return largest(torch.zeros_like(k, dtype=x.dtype).index_add_(2, kv_index, x))

    grad = grad.to(wide).abs()
    delta = torch.einsum("bqhd,bqhd->bhq", grad, exact["out"].to(wide).abs()).unsqueeze(-1)
    if grad_lse is not None:
        delta += grad_lse.to(wide).abs().unsqueeze(-1)
    ds = p * (growth * (torch.einsum("bqhd,bkhd->bhqk", grad, values) + delta) + last * delta)
    if "dbias" in exact:
        found["dbias"] += largest(ds.sum_to_size(exact["dbias"].shape))
    ds = ds * scale
    found["dq"] += largest(torch.einsum("bhqk,bkhd->bqhd", ds, keys))
    found["dk"] += by_key_head(torch.einsum("bhqk,bqhd->bkhd", ds, q))
    found["dv"] += growth * by_key_head(torch.einsum("bhqk,bqhd->bkhd", p, grad))
    return found


def largest(x: Tensor) -> float:
    """The largest absolute finite value; 0 where there is none."""
    return float(torch.where(x.isfinite(), x.abs(), 0.0).max()) if x.numel() else 0.0
