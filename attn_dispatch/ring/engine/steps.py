"""The steps of a pass over many ranks: which rows are exchanged and worked on in each, and the buffers of the messages.

`transfers` and `buffer_rows` need no positions: `plan` reads them for sequences too long to list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.ring.engine.parts import Part, Source, parts_of
from attn_dispatch.ring.rows.chunking import own_shares, pieces
from attn_dispatch.ring.rows.data import Kept
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import Rows, Traffic, traffic_of, without_caller_modes
from attn_dispatch.spec.orders import GATHER, LOCAL, ULYSSES
from attn_dispatch.spec.problem import Problem

# --- messages -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """Which ranks exchange rows in a step, or in several steps, piece by piece.

    Args:
        ranks: number of ranks.
        distances: for each d, rank r sends to rank (r + d) % ranks and receives from rank (r - d) % ranks.
        pieces: number of steps; each sends one piece of the rows between two ranks (see `Rows.piece`).
    """

    ranks: int
    distances: range
    pieces: int = 1

    def senders(self, rank: int) -> list[int]:
        """The ranks that `rank` receives rows from, ascending."""
        return sorted((rank - distance) % self.ranks for distance in self.distances)

    def receivers(self, rank: int) -> list[int]:
        """The ranks that `rank` sends rows to, ascending."""
        return sorted((rank + distance) % self.ranks for distance in self.distances)


def transfers(problem: Problem, layout: Layout, exchange: str) -> list[Transfer]:
    """The transfers of a forward pass, in order; the same on every rank.

    Args:
        problem: the whole sequence's.
        exchange: "ring": one sender for each rank at a time; "gather": all senders at once; others: none.
    """
    if exchange in (LOCAL, ULYSSES):
        return []
    if exchange == GATHER:
        return [Transfer(layout.ranks, range(1, layout.ranks))]
    count = pieces(problem, layout)
    return [Transfer(layout.ranks, range(distance, distance + 1), count) for distance in range(1, layout.ranks)]


def row_slots(number: int) -> tuple[int, int]:
    """The buffers for rows that step `number` receives and sends; the rows of the step before are still in use."""
    return number % 2, 2


GRAD_SLOTS = 3, 4  #: the buffers for gradients of rows that a step sent, and of rows that it received


def buffer_rows(counts: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Rows that each buffer must hold, by slot.

    Args:
        counts: rows that each step receives and sends, from the first transfer on.
    """
    most = dict.fromkeys((*range(3), *GRAD_SLOTS), 0)
    for number, (received, sent) in enumerate(counts, 1):
        for slot, rows in zip((*row_slots(number), *GRAD_SLOTS), (received, sent, sent, received)):
            most[slot] = max(most[slot], rows)
    return most


# --- steps of a rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Rows of k and v that are worked on together: the rank's own, or those of one transfer.

    Args:
        receives, sends: rows received from and sent to each peer; empty for the rank's own rows.
        sources: the rows, one source for each set of key heads.
        parts: the attention problems on them.
    """

    receives: dict[int, tuple[Rows, ...]]
    sends: dict[int, tuple[Rows, ...]]
    sources: tuple[Source, ...]
    parts: tuple[Part, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """Rows received and sent, one for each key head."""
        received, sent = (
            sum(each.count for several in by_peer.values() for each in several)
            for by_peer in (self.receives, self.sends)
        )
        return received, sent


@Kept
@without_caller_modes()
def steps_of(problem: Problem, layout: Layout, rank: int, exchange: str) -> tuple[Step, ...]:
    """A rank's steps: its own rows, then those of each of `transfers`, whose arguments these are, piece by piece."""
    traffic = traffic_of(problem.pattern, layout, problem.heads, problem.kv_heads, rank, problem.device)
    own = Source.of(problem, range(problem.kv_heads), traffic.own)
    found = [Step({}, {}, (own,), parts_of(problem, layout, rank, (own,), own=True))]
    # Steps without rows are kept: messages between two ranks are matched by their order, so that all ranks need equal
    # numbers of steps.
    for transfer in transfers(problem, layout, exchange):
        found += [_step(problem, traffic, transfer, number) for number in range(transfer.pieces)]
    return tuple(found)


def _step(problem: Problem, traffic: Traffic, transfer: Transfer, number: int) -> Step:
    def pieces_of(rows: Mapping[int, tuple[Rows, ...]], peers: Sequence[int]) -> dict[int, tuple[Rows, ...]]:
        cut = {peer: [each.piece(number, transfer.pieces) for each in rows.get(peer, ())] for peer in peers}
        some = {peer: tuple(each for each in several if each.count) for peer, several in cut.items()}
        return {peer: several for peer, several in some.items() if several}

    receives = pieces_of(traffic.receives, transfer.senders(traffic.rank))
    sends = pieces_of(traffic.sends, transfer.receivers(traffic.rank))
    by_heads: dict[range, list[Tensor]] = {}
    for rows in receives.values():
        for each in rows:
            by_heads.setdefault(each.heads, []).append(each.positions)
    sources = tuple(Source.of(problem, heads, torch.cat(positions)) for heads, positions in by_heads.items())
    parts = parts_of(problem, traffic.layout, traffic.rank, sources, own=False)
    return Step(receives, sends, sources, parts)


@lru_cache(maxsize=32)
def own_work(steps: tuple[Step, ...], backward: bool) -> list[Step]:
    """The parts of a rank's own rows, distributed over the steps (see `own_shares`)."""
    own, far = steps[0], steps[1:]
    if not far:
        return [own]
    each = sum(part.pairs for step in far for part in step.parts) / len(far)
    shares = own_shares(sum(part.pairs for part in own.parts), each, len(steps), backward)
    by_step: list[list[Part]] = [[] for _ in steps]
    number, done, due = 0, 0, shares[0]
    for part in own.parts:
        while done >= due and number + 1 < len(shares):
            number += 1
            due += shares[number]
        by_step[number].append(part)
        done += part.pairs
    return [replace(own, parts=tuple(parts)) for parts in by_step]
