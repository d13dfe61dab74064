"""The passes of the Triton backends: their results, and what of a launch is kept for calls that are alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import differentiable, refuse_tangents
from attn_dispatch.kernels.contract import Result
from attn_dispatch.kernels.device_cache import capturing
from attn_dispatch.kernels.hidden import may_hide
from attn_dispatch.kernels.triton.blocks import BlockConfig, parts_of
from attn_dispatch.kernels.triton.support import (
    NOTHING,
    Given,
    Launch,
    Meta,
    Terms,
    TritonKernel,
    grad_or_zeros,
    in_fitting_block,
    launch,
)
from attn_dispatch.kernels.triton.work_list import Bounds
from attn_dispatch.private import forward_ad
from attn_dispatch.spec.problem import Problem

MOST_KEPT = 2**20  #: bytes of lists that a function keeps; thousands may be alive
ALIGNMENT = 16  #: bytes; Triton compiles for addresses that are multiples, and for others


class Tables(NamedTuple):
    """The tensors of lists of either kind, None where a kind has none (see `lists`)."""

    tiles: Tensor
    runs: Tensor
    first_tile: Tensor | None
    kind_of: Tensor
    row_pos: Tensor | None = None
    column_pos: Tensor | None = None
    masks: Tensor | None = None
    reach: Tensor | None = None
    counts: Tensor | None = None
    block_at: Tensor | None = None


class Lists(NamedTuple):
    """What a launch depends on by its lists of either kind (see `lists`).

    Args:
        programs: of each head of a batch row.
        together: heads that take turns, at most.
        bounds: of a row's columns, and of runs of sinks.
        tile: places of a tile; 0: the lists are runs.
        by_row: whether each row of the batch has its own.
    """

    programs: int
    together: int
    tables: Tables
    bounds: tuple[Bounds, ...] = ((None, None),)
    tile: int = 0
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class TritonPasses:
    """A call without its q, k and v.

    Args:
        kernels: of the forward pass, of dq, and of dk and dv.
        blocks: of a kernel, in order of preference. lists: of a kernel in a block.
        every_query, every_key: whether each is in a tile; other rows have no keys, or no queries.
        known: where all calls have q, k and v of the same shapes and strides, and no more: what their launches need.
        key_lens: of few queries, the keys of each row, int32 or int64 without gaps; see `contract.Backend`.
    """

    problem: Problem
    kernels: tuple[TritonKernel, TritonKernel, TritonKernel]
    blocks: Callable[[TritonKernel], Sequence[BlockConfig]]
    lists: Callable[[TritonKernel, BlockConfig], Lists]
    given: Given = NOTHING
    every_query: bool = True
    every_key: bool = True
    known: dict[Hashable, Callable[..., object]] | None = None
    key_lens: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        problem = self.problem
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()  # the kernels read memory as it is
        out = (torch.empty if self.every_query else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32, device=q.device)
        if not self.every_query:
            lse.fill_(-math.inf)
        tensors = (q, k, v, out, lse, *self.given[:2])
        self.launch_as_known(TritonPasses.launch_on_lists, self.kernels[0], tensors, (q, k, v))
        return out, lse

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = (x.resolve_neg() for x in saved)
        out, lse = out.contiguous(), lse.contiguous()  # the kernels know no strides of theirs
        grad, grad_lse = grad_or_zeros(grad, out), None if grad_lse is None else grad_lse.resolve_neg().contiguous()
        dq = (torch.empty if self.every_query else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
        new = torch.empty if self.every_key else torch.zeros
        dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        scaled_lse, delta, strided = torch.empty_like(lse), torch.empty_like(lse), (q, k, v, grad)
        tensors = (q, k, v, out, grad, lse, grad_lse, scaled_lse, delta, dq, *self.given[:2])
        self.launch_as_known(TritonPasses.launch_on_lists, self.kernels[1], tensors, strided)
        of_keys = (q, k, v, grad, scaled_lse, delta, dk, dv, *self.given[:2])
        self.launch_as_known(TritonPasses.launch_on_lists, self.kernels[2], of_keys, strided)
        return dq, dk, dv

    def launch_as_known(
        self,
        launch: Callable[..., Launch],
        kernel: Hashable,
        tensors: Sequence[Tensor | None],
        strided: Sequence[Tensor],
    ) -> None:
        """Launch a kernel, as an earlier call did if there was one."""
        if self.known is None:
            launch(self, kernel, tensors, strided)
            return
        address = missing = 0
        for x in tensors:
            if x is None:
                missing += 1
            else:
                address |= x.data_ptr()
        odd = address % ALIGNMENT and tuple(x is not None and x.data_ptr() % ALIGNMENT > 0 for x in tensors)
        # Those of a backward pass may be other than the forward pass had: hooks of saved tensors make new ones.
        key = (kernel, *[x.stride() for x in strided], odd, missing)
        again = self.known.get(key)
        if again is not None and not capturing(self.problem.device):  # a graph has to keep what the launch reads
            again(tensors)
        else:
            self.known[key] = launch(self, kernel, tensors, strided).again()

    def launch_on_lists(
        self, each: TritonKernel, tensors: Sequence[Tensor | None], strided: Sequence[Tensor]
    ) -> Launch:
        """Launch a kernel in the first block whose resources fit."""
        problem, (block_d, rest_d) = self.problem, parts_of(self.problem.head_dim)
        heads = problem.heads if each.side == "queries" else problem.kv_heads

        def start(block: BlockConfig) -> Launch:
            lists = self.lists(each, block)
            reach = lists.tables.reach
            branches, axes = (0, 0) if reach is None else reach.shape[1:3]
            together = min(lists.together, problem.batch * heads)
            sizes = heads, lists.programs, together, problem.q_len, problem.k_len, *lists.bounds[0]
            others = (lists.tables, *(x.stride() for x in strided), *sizes, Terms.of(problem, self.given))
            meta = Meta.of(problem, block.rows, block.columns, strided, self.given.bias)
            meta = meta._replace(BLOCK_D=block_d, REST_D=rest_d, SINKS=len(lists.bounds) > 1)
            meta = meta._replace(TILE=lists.tile, BRANCHES=branches, AXES=axes, BY_ROW=lists.by_row)
            programs, options = lists.programs * heads * problem.batch, (block.warps, block.stages)
            return launch(each.load(), programs, problem.device, tensors, others, meta, *options)

        return in_fitting_block(each, problem, self.blocks(each), start)


def specialized(name: str, problem: Problem, passes: TritonPasses, list_bytes: int) -> Callable[..., Result] | None:
    """A function of a backend as `contract.Backend` has it, by passes that keep what their launches need."""
    if problem.device.type != "cuda" or list_bytes > MOST_KEPT or may_hide(problem):
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Result:
        if forward_ad._current_level >= 0:
            refuse_tangents(name, q, k, v)
        return differentiable(q, k, v, passes) if problem.needs_grad else passes.forward(q, k, v)

    return run
