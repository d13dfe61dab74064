"""When ranks are done: their work and their messages as a time-table, in the order in which the engine has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attn_dispatch.ring.engine.steps import Transfer, transfers
from attn_dispatch.ring.plan.bytes_sent import Freight, Load, freight_of
from attn_dispatch.ring.rows.chunking import own_shares
from attn_dispatch.spec.orders import GATHER, LOCAL, RING

FORWARD, BOTH = 4, 14  #: operations for a query-key pair and an element of head_dim, without and with backward

Size = Callable[[int, int], int]  #: bytes from one rank (first) to another


@dataclass(frozen=True, slots=True)
class Pace:
    """What a rank does in a second: operations on useful pairs, and bytes each way over its link."""

    operations: float
    link: float


def seconds(load: Load, exchange: str, pace: Pace) -> float:
    """From the first rank's start to the last one's end, all starting together; work and messages alone, no latency."""
    problem = load.problem
    element = problem.batch * problem.head_dim / pace.operations
    pairs = [[float(count) for count in row] for row in load.counts.pairs]

    def work(times: int) -> list[list[float]]:
        return [[count * element * times for count in row] for row in pairs]

    def rows(sender: int, receiver: int) -> int:
        return load.counts.rows[receiver][sender] * load.row_bytes

    def grads(sender: int, receiver: int) -> int:
        return load.counts.rows[sender][receiver] * load.grad_row_bytes

    passes = [_Pass(work(FORWARD), rows, None, pace.link)]
    if problem.needs_grad:
        passes.append(_Pass(work(BOTH - FORWARD), rows, grads, pace.link))
    if exchange == LOCAL:
        return sum(max(each.own(rank) for rank in range(load.layout.ranks)) for each in passes)
    if exchange == RING:
        steps = transfers(problem, load.layout, RING)
        return sum(each.ring(steps) for each in passes)
    if exchange == GATHER:
        (step,) = transfers(problem, load.layout, GATHER)
        return sum(each.gather(step) for each in passes)
    freight: Sequence[Freight] = freight_of(load, exchange)
    shipped = sum(max(each) for each in ([f.forward for f in freight], [f.backward for f in freight]))
    times = BOTH if problem.needs_grad else FORWARD
    return sum(map(sum, pairs)) / load.layout.ranks * element * times + shipped / pace.link


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass.

    Args:
        work: seconds [receiver][sender].
        rows: what is sent before the work. home: what goes back after it, if anything.
        link: bytes per second, each way.
    """

    work: list[list[float]]
    rows: Size
    home: Size | None
    link: float

    @property
    def ranks(self) -> range:
        return range(len(self.work))

    def own(self, rank: int) -> float:
        return self.work[rank][rank]

    def ring(self, transfers: Sequence[Transfer]) -> float:
        """A piece is sent while the one before, and some of a rank's own rows, are worked on; gradients are sent back
        meanwhile.
        """
        count, wires = len(self.work), _Wires(len(self.work), self.link)
        steps = [None, *(each for each in transfers for _ in range(each.pieces)), None]
        own = [self._own(rank, len(steps) - 1) for rank in self.ranks]
        done, arrived, home = ([0.0] * count for _ in range(3))
        for step, (now, then) in enumerate(pairwise(steps)):
            begin = [max(each) for each in zip(done, arrived)]
            if then is not None:
                arrived = wires.ship(then.pairs, self.rows, begin, then.pieces)
            done = list(begin)
            if now is not None:
                for sender, receiver in now.pairs:
                    done[receiver] += self.work[receiver][sender] / now.pieces
                if self.home is not None:
                    done = [max(each) for each in zip(done, home)]
                    home = wires.ship([pair[::-1] for pair in now.pairs], self.home, done, now.pieces)
            done = [done[rank] + own[rank][step] for rank in self.ranks]
        return max(*done, *home)

    def _own(self, rank: int, steps: int) -> list[float]:
        far = (sum(self.work[rank]) - self.own(rank)) / max(1, steps - 1)
        return [*own_shares(self.own(rank), far, steps, self.home is not None), 0.0]

    def gather(self, transfer: Transfer) -> float:
        """All rows are sent while a rank's own are worked on."""
        arrived = [max(self.own(rank), self._all(transfer, rank, self.rows)) for rank in self.ranks]
        done = [begin + sum(self.work[rank]) - self.own(rank) for rank, begin in zip(self.ranks, arrived)]
        home = self.home
        return max(done) + (0.0 if home is None else max(self._all(transfer, rank, home) for rank in self.ranks))

    def _all(self, transfer: Transfer, rank: int, size: Size) -> float:
        """Seconds for all that a rank sends and receives at once."""
        sent = sum(size(rank, peer) for peer in transfer.receivers(rank))
        return max(sent, sum(size(peer, rank) for peer in transfer.senders(rank))) / self.link


class _Wires:
    """One message at a time each way."""

    def __init__(self, ranks: int, link: float) -> None:
        self.out, self.into, self.link = [0.0] * ranks, [0.0] * ranks, link

    def ship(self, moves: Sequence[tuple[int, int]], size: Size, ready: Sequence[float], pieces: int) -> list[float]:
        """When each rank has sent and received one of so many pieces; it starts when both ends are ready for it."""
        found = list(ready)
        for sender, receiver in moves:
            taken = size(sender, receiver) / pieces / self.link
            if taken:
                end = max(ready[sender], ready[receiver], self.out[sender], self.into[receiver]) + taken
                self.out[sender] = self.into[receiver] = end
                found[sender], found[receiver] = max(found[sender], end), max(found[receiver], end)
        return found
