"""A pattern's multiplicity, and changes of scores, as functions of indices, for kernels that take such functions.

The functions take heads, queries and keys as broadcastable integer tensors; when a compiler traces them, each has one
element. Everything else in them is constant. The blocks of queries and keys that hold visible keys are found by the
bounding boxes of a pattern's normal form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Axis, Band, Reach

Count = Callable[[Tensor, Tensor, Tensor], Tensor]  #: of head, query and key
RowCount = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  #: of row of the batch, head, query and key


def multiplicity_function(
    pattern: Pattern, q_len: int, k_len: int, heads: int, device: torch.device | None = None
) -> Count | None:
    """The function `c(head, query, key)`; None if every query sees every key once.

    It returns int32 if `counts_above_one`, else bool.

    Args:
        device: of the tensors that the function reads.

    Raises:
        TypeError: the pattern is not one of this package's.
    """
    if pattern.axes:
        return _neighborhood(pattern.axes)
    bands = pattern.bands(q_len, k_len, (0,) * len(pattern.branches))
    if bands is None:
        raise TypeError(f"no arithmetic for {pattern!r}")
    by_head = [pattern.head_offsets(head, heads) or (0,) * len(bands) for head in range(heads)]
    by_branch = ([-1 if offset is None else offset for offset in offsets] for offsets in zip(*by_head))
    found = [_band(band, torch.tensor(offsets, device=device)) for band, offsets in zip(bands, by_branch)]
    branches = [branch for branch in found if branch is not None]
    if len(branches) < len(found):  # without bounds: the others see nothing that it does not
        return None
    adds = counts_above_one(pattern)

    def count(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        total = branches[0](head, query, key)
        total = total.to(torch.int32) if adds else total
        for branch in branches[1:]:
            more = branch(head, query, key)
            total = total + more.to(torch.int32) if adds else total | more
        return total

    return count


def score_function(
    problem: Problem, count: RowCount | None, places: Tensor | None, bias: Tensor | None, slopes: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """The function `score(s, row, head, query, key)`, which caps and biases a score; None if it would change none.

    Args:
        count: the multiplicity, whose logarithm is added; None where it is never above 1.
        places: of the kernel's rows in the caller's tensors; None for the same.
    """
    wide, shift = sum_dtype(problem.dtype), problem.k_len - problem.q_len
    if count is None and not problem.score_terms:
        return None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if problem.softcap:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        query, key = (i, j) if places is None else (places[i], places[j])
        if bias is not None:
            row, head = (index * (size > 1) for index, size in zip((b, h), problem.bias))
            s = s + bias[row, head, query, key].to(wide)
        if slopes is not None:
            slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
            s = s - slope.to(wide) * (query + shift - key).abs().to(wide)
        if count is not None:
            times = count(b, h, i, j)
            s = s + torch.where(times > 1, times, 1).to(wide).log()  # clamp: flash-attn 4's compiler lacks it
        return s

    return score


def counts_above_one(pattern: Pattern) -> bool:
    """Whether a query may see a key more than once."""
    return sum(offset is not None for offset in pattern.head_offsets(0, 1)) > 1


def _band(band: Band, offsets: Tensor) -> Count | None:
    """Whether a branch shows the key; None if it always does. `offsets` are those of the heads, -1 of others."""
    low, high, segment, rate, _, stop, ahead = band
    bounds: list[Count] = []
    if segment is not None:
        bounds.append(lambda head, query, key: (query + ahead) // segment == key // segment)
    if low is not None:
        bounds.append(lambda head, query, key: key - query >= low)
    if high is not None:
        bounds.append(lambda head, query, key: key - query <= high)
    if stop is not None:
        bounds.append(lambda head, query, key: key < stop)
    if segment is not None and (rate > 1 or bool((offsets != 0).any())):
        bounds.append(lambda head, query, key: (query + ahead) % segment % rate == offsets[head])
        bounds.append(lambda head, query, key: key % segment % rate == offsets[head])

    def seen(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = bounds[0](head, query, key)
        for bound in bounds[1:]:
            found = found & bound(head, query, key)
        return found

    return seen if bounds else None


def _neighborhood(grid: tuple[Axis, ...]) -> Count:
    axes = []
    stride = 1
    for axis in reversed(grid):
        axes.append((stride, axis.size, axis.sees))
        stride *= axis.size

    def seen(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        stride, size, sees = axes[0]
        found = sees(query // stride % size, key // stride % size)
        for stride, size, sees in axes[1:]:
            found = found & sees(query // stride % size, key // stride % size)
        return found

    return seen


# --- blocks ---------------------------------------------------------------------------------------------------

FAR = 2**40  #: past every place
#: The lists of a BlockMask.
LISTS = tuple(
    f"{kind}{side}_{what}" for kind in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
)


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


def listed(blocks: Blocks, partly: bool, always: bool) -> dict[str, Tensor | None]:
    """The lists of a BlockMask, of the blocks [rows, heads, query blocks, key blocks].

    Args:
        partly: whether no block is known to be full: there are masks, or a bias.
        always: whether there are lists of full blocks even where there is no such block.
    """
    whole = torch.zeros_like(blocks.full) if partly else blocks.full
    some = blocks.nonempty & ~whole
    found: list[Tensor | None] = [*_listed(some), *_listed(some.mT)]
    found += [*_listed(whole), *_listed(whole.mT)] if always or bool(whole.any()) else [None] * 4
    return dict(zip(LISTS, found))


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the number of set blocks, and the block indices with set blocks first."""
    count = table.sum(-1, dtype=torch.int32)
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count.contiguous(), order.contiguous()


def _blocked(x: Tensor, size: int, fill: int) -> Tensor:
    """[tokens] as [blocks, size], filled to whole blocks."""
    return pad(x, (0, -len(x) % size), value=fill).view(-1, size)
