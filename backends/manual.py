"""The plain formula in pieces that fit in memory: the slow reference, and the last resort.

SEMANTICS in three lines: bias = log c; lse = logsumexp(scale * q k^T + bias); out = exp(score - lse) v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.contract import Refusal, refuse_ranks
from attn_dispatch.kernels.formula import counts_of, formula, probabilities
from attn_dispatch.kernels.hidden import Hidden, copied_bytes
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.spec.problem import Problem

name = "manual"

REUSE = 2  #: pieces vary in size, and the C library does not use every freed block again
CHUNK_BYTES = 64 * 2**20  #: of scores per piece on a CPU; larger pieces leave the caches
CUDA_CHUNK_BYTES = 2**30
COPIES = 6  #: score-sized temporaries alive at once: counts, comparison, scores, exp, and two gradients
PASSES = 8  #: over the scores: scale, bias, maximum, exp, sum, log, exp, product
COUNT_PASSES = 6  #: for each branch's multiplicity
PASS_FLOPS = 60  #: what a processor works out while it reads and writes one float32: 8 bytes at 7 to 8 FLOP per byte
FREE_SHARE = 4  #: at most 1 / FREE_SHARE of the memory that is free


def version() -> str:
    return str(torch.__version__)


def refusals(problem: Problem) -> list[Refusal]:
    return refuse_ranks(problem)


def flops(problem: Problem) -> int:
    """Its arithmetic, and its passes over the scores counted as what could be worked out meanwhile."""
    pairs = problem.batch * problem.heads * problem.q_len * problem.k_len
    pattern = problem.pattern.natural
    passes = PASSES + (COUNT_PASSES * len(pattern.branches) if isinstance(pattern, Dilated) else 0)
    return pairs * (4 * problem.head_dim + passes * PASS_FLOPS) * (7 if problem.needs_grad else 2) // 2


def workspace_bytes(problem: Problem) -> int:
    rows, heads = _piece(problem)
    wide = sum_dtype(problem.dtype).itemsize
    scores = REUSE * COPIES * problem.batch * rows * heads * problem.k_len * max(wide, 4)
    # k and v are widened and spread over a piece's heads; their gradients are summed in the wider dtype.
    kv = 2 * problem.batch * problem.k_len * heads * problem.head_dim * wide * (2 if problem.needs_grad else 1)
    sums = 3 * problem.batch * problem.k_len * problem.heads * problem.head_dim * wide if problem.needs_grad else 0
    return scores + 2 * kv + sums + copied_bytes(problem) + 4 * problem.batch * problem.q_len * problem.heads * wide


def traceable(problem: Problem) -> bool:
    """A graph would drop the same weights in every call."""
    return not problem.dropout_p


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    seed = int(torch.randint(2**62, ())) if problem.dropout_p else 0
    call = _Call(problem, tensors.get("seq_lens"), tensors.get("key_mask"), seed, *_piece(problem))
    if problem.needs_grad:
        out, lse = _Manual.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return out, lse
    return _forward(q, k, v, call)


@dataclass(frozen=True, slots=True)
class _Call:
    """A problem with its masks, its dropout seed, and the query rows and heads whose scores are held at once."""

    problem: Problem
    seq_lens: Tensor | None
    key_mask: Tensor | None
    seed: int
    rows: int
    heads: int

    @property
    def hidden(self) -> Hidden:
        return Hidden.of(self.problem, self.seq_lens, self.key_mask)

    def head_runs(self) -> Iterator[slice]:
        for start in range(0, self.problem.heads, self.heads):
            yield slice(start, min(start + self.heads, self.problem.heads))

    def row_runs(self) -> Iterator[slice]:
        for start in range(0, self.problem.q_len, self.rows):
            yield slice(start, min(start + self.rows, self.problem.q_len))

    def counts(self, heads: slice, rows: slice, device: torch.device) -> Tensor | None:
        q_pos = torch.arange(rows.start, rows.stop, device=device)
        return counts_of(self.problem, range(heads.start, heads.stop), q_pos, self.seq_lens, self.key_mask)

    def keep(self, heads: slice, rows: slice, device: torch.device) -> Tensor | None:
        """Dropout's factors. Forward and backward draw the same ones: each piece has its own seed."""
        p = self.problem.dropout_p
        if not p:
            return None
        seed = (self.seed + heads.start * self.problem.q_len + rows.start) % 2**63
        shape = (self.problem.batch, heads.stop - heads.start, rows.stop - rows.start, self.problem.k_len)
        kept = torch.rand(shape, generator=torch.Generator(device).manual_seed(seed), device=device) >= p
        return kept.to(sum_dtype(self.problem.dtype)) / (1 - p)

    def kv_index(self, heads: slice, device: torch.device) -> Tensor:
        """The key and value head that each query head reads."""
        return torch.arange(heads.start, heads.stop, device=device) // (self.problem.heads // self.problem.kv_heads)


