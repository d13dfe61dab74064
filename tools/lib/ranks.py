"""Rank processes on this machine over gloo: start them, shard a sequence."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from attn_dispatch.ring.rows.layout import Layout

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
