"""Which rows each rank sends to which: every rank computes the same lists, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_dispatch.ring.rows.data import Kept
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.needs import Kind, kv_classes
from attn_dispatch.ring.rows.runs import seen_rows
from attn_dispatch.spec.pattern import Pattern

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of k and v of some key heads, sent from one rank to another.

    Args:
        heads: the key heads.
        local: int64 [rows], their indices in the sender's shard, ascending; on the device of k and v.
        positions: int64 [rows], in the sequence; on the CPU.
    """

    heads: range
    local: Tensor
    positions: Tensor

    @property
    def count(self) -> int:
        """Rows, counted once for each key head."""
        return len(self.local) * len(self.heads)

    def piece(self, number: int, count: int) -> Rows:
        """Number `number` of `count` parts of about the same length."""
        some = slice(len(self.local) * number // count, len(self.local) * (number + 1) // count)
        return Rows(self.heads, self.local[some], self.positions[some])


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Rows that one rank sends and receives in a forward pass, by peer; a backward pass also returns their gradients.

    Peers without rows are left out.
    """

    rank: int
    layout: Layout
    own: Tensor  #: int64 [tokens], the positions of this rank's shard
    sends: dict[int, tuple[Rows, ...]]
    receives: dict[int, tuple[Rows, ...]]


@contextmanager
def without_caller_modes() -> Iterator[None]:
    """For cached tensors: neither inference mode nor the default device of the call that happens to make them."""
    with torch.inference_mode(False), torch.device("cpu"):
        yield


@Kept
@without_caller_modes()
def traffic_of(
    pattern: Pattern, layout: Layout, heads: int, kv_heads: int, rank: int, device: torch.device = CPU
) -> Traffic:
    """The rows that one rank of a layout sends and receives.

    Args:
        pattern: the whole sequence's. A key row is sent once, and only to ranks with a query that sees it.
    """
    sends: dict[int, list[Rows]] = {}
    receives: dict[int, list[Rows]] = {}
    for members, kind in kv_classes(pattern, heads, kv_heads):
        for receiver in range(layout.ranks):
            senders = range(layout.ranks) if receiver == rank else (rank,)
            for sender, local, positions in _rows(pattern, layout, kind, receiver, senders):
                by_peer, peer = (receives, sender) if receiver == rank else (sends, receiver)
                by_peer.setdefault(peer, []).append(Rows(members, local.to(device), positions))
    sent_received = ({peer: tuple(rows) for peer, rows in by_peer.items()} for by_peer in (sends, receives))
    return Traffic(rank, layout, positions_of(layout, rank), *sent_received)


def positions_of(layout: Layout, rank: int) -> Tensor:
    """The positions of a rank's tokens, in the order of its shard: int64 [tokens]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device="cpu") for chunk in layout.chunks[rank]])


def tokens_of(x: Tensor, layout: Layout, rank: int, dim: int = 1) -> Tensor:
    """A rank's tokens of a tensor of the whole sequence, by slices: indices would be copied to a GPU in every call."""
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in layout.chunks[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _rows(
    pattern: Pattern, layout: Layout, kind: Kind, receiver: int, senders: Iterable[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Sender, local indices and positions of rows that the receiver's queries see; senders without rows left out."""
    seen = seen_rows(pattern, layout.tokens, layout.chunks[receiver], kind)
    none = torch.empty(0, dtype=torch.int64)
    for sender in senders:
        if sender == receiver:
            continue
        local, positions, start = [none], [none], 0
        for chunk in layout.chunks[sender]:
            found = [each.positions(chunk) for each in seen]
            positions += found
            local += [each + (start - chunk.start) for each in found]
            start += len(chunk)
        if sum(map(len, positions)):
            yield sender, torch.cat(local), torch.cat(positions)
