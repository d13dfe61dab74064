"""A pattern's multiplicity, and changes of scores, as functions of indices, for kernels that take such functions.

The functions take heads, queries and keys as broadcastable integer tensors; when a compiler traces them, each has one
element. Everything else in them is constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem

Count = Callable[[Tensor, Tensor, Tensor], Tensor]


def multiplicity_function(pattern: Pattern, q_len: int, k_len: int, heads: int) -> Count | None:
    """The function `c(head, query, key)`; None if every query sees every key once.

    It returns int32 if `counts_above_one`, else bool.

    Raises:
        TypeError: the pattern is not one of this package's.
    """
    if isinstance(pattern, Dilated):
        return _dilated(pattern, q_len, heads)
    if isinstance(pattern, Neighborhood):
        return _neighborhood(pattern)
    bands = pattern.bands(q_len, k_len, ())
    if bands is None:
        raise TypeError(f"no arithmetic for {pattern!r}")
    found = [_band(band.low, band.high, band.stop) for band in bands]
    return found[0] if len(found) == 1 else _either(found)


def score_function(
    problem: Problem,
    count: Count | None,
    places: Tensor | None,
    positions: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """The function `score(s, row, head, query, key)`, which caps and biases a score; None if it would change none.

    Args:
        count: the multiplicity, whose logarithm is added; None where it is never above 1.
        places, positions: of the kernel's rows, in the caller's tensors and in the pattern; None for the same.
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
            at = (i, j) if positions is None else (positions[i], positions[j])
            s = s + count(h, *at).clamp(min=1).to(wide).log()
        return s

    return score


def counts_above_one(pattern: Pattern) -> bool:
    """Whether a query may see a key more than once."""
    return isinstance(pattern, Dilated) and pattern.heads == "all" and len(pattern.branches) > 1


def _band(low: int | None, high: int | None, stop: int | None) -> Count | None:
    bounds: list[Count] = []
    if low is not None:
        bounds.append(lambda head, query, key: key - query >= low)
    if high is not None:
        bounds.append(lambda head, query, key: key - query <= high)
    if stop is not None:
        bounds.append(lambda head, query, key: key < stop)

    def seen(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = bounds[0](head, query, key)
        for bound in bounds[1:]:
            found = found & bound(head, query, key)
        return found

    return seen if bounds else None


def _either(branches: list[Count | None]) -> Count | None:
    """Whether any branch shows the key; the branches are disjoint."""
    some = [branch for branch in branches if branch is not None]
    if len(some) < len(branches):
        return None

    def seen(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = some[0](head, query, key)
        for branch in some[1:]:
            found = found | branch(head, query, key)
        return found

    return seen


def _dilated(pattern: Dilated, length: int, heads: int) -> Count:
    branches = [_branch(pattern, branch, length, heads) for branch in range(len(pattern.branches))]
    once = not counts_above_one(pattern)

    def count(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = branches[0](head, query, key)
        found = found if once else found.to(torch.int32)
        for branch in branches[1:]:
            more = branch(head, query, key)
            found = found | more if once else found + more.to(torch.int32)
        return found

    return count


def _branch(pattern: Dilated, branch: int, length: int, heads: int) -> Count:
    segment, rate = min(pattern.segment_lengths[branch], length), pattern.dilation_rates[branch]
    in_branch, offset = _offset(pattern, branch, heads)

    def seen(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = query // segment == key // segment
        if pattern.is_causal:
            found = found & (key <= query)
        if rate > 1:
            wanted = offset(head)
            found = found & (query % segment % rate == wanted) & (key % segment % rate == wanted)
        return found if in_branch is None else found & in_branch(head)

    return seen


def _offset(
    pattern: Dilated, branch: int, heads: int
) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor | int]]:
    """Functions of the head: whether it is in the branch (None: all are), and its offset."""
    rate, skipped = pattern.dilation_rates[branch], pattern.first_head
    if pattern.heads == "all":
        run = -(-(pattern.all_heads or heads) // rate)
        if pattern.offsets == "mod":
            return None, lambda head: (head + skipped) % rate
        return None, lambda head: (head + skipped) // run
    members = [head for head in range(heads) if pattern.head_offset(branch, head, heads) is not None]
    first, stop = (members[0], members[-1] + 1) if members else (0, 0)
    return (lambda head: (head >= first) & (head < stop)), (lambda head: branch % rate)


def _neighborhood(pattern: Neighborhood) -> Count:
    axes = []
    stride = 1
    for axis in reversed(pattern.axes):
        axes.append((stride, axis.size, axis.sees))
        stride *= axis.size

    def seen(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        stride, size, sees = axes[0]
        found = sees(query // stride % size, key // stride % size)
        for stride, size, sees in axes[1:]:
            found = found & sees(query // stride % size, key // stride % size)
        return found

    return seen
