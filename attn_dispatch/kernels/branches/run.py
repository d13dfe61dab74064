"""Runs a pattern's dense sub-problems with any dense kernel, merges by lse, and sums the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Passes, differentiable
from attn_dispatch.kernels.branches.plan import Block, BranchPlan, Piece
from attn_dispatch.kernels.contract import Result
from attn_dispatch.kernels.dense import CUDA_HEAD_ALIGN, DenseCall, Drawn, Kernel, with_lse_column
from attn_dispatch.kernels.device_cache import kv_head_index
from attn_dispatch.kernels.hidden import Hidden, copied_bytes, hidden_by_masks, without_padding
from attn_dispatch.kernels.numerics import SMALLEST_SCALE, kernel_bytes, merge_, sum_dtype, with_positive_scale
from attn_dispatch.spec.problem import Problem

PROCESSORS, PER_PROCESSOR = 192, 256  #: of a large GPU, and rows of sums that flash kernels have for each


class Bias(NamedTuple):
    """`values` added to the scores: [1 or batch, 1 or heads of its piece, q_len, k_len], float32 (float64 for float64
    inputs). `seen`: bool, without the last axis: whether a query sees any key.
    """

    values: Tensor
    seen: Tensor


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    plan: BranchPlan,
    kernel: Kernel,
    masks: Mapping[str, Tensor],
    biases: tuple[Bias, ...] = (),
) -> Result:
    """Run a plan with a dense kernel.

    Args:
        q: [batch, q_len, heads, head_dim]. k, v: [batch, k_len, kv_heads, head_dim]. Any strides.
        masks: `seq_lens`, `key_mask` and `bias`, where the problem has them.
        biases: indexed by `Piece.bias`.

    Returns:
        out as q, and lse [batch, heads, q_len] where the kernel gives it. Gradients pass through both where
        `problem.needs_grad`.
    """
    q, problem = with_positive_scale(q, problem)
    single = plan.single
    if single is not None and not problem.needs_grad and not masks and not problem.dropout_p:
        out, lse = kernel.forward(DenseCall(q, k, v, single.is_causal, problem.scale))
        out = _as(out, q.dtype)
    else:
        call = passes(problem, plan, kernel, masks, biases)
        out, lse = differentiable(q, k, v, call) if problem.needs_grad else call.forward(q, k, v)
    return (out, lse) if kernel.gives_lse else out


def passes(
    problem: Problem, plan: BranchPlan, kernel: Kernel, masks: Mapping[str, Tensor], biases: tuple[Bias, ...] = ()
) -> Passes:
    """The passes of `run`, for a scale above 0."""
    seq_lens = masks.get("seq_lens")
    hidden = hidden_by_masks(problem.k_len, seq_lens, masks.get("key_mask"))
    if hidden is not None:
        zeros = torch.zeros(hidden.shape, dtype=sum_dtype(problem.dtype), device=hidden.device)
        hidden = zeros.masked_fill_(hidden, -math.inf)
    drawn = Drawn(problem.dropout_p) if problem.dropout_p else None
    call = BranchPasses(problem, plan, kernel, hidden, seq_lens, biases, drawn)
    # Pieces of branches hold selected keys only; others hold keys that no query sees, which kernels read.
    return Hidden.of(problem, masks, pattern=bool(biases) or not problem.pattern.branches).around(call)


@dataclass(slots=True)
class BranchPasses:
    """The passes of one plan with the masks of a call. `hidden` [batch, k_len] is -inf at hidden keys, else 0."""

    problem: Problem
    plan: BranchPlan
    kernel: Kernel
    hidden: Tensor | None
    seq_lens: Tensor | None
    biases: tuple[Bias, ...]
    drawn: Drawn | None = None  #: of a plan with one call of the kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(q, k, v, self)

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        grad = torch.zeros_like(out) if grad is None else grad
        if grad_lse is None or self.kernel.takes_grad_lse:
            return _backward(grad, grad_lse, q, k, v, out, lse, self)
        d = q.shape[-1]
        grad, q, k, v, out = with_lse_column(grad_lse.transpose(1, 2), grad, q, k, v, out)
        dq, dk, dv = _backward(grad, None, q, k, v, out, lse, self)
        return dq[..., :d], dk[..., :d], dv[..., :d]

    def parts(self) -> Iterator[tuple[slice, Block]]:
        for start in range(0, self.problem.batch, self.plan.batch_step):
            for block in self.plan.blocks:
                yield slice(start, start + self.plan.batch_step), block


def _forward(q: Tensor, k: Tensor, v: Tensor, call: BranchPasses) -> tuple[Tensor, Tensor]:
    single = call.plan.single
    if single is not None and call.hidden is None:
        dense = DenseCall(q, k, v, single.is_causal, call.problem.scale, drawn=call.drawn)
        out, lse = call.kernel.forward(dense)
        return _as(out, q.dtype), lse
    whole = len(call.plan.blocks) == 1 and call.plan.batch_step >= call.problem.batch
    if whole:
        out, lse = _block_forward(q, k, v, call.hidden, call, call.plan.blocks[0])
        out = out.to(q.dtype)
    else:
        # New tensors are of q's class: written into plain ones, the results of a wrapper subclass would be lost.
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))
        for rows, block in call.parts():
            hidden = None if call.hidden is None else call.hidden[rows, block.k]
            part, lse_part = _block_forward(q[rows, block.q], k[rows, block.k], v[rows, block.k], hidden, call, block)
            out[rows, block.q], lse[rows, block.q] = part, lse_part
    without_padding(out, lse, call.seq_lens)
    return out, lse.transpose(1, 2)


def _block_forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, call: BranchPasses, block: Block
) -> tuple[Tensor, Tensor]:
    """out and lse [batch, len, heads] of one block, in `sum_dtype`."""
    wide = sum_dtype(q.dtype)
    pieces = iter(block.pieces)
    if block.covers_q and _fills(block.pieces[0], q):
        part, lse_part = _piece_forward(q, k, v, hidden, call, next(pieces))
        out, lse = part.reshape(q.shape).to(wide), lse_part.reshape(q.shape[:-1])
        del part, lse_part  # copies of them are out and lse, where they had another dtype or layout
    else:
        out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:-1], dtype=wide)
        if not block.covers_q:
            out.zero_()
            lse.fill_(-math.inf)
    for piece in pieces:
        _merge_piece(out, lse, piece, _piece_forward(q, k, v, hidden, call, piece))
    return out, lse


def _merge_piece(out: Tensor, lse: Tensor, piece: Piece, found: tuple[Tensor, Tensor]) -> None:
    """Join a piece's results into those of its block. They are freed before the next piece is computed."""
    part, lse_part = found
    rows, lse_rows = piece.q.of(out)[:, :, :, piece.heads], piece.q.of(lse)[:, :, :, piece.heads]
    if piece.fresh_q:
        rows.copy_(part)
        lse_rows.copy_(lse_part)
    else:
        merge_(rows, lse_rows, part.to(out.dtype), lse_part)