class _Manual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse, call.seq_lens, call.key_mask)
        ctx.call = replace(call, seq_lens=None, key_mask=None)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_out, grad_lse = grad_outputs
        q, k, v, out, _, seq_lens, key_mask = ctx.saved_tensors
        call = replace(ctx.call, seq_lens=seq_lens, key_mask=key_mask)
        grad_out, grad_lse = map(call.hidden.of_queries, (grad_out, grad_lse))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        # Where a graph of the gradients is asked for, autograd records what they are made of.
        with torch.autocast(q.device.type, enabled=False):
            return (*_backward(grad_out, grad_lse, q, k, v, out, call), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    problem, wide = call.problem, sum_dtype(q.dtype)
    q, k, v = call.hidden.zeroed(q, k, v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=wide, device=q.device)
    for heads in call.head_runs():
        index = call.kv_index(heads, q.device)
        k_wide, v_wide = k[:, :, index].to(wide), v[:, :, index].to(wide)
        for rows in call.row_runs():
            counts, keep = call.counts(heads, rows, q.device), call.keep(heads, rows, q.device)
            piece, lse_piece = formula(q[:, rows, heads].to(wide), k_wide, v_wide, counts, problem.scale, keep)
            out[:, rows, heads] = piece.to(q.dtype)
            lse[:, heads, rows] = lse_piece
    return out, lse


def _backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    """SEMANTICS' gradient: dS = P * (dO V^T - rowsum(dO * out) + dlse), piece by piece."""
    problem, wide = call.problem, sum_dtype(q.dtype)
    q, k, v = call.hidden.zeroed(q, k, v)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=wide, device=q.device) for _ in range(2))
    for heads in call.head_runs():
        index = call.kv_index(heads, q.device)
        k_wide, v_wide = k[:, :, index].to(wide), v[:, :, index].to(wide)
        for rows in call.row_runs():
            counts, keep = call.counts(heads, rows, q.device), call.keep(heads, rows, q.device)
            q_wide, grad = q[:, rows, heads].to(wide), grad_out[:, rows, heads].to(wide)
            p, _ = probabilities(q_wide, k_wide, counts, problem.scale)
            dp = torch.einsum("bqhd,bkhd->bhqk", grad, v_wide)
            delta = torch.einsum("bqhd,bqhd->bhq", grad, out[:, rows, heads].to(wide))
            delta = delta if grad_lse is None else delta - grad_lse[:, heads, rows]
            ds = p * ((dp if keep is None else dp * keep) - delta.unsqueeze(-1)) * problem.scale
            dv.index_add_(2, index, torch.einsum("bhqk,bqhd->bkhd", p if keep is None else p * keep, grad))
            dk.index_add_(2, index, torch.einsum("bhqk,bqhd->bkhd", ds, q_wide))
            dq[:, rows, heads] = torch.einsum("bhqk,bkhd->bqhd", ds, k_wide).to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _piece(problem: Problem) -> tuple[int, int]:
    """Query rows and heads per piece."""
    row = problem.batch * problem.k_len * COPIES * max(sum_dtype(problem.dtype).itemsize, 4)
    limit = CHUNK_BYTES if problem.device.type == "cpu" else CUDA_CHUNK_BYTES
    if row * problem.q_len * problem.heads > limit:
        limit = min(limit, available_bytes(problem.device) // FREE_SHARE)
    heads = max(1, min(problem.heads, limit // (row * min(problem.q_len, 128))))
    return max(1, min(problem.q_len, limit // (row * heads))), heads
