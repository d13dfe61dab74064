"""The blocks of queries and keys that hold visible keys, by the bounding boxes of a pattern's normal form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.reach import Reach

FAR = 2**40  #: past every place


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bool tensors [heads, query blocks, key blocks], or [1, ...] where one entry stands for all heads.

    Args:
        nonempty: the block may hold a visible pair; where False it holds none.
        full: every pair of the block is visible to all its heads, and the block has full size.
    """

    nonempty: Tensor
    full: Tensor


def blocks_of(
    pattern: Pattern,
    q_len: int,
    k_len: int,
    heads: int,
    size: int,
    device: torch.device | str | None = None,
    positions: Tensor | None = None,
) -> Blocks:
    """The blocks of `size` x `size` tokens from token 0 on; the last ones may be shorter.

    Args:
        positions: int64 [q_len], natural positions of queries and keys in another order.

    Raises:
        TypeError: the pattern is not one of this package's.
    """
    queries, keys = (torch.arange(n, device=device) if positions is None else positions for n in (q_len, k_len))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for (offsets,), members in heads_by_kind(pattern, heads).items():
        branches = [_branch(reach, size) for reach in pattern.reaches(queries, keys, q_len, k_len, offsets)]
        nonempty, full = (torch.stack(each).any(0) for each in zip(*branches))
        found |= dict.fromkeys(members, (nonempty, full))
    nonempty, full = (torch.stack(each) for each in zip(*(found[head] for head in range(heads))))
    if distinct_heads(pattern, heads, size, positions is not None) == 1:
        nonempty, full = nonempty.any(0, keepdim=True), full.all(0, keepdim=True)
    return Blocks(nonempty, full)


def distinct_heads(pattern: Pattern, heads: int, size: int, reordered: bool = False) -> int:
    """The length of `blocks_of`'s first axis: `heads`, or 1.

    Rates up to the block size select a token in every block of a segment whatever the offset, except in short last
    blocks; not so in another order, nor where heads are split among branches.
    """
    offsets = [offset for head in range(heads) for offset in pattern.head_offsets(head, heads)]
    alike = None not in offsets and not reordered and max((rate for _, rate in pattern.branches), default=1) <= size
    return 1 if alike or not offsets else heads


def _branch(reach: Reach, size: int) -> tuple[Tensor, Tensor]:
    """Nonempty and full blocks of a branch, bool [query blocks, key blocks]."""
    blocks: list[tuple[Tensor, Tensor]] = []
    for first, last, at in zip(*reach):
        # A block with places past the end is not full.
        low, high, start, end = (_blocked(x, size, fill) for x, fill in zip((first, last, at, at), (FAR, -FAR) * 2))
        meets = (low.amin(1)[:, None] <= end.amax(1)) & (high.amax(1)[:, None] >= start.amin(1))
        covers = (low.amax(1)[:, None] <= end.amin(1)) & (high.amin(1)[:, None] >= start.amax(1))
        blocks.append((meets, covers))
    nonempty, full = (torch.stack(each).all(0) for each in zip(*blocks))
    return nonempty, full


def _blocked(x: Tensor, size: int, fill: int) -> Tensor:
    """[tokens] as [blocks, size], filled to whole blocks."""
    return pad(x, (0, -len(x) % size), value=fill).view(-1, size)