def _fills(piece: Piece, q: Tensor) -> bool:
    """Whether a piece writes every row and head of its block."""
    heads = len(range(*piece.heads.indices(q.shape[2])))
    return piece.q.segments * piece.q.rows == q.shape[1] and heads == q.shape[2]


def _piece_forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, call: BranchPasses, piece: Piece
) -> tuple[Tensor, Tensor]:
    """out [batch, segments, count, heads, head_dim] and lse without the last axis."""
    views = [piece.q.of(q)[:, :, :, piece.heads], _kv(k, piece, call), _kv(v, piece, call)]
    views += [] if hidden is None else [piece.k.of(hidden)]
    outs, lses = [], []
    for part in _folds(views):
        mask = _mask(part[3] if hidden is not None else None, call, piece)
        dense = DenseCall(part[0], part[1], part[2], piece.is_causal, call.problem.scale, mask, call.drawn)
        out, lse = call.kernel.forward(dense)
        if mask is not None:
            lse = lse.masked_fill(~_seen(mask, call, piece), -math.inf)
        outs.append(out)
        lses.append(lse.transpose(1, 2))
    shape = views[0].shape
    return _unfold(outs, shape), _unfold(lses, shape[:-1])


def _kv(x: Tensor, piece: Piece, call: BranchPasses) -> Tensor:
    rows = piece.k.of(x)
    if isinstance(piece.kv_heads, slice):
        return rows[:, :, :, piece.kv_heads]
    return rows.index_select(3, _index(piece, call))


