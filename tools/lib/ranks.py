"""Rank processes on this machine over gloo."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

PATIENCE_S = 600.0  #: time-out of the group, seconds


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
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet, patience = f"file://{folder}/meet", timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", meet, patience, rank=rank, world_size=ranks)
    found = work(*arguments)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()  # a rank that ends early would close sockets that others still use
    dist.destroy_process_group()
