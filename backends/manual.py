"""The plain formula in pieces that fit in memory: the slow reference, and the last resort.

The definition: lse = logsumexp(s + log c), out = exp(s + log c - lse) v, with scores s = scale * q k^T or what
a softcap, a bias and ALiBi make of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels import dropout
from attn_dispatch.kernels.contract import SCORE_TERMS, Refusal, refuse_ranks
from attn_dispatch.kernels.formula import ScoreTerms, formula, probabilities, score_terms_of
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.numerics import multiplicity_of, sum_dtype
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.private import forward_ad
from attn_dispatch.spec import tracing
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import without_autocast

name = "manual"
score_terms = SCORE_TERMS
takes_data = True

TENSORS = ("seq_lens", "key_mask", "bias", "alibi_slopes", "pattern_data")
REUSE = 2  #: pieces vary in size, and the allocator cannot reuse every freed block
CHUNK_BYTES = 64 * 2**20  #: of scores per piece on a CPU; larger pieces do not fit the caches
CUDA_CHUNK_BYTES = 2**30
COPIES = 6  #: score-sized temporaries alive at once: counts, comparison, scores, exp, and two gradients
PASSES = 8  #: over the scores: scale, bias, maximum, exp, sum, log, exp, product
COUNT_PASSES = 6  #: for each branch's multiplicity
PASS_FLOPS = 60  #: operations in the time of reading and writing one float32: 8 bytes at 7 to 8 FLOP per byte
FREE_SHARE = 4  #: uses at most 1 / FREE_SHARE of the free memory


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    return refuse_ranks(problem)


def flops(problem: Problem) -> int:
    """Operations of one call; passes over the scores count as the operations possible in their time."""
    pairs = problem.batch * problem.heads * problem.q_len * problem.k_len
    passes = PASSES + COUNT_PASSES * len(problem.pattern.natural.branches)
    return pairs * (4 * problem.head_dim + passes * PASS_FLOPS) * (7 if problem.needs_grad else 2) // 2


def workspace_bytes(problem: Problem) -> int:
    rows, heads = _piece(problem)
    wide = sum_dtype(problem.dtype).itemsize
    scores = REUSE * COPIES * problem.batch * rows * heads * problem.k_len * max(wide, 4)
    # k and v are converted to the wide dtype and copied to each query head; gradients are summed in it.
    kv = 2 * problem.batch * problem.k_len * heads * problem.head_dim * wide * (2 if problem.needs_grad else 1)
    sums = 3 * problem.batch * problem.k_len * problem.heads * problem.head_dim * wide if problem.needs_grad else 0
    queries = (5 if problem.needs_grad else 2) * problem.batch * rows * heads * problem.head_dim * wide
    return (
        scores
        + queries
        + 2 * kv
        + sums
        + copied_bytes(problem)
        + 4 * problem.batch * problem.q_len * problem.heads * wide
    )


def traceable(problem: Problem) -> bool:
    """False with dropout: a graph would drop the same weights in every call."""
    return not problem.dropout_p


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    seed = dropout.drawn_seed(problem.device) if problem.dropout_p else None
    pieces = _Pieces(problem, {name: tensors[name] for name in TENSORS if name in tensors}, seed, *_piece(problem))
    if tracing.is_transformed() or forward_ad._current_level >= 0:
        return _in_one_piece(q, k, v, pieces)
    if problem.needs_grad:
        out, lse = _Manual.apply(q, k, v, tensors.get("bias"), pieces)  # type: ignore[no-untyped-call]
        return out, lse
    return _forward(q, k, v, pieces)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A problem with its further tensors and dropout seed, and the number of query rows and heads per piece."""

    problem: Problem
    tensors: Mapping[str, Tensor]
    seed: Tensor | None
    rows: int
    heads: int

    @property
    def hidden(self) -> Hidden:
        return Hidden.of(self.problem, self.tensors)

    def head_slices(self) -> Iterator[slice]:
        for start in range(0, self.problem.heads, self.heads):
            yield slice(start, min(start + self.heads, self.problem.heads))

    def row_slices(self) -> Iterator[slice]:
        for start in range(0, self.problem.q_len, self.rows):
            yield slice(start, min(start + self.rows, self.problem.q_len))

    def counts(self, heads: slice, rows: slice, device: torch.device) -> Tensor | None:
        q_pos = torch.arange(rows.start, rows.stop, device=device)
        return multiplicity_of(self.problem, range(heads.start, heads.stop), q_pos, self.tensors)

    def terms(self, heads: slice, rows: slice, device: torch.device) -> ScoreTerms:
        q_pos, wide = torch.arange(rows.start, rows.stop, device=device), sum_dtype(self.problem.dtype)
        return score_terms_of(self.problem, range(heads.start, heads.stop), q_pos, self.tensors, wide)

    def keep(self, heads: slice, rows: slice, device: torch.device) -> Tensor | None:
        """Dropout factors, which do not depend on pieces."""
        if self.seed is None:
            return None
        problem, on = self.problem, self.seed.device
        row = torch.arange(problem.batch, device=on)[:, None] * problem.heads
        row = (row + torch.arange(heads.start, heads.stop, device=on)).flatten()
        begin = rows.start - rows.start % dropout.DRAWN
        first = torch.arange(begin, rows.stop, dropout.DRAWN, device=on)
        kept = dropout.kept(self.seed, problem.dropout_p, row, first, problem.k_len)
        kept = torch.unflatten(kept[:, rows.start - begin : rows.stop - begin], 0, (problem.batch, -1))
        return kept.to(device, sum_dtype(problem.dtype)) * dropout.gain(problem.dropout_p)

    def formula(self, q: Tensor, k: Tensor, v: Tensor, heads: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """out and lse of these heads and queries, of their own q, k and v in the wide dtype."""
        counts, keep = self.counts(heads, rows, q.device), self.keep(heads, rows, q.device)
        return formula(q, k, v, counts, self.problem.scale, keep, self.terms(heads, rows, q.device))

    def kv_index(self, heads: slice, device: torch.device) -> Tensor:
        """The key head of each query head."""
        return torch.arange(heads.start, heads.stop, device=device) // (self.problem.heads // self.problem.kv_heads)


class _Manual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, pieces: _Pieces
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, pieces)
        ctx.save_for_backward(q, k, v, out, lse, *pieces.tensors.values())
        ctx.names, ctx.pieces = tuple(pieces.tensors), replace(pieces, tensors={})
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_out, grad_lse = grad_outputs
        q, k, v, out, _, *tensors = ctx.saved_tensors
        pieces = replace(ctx.pieces, tensors=dict(zip(ctx.names, tensors)))
        grad_out, grad_lse = map(pieces.hidden.of_queries, (grad_out, grad_lse))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        # With create_graph autograd records these operations: second derivatives work.
        with without_autocast(q.device.type):
            return (*_backward(grad_out, grad_lse, q, k, v, out, pieces), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, pieces: _Pieces) -> tuple[Tensor, Tensor]:
    problem, wide = pieces.problem, sum_dtype(q.dtype)
    q, k, v = pieces.hidden.zeroed(q, k, v)
    # New tensors are of q's class: written into plain ones, the results of a wrapper subclass would be lost.
    out = q.new_empty(q.shape)
    lse = q.new_empty((problem.batch, problem.heads, problem.q_len), dtype=wide)
    for heads in pieces.head_slices():
        index = pieces.kv_index(heads, q.device)
        k_wide, v_wide = k[:, :, index].to(wide), v[:, :, index].to(wide)
        for rows in pieces.row_slices():
            piece, lse_piece = pieces.formula(q[:, rows, heads].to(wide), k_wide, v_wide, heads, rows)
            out[:, rows, heads] = piece.to(q.dtype)
            lse[:, heads, rows] = lse_piece
    return out, lse


