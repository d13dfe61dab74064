"""Attention over tile pairs, forward and backward, with any dense kernel that takes a mask, in few large calls.

Query tiles with the same number of key tiles form one call. Their keys are gathered from the caller's tensors into a
reused buffer that fits a cache; results are scattered into the output tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Passes, differentiable
from attn_dispatch.kernels.dense import DenseCall, Kernel, with_lse_column
from attn_dispatch.kernels.device_cache import kv_head_index
from attn_dispatch.kernels.heads import kv_heads_of
from attn_dispatch.kernels.hidden import Hidden, hidden_by_masks, without_padding
from attn_dispatch.kernels.numerics import sum_dtype, with_positive_scale
from attn_dispatch.kernels.tiles.tables import TileTable, cached_with
from attn_dispatch.kernels.tiles.threads import WorkQueue, run_in_threads
from attn_dispatch.spec.problem import Problem

CHUNK_BYTES = 5 * 2**19  #: of keys gathered at once: few enough to be read from a cache
CUDA_CHUNK_BYTES = 2**28


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    tables: Sequence[Sequence[TileTable]],
    kernel: Kernel,
    **tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute attention over the tile pairs of these tables.

    Args:
        q: [batch, q_len, heads, head_dim]. k, v: [batch, k_len, kv_heads, head_dim]. Any strides.
        tables: one for each class of heads, of all rows of the batch or of each.
        kernel: a dense kernel that takes masks.
        tensors: seq_lens, key_mask and pattern_data, where the problem has them. Hidden keys may hold NaN.

    Returns:
        out as q, and lse [batch, heads, q_len]. Gradients pass through both where `problem.needs_grad`.
    """
    q, problem = with_positive_scale(q, problem)
    seq_lens = tensors.get("seq_lens")
    hidden = hidden_by_masks(problem.k_len, seq_lens, tensors.get("key_mask"))
    inner = _TilePasses(problem, tables, kernel, hidden, seq_lens)
    call = Hidden.of(problem, tensors, masked_keys=False).around(inner)
    if problem.needs_grad:
        return differentiable(q, k, v, call, (tensors.get("pattern_data"),))
    with torch.no_grad():
        return call.forward(q, k, v)


def partial(problem: Problem, tables: Sequence[TileTable], kernel: Kernel, key_mask: Tensor | None) -> Passes:
    """The passes for queries that also see other keys (see `contract.Backend`); the scale must be above 0."""
    return _TilePasses(problem, (tables,), kernel, hidden_by_masks(problem.k_len, None, key_mask), None)


@dataclass(frozen=True, slots=True)
class _TilePasses:
    """The passes over the pairs of `tables`, of all rows or of each. `hidden` bool [batch, k_len]: keys of masks."""

    problem: Problem
    tables: Sequence[Sequence[TileTable]]
    kernel: Kernel
    hidden: Tensor | None
    seq_lens: Tensor | None

    def by_table(self, *tensors: Tensor) -> Iterator[tuple[TileTable, _TilePasses, tuple[Tensor, ...]]]:
        """Each table with the passes, and these tensors, of the rows that have it."""
        for number, tables in enumerate(self.tables):
            call, rows = self, slice(None)
            if len(self.tables) > 1:
                rows = slice(number, number + 1)
                hidden = None if self.hidden is None else self.hidden[rows]
                call = replace(self, problem=replace(self.problem, batch=1), hidden=hidden)
            for table in tables:
                yield table, call, tuple(x[rows] for x in tensors)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(q, k, v, self)

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = saved[3]
        return _backward(out.new_zeros(()).expand_as(out) if grad is None else grad, grad_lse, saved, self)


class _TileGroup(NamedTuple):
    """Query tiles with the same number of key tiles.

    Args:
        tiles: query tiles, [tiles].
        queries: positions of their queries, [tiles * tile].
        keys, masks: key tiles, and the mask of each pair, [tiles, key tiles].
        partial: whether any pair has a mask.
        distinct: the number of queries without those that a short last tile repeats.
    """

    tiles: Tensor
    queries: Tensor
    keys: Tensor
    masks: Tensor
    partial: bool
    distinct: int


