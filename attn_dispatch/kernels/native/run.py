"""The forward and backward pass of the native kernel on its tables."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels import dropout
from attn_dispatch.kernels.autograd import Passes, refuse_tangents
from attn_dispatch.kernels.contract import Result
from attn_dispatch.kernels.native import library
from attn_dispatch.kernels.native.tables import TILE, NativeTables, few_query_tables, native_tables
from attn_dispatch.machine.memory import LARGE_PAGE, in_large_pages
from attn_dispatch.private import forward_ad
from attn_dispatch.spec.problem import Problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  #: in attention.cpp's numbering
VECTOR = 16  #: floats of the widest vector; rows of dk and dv sums are padded to it
BLOCK = 192  #: keys per block of scores, KEYS in attention.cpp
SUM_BYTES = 2**30  #: limit for sums of dk and dv
HEAD_DIM = 4096  #: the largest; a thread's scratch memory grows with it
UNITS_PER_THREAD = 4  #: units of work per thread from which threads end at about the same time
SPLIT = 512  #: fewest keys of a run that are worth a unit of their own
CHUNK = 768  #: keys of a split where rows have the same bits in every batch, CHUNK in attention/vectors.h
MOST_TOGETHER = 32  #: key heads that read in turns: their sums stay in the L2 cache
VIEWS = struct.Struct(4 * "Pqqq")  #: q, k, v and out, with which Args begins
TABLE_BYTES = 2**14  #: limit of the tables of a specialized function; thousands may be alive
NO_ADDRESS = "native reads plain tensors in a CPU's memory"
SHORT = "no memory is left for the tiles of a thread"
LANES = 16  #: queries of a tile up to which a call is bound by memory, FEW in attention/vectors.h


def partial(problem: Problem, key_mask: Tensor | None = None, tables: NativeTables | None = None) -> Passes:
    """The passes for queries that also see other keys (see `contract.Backend`).

    Args:
        tables: of the rows that the tensors hold; by default those of the problem's pattern.
    """
    seen = None if key_mask is None else key_mask.contiguous()
    return NativePasses(problem, native_tables(problem) if tables is None else tables, seen, None, more_keys=True)


@dataclass(frozen=True, slots=True)
class NativePasses:
    """A problem with its tables and tensors; `seen` is the key mask, contiguous; bias and slopes are float32."""

    problem: Problem
    tables: NativeTables
    seen: Tensor | None
    seq_lens: Tensor | None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    later: tuple[NativeTables, ...] = ()  #: of more queries, which are computed after those of `tables`
    more_keys: bool = False  #: whether the backward pass is given the lse of more keys than these
    made: ForwardArguments | None = None  #: for `tables`; by default those of the problem's pattern, if they are
    seed: int = 0  #: of dropout
    first_row: int = 0  #: of the batch, in the whole call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        problem = self.problem
        lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32, device=q.device)
        return self.out(q, k, v, lse), lse

    def out(self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None) -> Tensor:
        """Out; lse is written to, where it is given."""
        problem = self.problem
        q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
        out = in_large_pages(torch.empty(q.shape, dtype=q.dtype, device=q.device))
        made = self.made
        if made is None and self.tables is native_tables(problem):
            made = forward_arguments(problem, torch.get_num_threads())
        if made is not None:
            args = self.args(library.Args.from_buffer_copy(made.args), q, k, v, out)
            if made.states:
                left = torch.empty(made.states, state_floats(problem), dtype=torch.float32, device=q.device)
                args.states = left.data_ptr()
        else:
            args = self.args(arguments(problem, self.tables, torch.get_num_threads()), q, k, v, out)
        args.lse = None if lse is None else lse.data_ptr()
        kernel = library.load().attention_forward
        short = kernel(ctypes.byref(args))
        for tables in self.later:
            _set_tables(args, tables)
            short = kernel(ctypes.byref(args)) or short
        if short:
            raise MemoryError(SHORT)
        return out

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, out, lse = saved
        problem, parts = self.problem, threads_per_key_head(self.problem)
        grad = _dense_rows(torch.zeros((), dtype=q.dtype, device=q.device).expand_as(q) if grad is None else grad)
        q, k, v, out = (_dense_rows(x) for x in (q, k, v, out))
        lse = lse.resolve_neg().contiguous()
        dq = in_large_pages(torch.empty(q.shape, dtype=q.dtype, device=q.device))
        apart = sums_apart(problem)
        width = problem.head_dim if apart else padded_width(problem.head_dim)
        shape = (parts, problem.batch, problem.k_len, problem.kv_heads, width)
        dtype = problem.dtype if apart else torch.float32
        dk, dv = (in_large_pages(torch.empty(shape, dtype=dtype, device=q.device)) for _ in range(2))
        if not apart or self.later:  # else the kernel writes every key
            dk, dv = dk.zero_(), dv.zero_()
        args = arguments(problem, self.tables, torch.get_num_threads())
        args = self.args(args, q, k, v, out, grad=grad, dq=dq, dk=dk[0], dv=dv[0])
        if apart:
            sums = in_large_pages(torch.empty(apart, dtype=torch.float32, device=q.device))
            args.sums = sums.data_ptr()
        grad_lse = None if grad_lse is None else grad_lse.resolve_neg().contiguous()
        args.lse, args.grad_lse = lse.data_ptr(), None if grad_lse is None else grad_lse.data_ptr()
        args.parts, args.part_stride, args.more_keys = parts, dk.stride(0), self.more_keys
        dbias = None
        if problem.bias_needs_grad:
            scores = (problem.batch, problem.heads, problem.q_len, problem.k_len)
            dbias = torch.zeros(scores, dtype=torch.float32, device=q.device)
            args.dbias = dbias.data_ptr()
        kernel = library.load().attention_backward
        for tables in (self.tables, *self.later):
            _set_tables(args, tables)
            args.first_key, args.last_key = key_range(tables) if self.later else (0, problem.k_len)
            if kernel(ctypes.byref(args)):
                raise MemoryError(SHORT)
        whole = dq, _total(dk, problem), _total(dv, problem)
        return whole if dbias is None else (*whole, dbias.sum_to_size((*problem.bias, problem.q_len, problem.k_len)))

    def args(self, made: library.Args, *first: Tensor, **views: Tensor) -> library.Args:
        """The kernel's arguments with q, k, v and out, then other `views`, and the masks and terms of this call."""
        VIEWS.pack_into(made, 0, *(number for x in first for number in (x.data_ptr(), *x.stride()[:3])))
        for name, x in views.items():
            setattr(made, name, library.View(x.data_ptr(), *x.stride()[:3]))
        made.seed, made.first_row = self.seed, self.first_row
        if self.seen is not None:
            made.seen = self.seen.data_ptr()
        if self.seq_lens is not None:
            made.seq_lens = self.seq_lens.data_ptr()
        if self.slopes is not None:
            made.slopes = self.slopes.data_ptr()
            made.slopes_batch = self.slopes.stride(0) if self.slopes.ndim == 2 else 0
        if self.bias is not None:
            made.bias = self.bias.data_ptr()
            strides = (stride if size > 1 else 0 for size, stride in zip(self.bias.shape, self.bias.stride()))
            made.bias_batch, made.bias_head, made.bias_row, made.bias_key = strides
        return made


