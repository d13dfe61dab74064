"""Masks made of data for FlexAttention: multiplicity and blocks of the tensors of `Ranges` and `Blocks`.

Kernels take them as inputs: a kernel is compiled for a form, and takes all tensors of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.device_cache import made_on
from attn_dispatch.kernels.flex import mask
from attn_dispatch.kernels.flex.mask import Count, RowCount
from attn_dispatch.spec.data import FAR, Blocks, BlocksForm, DataPattern, Form, Ranges, RangesForm, derived
from attn_dispatch.spec.pattern import Dense, Pattern
from attn_dispatch.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class DataTables:
    """What a kernel takes of a pattern's tensors.

    Args:
        counted: first and last [rows, intervals, q_len]; or how often blocks are seen [rows, tables, q blocks, k blocks].
        lists: see `mask.listed`.
        repeated: whether a query may see a key more than once.
    """

    counted: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]
    repeated: bool


NO_DATA = DataTables((), (), repeated=False)


def arithmetic(pattern: Pattern) -> Pattern:
    """The part of a pattern that needs no tensors, in natural order."""
    return getattr(pattern, "within", Dense()) if isinstance(pattern, Form) else pattern.natural


def without_density(problem: Problem) -> Problem:
    """The problem that stands for all with tensors of one form."""
    form = problem.pattern
    return replace(problem, pattern=replace(form, density=None)) if isinstance(form, RangesForm | BlocksForm) else problem


def table_axes(form: Pattern, problem: Problem) -> tuple[int, int]:
    """The rows of the batch, and the heads, with block tables of their own by the tensors."""
    heads = problem.heads if isinstance(form, BlocksForm) and form.heads != "all" else 1
    return problem.batch if getattr(form, "by_row", False) else 1, heads


def tables_of(problem: Problem, data: Tensor, size: int) -> DataTables:
    """Kept as long as the tensors. Blocks have `size` tokens per side."""
    partly = bool(problem.masked or problem.bias)
    key = "flex", problem.q_len, problem.k_len, problem.heads, size, partly
    return derived(data, key, lambda: made_on(problem.device, _tables, problem, data, size, partly))


def _tables(problem: Problem, data: Tensor, size: int, partly: bool) -> DataTables:
    pattern, sizes = problem.pattern.bound(data), (problem.q_len, problem.k_len)
    assert isinstance(pattern, Ranges | Blocks)
    within, heads = arithmetic(problem.pattern), problem.heads
    if isinstance(pattern, Ranges):
        found = blocks_of_ranges(pattern, *sizes, size)
        counted, repeated = (data[0].clone(), data[1].clone()), _overlap(pattern, problem.k_len)
    else:
        found = blocks_of_table(pattern, *sizes, size)
        counts = pattern.block_counts(problem.k_len)
        repeated = bool((counts > 1).any())
        counted = ((counts.clone() if repeated else counts > 0).contiguous(),)
        # of heads that share a table
        some = (x.repeat_interleave(heads // x.shape[1] if x.shape[1] > 1 else 1, 1) for x in (found.nonempty, found.full))
        cut = mask.blocks_of(within, *sizes, heads, size, data.device)
        nonempty, full = (x & y for x, y in zip(some, (cut.nonempty, cut.full)))
        found = mask.Blocks(nonempty, full)
    lists = mask.listed(found, partly, always=True)
    return DataTables(counted, tuple(x for x in lists.values() if x is not None), repeated)


def counted_by(
    form: Form, count: Count | None, heads: int, tensors: tuple[Tensor, ...], repeated: bool
) -> RowCount:
    """The multiplicity by a pattern's tensors, `DataTables.counted`; `count` is that of its `arithmetic` part."""
    if isinstance(form, RangesForm):
        return _ranges_function(*tensors, repeated)
    assert isinstance(form, BlocksForm)
    return _blocks_function(*tensors, form.size, count, heads)


