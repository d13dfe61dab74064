"""Predicts the wall time of a call over many ranks: simulates compute and messages in the engine's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attn_dispatch.ring.engine.steps import Transfer, transfers
from attn_dispatch.ring.plan.bytes_sent import BytesSent, CountedProblem, bytes_sent_of
from attn_dispatch.ring.rows.chunking import own_shares
from attn_dispatch.spec.orders import GATHER, LOCAL, RING

FORWARD, BOTH = 4, 14  #: operations per query-key pair and element of head_dim: forward, and forward with backward

Size = Callable[[int, int], int]  #: bytes sent by one rank (first) to another (second)


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Operations per second of a rank on the pattern's pairs, and bytes per second of its link in each direction."""

    operations_per_s: float
    link: float


def seconds(counted: CountedProblem, exchange: str, speed: RankSpeed) -> float:
    """Seconds until the last rank is done if all start together. Latency is not counted."""
    problem = counted.problem
    element = problem.batch * problem.head_dim / speed.operations_per_s
    pairs = [[float(count) for count in row] for row in counted.counts.pairs]

    def work(times: int) -> list[list[float]]:
        return [[count * element * times for count in row] for row in pairs]

    def rows(sender: int, receiver: int) -> int:
        return counted.counts.rows[receiver][sender] * counted.row_bytes

    def grads(sender: int, receiver: int) -> int:
        return counted.counts.rows[sender][receiver] * counted.grad_row_bytes

    passes = [_Pass(work(FORWARD), rows, None, speed.link)]
    if problem.needs_grad:
        passes.append(_Pass(work(BOTH - FORWARD), rows, grads, speed.link))
    if exchange == LOCAL:
        return sum(max(each.own(rank) for rank in range(counted.layout.ranks)) for each in passes)
    if exchange == RING:
        steps = transfers(problem, counted.layout, RING)
        return sum(each.ring(steps) for each in passes)
    if exchange == GATHER:
        (step,) = transfers(problem, counted.layout, GATHER)
        return sum(each.gather(step) for each in passes)
    sent: Sequence[BytesSent] = bytes_sent_of(counted, exchange)
    most_sent = max(each.forward for each in sent) + max(each.backward for each in sent)
    times = BOTH if problem.needs_grad else FORWARD
    return sum(map(sum, pairs)) / counted.layout.ranks * element * times + most_sent / speed.link


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass.

    Args:
        work: seconds of a rank on the rows of a sender, [rank][sender].
        rows: bytes of the rows that are sent before the work.
        grads: bytes of their gradients, which are sent back after it; None in a forward pass.
        link: bytes per second in each direction.
    """

    work: list[list[float]]
    rows: Size
    grads: Size | None
    link: float

    @property
    def ranks(self) -> range:
        return range(len(self.work))

    def own(self, rank: int) -> float:
        return self.work[rank][rank]

    def ring(self, transfers: Sequence[Transfer]) -> float:
        """Seconds of a ring pass. While a rank receives a piece, and gradients are returned, it computes on the piece
        before and on some of its own rows.
        """
        count, links = len(self.work), _Links(len(self.work), self.link)
        steps = [None, *(each for each in transfers for _ in range(each.pieces)), None]
        own = [self._own(rank, len(steps) - 1) for rank in self.ranks]
        done, received, returned = ([0.0] * count for _ in range(3))
        for step, (now, following) in enumerate(pairwise(steps)):
            begin = [max(each) for each in zip(done, received)]
            if following is not None:
                received = links.send(following.pairs, self.rows, begin, following.pieces)
            done = list(begin)
            if now is not None:
                for sender, receiver in now.pairs:
                    done[receiver] += self.work[receiver][sender] / now.pieces
                if self.grads is not None:
                    done = [max(each) for each in zip(done, returned)]
                    returned = links.send([pair[::-1] for pair in now.pairs], self.grads, done, now.pieces)
            done = [done[rank] + own[rank][step] for rank in self.ranks]
        return max(*done, *returned)

    def _own(self, rank: int, steps: int) -> list[float]:
        far = (sum(self.work[rank]) - self.own(rank)) / max(1, steps - 1)
        return [*own_shares(self.own(rank), far, steps, self.grads is not None), 0.0]

    def gather(self, transfer: Transfer) -> float:
        """Seconds of a gather pass: each rank computes on its own rows while it receives all others."""
        received = [max(self.own(rank), self._all(transfer, rank, self.rows)) for rank in self.ranks]
        done = [begin + sum(self.work[rank]) - self.own(rank) for rank, begin in zip(self.ranks, received)]
        grads = self.grads
        return max(done) + (0.0 if grads is None else max(self._all(transfer, rank, grads) for rank in self.ranks))

    def _all(self, transfer: Transfer, rank: int, size: Size) -> float:
        """Seconds in which a rank sends and receives all messages of a transfer."""
        sent = sum(size(rank, peer) for peer in transfer.receivers(rank))
        return max(sent, sum(size(peer, rank) for peer in transfer.senders(rank))) / self.link


class _Links:
    """The ranks' links; each carries one message at a time in each direction."""

    def __init__(self, ranks: int, link: float) -> None:
        self.link = link
        self.sent_at, self.received_at = [0.0] * ranks, [0.0] * ranks  # the end of each rank's last message

    def send(self, pairs: Sequence[tuple[int, int]], size: Size, ready: Sequence[float], pieces: int) -> list[float]:
        """The time at which each rank has sent and received one of `pieces` pieces.

        Args:
            pairs: senders and receivers; a message starts when both are ready.
        """
        found = list(ready)
        for sender, receiver in pairs:
            taken = size(sender, receiver) / pieces / self.link
            if taken:
                end = max(ready[sender], ready[receiver], self.sent_at[sender], self.received_at[receiver]) + taken
                self.sent_at[sender] = self.received_at[receiver] = end
                found[sender], found[receiver] = max(found[sender], end), max(found[receiver], end)
        return found
