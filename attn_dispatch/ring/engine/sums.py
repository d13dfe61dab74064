"""Partial results of one rank, summed up in float32 or wider: out and lse forward, gradients backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_dispatch.kernels.branches.run import merge_, sum_dtype
from attn_dispatch.ring.engine.parts import Part


class Sums:
    """out [batch, tokens, heads, head_dim] and lse [batch, tokens, heads] over the keys met so far."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, part: Part, out: Tensor, lse: Tensor) -> None:
        """Join what a part of the keys gave; lse is [batch, heads, tokens]."""
        wide = sum_dtype(self.q.dtype)
        out, lse = out.to(wide), lse.transpose(1, 2)
        if self.out is None or self.lse is None:
            if isinstance(part.rows, slice) and out.shape == self.q.shape:
                self.out, self.lse = out, lse.contiguous()
                return
            self.out = torch.zeros(self.q.shape, dtype=wide, device=self.q.device)
            self.lse = torch.full(self.q.shape[:3], -math.inf, dtype=wide, device=self.q.device)
        mine, stats = part.of(self.out), part.of(self.lse)
        merge_(mine, stats, out, lse)
        if isinstance(part.rows, Tensor):
            self.out[:, :, part.heads].index_copy_(1, part.rows, mine)
            self.lse[:, :, part.heads].index_copy_(1, part.rows, stats)

    def results(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of q, and lse [batch, heads, tokens]; zeros and -inf where nothing was met."""
        if self.out is None or self.lse is None:
            wide = sum_dtype(self.q.dtype)
            none = torch.full(self.q.shape[:3], -math.inf, dtype=wide, device=self.q.device)
            return torch.zeros_like(self.q), none.transpose(1, 2)
        return self.out.to(self.q.dtype), self.lse.transpose(1, 2)


def add_rows(total: Tensor, part: Part, grad: Tensor) -> None:
    """Add a part's gradient to its rows and heads of `total` [batch, tokens, heads, head_dim]."""
    mine = total[:, :, part.heads]
    if isinstance(part.rows, Tensor):
        mine.index_add_(1, part.rows, grad.to(total.dtype))
    else:
        mine[:, part.rows] += grad
