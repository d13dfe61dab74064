"""A C++ kernel for CPUs: dense, windowed and dilated patterns in one pass, all branches in one softmax, no merging.

Compiled for the machine by its own g++ when it is first used. See attn_dispatch/native/attention.cpp.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Call, gradients
from attn_dispatch.kernels.contract import (
    Refusal,
    refuse_device,
    refuse_dropout,
    refuse_dtype,
    refuse_pattern,
    refuse_ranks,
)
from attn_dispatch.kernels.native import library
from attn_dispatch.kernels.native.steps import PERIOD_LIMIT, grid_of, period, table_bytes, tiles_of
from attn_dispatch.kernels.native.tables import TILE, Tiles
from attn_dispatch.spec.orders import NATURAL, ORDERS, serves
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem

name = "native"

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  #: in attention.cpp's numbering
VECTOR = 16  #: floats of the widest vector; sums of dk and dv have rows of whole vectors
BLOCK = 192  #: keys whose scores are held at once, as in attention.cpp
SUM_BYTES = 2**30  #: of such sums at most
HEAD_DIM = 4096  #: a thread's scratch grows with it
UNITS_PER_THREAD = 4  #: pieces of a backward pass, so that no thread waits long for the last one


def version() -> str:
    """A digest of source, compiler and processor.

    Raises:
        ImportError: there is no compiler.
    """
    command = library.compiler()
    return f"{Path(command[0]).name if command else ''} {library.digest()}"


def refusals(problem: Problem) -> list[Refusal]:
    found = refuse_ranks(problem) + refuse_dropout(problem) + refuse_device(problem, ("cpu",))
    found += refuse_dtype(problem, DTYPES)
    if grid_of(problem.pattern)[0] is None:
        found += refuse_pattern(problem, (Dense, Window, Dilated, Neighborhood))
    if period(problem.pattern) > PERIOD_LIMIT:
        tokens = period(problem.pattern)
        found.append(Refusal("pattern", f"its rates come round every {tokens} tokens, over {PERIOD_LIMIT}"))
    if problem.head_dim > HEAD_DIM:
        found.append(Refusal("head_dim", f"takes a head_dim up to {HEAD_DIM}, not {problem.head_dim}"))
    if library.compiler() is None:
        found.append(Refusal("not_installed", "needs a C++ compiler: g++ on the path, or $CXX"))
    return found


def orders(problem: Problem) -> tuple[str, ...]:
    """Other patterns are made of steps, which need no order to stand together; kept tokens stand as they are kept."""
    if not isinstance(problem.pattern, Neighborhood):
        return (NATURAL,)
    return tuple(order for order in ORDERS if serves(order, problem.pattern))


def prepare() -> None:
    """Compile it for this machine, some seconds, unless that was done before."""
    library.load()


def flops(problem: Problem) -> int:
    return problem.batch * _pairs(problem) * problem.head_dim * (14 if problem.needs_grad else 4)


def workspace_bytes(problem: Problem) -> int:
    width = _padded(problem.head_dim)
    scratch = 4 * torch.get_num_threads() * (5 * width * TILE + 6 * BLOCK * max(TILE, width))
    total = scratch + max(table_bytes(problem, order) for order in orders(problem))
    total += 4 * problem.batch * problem.heads * problem.q_len * (3 if problem.needs_grad else 1)
    total += problem.batch * (problem.k_len * problem.has_key_mask + 8 * problem.has_seq_lens)
    # Rows that are not dense are copied; out and its gradient may be too.
    rows = (problem.q_len * problem.heads, problem.k_len * problem.kv_heads, problem.k_len * problem.kv_heads)
    item = problem.batch * problem.head_dim * problem.dtype.itemsize
    total += item * sum(n for n, kind in zip(rows, problem.strides) if kind[-1:] != "d")
    if problem.needs_grad:
        total += item * rows[0]
        if not _sums_in_place(problem):
            one = 4 * problem.batch * rows[1] * width
            total += 2 * one * (_parts(problem) + (_parts(problem) > 1)) + item * rows[1]
    return total


def run(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, order: str = NATURAL, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    key_mask, seq_lens = tensors.get("key_mask"), tensors.get("seq_lens")
    seen = None if key_mask is None else key_mask.contiguous()
    # Before anything is kept: wrapped tensors have no address, and meta tensors none that means anything.
    if any(x.device.type != "cpu" or not x.data_ptr() for x in (q, k, v)):
        raise TypeError("native reads plain tensors in a CPU's memory")
    call = _Call(problem, tiles_of(problem, order), seen, None if seq_lens is None else seq_lens.long().contiguous())
    if problem.needs_grad:
        out, lse = _Native.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return out, lse
    return _forward(q, k, v, call)


def partial(problem: Problem, key_mask: Tensor | None = None, tiles: Tiles | None = None) -> Call:
    """The passes of queries that see keys elsewhere too (see `contract`). `tiles`: those of rows that are not all of a
    pattern's.
    """
    seen = None if key_mask is None else key_mask.contiguous()
    return _Call(problem, tiles_of(problem) if tiles is None else tiles, seen, None)


@dataclass(frozen=True, slots=True)
class _Call:
    problem: Problem
    tiles: Tiles
    seen: Tensor | None
    seq_lens: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(q, k, v, self)

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(grad, grad_lse, saved, self)

    def args(self, **tensors: Tensor) -> library.Args:
        """Views of [batch, len, heads, head_dim] tensors, and everything that does not change with the pass."""
        problem = self.problem
        made = library.Args(**{name: _view(x) for name, x in tensors.items()})
        tables = {name: getattr(self.tiles, name) for name in Tiles.__dataclass_fields__}
        for name, table in {**tables, "seen": self.seen, "seq_lens": self.seq_lens}.items():
            setattr(made, name, None if table is None else table.data_ptr())
        for name in ("batch", "heads", "q_len", "k_len", "head_dim", "scale"):
            setattr(made, name, getattr(problem, name))
        made.group = problem.heads // problem.kv_heads
        made.dtype = DTYPES.index(problem.dtype)
        made.threads, made.parts = torch.get_num_threads(), 1
        return made


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse, call.seen, call.seq_lens)
        ctx.call = replace(call, seen=None, seq_lens=None)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, grad_lse = grad_outputs
        *saved, seen, seq_lens = ctx.saved_tensors
        call = replace(ctx.call, seen=seen, seq_lens=seq_lens)
        return (*gradients(call, grad, grad_lse, tuple(saved)), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    problem = call.problem
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32, device=q.device)
    args = call.args(q=q, k=k, v=v, out=out)
    args.lse = lse.data_ptr()
    library.load().attention_forward(ctypes.byref(args))
    return out, lse


def _backward(
    grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...], call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    problem, parts = call.problem, _parts(call.problem)
    grad = _dense_rows(torch.zeros((), dtype=q.dtype, device=q.device).expand_as(q) if grad is None else grad)
    q, k, v, lse = _dense_rows(q), _dense_rows(k), _dense_rows(v), lse.contiguous()
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    width = problem.head_dim if _sums_in_place(problem) else _padded(problem.head_dim)
    shape = (parts, problem.batch, problem.k_len, problem.kv_heads, width)
    dk, dv = (torch.zeros(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    args = call.args(q=q, k=k, v=v, out=out, grad=grad, dq=dq, dk=dk[0], dv=dv[0])
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    args.lse, args.grad_lse = lse.data_ptr(), None if grad_lse is None else grad_lse.data_ptr()
    args.parts, args.part_stride = parts, dk.stride(0)
    library.load().attention_backward(ctypes.byref(args))
    return dq, _total(dk, problem), _total(dv, problem)


def _total(sums: Tensor, problem: Problem) -> Tensor:
    whole = sums[0] if len(sums) == 1 else sums.sum(0)
    return whole[..., : problem.head_dim].to(problem.dtype)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _view(x: Tensor) -> library.View:
    return library.View(x.data_ptr(), *x.stride()[:3])


def _padded(head_dim: int) -> int:
    return -(-head_dim // VECTOR) * VECTOR


def _sums_in_place(problem: Problem) -> bool:
    """Whether dk and dv can be summed where they are returned."""
    return problem.dtype == torch.float32 and problem.head_dim % VECTOR == 0 and _parts(problem) == 1


def _parts(problem: Problem) -> int:
    """How many threads share a key head in a backward pass, each with sums of its own."""
    units, threads = problem.batch * problem.kv_heads, torch.get_num_threads()
    if units % threads == 0 or units >= UNITS_PER_THREAD * threads:
        return 1
    one = 8 * problem.batch * problem.k_len * problem.kv_heads * _padded(problem.head_dim)
    return max(1, min(math.ceil(threads / units), -(-problem.q_len // TILE), SUM_BYTES // one))


@lru_cache(maxsize=4096)
def _pairs(problem: Problem) -> int:
    """Query-key pairs per batch row, counted by tile: what a tile's last query sees, for all of its queries."""
    tables = tiles_of(problem)
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