def specialized(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, heads_first: bool = False
) -> Callable[..., Result] | None:
    """A forward pass whose arguments are all known but for addresses; None where rows must be copied, where tables are
    large, which the function would hold, and for subclasses, of which new tensors would be (see `contract.Backend`).
    """
    made = forward_arguments(problem, torch.get_num_threads())
    return None if made.tables.nbytes > TABLE_BYTES else forward_with(made, problem, q, k, v, heads_first)


def forward_with(
    arguments: ForwardArguments, problem: Problem, q: Tensor, k: Tensor, v: Tensor, heads_first: bool = False
) -> Callable[..., Result] | None:
    """The same with these tables, of any size."""
    if any(x.stride(-1) != 1 or x.is_neg() or type(x) not in (Tensor, torch.nn.Parameter) for x in (q, k, v)):
        return None
    fixed, tables, states = arguments
    made = library.Args.from_buffer_copy(fixed)
    at_row, at_head = (2, 1) if heads_first else (1, 2)
    row, head = problem.heads * problem.head_dim, problem.head_dim
    strides = [0, 0, 0, 1]
    strides[0], strides[at_row], strides[at_head] = problem.q_len * row, row, head  # in memory always tokens first
    for name, each in zip(("q", "k", "v", "out"), (q.stride(), k.stride(), v.stride(), strides), strict=True):
        setattr(made, name, library.View(None, each[0], each[at_row], each[at_head]))
    shape, is_long = q.shape, q.nbytes >= 2 * LARGE_PAGE
    lse_shape, state_shape = (problem.batch, problem.heads, problem.q_len), (states, state_floats(problem))
    kernel, returns_lse = library.load().attention_forward_on, problem.return_lse
    kernel.argtypes, kernel.restype = 7 * [ctypes.c_void_p], ctypes.c_int
    held = made, tables  # the first points into the others

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Result:
        at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if 0 in at:
            raise TypeError(NO_ADDRESS)
        if forward_ad._current_level >= 0:
            refuse_tangents("native", q, k, v)
        out = q.new_empty_strided(shape, strides)
        if is_long:
            in_large_pages(out)
        lse = q.new_empty(lse_shape, dtype=torch.float32) if returns_lse else None
        left = q.new_empty(state_shape, dtype=torch.float32) if states else None
        short = kernel(
            ctypes.addressof(held[0]),
            *at,
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            None if left is None else left.data_ptr(),
        )
        if short:
            raise MemoryError(SHORT)
        return out if lse is None else (out, lse)

    return run


