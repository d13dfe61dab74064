"""The blocks of queries and keys that hold visible keys, by the bounding boxes of a pattern's normal form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
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
    if positions is not None and not isinstance(pattern, Neighborhood):
        return _reordered(pattern, heads, size, positions)
    queries, keys = (torch.arange(n, device=device) if positions is None else positions for n in (q_len, k_len))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for (offsets,), members in heads_by_kind(pattern, heads).items():
        reaches = pattern.reaches(queries, keys, q_len, k_len, offsets)
        branches = [_branch(reach, isinstance(pattern, Dilated), size) for reach in reaches]
        nonempty, full = (torch.stack(each).any(0) for each in zip(*branches))
        found |= dict.fromkeys(members, (nonempty, full))
    nonempty, full = (torch.stack(each) for each in zip(*(found[head] for head in range(heads))))
    if distinct_heads(pattern, heads, size) == 1:
        nonempty, full = nonempty.any(0, keepdim=True), full.all(0, keepdim=True)
    return Blocks(nonempty, full)


def distinct_heads(pattern: Pattern, heads: int, size: int, reordered: bool = False) -> int:
    """The length of `blocks_of`'s first axis: `heads`, or 1.

    Rates up to the block size select a token in every block of a segment whatever the offset, except in short last
    blocks; not so in another order.
    """
    if reordered:
        return 1 if isinstance(pattern, Neighborhood) else heads
    distinct = isinstance(pattern, Dilated) and (pattern.heads == "split" or max(pattern.dilation_rates) > size)
    return heads if distinct else 1


def _branch(reach: Reach, selects: bool, size: int) -> tuple[Tensor, Tensor]:
    """Nonempty and full blocks of a branch, bool [query blocks, key blocks].

    Args:
        selects: the second axis, if any, says which tokens the branch selects, with 0.
    """
    axes = list(zip(reach.first, reach.last, reach.at))
    q_out = k_out = torch.zeros((), dtype=torch.bool, device=axes[0][2].device)
    if selects and len(axes) > 1:
        (_, last, at), axes = axes[1], axes[:1]
        q_out, k_out = last != 0, at != 0
    blocks: list[tuple[Tensor, Tensor]] = []
    for first, last, at in axes:
        # The box of the selected tokens; with others, or past the end, a block is not full.
        low, high = _blocked(first, q_out, size, FAR), _blocked(last, q_out, size, -FAR)
        start, end = _blocked(at, k_out, size, FAR), _blocked(at, k_out, size, -FAR)
        meets = (low.amin(1)[:, None] <= end.amax(1)) & (high.amax(1)[:, None] >= start.amin(1))
        covers = (low.amax(1)[:, None] <= end.amin(1)) & (high.amin(1)[:, None] >= start.amax(1))
        blocks.append((meets, covers))
    nonempty, full = (torch.stack(each).all(0) for each in zip(*blocks))
    return nonempty, full


def _blocked(x: Tensor, out: Tensor, size: int, fill: int) -> Tensor:
    """[tokens] as [blocks, size], filled in where tokens are out, and to whole blocks."""
    return pad(x.masked_fill(out, fill), (0, -len(x) % size), value=fill).view(-1, size)


def _reordered(pattern: Pattern, heads: int, size: int, positions: Tensor) -> Blocks:
    """By the definition, a block of queries at a time."""
    nonempty, full = [], []
    for rows in torch.split(positions, size):
        seen = pattern.multiplicity(len(positions), heads=heads, q_pos=rows, k_pos=positions) > 0
        by_key = torch.stack([seen.any(1), seen.all(1)])
        padded = pad(by_key, (0, -len(positions) % size)).view(2, len(seen), -1, size)
        nonempty.append(padded[0].any(-1))
        full.append(padded[1].all(-1) & (len(rows) == size))
    return Blocks(torch.stack(nonempty, 1), torch.stack(full, 1))