def _ranges_function(first: Tensor, last: Tensor, repeated: bool) -> RowCount:
    rows, intervals = first.shape[:2]

    def count(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, total = b * (rows > 1), (j < 0).to(torch.int32 if repeated else torch.bool)
        for number in range(intervals):
            seen = (first[row, number, i] <= j) & (j <= last[row, number, i])
            total = total + seen if repeated else total | seen
        return total

    return count


def _blocks_function(table: Tensor, size: tuple[int, int], within: Count | None, heads: int) -> RowCount:
    rows, tables = table.shape[:2]

    def count(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = table[b * (rows > 1), h // (heads // tables), i // size[0], j // size[1]]
        return found if within is None else found * within(h, i, j)

    return count


# --- blocks -----------------------------------------------------------------------------------------------------------


def blocks_of_ranges(pattern: Ranges, q_len: int, k_len: int, size: int) -> mask.Blocks:
    """The blocks of `size` x `size` tokens that intervals meet or cover: [rows, 1, query blocks, key blocks]."""
    first, last, none = _within_keys(pattern, k_len)
    columns = -(-k_len // size)
    touched = _marked(first // size, last // size + 1, none, columns, size) > 0
    covered = _marked(-(-first // size), (last + 1) // size, none, columns, size) == size
    return mask.Blocks(touched.any(1, keepdim=True), covered.any(1, keepdim=True))


def _within_keys(pattern: Ranges, k_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last keys, int64 [rows, intervals, q_len], and where there are none."""
    first, last = pattern.data.long()
    first, last = first.clamp(min=0), last.clamp(max=k_len - 1)
    return first, last, first > last


def _marked(begin: Tensor, end: Tensor, none: Tensor, columns: int, size: int) -> Tensor:
    """How many queries of a block have `begin <= column < end`: [.., query blocks, columns]."""
    q_len = begin.shape[-1]
    block = torch.arange(q_len, device=begin.device) // size
    edges = torch.zeros(*begin.shape[:-1], -(-q_len // size) * (columns + 1), dtype=torch.int32, device=begin.device)
    one = (~none & (begin < end)).int()
    for at, step in ((begin, one), (end, -one)):
        edges.scatter_add_(-1, block * (columns + 1) + at * one, step)
    return edges.unflatten(-1, (-1, columns + 1)).cumsum(-1)[..., :-1]


def _overlap(pattern: Ranges, k_len: int) -> bool:
    """Whether two intervals of a query share a key."""
    first, last, none = _within_keys(pattern, k_len)
    first, last = first.masked_fill(none, FAR), last.masked_fill(none, -FAR)
    order = first.argsort(1)
    first, last = first.gather(1, order), last.gather(1, order)
    return bool((first[:, 1:] <= last.cummax(1).values[:, :-1]).any())


def blocks_of_table(pattern: Blocks, q_len: int, k_len: int, size: int) -> mask.Blocks:
    """The blocks of `size` x `size` tokens in which some or all of the table's are seen: [rows, tables, ..]."""
    seen = pattern.block_counts(k_len) > 0
    sums = pad(seen.int().cumsum(2, dtype=torch.int32).cumsum(3, dtype=torch.int32), (1, 0, 1, 0))
    (top, bottom, tall), (left, right, wide) = (
        _spans(length, block, size, seen.device) for length, block in zip((q_len, k_len), pattern.size)
    )
    top, bottom, tall = top[:, None], bottom[:, None], tall[:, None]
    number = sums[..., bottom, right] - sums[..., top, right] - sums[..., bottom, left] + sums[..., top, left]
    return mask.Blocks(number > 0, (number == (bottom - top) * (right - left)) & tall & wide)


def _spans(length: int, block: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The first and one past the last of the table's blocks in each of a kernel's, and whether that has full size."""
    start = torch.arange(0, length, size, device=device)
    stop = (start + size).clamp(max=length)
    return start // block, (stop - 1) // block + 1, stop - start == size
