"""Masks made of data for FlexAttention: multiplicity and blocks of the tensors of `Ranges` and `Blocks`.

Kernels take them as inputs: a kernel is compiled for a form, and takes all tensors of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.device_cache import made_on
from attn_dispatch.kernels.flex import mask
from attn_dispatch.kernels.flex.mask import Count, RowCount
from attn_dispatch.spec.data import FAR, Blocks, BlocksForm, Form, Ranges, RangesForm, derived
from attn_dispatch.spec.pattern import Dense, Pattern
from attn_dispatch.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class DataTables:
    """What a kernel takes of a pattern's tensors.

    Args:
        counted: first and last keys [rows, intervals, q_len]; or how often, or whether, blocks are seen:
            [rows, tables, q blocks, k blocks].
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


@lru_cache(maxsize=4096)
def without_density(problem: Problem) -> Problem:
    """The problem that stands for all with tensors of one form."""
    form = problem.pattern
    if not isinstance(form, RangesForm | BlocksForm) or form.density is None:
        return problem
    return replace(problem, pattern=replace(form, density=None, imbalance=None))


def table_axes(form: Pattern, problem: Problem) -> tuple[int, int]:
    """The rows of the batch, and the heads, with block tables of their own by the tensors."""
    heads = problem.heads if isinstance(form, BlocksForm) and form.heads != "all" else 1
    return problem.batch if getattr(form, "by_row", False) else 1, heads


def table_bytes(problem: Problem, size: int) -> int:
    """Upper bound of what making `DataTables` of blocks of `size` tokens takes besides their lists."""
    form, sizes = problem.pattern, (problem.q_len, problem.k_len)
    rows, heads = table_axes(form, problem)
    if isinstance(form, RangesForm):
        blocks = (sizes[0] // size + 1) * (sizes[1] // size + 2)
        return rows * form.intervals * (120 * problem.q_len + 32 * blocks)
    if not isinstance(form, BlocksForm):
        return 0
    return 40 * rows * heads * math.prod(-(-length // block) + 1 for length, block in zip(sizes, form.size))


def tables_of(problem: Problem, data: Tensor, size: int) -> DataTables:
    """Kept as long as the tensors. Blocks have `size` tokens per side."""
    partly = bool(problem.masked or problem.bias)
    form, sizes = without_density(problem).pattern, (problem.q_len, problem.k_len, problem.heads, size)
    key = "flex", form, *sizes, partly
    return derived(data, key, lambda: made_on(problem.device, _tables, problem, data, size, partly))


def _tables(problem: Problem, data: Tensor, size: int, partly: bool) -> DataTables:
    pattern, k_len = problem.pattern.bound(data), problem.k_len
    counted: tuple[Tensor, ...]
    if isinstance(pattern, Ranges):
        found = blocks_of_ranges(pattern, problem.q_len, k_len, size)
        counted, repeated = (data[0].contiguous(), data[1].contiguous()), _overlap(pattern, k_len)
    else:
        assert isinstance(pattern, Blocks)
        found = _cut(blocks_of_table(pattern, problem.q_len, k_len, size), problem, size)
        counts = pattern.block_counts(k_len)
        repeated = bool((counts > 1).any())
        counted = ((counts if repeated else counts > 0).contiguous(),)
    lists = mask.listed(found, partly, always=True)
    copies = tuple(x.clone() for x in counted)  # `data` must not be kept, nor a tensor of inference mode
    return DataTables(copies, tuple(x for x in lists.values() if x is not None), repeated)


def _cut(found: mask.Blocks, problem: Problem, size: int) -> mask.Blocks:
    """The blocks by tables as those of all heads, where the pattern within has some."""
    of_within, heads = arithmetic(problem.pattern), problem.heads
    cut = mask.blocks_of(of_within, problem.q_len, problem.k_len, heads, size, problem.device)
    tables = found.full.shape[1]
    each = heads // tables if tables > 1 else 1
    nonempty, full = (x.repeat_interleave(each, 1) for x in (found.nonempty, found.full))
    return mask.Blocks(nonempty & cut.nonempty, full & cut.full)


def counted_by(form: Form, within: Count | None, heads: int, tensors: tuple[Tensor, ...], adds: bool) -> RowCount:
    """The multiplicity by a pattern's tensors, `DataTables.counted`; `within` is that of its `arithmetic` part."""
    if isinstance(form, RangesForm):
        first, last = tensors
        return _ranges_function(first, last, adds)
    assert isinstance(form, BlocksForm)
    return _blocks_function(tensors[0], form.size, within, heads)


def _ranges_function(first: Tensor, last: Tensor, adds: bool) -> RowCount:
    rows, intervals = first.shape[:2]

    def count(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, total = b * (rows > 1), (j < 0).to(torch.int32 if adds else torch.bool)
        for number in range(intervals):
            seen = (first[row, number, i] <= j) & (j <= last[row, number, i])
            total = total + seen if adds else total | seen
        return total

    return count


def _blocks_function(table: Tensor, size: tuple[int, int], within: Count | None, heads: int) -> RowCount:
    rows, tables = table.shape[:2]

    def count(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = table[b * (rows > 1), h // (heads // tables), i // size[0], j // size[1]]
        return found if within is None else found * within(h, i, j)

    return count


# --- blocks ---------------------------------------------------------------------------------------------------


def blocks_of_ranges(pattern: Ranges, q_len: int, k_len: int, size: int) -> mask.Blocks:
    """The blocks of `size` x `size` tokens that intervals meet or cover: [rows, 1, query blocks, key blocks]."""
    first, last = pattern.bounds(k_len)
    none, columns = first > last, -(-k_len // size)
    touched = _marked(first // size, last // size + 1, none, columns, size) > 0
    covered = _marked(-(-first // size), (last + 1) // size, none, columns, size) == size
    return mask.Blocks(touched.any(1, keepdim=True), covered.any(1, keepdim=True))


def _marked(begin: Tensor, end: Tensor, none: Tensor, columns: int, size: int) -> Tensor:
    """How many queries of a block have `begin <= column < end`: [.., query blocks, columns]."""
    q_len = begin.shape[-1]
    block = torch.arange(q_len, device=begin.device) // size
    rows = -(-q_len // size)
    edges = torch.zeros(*begin.shape[:-1], rows * (columns + 1), dtype=torch.int32, device=begin.device)
    one = (~none & (begin < end)).int()
    for at, step in ((begin, one), (end, -one)):
        edges.scatter_add_(-1, block * (columns + 1) + at * one, step)
    return torch.unflatten(edges, -1, (rows, columns + 1)).cumsum(-1)[..., :-1]


def _overlap(pattern: Ranges, k_len: int) -> bool:
    """Whether two intervals of a query share a key."""
    first, last = pattern.bounds(k_len)
    first, last = first.masked_fill(first > last, FAR), last.masked_fill(first > last, -FAR)
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
    """The first and one past the last of the table's blocks in each of a kernel's; whether that has full size."""
    start = torch.arange(0, length, size, device=device)
    stop = (start + size).clamp(max=length)
    return start // block, (stop - 1) // block + 1, stop - start == size
