"""Predicts the bytes that ranks send in one call, from counts of rows: those that `Transport.bytes_sent` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.engine.exchange import Sizes, message_size
from attn_dispatch.ring.plan.counts import Counts, count_layout
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.spec.orders import GATHER, LOCAL, RING, ULYSSES
from attn_dispatch.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class CountedProblem:
    """The problem of a whole sequence, its layout over ranks, and the counts for the layout."""

    problem: Problem
    layout: Layout
    counts: Counts

    @classmethod
    def of(cls, problem: Problem, layout: Layout) -> CountedProblem:
        return cls(problem, layout, count_layout(problem.pattern, layout, problem.heads, problem.kv_heads))

    @property
    def row_bytes(self) -> int:
        """Bytes of k and v of one row of one key head, for all batch rows."""
        return message_size(1, self.problem) * self.problem.dtype.itemsize

    @property
    def grad_row_bytes(self) -> int:
        """Bytes of the gradients of one row, which are sent in the dtype of sums."""
        return message_size(1, self.problem) * sum_dtype(self.problem.dtype).itemsize


@dataclass(frozen=True, slots=True)
class BytesSent:
    """Bytes that one rank sends in each pass; backward is 0 if no gradients are needed."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def refusal(counted: CountedProblem, exchange: str) -> str:
    """The reason why an exchange cannot serve; "" if it can."""
    most = max(map(counted.counts.received, range(counted.layout.ranks)))
    if exchange == LOCAL:
        return f"a rank sees {most} key rows of other ranks" if most else ""
    if not most:
        return "no rank sees another's rows: there is nothing to exchange"
    return ulysses.refusal(counted.problem, counted.layout.ranks) if exchange == ULYSSES else ""


def bytes_sent_of(counted: CountedProblem, exchange: str) -> list[BytesSent]:
    """For each rank. A gradient of lse is counted if lse is returned."""
    ranks = range(counted.layout.ranks)
    if exchange == ULYSSES:
        return [_by_heads(counted, rank) for rank in ranks]
    if exchange in (RING, GATHER):
        return [_rows(counted, rank) for rank in ranks]
    return [BytesSent(0, 0) for _ in ranks]


def _rows(counted: CountedProblem, rank: int) -> BytesSent:
    forward = counted.counts.sent(rank) * counted.row_bytes
    grads = counted.counts.received(rank) * counted.grad_row_bytes
    return BytesSent(forward, forward + grads if counted.problem.needs_grad else 0)


def _by_heads(counted: CountedProblem, rank: int) -> BytesSent:
    """Each rank sends its tokens of other ranks' heads, then its heads of other ranks' tokens; gradients conversely."""
    problem, lengths = counted.problem, counted.layout.lengths
    token = Sizes.of(problem, 1)
    inputs, results = token.q + token.kv, token.q + (token.lse if problem.return_lse else 0)
    forward = _to_heads(lengths, rank, inputs) + _to_tokens(lengths, rank, results)
    backward = _to_heads(lengths, rank, results) + _to_tokens(lengths, rank, inputs)
    return BytesSent(forward, backward if problem.needs_grad else 0)


def _to_heads(lengths: Sequence[int], rank: int, token_bytes: int) -> int:
    """Bytes of the rank's tokens, for the heads of other ranks."""
    return lengths[rank] * token_bytes // len(lengths) * (len(lengths) - 1)


def _to_tokens(lengths: Sequence[int], rank: int, token_bytes: int) -> int:
    """Bytes of the rank's heads, for the tokens of other ranks."""
    return (sum(lengths) - lengths[rank]) * (token_bytes // len(lengths))