class _Chunk(NamedTuple):
    """A group of query tiles in one batch row.

    Args:
        number: of this chunk, in the order in which gradients are added.
        batch: the batch row.
        group: the query tiles.
        size: number of query tiles.
        keys: positions, [query tiles * key tiles * tile].
        bias: log of the multiplicity, [query tiles, 1, tile, keys]; None: 0.
    """

    number: int
    batch: int
    group: _TileGroup
    size: int
    keys: Tensor
    bias: Tensor | None


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _TilePasses) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Heads last, as in out: all heads of a token are then written together.
    lse = torch.empty(q.shape[:3], dtype=sum_dtype(q.dtype), device=q.device)
    for table, part, rows in call.by_table(q, out, lse, k, v):
        heads = _Heads.of(table, part)
        own_q, own_out, own_lse = (x[:, :, heads.q] for x in rows[:3])
        for positions in _queries_without_keys(table):
            own_out.index_fill_(1, positions, 0.0)
            own_lse.index_fill_(1, positions, -math.inf)
        inputs = own_q, *(x[:, :, heads.kv] for x in rows[3:])
        _forward_heads(inputs, own_out, own_lse, heads, table, part)
    without_padding(out, lse, call.seq_lens)
    return out, lse.transpose(1, 2)


def _forward_heads(
    inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, heads: _Heads, table: TileTable, call: _TilePasses
) -> None:
    groups, outs, lses = _groups(table, call), out.unbind(), lse.unbind()

    def work(queue: WorkQueue) -> None:
        q, *kv = map(_GatherBuffer, inputs)

        def compute(chunk: _Chunk) -> None:
            queries = q.at(chunk.batch, chunk.group.queries, chunk.size)
            keys, values, mask = _keys(kv, heads, chunk, call)
            part, stats = call.kernel.forward(DenseCall(queries, keys, values, False, call.problem.scale, mask))
            stats = stats.transpose(1, 2)
            if mask is not None and (call.hidden is not None or not table.covered):
                stats = stats.masked_fill((mask == -math.inf).all(-1).transpose(1, 2), -math.inf)
            _put(outs[chunk.batch], chunk.group, part)
            _put(lses[chunk.batch], chunk.group, stats)

        for number in queue.take():  # what a chunk holds is freed before the next
            compute(_chunk(number, groups, table, call))

    _run_chunks(len(groups) * len(outs), work, call)


