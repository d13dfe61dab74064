"""How far the tuner can be trusted: stable winners, a store that loses nothing, choices for unmeasured shapes.

    python -m tools.bench.trust

Winners and planted surfaces run on a simulated clock, where a machine's own noise would decide; all else is real.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from attn_dispatch import attend, counters, profile
from attn_dispatch.decisions import decide
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.folder import Store
from tools.checks import trust_choice, trust_learned, trust_store
from tools.lib.common import parser, write

MANY = 10_000


@contextmanager
def own_folder() -> Iterator[Path]:
    """A separate cache folder for this figure."""
    before = os.environ.get("ATTN_DISPATCH_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTN_DISPATCH_CACHE_DIR"] = folder
        yield Path(folder)
    os.environ.pop("ATTN_DISPATCH_CACHE_DIR")
    if before is not None:
        os.environ["ATTN_DISPATCH_CACHE_DIR"] = before


def storm(problems: int = MANY) -> dict[str, Any]:
    """attend() on many problems, each once, as in a server whose requests all differ."""
    generator = torch.Generator().manual_seed(0)
    before = counters()
    start = time.perf_counter()
    for number in torch.randperm(problems, generator=generator).tolist():
        q = torch.ones(1, number % 2500 + 16, 1, 8)
        attend(q, q, q, is_causal=number // 2500 % 2 == 1, scale=0.5 if number >= 5000 else None)
    seconds = time.perf_counter() - start
    ways = {name: count - before[name] for name, count in counters().items()}
    spent = sum(seconds for _, seconds in decide._rate_limit._trials)
    return {"problems": problems, "seconds": seconds, "last_minute_trial_seconds": spent, **ways}


def inspect(count: int = MANY, runs: int = 5) -> dict[str, Any]:
    """Seconds of `attn-dispatch inspect` over many decisions, and of its help."""
    problem = problem_of((1, 64, 2, 8), Dense(), torch.float32, torch.device("cpu"))
    profile([problem], budget_s=1.0, progress=False)
    store = Store(cache_folder())
    ((_, decision),) = store.all()
    for number in range(count - 1):
        store.put(msgspec.structs.replace(decision, key=f"{number:020x}"))
    seen = {name: [run_s(*words) for _ in range(runs)] for name, words in COMMANDS.items()}
    return {"decisions": count, **{name: statistics.median(times) for name, times in seen.items()}}


COMMANDS = {"inspect_s": ("inspect",), "inspect_json_s": ("inspect", "--json"), "help_s": ("inspect", "--help")}


def run_s(*arguments: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "attn_dispatch", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    arguments = parser(__doc__, "trust.json").parse_args()
    found: dict[str, Any] = {}
    for name, figures in (
        ("choice", trust_choice.figures),
        ("store", trust_store.figures),
        ("learned", trust_learned.figures),
        ("storm", storm),
        ("inspect", inspect),
    ):
        with own_folder():
            found[name] = figures()
        print(name, found[name], flush=True)
    write(arguments.output, found)


if __name__ == "__main__":
    main()
