"""What a plan takes with PyTorch's kernel for CPUs: the sizes of what `run` and that kernel allocate, step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_dispatch.kernels.branches.plan import Block, BranchPlan, Piece
from attn_dispatch.kernels.hidden import copied_bytes
from attn_dispatch.kernels.numerics import SMALLEST_SCALE, sum_dtype
from attn_dispatch.kernels.scratch import backward_scratch, forward_scratch, packed_bytes
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.spec.problem import Problem

MASK_ENTRY = 18  #: bytes of a key's mask, its copy, its comparison and its running sum
SCALARS = 2**12  #: bytes of tensors with a few entries


class _Sizes(NamedTuple):
    """A piece of all batch rows that are computed at once."""

    q: int  #: rows of queries, of all its heads and segments
    k: int  #: rows of keys
    gathered: bool  #: keys are copied to each query head
    stacked: bool  #: its batch rows and segments are computed one after the other, and joined
    segments: int
    masks: int  #: bytes


def cpu_workspace_bytes(problem: Problem, plan: BranchPlan) -> int:
    """Upper bound of what `run` and its backward allocate on a CPU beyond q, k, v, out and their gradients."""
    item, wide = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize
    q, k = (n * problem.batch * problem.head_dim for n in _rows(problem))
    total = SCALARS + problem.batch * problem.q_len * problem.heads * wide  # lse
    if problem.masked or not isinstance(problem.pattern, Dilated):
        total += copied_bytes(problem)  # pieces of dilated branches hold no keys that the pattern hides
    total += problem.batch * (problem.q_len + problem.k_len) * (MASK_ENTRY + wide) * problem.masked
    if problem.scale < SMALLEST_SCALE[sum_dtype(problem.dtype)]:
        total += q * item  # q times the scale's sign
    if any("d" not in kind.split("+")[0][-1:] for kind in problem.strides):
        total += 2 * (q + k) * item  # rows that are not contiguous are copied
    forward = _forward(problem, plan)
    if not problem.needs_grad:
        return total + forward
    # A forward pass is over before the three gradients exist.
    return total + max(forward - (q + 2 * k) * item, _backward(problem, plan), 0)


def _rows(problem: Problem) -> tuple[int, int]:
    return problem.q_len * problem.heads, problem.k_len * problem.kv_heads


def _is_single(problem: Problem, plan: BranchPlan) -> bool:
    """Whether one call of the kernel computes the problem."""
    return plan.single is not None and not problem.masked


def _sizes(problem: Problem, plan: BranchPlan, piece: Piece) -> _Sizes:
    batch, segments = min(plan.batch_step, problem.batch), piece.q.segments
    grouped = isinstance(piece.kv_heads, slice)
    heads = len(range(problem.heads)[piece.heads])
    kv_heads = len(range(problem.kv_heads)[piece.kv_heads]) if isinstance(piece.kv_heads, slice) else heads
    # Batch rows and segments fold into one axis without a copy where segments fill contiguous rows.
    whole = all(x.segments * x.length == problem.q_len == problem.k_len for x in (piece.q, piece.k))
    folds = segments == 1 or batch == 1 or (whole and all(kind in ("bnhd", "bnd") for kind in problem.strides))
    return _Sizes(
        batch * segments * piece.q.rows * heads,
        batch * segments * piece.k.rows * kv_heads,
        not grouped,
        not folds,
        segments,
        MASK_ENTRY * batch * segments * piece.k.rows * problem.masked,
    )


def _blocks(plan: BranchPlan) -> list[Block]:
    """One block of each length."""
    return list({(block.q.stop - block.q.start, block.k.stop - block.k.start): block for block in plan.blocks}.values())


def _forward(problem: Problem, plan: BranchPlan) -> int:
    """Bytes of a forward pass beyond out and lse."""
    if _is_single(problem, plan):
        piece = plan.blocks[0].pieces[0]
        return _forward_scratch(problem, piece) + packed_bytes(problem, _sizes(problem, plan, piece).k)
    item, wide, d = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize, problem.head_dim
    whole = len(plan.blocks) == 1 and plan.batch_step >= problem.batch
    out = problem.batch * problem.q_len * problem.heads * d * item
    rest = out if whole else 0  # a whole block's sums are out, unless they are rounded
    most = 0
    for block in _blocks(plan):
        rows = min(plan.batch_step, problem.batch) * (block.q.stop - block.q.start) * problem.heads
        sums = rows * (d + 1) * wide
        most = max(most, sums + (out if whole and item != wide else 0))
        for number, piece in enumerate(block.pieces):
            sizes = _sizes(problem, plan, piece)
            part = sizes.q * (d * item + wide)
            merged = part + sizes.q * (d * wide * (item != wide) + 3 * wide)  # widened; shares of the two sides
            first = number == 0 and block.covers_q and sizes.q == rows
            if first:  # becomes the sums; rows of a lse by segments are copied, those of out in other layouts
                merged = part + rows * (d * wide * (item != wide) + wide * (sizes.segments > 1))
                merged += part * (problem.strides[0] not in ("bnhd", "nhd"))
            held = 0 if first else sums
            most = max(most, held + _computed(problem, sizes, part, _forward_scratch(problem, piece)), held + merged)
    return max(0, most - rest)


def _backward(problem: Problem, plan: BranchPlan) -> int:
    """Bytes of a backward pass beyond the gradients of q, k and v."""
    item, wide = problem.dtype.itemsize, sum_dtype(problem.dtype).itemsize
    d = problem.head_dim + problem.return_lse  # a column for the gradient of lse
    q, k = (n * problem.batch for n in _rows(problem))
    columns = ((3 * q + 2 * k) * d * item + (q + 2 * k) * item + 3 * q * wide) * problem.return_lse
    if _is_single(problem, plan):
        return columns + q * d * item + _backward_scratch(problem, plan.blocks[0].pieces[0])  # a contiguous gradient
    most, batch = 0, min(plan.batch_step, problem.batch)
    for block in _blocks(plan):
        lengths = block.q.stop - block.q.start, block.k.stop - block.k.start
        sums = batch * (lengths[0] * problem.heads + 2 * lengths[1] * problem.kv_heads) * d * wide
        for piece in block.pieces:
            # The rows of lse, which is by heads, fold into no axis with those of other batch rows.
            sizes = _sizes(problem, plan, piece)._replace(stacked=piece.q.segments > 1 and batch > 1)
            part = (sizes.q + 2 * sizes.k) * d * item
            copied = sizes.q * (d * item + wide)  # the kernel wants a contiguous gradient and lse
            put = max(sizes.q, sizes.k) * d * wide * (item != wide)  # widened to be added
            running = _computed(problem, sizes, part, copied + _backward_scratch(problem, piece), d)
            most = max(most, sums + running, sums + part + put)
    return columns + q * wide + most  # and a lse without -inf


def _computed(problem: Problem, sizes: _Sizes, part: int, scratch: int, d: int | None = None) -> int:
    """The most bytes while a piece is computed, with its results, `part`."""
    gathered = 2 * sizes.k * (d or problem.head_dim) * problem.dtype.itemsize * sizes.gathered
    lse = sizes.q * sum_dtype(problem.dtype).itemsize * problem.masked  # without rows that see no key
    at_end = part * sizes.stacked
    return gathered + sizes.masks + part + max(scratch + packed_bytes(problem, sizes.k), lse, at_end)


def _forward_scratch(problem: Problem, piece: Piece) -> int:
    """Bytes of the kernel's tiles in all threads."""
    return torch.get_num_threads() * forward_scratch(problem, piece.q.rows, piece.k.rows)


def _backward_scratch(problem: Problem, piece: Piece) -> int:
    return torch.get_num_threads() * backward_scratch(problem, piece.q.rows, piece.k.rows)