def _index(piece: Piece, call: BranchPasses) -> Tensor:
    """The key head of each query head of a piece."""
    problem = call.problem
    heads = range(*piece.heads.indices(problem.heads))
    return kv_head_index(heads, problem.heads // problem.kv_heads, problem.device)


def _mask(hidden: Tensor | None, call: BranchPasses, piece: Piece) -> Tensor | None:
    """The mask added to the scores, [batch, 1, 1 or queries, keys]."""
    # PyTorch copies a mask with gaps for every query on a CPU: [batch, 1, queries, keys].
    mask = None if hidden is None else hidden.contiguous()[:, None, None, :]
    if piece.bias is None:
        return mask
    bias = call.biases[piece.bias].values
    # A caller's bias may be NaN there.
    return bias if mask is None else torch.where(mask == -math.inf, mask, bias + mask)


def _seen(mask: Tensor, call: BranchPasses, piece: Piece) -> Tensor:
    """Whether a query sees any key: bool [batch or 1, 1, queries or 1]."""
    if piece.bias is not None and call.hidden is None:
        return call.biases[piece.bias].seen
    seen = mask != -math.inf
    return seen[:, :, 0].cumsum(-1) > 0 if piece.is_causal else seen.any(-1)


def _folds(views: list[Tensor]) -> Iterator[list[Tensor]]:
    """[batch, segments, ...] tensors as [rows, ...]: all at once if a view can, else along the shorter axis."""
    batch, segments = views[0].shape[:2]
    if segments == 1:
        yield [x[:, 0] for x in views]
    elif batch == 1:
        yield [x[0] for x in views]
    elif all(x.stride(0) == segments * x.stride(1) for x in views):
        yield [x.flatten(0, 1) for x in views]
    elif batch <= segments:
        yield from ([x[i] for x in views] for i in range(batch))
    else:
        yield from ([x[:, i] for x in views] for i in range(segments))


def _unfold(parts: list[Tensor], shape: torch.Size) -> Tensor:
    if len(parts) == 1:
        return torch.unflatten(parts[0], 0, shape[:2])
    return torch.stack(parts, dim=0 if shape[0] <= shape[1] else 1)


def _backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: BranchPasses
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the pieces' gradients; each piece's backward takes the merged out and lse.

    `grad_lse` [batch, heads, q_len] is given to kernels that take it; None with others.
    """
    single = call.plan.single
    if single is not None and call.hidden is None:
        dq, dk, dv = _kernel_backward([grad, q, out, lse, grad_lse], k, v, single, call, None)
        return _as(dq, q.dtype), _as(dk, q.dtype), _as(dv, q.dtype)
    # For rows without keys exp(s + inf) would be inf; with lse = inf their weight is 0.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    by_token = [grad, q, out, lse.transpose(1, 2)] + ([] if grad_lse is None else [grad_lse.transpose(1, 2)])
    for rows, block in call.parts():
        hidden = None if call.hidden is None else call.hidden[rows, block.k]
        q_side = [x[rows, block.q] for x in by_token]
        parts = _block_backward(q_side, k[rows, block.k], v[rows, block.k], hidden, call, block)
        for whole, part, where in zip(grads, parts, (block.q, block.k, block.k)):
            whole[rows, where] = part
    return grads[0], grads[1], grads[2]


def _block_backward(
    q_side: list[Tensor], k: Tensor, v: Tensor, hidden: Tensor | None, call: BranchPasses, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of one block, in `sum_dtype`; `q_side` is grad, q, out, lse and, for some kernels, its gradient."""
    q = q_side[1]
    wide = sum_dtype(q.dtype)
    new_q = q.new_empty if block.covers_q else q.new_zeros
    new_k = k.new_empty if block.covers_k else k.new_zeros
    dq = new_q(q.shape, dtype=wide)
    dk, dv = (new_k(k.shape, dtype=wide) for _ in range(2))
    for piece in block.pieces:
        gq, gk, gv = _piece_backward(q_side, k, v, hidden, call, piece)
        _put(piece.q.of(dq)[:, :, :, piece.heads], gq, piece.fresh_q)
        for total, one in ((dk, gk), (dv, gv)):
            if isinstance(piece.kv_heads, slice):
                _put(piece.k.of(total)[:, :, :, piece.kv_heads], one, piece.fresh_k)
            else:
                piece.k.of(total).index_add_(3, _index(piece, call), one.to(wide))
        del gq, gk, gv, one  # before the next piece is computed
    return dq, dk, dv


def _piece_backward(
    q_side: list[Tensor], k: Tensor, v: Tensor, hidden: Tensor | None, call: BranchPasses, piece: Piece
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the rows and heads of one piece, [batch, segments, count, heads, head_dim]."""
    mine = [piece.q.of(x)[:, :, :, piece.heads] for x in q_side]
    keys = [_kv(x, piece, call) for x in (k, v)]
    views = [*mine, *keys] + ([] if hidden is None else [piece.k.of(hidden)])
    found: list[list[Tensor]] = [[], [], []]
    for part in _folds(views):
        mask = _mask(part[-1] if hidden is not None else None, call, piece)
        g, rows, o, *stats = part[: len(mine)]
        side = [g, rows, o, *(x.transpose(1, 2) for x in stats)]
        grads = _kernel_backward(side, part[len(mine)], part[len(mine) + 1], piece, call, mask)
        for store, one in zip(found, grads):
            store.append(one)
    gq, gk, gv = (_unfold(parts, x.shape) for parts, x in zip(found, (mine[1], *keys)))
    return gq, gk, gv


def _kernel_backward(
    q_side: list[Any], k: Tensor, v: Tensor, piece: Piece, call: BranchPasses, mask: Tensor | None
) -> tuple[Tensor, ...]:
    """One call of the kernel; `q_side` is grad, q, out and lse, and the gradient of lse or nothing."""
    grad, q, out, lse, *grad_lse = q_side
    return call.kernel.backward(
        DenseCall(q, k, v, piece.is_causal, call.problem.scale, mask, call.drawn), grad, out, lse, *grad_lse
    )


def _put(total: Tensor, part: Tensor, fresh: bool) -> None:
    if fresh:
        total.copy_(part)
    else:
        total.add_(part)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The comparison takes a tenth of the time of a no-op conversion.
    return x if x.dtype == dtype else x.to(dtype)


def workspace_bytes(problem: Problem, plan: BranchPlan, kernel: Kernel) -> int:
    """Upper bound of what `run`, its backward and the kernel allocate beyond q, k, v, out and their gradients."""
    entries = -(-(problem.head_dim + 1) // CUDA_HEAD_ALIGN) * CUDA_HEAD_ALIGN  # with a column for the gradient of lse
    row, wide, grads = entries * problem.dtype.itemsize, entries * sum_dtype(problem.dtype).itemsize, problem.needs_grad
    q, k = problem.batch * problem.q_len * problem.heads, problem.batch * problem.k_len * problem.kv_heads
    odd = problem.scale < SMALLEST_SCALE[sum_dtype(problem.dtype)] or any("d" not in x[:4] for x in problem.strides)
    copied = q * grads + 2 * (q + k) * odd + (3 * q + 2 * k) * (grads and problem.return_lse)
    total: int = copied_bytes(problem) + copied * row + 32 * (q + k * problem.masked) + kernel_bytes(problem, k)
    if problem.masked and not kernel.gives_lse:  # the mask of `Sdpa`
        total += 8 * problem.batch * problem.q_len * problem.k_len
    if plan.single is not None and not problem.masked and problem.device.type == "cpu":
        return total + kernel.allocates * (2 + 2 * grads) * (q + k) * wide
    # Of the largest block: its sums, and of a piece what is gathered for each query head, results, and copies.
    spread = any(isinstance(piece.kv_heads, tuple) for block in plan.blocks for piece in block.pieces)
    q, k = (max(span.stop - span.start for span in spans) for spans in zip(*(block[:2] for block in plan.blocks)))
    rows = min(plan.batch_step, problem.batch) * problem.heads
    q, k = rows * q, (2 * rows if spread else rows * problem.kv_heads // problem.heads) * k
    total += q * (row + 2 * wide) + (q + 2 * k) * (row + wide) * grads
    total += kernel.allocates * (2 + 2 * grads) * (q + k) * wide
    if problem.device.type == "cuda":  # sums of a split forward pass, or a dq of each processor
        total += PROCESSORS * wide * (q // rows if problem.deterministic and grads else PER_PROCESSOR)
    return total
