"""Predicts the wall time of a call over many ranks, from the steps of the engine: in each, ranks compute while
they send and receive.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from attn_dispatch.ring.engine.steps import transfers
from attn_dispatch.ring.plan.counts import CountedProblem
from attn_dispatch.ring.rows.chunking import own_shares
from attn_dispatch.spec.orders import ULYSSES

FORWARD, BOTH = 4, 14  #: operations per query-key pair and element of head_dim: forward, and forward with backward


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Operations per second of a rank on the pattern's pairs, and bytes per second of its link in each direction."""

    operations_per_s: float
    link: float


def seconds(counted: CountedProblem, exchange: str, speed: RankSpeed) -> float:
    """Seconds until the last rank is done if all begin each step together. Latency is not counted."""
    if exchange == ULYSSES:  # all ranks have as many pairs, and wait for what they receive
        sent = max(sum(counted.bytes_sent(rank, exchange)) for rank in range(counted.layout.ranks))
        work = sum(map(sum, counted.counts.pairs)) / counted.layout.ranks * counted.problem.batch
        work *= counted.problem.head_dim * (BOTH if counted.problem.needs_grad else FORWARD)
        return work / speed.operations_per_s + sent / speed.link
    forward = _pass_seconds(counted, exchange, speed, FORWARD, backward=False)
    if not counted.problem.needs_grad:
        return forward
    return forward + _pass_seconds(counted, exchange, speed, BOTH - FORWARD, backward=True)


def _pass_seconds(
    counted: CountedProblem, exchange: str, speed: RankSpeed, operations: int, *, backward: bool
) -> float:
    pair_s = operations * counted.problem.batch * counted.problem.head_dim / speed.operations_per_s
    row_s, grad_s = counted.row_bytes / speed.link, counted.grad_row_bytes / speed.link if backward else 0.0
    rows, pairs = counted.counts.rows, counted.counts.pairs
    found = transfers(counted.problem, counted.layout, exchange)
    by_rank: list[list[float]] = []
    for rank in range(counted.layout.ranks):
        # Of each step: seconds on received rows, rows received and rows sent; nothing in the step of its own rows,
        # and nothing after the last.
        work, received, sent = [0.0], [0.0], [0.0]
        for each in found:
            senders, receivers = each.senders(rank), each.receivers(rank)
            work += [sum(pairs[rank][peer] for peer in senders) * pair_s / each.pieces] * each.pieces
            received += [sum(rows[rank][peer] for peer in senders) / each.pieces] * each.pieces
            sent += [sum(rows[peer][rank] for peer in receivers) / each.pieces] * each.pieces
        steps = len(work)
        own = own_shares(pairs[rank][rank] * pair_s, sum(work) / max(1, steps - 1), steps, backward)
        work, own, received, sent = ([*x, 0.0, 0.0] for x in (work, own, received, sent))
        # During a step, the next one's rows and the gradients of the one before are sent.
        gives = (sent[n + 1] * row_s + received[n - 1] * grad_s for n in range(steps + 1))
        takes = (received[n + 1] * row_s + sent[n - 1] * grad_s for n in range(steps + 1))
        by_rank.append([*map(max, map(add, work, own), gives, takes)])
    return float(sum(map(max, zip(*by_rank))))
