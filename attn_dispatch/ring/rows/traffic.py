"""Which rows go from which rank to which: worked out alike on every rank, so that nobody has to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.needs import Kind, kv_classes, seen_by
from attn_dispatch.ring.rows.runs import Cell, cells_of
from attn_dispatch.spec.pattern import Pattern

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of k and v that some key heads send along.

    Args:
        heads: the key heads.
        local: int64 [rows], where they lie in the sender's shard, ascending; on the device of k and v.
        positions: int64 [rows], which tokens they are; on the CPU.
    """

    heads: range
    local: Tensor
    positions: Tensor

    @property
    def count(self) -> int:
        return len(self.local) * len(self.heads)

    def piece(self, number: int, count: int) -> Rows:
        """One of so many parts of about as many rows each."""
        some = slice(len(self.local) * number // count, len(self.local) * (number + 1) // count)
        return Rows(self.heads, self.local[some], self.positions[some])


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What one rank sends and receives in a forward pass, by peer; in a backward pass gradients go the other way.

    Peers that nothing goes to or comes from are left out.
    """

    rank: int
    layout: Layout
    own: Tensor  #: int64 [tokens], the positions of this rank's shard
    sends: dict[int, tuple[Rows, ...]]
    receives: dict[int, tuple[Rows, ...]]


@contextmanager
def plain() -> Iterator[None]:
    """For tensors that are kept, or compared: neither the mode nor the default device of the call that asks first."""
    with torch.inference_mode(False), torch.device("cpu"):
        yield


@lru_cache(maxsize=16)
@plain()
def traffic_of(
    pattern: Pattern, layout: Layout, heads: int, kv_heads: int, rank: int, device: torch.device = CPU
) -> Traffic:
    """What one rank of a layout sends and receives.

    Args:
        pattern: the whole sequence's; a key row is shipped once, and only where a query of the receiver sees it.
    """
    sends: dict[int, list[Rows]] = {}
    receives: dict[int, list[Rows]] = {}
    for members, kind in kv_classes(pattern, heads, kv_heads):
        for receiver in range(layout.ranks):
            senders = range(layout.ranks) if receiver == rank else (rank,)
            for sender, local, positions in _rows(pattern, layout, kind, receiver, senders):
                store, peer = (receives, sender) if receiver == rank else (sends, receiver)
                store.setdefault(peer, []).append(Rows(members, local.to(device), positions))
    made = ({peer: tuple(rows) for peer, rows in store.items()} for store in (sends, receives))
    return Traffic(rank, layout, positions_of(layout, rank), *made)


def positions_of(layout: Layout, rank: int) -> Tensor:
    """The positions of a rank's tokens in the order in which they lie in its shard."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device="cpu") for chunk in layout.chunks[rank]])


def _rows(
    pattern: Pattern, layout: Layout, kind: Kind, receiver: int, senders: Iterable[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Sender, local rows and positions of what the receiver's queries see of each sender; of some senders nothing."""
    mine = layout.chunks[receiver]
    sees: Callable[[range], Tensor]
    # By arithmetic where it can be: masks of every token take long where ranks are many.
    if pattern.bands(layout.tokens, layout.tokens, ()) is not None:
        sees = partial(_of_cells, cells_of(pattern, layout.tokens, mine, kind))
    else:
        sees = partial(_of_mask, seen_by(pattern, layout.tokens, mine, kind))
    for sender in senders:
        if sender == receiver:
            continue
        local, positions, start = [], [], 0
        for chunk in layout.chunks[sender]:
            found = sees(chunk)
            positions.append(found)
            local.append(found + (start - chunk.start))
            start += len(chunk)
        if sum(map(len, positions)):
            yield sender, torch.cat(local), torch.cat(positions)


def _of_cells(cells: list[Cell], chunk: range) -> Tensor:
    """The positions of a run that lie in these cells, ascending."""
    return torch.cat([cell.positions(chunk) for cell in cells] or [torch.empty(0, dtype=torch.int64)])


def _of_mask(seen: Tensor, chunk: range) -> Tensor:
    return seen[chunk.start : chunk.stop].nonzero().flatten() + chunk.start
