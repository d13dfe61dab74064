"""What ranks ship in one call, in bytes, by counts alone: what `exchange.Wire.shipped` comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.engine.exchange import Sizes, message_size
from attn_dispatch.ring.plan.counts import Counts
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.spec.orders import GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class Load:
    """A problem over ranks with what was counted of it.

    Args:
        problem: the whole sequence's.
    """

    problem: Problem
    layout: Layout
    counts: Counts

    @property
    def row_bytes(self) -> int:
        """Of one row of one key head: k and v, all batch rows."""
        return message_size(1, self.problem) * self.problem.dtype.itemsize

    @property
    def grad_row_bytes(self) -> int:
        """Of the gradients of one row, which are sent in the dtype of sums."""
        return message_size(1, self.problem) * sum_dtype(self.problem.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Freight:
    """Bytes that one rank sends, forward, and backward where there is one."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def why_not(load: Load, exchange: str) -> str:
    """Why ranks would not exchange rows so; empty where they could."""
    most = max(map(load.counts.received, range(load.layout.ranks)))
    if exchange == LOCAL:
        return f"a rank sees {most} key rows of other ranks" if most else ""
    if not most:
        return "no rank sees another's rows: there is nothing to exchange"
    return ulysses.why_not(load.problem, load.layout.ranks) if exchange == ULYSSES else ""


def freight_of(load: Load, exchange: str) -> list[Freight]:
    """By rank. A gradient that reaches lse is counted where lse is asked for."""
    ranks = range(load.layout.ranks)
    if exchange == ULYSSES:
        return [_by_heads(load, rank) for rank in ranks]
    if exchange in (RING, GATHER):
        return [_rows(load, rank) for rank in ranks]
    return [Freight(0, 0) for _ in ranks]


def _rows(load: Load, rank: int) -> Freight:
    forward = load.counts.sent(rank) * load.row_bytes
    home = load.counts.received(rank) * load.grad_row_bytes
    return Freight(forward, forward + home if load.problem.needs_grad else 0)


def _by_heads(load: Load, rank: int) -> Freight:
    """Tokens go to all others by heads, and heads go back by tokens; gradients the other way."""
    problem, lengths = load.problem, load.layout.lengths
    token = Sizes.of(problem, 1)
    inputs, results = token.q + token.kv, token.q + (token.lse if problem.return_lse else 0)
    forward = _to_heads(lengths, rank, inputs) + _to_tokens(lengths, rank, results)
    backward = _to_heads(lengths, rank, results) + _to_tokens(lengths, rank, inputs)
    return Freight(forward, backward if problem.needs_grad else 0)


def _to_heads(lengths: Sequence[int], rank: int, token: int) -> int:
    """Own tokens, but for own heads."""
    return lengths[rank] * token // len(lengths) * (len(lengths) - 1)


def _to_tokens(lengths: Sequence[int], rank: int, token: int) -> int:
    """Own heads, but for own tokens."""
    return (sum(lengths) - lengths[rank]) * (token // len(lengths))
