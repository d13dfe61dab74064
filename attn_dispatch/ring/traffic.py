"""Which rows go from which rank to which: worked out alike on every rank, so that nobody has to ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.pattern import Pattern
from attn_dispatch.ring.layout import Layout
from attn_dispatch.ring.needs import kv_classes, seen_by

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
    classes = kv_classes(pattern, heads, kv_heads)
    positions = [_positions(layout.chunks[each]) for each in range(layout.ranks)]
    sends: dict[int, list[Rows]] = {}
    receives: dict[int, list[Rows]] = {}
    for members, kind in classes:
        for receiver in range(layout.ranks):
            seen = seen_by(pattern, layout.tokens, layout.chunks[receiver], kind)
            for sender in range(layout.ranks) if receiver == rank else (rank,):
                if sender == receiver:
                    continue
                local = seen[positions[sender]].nonzero().flatten()
                if len(local):
                    rows = Rows(members, local.to(device), positions[sender][local])
                    store, peer = (receives, sender) if receiver == rank else (sends, receiver)
                    store.setdefault(peer, []).append(rows)
    made = ({peer: tuple(rows) for peer, rows in store.items()} for store in (sends, receives))
    return Traffic(rank, layout, positions[rank], *made)


def _positions(chunks: tuple[range, ...]) -> Tensor:
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