def arguments(problem: Problem, tables: NativeTables, threads: int) -> library.Args:
    """The kernel's arguments without tensors."""
    made = library.Args(threads=threads, parts=1, packed_heads=1, together=1, splits=1)
    _set_tables(made, tables)
    for name in ("batch", "heads", "q_len", "k_len", "head_dim", "scale", "softcap"):
        setattr(made, name, getattr(problem, name))
    made.invariant = problem.batch_invariant
    made.group = problem.heads // problem.kv_heads
    made.dtype = DTYPES.index(problem.dtype)
    made.dropped = dropout.threshold(problem.dropout_p)
    return made


class ForwardArguments(NamedTuple):
    """The kernel's arguments without tensors, with the tables that they point to."""

    args: bytes
    tables: NativeTables
    states: int  #: of splits, of `state_floats` each


@lru_cache(maxsize=64)
def forward_arguments(problem: Problem, threads: int) -> ForwardArguments:
    """The arguments of a forward pass on the problem's own rows."""
    return arguments_in_units(problem, forward_tables(problem), work_units(problem, threads), threads)


def arguments_in_units(problem: Problem, tables: NativeTables, units: WorkUnits, threads: int) -> ForwardArguments:
    """The arguments of a forward pass that is cut so."""
    made = arguments(problem, tables, threads)
    made.packed_heads, made.together, made.splits, tiles = units
    return ForwardArguments(bytes(made), tables, tiles * units.splits if units.splits > 1 else 0)


def _set_tables(args: library.Args, tables: NativeTables) -> None:
    for name in NativeTables.__dataclass_fields__:
        table = getattr(tables, name)
        setattr(args, name, None if table is None else table.data_ptr())


def _total(sums: Tensor, problem: Problem) -> Tensor:
    whole = sums[0] if len(sums) == 1 else sums.sum(0)
    return whole[..., : problem.head_dim].to(problem.dtype)