def _in_one_piece(q: Tensor, k: Tensor, v: Tensor, pieces: _Pieces) -> tuple[Tensor, Tensor]:
    """The same by operators that write into no other tensor: autograd has all derivatives, vmap a rule for each."""
    problem, wide, hidden = pieces.problem, sum_dtype(q.dtype), pieces.hidden
    heads, rows = slice(0, problem.heads), slice(0, problem.q_len)
    index = pieces.kv_index(heads, q.device)
    q, k, v = (x.to(wide) for x in hidden.zeroed(q, k, v))
    out, lse = pieces.formula(q, k[:, :, index], v[:, :, index], heads, rows)
    masked = hidden.of_queries(out)  # so that gradients of padding, which may be NaN, reach nothing
    assert masked is not None
    return masked.to(problem.dtype), lse


def _backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, pieces: _Pieces
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and that of a bias, by the formula, piece by piece: dS = P * (dO V^T - rowsum(dO * out) + dlse)."""
    problem, wide = pieces.problem, sum_dtype(q.dtype)
    q, k, v = pieces.hidden.zeroed(q, k, v)
    dq = q.new_empty(q.shape)
    dk, dv = (k.new_zeros(k.shape, dtype=wide) for _ in range(2))
    bias = pieces.tensors["bias"] if problem.bias_needs_grad else None
    dbias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
    for heads in pieces.head_slices():
        index = pieces.kv_index(heads, q.device)
        k_wide, v_wide = k[:, :, index].to(wide), v[:, :, index].to(wide)
        for rows in pieces.row_slices():
            counts, keep = pieces.counts(heads, rows, q.device), pieces.keep(heads, rows, q.device)
            q_wide, grad = q[:, rows, heads].to(wide), grad_out[:, rows, heads].to(wide)
            terms = pieces.terms(heads, rows, q.device)
            p, _, slope = probabilities(q_wide, k_wide, counts, problem.scale, terms)
            dp = torch.einsum("bqhd,bkhd->bhqk", grad, v_wide)
            delta = torch.einsum("bqhd,bqhd->bhq", grad, out[:, rows, heads].to(wide))
            delta = delta if grad_lse is None else delta - grad_lse[:, heads, rows]
            ds = p * ((dp if keep is None else dp * keep) - delta.unsqueeze(-1))
            if dbias is not None:
                own = heads if problem.bias[1] > 1 else slice(None)
                dbias[:, own, rows] += ds.sum_to_size(dbias[:, own, rows].shape)
            ds = (ds if slope is None else ds * slope) * problem.scale
            dv.index_add_(2, index, torch.einsum("bhqk,bqhd->bkhd", p if keep is None else p * keep, grad))
            dk.index_add_(2, index, torch.einsum("bhqk,bqhd->bkhd", ds, q_wide))
            dq[:, rows, heads] = torch.einsum("bhqk,bkhd->bqhd", ds, k_wide).to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), None if bias is None or dbias is None else dbias.to(bias.dtype)


def _piece(problem: Problem) -> tuple[int, int]:
    """Query rows and heads per piece."""
    row = problem.batch * problem.k_len * COPIES * max(sum_dtype(problem.dtype).itemsize, 4)
    limit = CHUNK_BYTES if problem.device.type == "cpu" else CUDA_CHUNK_BYTES
    if row * problem.q_len * problem.heads > limit:
        limit = min(limit, available_bytes(problem.device) // FREE_SHARE)
    heads = max(1, min(problem.heads, limit // (row * min(problem.q_len, 128))))
    return max(1, min(problem.q_len, limit // (row * heads))), heads
