"""First calls of new processes: with empty caches, after `attn-dispatch warm`, and after `warm()` in the process.

    python -m tools.bench.warm

Each process has a stored decision. What torch loads by itself is not timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attn_dispatch import Dilated, Problem, attend, warm
from attn_dispatch.kernels import registry
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Row
from attn_dispatch.store.folder import Store
from attn_dispatch.text import milliseconds
from attn_dispatch.tuning.candidates import Request
from tools.lib.common import alone, parser, write
from tools.lib.tables import Table

TAKES = "3 minutes"
PATTERN = Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True)
BACKENDS = ("native", "flex")
PROCESSES = {"empty caches": False, "after `attn-dispatch warm`": False, "the same, `warm()` first": True}
ABOUT = "A LongNet call of 2,048 tokens, in new processes, each with a stored decision."
LATER = 20  #: calls after the first, of which the median counts


def measured(backend: str, first: bool) -> dict[str, Any]:
    """The first call of this process, and later ones; with `first`, after `warm()`."""
    q, k, v = (torch.randn(1, 2048, 8, 64) for _ in range(3))
    of = Problem.of(q, k, v, PATTERN)
    row = Row(backend=backend, order=NATURAL, status="chosen", version=registry.load(backend).version(), median_ms=1.0)
    Store(cache_folder()).put(Request.of(of).decision((backend, NATURAL), "measured", [row]))
    took = []
    calls: list[Callable[[], object]] = [partial(attend, q, k, v, PATTERN)] * (1 + LATER)
    for call in (partial(warm, progress=False) if first else list, *calls):
        start = time.perf_counter()
        call()
        took.append((time.perf_counter() - start) * 1e3)
    return {"warm_ms": took[0] if first else None, "first_ms": took[1], "usual_ms": median(took[2:])}


def processes(backend: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each process measured, in turn, and how many libraries were compiled for it."""
    names = {"XDG_CACHE_HOME": "home", "ATTN_DISPATCH_CACHE_DIR": "decisions", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    own = {"ATTN_DISPATCH_MODE": "locked", **{name: str(folder / of) for name, of in names.items()}}
    for process, first in PROCESSES.items():
        if process == "after `attn-dispatch warm`":
            command, env = [sys.executable, "-m", "attn_dispatch", "warm"], os.environ | own
            subprocess.run(command, env=env, check=True, capture_output=True)
        before = set(folder.rglob("*.so"))
        found = alone(measured, backend, first, **own)
        yield process, {**found, "compiled": len(set(folder.rglob("*.so")) - before)}


def tables(found: Any) -> Iterator[Table]:
    rows = [
        (f"`{backend}`", process, *map(_cell, (one["warm_ms"], one["first_ms"], one["usual_ms"])), str(one["compiled"]))
        for backend, each in found["processes"].items()
        for process, one in each.items()
    ]
    yield Table(("backend", "process", "`warm()`", "first call", "later ones, median", "compiled"), rows, ABOUT)


def _cell(ms: float | None) -> str:
    return "-" if ms is None else milliseconds(ms)


def main() -> None:
    given = parser(__doc__, "warm.json").parse_args()
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            found[backend] = dict(processes(backend, Path(folder)))
    write(given, {"processes": found}, tables)


if __name__ == "__main__":
    main()