def _dense_rows(x: Tensor) -> Tensor:
    x = x.resolve_neg()  # the kernel reads memory as it is
    return x if x.stride(-1) == 1 else x.contiguous()


class WorkUnits(NamedTuple):
    """How a forward pass is cut into units of work."""

    packed_heads: int  #: heads in a tile: grouped heads of few queries read their keys once
    together: int  #: tiles of key heads that read their keys in turns, where these are neighbours in memory
    splits: int  #: of the keys of each tile, where there are fewer tiles than the threads need
    tiles: int  #: of all heads


def forward_tables(problem: Problem) -> NativeTables:
    """The tables of a forward pass on the problem's own rows."""
    packed = few_lanes(problem) and not problem.batch_invariant  # these may have runs of keys in another order
    return few_query_tables(problem) if packed else native_tables(problem)


@lru_cache(maxsize=4096)
def work_units(problem: Problem, threads: int) -> WorkUnits:
    """The units of a forward pass on the problem's own tables."""
    group = problem.heads // problem.kv_heads
    tables = forward_tables(problem)
    if tables.order is not None:
        return WorkUnits(1, 1, 1, 0)
    classes = tables.head_class.view(-1, group)
    packed_heads = group if packs_heads(problem) and bool((classes == classes[:, :1]).all()) else 1
    runs = tables.runs
    seen = runs[:, 2].minimum(runs[:, 4] - runs[:, 3] + min(TILE, problem.q_len))  # by the queries of a tile
    return units_of(problem, tables, packed_heads, int(seen.max()) if len(runs) else 0, threads)


def units_of(problem: Problem, tables: NativeTables, packed_heads: int, keys: int, threads: int) -> WorkUnits:
    """The units of a forward pass on tables without listed keys, of which a tile reads about `keys`."""
    tiles = problem.batch * int(tables.first_tile.diff()[tables.head_class[::packed_heads]].sum())
    splits = 1
    alike = bool((tables.head_class == tables.head_class[0]).all())
    together = 1
    if alike and few_lanes(problem) and side_by_side(problem):
        kv_heads = problem.heads // packed_heads
        together = next(n for n in range(min(kv_heads, MOST_TOGETHER), 0, -1) if kv_heads % n == 0)
    units = tiles // together
    if problem.batch_invariant:  # all chunks or none: each is a split, of which a run of keys may touch one more
        many = keys < 2 * CHUNK or units % threads == 0 or units >= UNITS_PER_THREAD * threads
        splits = 1 if many else int(tables.tiles[:, 4].max()) * chunks(keys)
        return WorkUnits(packed_heads, together, splits, tiles)
    while keys >= (splits + 1) * SPLIT and units * splits % threads and units * splits < UNITS_PER_THREAD * threads:
        splits += 1
    return WorkUnits(packed_heads, together, splits, tiles)


