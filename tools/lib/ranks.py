"""Rank processes on this machine over gloo: start them, shard a sequence, check sampled rows."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from attn_dispatch import Problem
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.oracle import Oracle

PATIENCE_S = 600.0  #: time-out of the group, seconds


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Processes started within this context return freed blocks of 256 KiB and more to the system at once.

    Otherwise glibc retains a varying amount of them, which counts as resident memory.
    """
    with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**18)):
        yield


def together(work: Callable[..., Any], ranks: int, *arguments: Any, threads: int = 1) -> list[Any]:
    """The results of `work(*arguments)` on each rank of a new process group; both must be picklable.

    Raises:
        Exception: torch's, if a rank raised; the other ranks are then terminated.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = ranks, folder, threads, work, arguments
        multiprocessing.spawn(_rank, arguments, nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, threads: int, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(threads)
    join(rank, ranks, folder, PATIENCE_S)
    found = work(*arguments)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()  # a rank that ends early would close sockets that others still use
    dist.destroy_process_group()


def join(rank: int, ranks: int, folder: str | Path, timeout_s: float) -> None:
    """Join a process group whose rendezvous is a file in `folder`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=timeout_s), rank=rank, world_size=ranks)


# --- a sequence -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Unit-normal q, k and v of one sequence, each shard from its own seed, so that no rank needs the whole."""

    layout: Layout
    heads: int
    head_dim: int
    dtype: torch.dtype

    def shard(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The q, k and v of a rank, each [1, its tokens, heads, head_dim]."""
        generator = torch.Generator().manual_seed(rank)
        shape = 1, self.layout.lengths[rank], self.heads, self.head_dim
        q, k, v = (torch.randn(shape, generator=generator).to(self.dtype) for _ in range(3))
        return q, k, v

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """The whole q, k and v by position, each [1, tokens, heads, head_dim]."""
        shape = 1, self.layout.tokens, self.heads, self.head_dim
        q, k, v = (torch.empty(shape, dtype=self.dtype) for _ in range(3))
        for rank in range(self.layout.ranks):
            at = positions_of(self.layout, rank)
            for x, part in zip((q, k, v), self.shard(rank)):
                x.index_copy_(1, at, part)
        return q, k, v


# --- rows drawn -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Expected rows and heads of out, float64 [1, rows, heads, head_dim], and their tolerance."""

    rows: Tensor
    heads: Tensor
    value: Tensor
    tolerance: float


def drawn(pattern: Pattern, tokens: Tokens, seeds: int) -> list[Drawn]:
    """One sample per seed; holds the whole sequence in memory."""
    q, k, v = tokens.whole()
    example = Example(Problem.of(q, k, v, pattern), q, k, v, None, {})
    return list(_drawn(example, seeds))


def _drawn(example: Example, seeds: int) -> Iterator[Drawn]:
    for seed in range(seeds):
        gate = Oracle.of(example, seed)
        expected = gate.expected["out"]
        yield Drawn(gate.rows, gate.heads, expected.value, expected.tolerance)


def errors(out: Tensor, layout: Layout, rank: int, draws: Sequence[Drawn]) -> list[tuple[int, float]]:
    """For each sample, the number of its rows on this rank and their largest error."""
    at = positions_of(layout, rank)
    found = []
    for each in draws:
        here, local = (each.rows[:, None] == at).nonzero(as_tuple=True)
        off = out[:, local[:, None], each.heads].double() - each.value[:, here]
        found.append((len(here), float(off.abs().max()) if len(here) else 0.0))
    return found


def checked(by_rank: Sequence[list[tuple[int, float]]], draws: Sequence[Drawn]) -> dict[str, Any]:
    """Combine the `errors` of all ranks.

    Raises:
        RuntimeError: a row is missing, or an error exceeds its tolerance.
    """
    worst = share = 0.0
    for number, each in enumerate(draws):
        found = [mine[number] for mine in by_rank]
        error = max(off for _, off in found)
        if sum(count for count, _ in found) != len(each.rows):
            raise RuntimeError(f"draw {number}: {found} are not its {len(each.rows)} rows")
        if not error <= each.tolerance:
            raise RuntimeError(f"draw {number}: out is off by {error:.2e}, more than {each.tolerance:.2e}")
        worst, share = max(worst, error), max(share, error / each.tolerance)
    rows = len({(row, head) for each in draws for row in each.rows.tolist() for head in each.heads.tolist()})
    return {"rows_of_heads": rows, "error": worst, "share_of_tolerance": share}