def _backward(
    grad: Tensor, grad_lse: Tensor | None, saved: tuple[Tensor, ...], call: _TilePasses
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the chunks' gradients; each chunk's backward takes the final out and lse."""
    q, k, v, out, lse = saved
    lse = lse.transpose(1, 2)
    # For rows without keys exp(s + inf) would be inf; with lse = inf their weight is 0.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    by_token = [grad, q, out, lse] + ([] if grad_lse is None else [grad_lse.transpose(1, 2)])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=lse.dtype, device=q.device) for _ in range(2))
    for table, part, rows in call.by_table(k, v, dk, dv, dq, *by_token):
        heads = _Heads.of(table, part)
        own_k, own_v, own_dk, own_dv = (x[:, :, heads.kv] for x in rows[:4])
        own_dq, *inputs = [x[:, :, heads.q] for x in rows[4:]]
        for positions in _queries_without_keys(table):
            own_dq.index_fill_(1, positions, 0.0)
        _backward_heads(inputs, [own_k, own_v], own_dq, own_dk, own_dv, heads, table, part)
    dk = dk.to(k.dtype)  # one sum is freed before the other is rounded
    dv = dv.to(v.dtype)
    return dq, dk, dv


def _backward_heads(
    q_side: list[Tensor],
    k_side: list[Tensor],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    heads: _Heads,
    table: TileTable,
    call: _TilePasses,
) -> None:
    groups, d = _groups(table, call), dq.shape[3]
    into = [x.unbind() for x in (dq, dk, dv)]

    def work(queue: WorkQueue) -> None:
        rows, kv = [_GatherBuffer(x) for x in q_side], [_GatherBuffer(x) for x in k_side]

        def compute(chunk: _Chunk) -> None:
            g, queries, o, stats, *slope = (x.at(chunk.batch, chunk.group.queries, chunk.size) for x in rows)
            keys, values, mask = _keys(kv, heads, chunk, call)
            if chunk.group.distinct < len(chunk.group.queries):
                stats.flatten(0, 1)[chunk.group.distinct :].fill_(math.inf)
            if slope:
                g, queries, keys, values, o = with_lse_column(slope[0], g, queries, keys, values, o)
            stats = stats.transpose(1, 2)
            dense = DenseCall(queries, keys, values, False, call.problem.scale, mask)
            grads = call.kernel.backward(dense, g, o, stats)
            _put(into[0][chunk.batch], chunk.group, grads[0][..., :d])
            # In a fixed order, so that sums are the same in every run.
            with queue.in_order(chunk.number):
                for sums, part in zip(into[1:], grads[1:]):
                    heads.add(sums[chunk.batch], chunk.keys, part[..., :d])

        for number in queue.take():  # what a chunk holds is freed before the next
            compute(_chunk(number, groups, table, call))

    _run_chunks(len(groups) * len(dq), work, call)


def _run_chunks(count: int, work: Callable[[WorkQueue], None], call: _TilePasses) -> None:
    if call.problem.device.type == "cpu":
        run_in_threads(count, work)
    else:
        work(WorkQueue(count))


def _keys(
    sources: list[_GatherBuffer], heads: _Heads, chunk: _Chunk, call: _TilePasses
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A chunk's keys and values [query tiles, keys, heads, head_dim], and the mask to add to the scores."""
    k, v = (x.at(chunk.batch, chunk.keys, chunk.size) for x in sources)
    mask = chunk.bias
    if call.hidden is not None:
        hidden = call.hidden[chunk.batch][chunk.keys].view(chunk.size, -1)
        for x in (k, v):
            x.masked_fill_(hidden[:, :, None, None], 0.0)
        if mask is None:
            shape = chunk.size, 1, len(chunk.group.queries) // chunk.size, hidden.shape[1]
            mask = torch.zeros(shape, dtype=sum_dtype(k.dtype), device=k.device)
        mask.masked_fill_(hidden[:, None, None], -math.inf)  # a chunk's bias is its own
    return heads.for_queries(k), heads.for_queries(v), mask


# --- chunks ---------------------------------------------------------------------------------------------------


def _groups(table: TileTable, call: _TilePasses) -> list[_TileGroup]:
    problem = call.problem
    return cached_with(table, (problem.q_len, most_keys(problem, table.tile)), lambda: _grouped(table, problem))


def _grouped(table: TileTable, problem: Problem) -> list[_TileGroup]:
    """Group the query tiles. Work for many tiles is done here at once: a chunk takes only about a millisecond."""
    device, found = table.keys.device, list[_TileGroup]()
    sizes, missing = table.first.diff(), -problem.q_len % table.tile
    for size in torch.unique(sizes[sizes > 0]).tolist():
        tiles = (sizes == size).nonzero().flatten()
        # By the boxes alone, so that what is gathered at once is known without the masks.
        step = max(1, most_keys(problem, table.tile) // (int(table.near[tiles].max()) * table.tile))
        distinct = len(tiles) * table.tile - (missing if int(tiles[-1]) == len(sizes) - 1 else 0)
        pairs = (table.first[tiles][:, None] + torch.arange(size, device=table.first.device)).to(device)
        tiles = tiles.to(device)
        masks = pairs if table.bias is None else table.mask[pairs]
        partial = masks.any(1).tolist()
        parts = zip(*(torch.split(x, step) for x in (tiles, table.q_pos[tiles], table.keys[pairs], masks)))
        for start, (some, queries, keys, mask) in zip(range(0, len(partial), step), parts):
            mine = min(queries.numel(), distinct - start * table.tile)
            found.append(_TileGroup(some, queries.flatten(), keys, mask, any(partial[start : start + step]), mine))
    return found


def _chunk(number: int, groups: list[_TileGroup], table: TileTable, call: _TilePasses) -> _Chunk:
    which, batch = divmod(number, call.problem.batch)
    group, bias = groups[which], None
    if table.bias is None:
        bias = _computed_bias(table, group.tiles, group.keys, sum_dtype(call.problem.dtype))
    elif group.partial:
        bias = _gathered_bias(table.bias, group.masks)
    return _Chunk(number, batch, group, len(group.tiles), table.k_pos[group.keys].flatten(), bias)


def _queries_without_keys(table: TileTable) -> tuple[Tensor, ...]:
    """The positions of queries in tiles without pairs; empty if there are none."""

    def find() -> tuple[Tensor, ...]:
        alone = (table.first.diff() == 0).nonzero().flatten().to(table.q_pos.device)
        return (table.q_pos[alone].flatten(),) if len(alone) else ()

    return cached_with(table, "queries without keys", find)


def most_keys(problem: Problem, tile: int) -> int:
    """Keys gathered at once, such that the keys, or their masks, take CHUNK_BYTES."""
    limit = CHUNK_BYTES if problem.device.type == "cpu" else CUDA_CHUNK_BYTES
    row = problem.kv_heads * problem.head_dim * problem.dtype.itemsize
    return limit // max(row, tile * sum_dtype(problem.dtype).itemsize)


def _gathered_bias(biases: Tensor, masks: Tensor) -> Tensor:
    """The bias [query tiles, 1, tile, keys] from the table's biases of these masks [query tiles, key tiles]."""
    (tiles, size), tile = masks.shape, biases.shape[1]
    rows = masks[:, None, :] * tile + torch.arange(tile, device=masks.device)[:, None]
    return biases.view(-1, tile).index_select(0, rows.flatten()).view(tiles, 1, tile, size * tile)


def _computed_bias(table: TileTable, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias [query tiles, 1, tile, keys] of these tiles, computed from the table's branches."""
    (tiles, size), tile = keys.shape, table.tile
    found = table.counts(queries.repeat_interleave(size), keys.flatten())
    found = found.view(tiles, size, tile, tile).transpose(1, 2).reshape(tiles, 1, tile, size * tile)
    return found.to(dtype).log_()


# --- rows -----------------------------------------------------------------------------------------------------


class _GatherBuffer:
    """Gathers tokens of [batch, len, heads, ...] into a buffer; each call of `at` overwrites it."""

    def __init__(self, x: Tensor) -> None:
        self.sources = x.unbind()
        self.kept = x.new_empty(0)
        self.views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def at(self, batch: int, positions: Tensor, tiles: int) -> Tensor:
        """The tokens as [tiles, tokens, heads, ...]; the caller may write to it."""
        size = len(positions), tiles
        flat, shaped = self.views.get(size) or self._room(*size)
        torch.index_select(self.sources[batch], 0, positions, out=flat)
        return shaped

    def _room(self, tokens: int, tiles: int) -> tuple[Tensor, Tensor]:
        # Creating a view takes as long as gathering some rows.
        row = self.sources[0].shape[1:]
        if len(self.kept) < tokens:
            self.views.clear()
            self.kept = self.kept.new_empty(0)  # freed before the larger one is there
            self.kept = self.kept.new_empty(tokens, *row)
        flat = self.kept[:tokens]
        self.views[tokens, tiles] = flat, torch.unflatten(flat, 0, (tiles, -1))
        return self.views[tokens, tiles]


@dataclass(frozen=True, slots=True)
class _Heads:
    """The heads of a table.

    Args:
        q: the query heads.
        kv: their key heads.
        spread: the index in `kv` for each query head, where the kernel's grouping does not map them.
    """

    q: slice
    kv: slice
    spread: Tensor | None

    @classmethod
    def of(cls, table: TileTable, call: _TilePasses) -> _Heads:
        heads = table.heads
        read = kv_heads_of(heads, call.problem, call.kernel.grouped)
        q = slice(heads.start, heads.stop, heads.step)
        if isinstance(read, slice):
            return cls(q, read, None)
        group = call.problem.heads // call.problem.kv_heads
        return cls(q, slice(None), kv_head_index(heads, group, call.problem.device))

    def for_queries(self, keys: Tensor) -> Tensor:
        """[..., tokens, key heads, head_dim], copied to each query head if the kernel needs it."""
        return keys if self.spread is None else keys.index_select(-2, self.spread)

    def add(self, whole: Tensor, positions: Tensor, part: Tensor) -> None:
        """Add gradients of gathered keys [tiles, keys, heads, head_dim] to `whole` [k_len, key heads, head_dim]."""
        part = part.new_empty(part.shape, dtype=whole.dtype).copy_(part).flatten(0, 1)
        if self.spread is not None:
            part = part.new_zeros(len(part), *whole.shape[1:]).index_add_(1, self.spread, part)
        whole.index_add_(0, positions, part)


def _put(whole: Tensor, group: _TileGroup, part: Tensor) -> None:
    """Write `part` [query tiles, tile, ...] to its rows of `whole` [q_len, ...]."""
    positions, part = group.queries, part.flatten(0, 1)
    if group.distinct < len(positions):
        positions, part = positions[: group.distinct], part[: group.distinct]
    whole.index_copy_(0, positions, part)