def chunks(keys: int) -> int:
    """The most chunks that a run of so many keys touches."""
    return -(-keys // CHUNK) + 1


def packs_heads(problem: Problem) -> bool:
    """Whether the queries of grouped heads fit into one tile. With dropout all passes have the same tiles."""
    return not problem.dropout_p and problem.heads // problem.kv_heads * problem.q_len <= TILE


def few_lanes(problem: Problem) -> bool:
    """Whether all queries of grouped heads are so few that reading the keys bounds the call."""
    return not problem.dropout_p and problem.heads // problem.kv_heads * problem.q_len <= LANES


def side_by_side(problem: Problem) -> bool:
    """Whether a key's rows of all heads are neighbours in memory, so that reading one head alone is slow."""
    orders = (kind.partition("+")[0] for kind in problem.strides[1:])
    return problem.kv_heads > 1 and any(order.find("h") > order.find("n") for order in orders)


def state_floats(problem: Problem) -> int:
    """Upper bound of the floats that a split of a tile leaves, `state_size` in attention.cpp."""
    lanes = LANES if few_lanes(problem) else TILE
    return 2 * TILE + problem.head_dim * lanes + 1


def scratch_bytes(problem: Problem) -> int:
    """Upper bound of the bytes of all threads' scratch memory, of heads that read in turns, and of splits' states."""
    threads, width = torch.get_num_threads(), padded_width(problem.head_dim)
    floats = 6 * width * TILE + 2 * TILE + 4 * BLOCK * max(TILE, width)
    if few_lanes(problem) and side_by_side(problem):
        own, kept = 2 * LANES * (width + 1), 2 * TILE + LANES * (width + 2 * (BLOCK + LANES))
        floats += min(problem.kv_heads, MOST_TOGETHER) * (own + kept)
    if problem.k_len >= 2 * SPLIT:
        # Pieces are added until there are UNITS_PER_THREAD for each thread; before the last, there were fewer.
        together = problem.heads if few_lanes(problem) and side_by_side(problem) else 1
        floats += together * 2 * UNITS_PER_THREAD * state_floats(problem)
        if problem.batch_invariant:
            runs = max(2, len(problem.pattern.branches))
            floats += together * UNITS_PER_THREAD * runs * chunks(problem.k_len) * state_floats(problem)
    return 4 * threads * floats


def padded_width(head_dim: int) -> int:
    return -(-head_dim // VECTOR) * VECTOR


def sums_apart(problem: Problem) -> int:
    """The floats of sums of dk and dv apart from the returned tensors: of one key head for each thread.

    0 where the returned tensors are the sums, and where several threads share a key head, of which each sums all of it.
    """
    if problem.dtype == torch.float32 or threads_per_key_head(problem) > 1:
        return 0
    at_once = min(torch.get_num_threads(), problem.batch * problem.kv_heads)
    return 2 * at_once * problem.k_len * padded_width(problem.head_dim)


def key_range(tables: NativeTables) -> tuple[int, int]:
    """The first key that the tables' runs name, and the one after the last."""
    first, step, count = tables.runs[tables.runs[:, 2] > 0, :3].unbind(1)
    return int(first.min()), int((first + step * (count - 1)).max()) + 1


def threads_per_key_head(problem: Problem) -> int:
    """The number of threads per key head in a backward pass, each with its own sums."""
    units, threads = problem.batch * problem.kv_heads, torch.get_num_threads()
    if problem.batch_invariant or units % threads == 0 or units >= UNITS_PER_THREAD * threads:
        return 1
    one = 8 * problem.batch * problem.k_len * problem.kv_heads * padded_width(problem.head_dim)
    return max(1, min(math.ceil(threads / units), -(-problem.q_len // TILE), SUM_BYTES // one))


@lru_cache(maxsize=4096)
def pair_count(problem: Problem) -> int:
    """Query-key pairs per batch row; every query of a tile counts the keys of its middle query."""
    tables = native_tables(problem)
    tiles, runs = tables.tiles, tables.runs
    if tables.order is not None:
        return problem.heads * int((runs[:, 2] * (runs[:, 4] - runs[:, 3])).sum())
    per_class = []
    for first, last in zip(tables.first_tile[:-1].tolist(), tables.first_tile[1:].tolist()):
        mine = tiles[first:last]
        row = torch.repeat_interleave(torch.arange(len(mine)), mine[:, 4])
        number = mine[row, 3] + torch.arange(len(row)) - (mine[:, 4].cumsum(0) - mine[:, 4])[row]
        run, query, step, count = runs[number], mine[row, 0], mine[row, 1], mine[row, 2]
        middle = query + step * (count - 1) // 2
        end = torch.minimum(run[:, 2], (middle + run[:, 4] - run[:, 0]).div(run[:, 1], rounding_mode="floor") + 1)
        start = (middle + run[:, 3] - run[:, 0]).div(run[:, 1], rounding_mode="floor").clamp(min=0)
        per_class.append(int(((end - start).clamp(min=0) * count).sum()))
    return sum(per_class[kind] for kind in tables.head_class.tolist())
