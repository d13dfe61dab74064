"""Shard a sequence at a model's input, and gather it at its output.

mesh = init_device_mesh("cuda", (8,))
spread = Sharded(mesh, "zigzag")  # balances causal work; plain `mesh` means contiguous shards
x = shard(x, spread)              # [batch, tokens, ...], this rank's part
... attend(q, k, v, is_causal=True, mesh=spread) in every layer ...
x = unshard(x, spread)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring.link import Link, agree, errors_sent, gathered, link_of
from attn_dispatch.ring.rows.layout import CONTIGUOUS, KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of, tokens_of
from attn_dispatch.spec import checks
from attn_dispatch.spec.tracing import ContextParallel


@dataclass(frozen=True)
class Sharded:
    """How a sequence is split over the ranks of a mesh.

    Args:
        mesh: a 1-D DeviceMesh (of a larger one: `mesh["context"]`), a process group, or "world".
        kind: "contiguous", or "zigzag": an early and a late chunk for each rank, which balances causal work.
        weights: proportions of the ranks' token counts, one number for each rank; equal by default.
        multiple_of: every shard's tokens but the last one's are a multiple of this, so that rows of a grid, or
            segments, are not cut.
    """

    mesh: Any
    kind: str = CONTIGUOUS
    weights: tuple[float, ...] | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")
        if isinstance(self.multiple_of, bool) or not isinstance(self.multiple_of, int) or self.multiple_of < 1:
            raise InvalidInput(f"multiple_of must be an integer >= 1, got {self.multiple_of!r}")
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(checks.reals(self.weights)))

    def layout(self, tokens: int) -> Layout:
        """The positions of each rank in a sequence of `tokens` tokens.

        Raises:
            InvalidInput: a rank would have no token, or the number of weights is not that of ranks.
        """
        return Layout(deal(tokens, link_of(self.mesh).size, self.weights, self.multiple_of), self.kind)


def spread_of(mesh: object) -> tuple[Link, Sharded]:
    """The link and the `Sharded` of a mesh, or of torch's context_parallel; by default contiguous."""
    if isinstance(mesh, ContextParallel):
        mesh = Sharded(mesh.mesh, ZIGZAG if mesh.balanced else CONTIGUOUS)
    spread = mesh if isinstance(mesh, Sharded) else Sharded(mesh)
    return link_of(spread.mesh), spread


def shard(x: Tensor, mesh: object, dim: int = 1) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole.

    Args:
        x: any shape, with the tokens along `dim`; gradients pass through.
        mesh: as `attend` takes it, a `Sharded` included.

    Raises:
        InvalidInput: an argument is wrong, or there are fewer tokens than ranks.
    """
    link, spread = spread_of(mesh)
    axis = checks.axis_of(x, dim)
    return tokens_of(x, spread.layout(x.shape[axis]), link.rank, axis).contiguous()


def unshard(x: Tensor, mesh: object, dim: int = 1) -> Tensor:
    """Gather a sharded tensor on every rank; a collective.

    Shards may have any lengths. The gradient of a shard is its part of this rank's gradient of the whole tensor, which
    is right where every rank computes the same loss.

    Args:
        x: this rank's shard, with the tokens along `dim`.
        mesh: as `attend` takes it, a `Sharded` included.

    Raises:
        InvalidInput: an argument is wrong. GroupMismatch: shards differ in more than their lengths. RankLost: a rank
            has exited, or did not answer in time.
    """
    link, spread = spread_of(mesh)
    with errors_sent(link):
        axis = checks.axis_of(x, dim)
    shape = [None if at == axis else size for at, size in enumerate(x.shape)]
    arguments = {"shape": shape, "dtype": str(x.dtype), "device": x.device.type, "shards": spread.kind}
    layout = Layout(agree(link, arguments, x.shape[axis], 0).lengths, spread.kind)
    return gathered(x, link, layout.chunks, axis, sums=False).contiguous()


def shard_positions(length: int, mesh: object) -> Tensor:
    """The positions of this rank's tokens in a sequence of `length`, int64 on the CPU: for rotary embeddings.

    Raises:
        InvalidInput: an argument is wrong, or there are fewer tokens than ranks.
    """
    length = checks.length(length)
    link, spread = spread_of(mesh)
    return positions_of(spread.layout(length), link.rank)


def weights_of(mesh: object, each: float) -> tuple[float, ...]:
    """Weights for `Sharded` from a number of each rank, such as free memory or measured speed; a collective.

    Args:
        each: this rank's number, positive.

    Raises:
        InvalidInput: a rank's number is not positive. RankLost: a rank has exited, or did not answer in time.
    """
    link, _ = spread_of(mesh)
    number = checks.real(each)
    found = link.all_gather_objects((number, repr(each)))
    if not all(0 < share < math.inf for share, _ in found):
        raise InvalidInput(f"each must be a positive number on every rank, got {', '.join(text for _, text in found)}")
    return tuple(share for share, _ in found)
