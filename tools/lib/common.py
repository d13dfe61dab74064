"""Parser, output, processes and timing fields that all benchmarks share; results name the machine and versions.

Imports nothing but Python's own modules, for the one program that has to run without torch: `tools.checks.matrix`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from attn_dispatch.tuning.intervals import Timing
    from tools.lib.tables import Table

T = TypeVar("T")
RESULTS = Path(__file__).parents[1] / "results"
#: When this process began, and the load of the last minute then, before it added its own; None where unknown.
STARTED, LOAD_BEFORE = datetime.now(UTC), os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def parser(description: str | None, default: str, *, quick: str = "") -> argparse.ArgumentParser:
    """A parser with `--output`, a file of `RESULTS` by default; with `--quick` where it says what that does."""
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(description=description, formatter_class=raw)
    found.add_argument("-o", "--output", type=Path, default=RESULTS / default, help="JSON file to write")
    if quick:
        found.add_argument("--quick", action="store_true", help=quick)
    return found


def alone(work: Callable[..., T], *arguments: Any, **variables: str) -> T:
    """The result of `work(*arguments)` in a new process with these environment variables; all must be picklable."""
    context = get_context("spawn")
    with patch.dict(os.environ, variables), ProcessPoolExecutor(1, context) as pool:
        return pool.submit(work, *arguments).result()


def write(
    given: argparse.Namespace,
    figures: dict[str, Any],
    tables: Callable[[Any], Iterable[Table]] = lambda _: (),
    whole: bool = True,
) -> None:
    """Print the tables of figures; write these with the machine, versions, commit and load they were measured with.

    Args:
        given: the options of `parser`.
        whole: whether these are all figures of the file: a part, or those of `--quick`, does not replace one of
            `RESULTS`.
    """
    path, whole = given.output, whole and not vars(given).get("quick")
    for table in tables(figures):
        table.show()
    if not whole and path.resolve().is_relative_to(RESULTS.resolve()):
        print(f"a part of the figures: {path.name} is left as it is; -o FILE writes them")
        return
    import torch

    from attn_dispatch.machine.hardware import hardware, provenance, silicon

    where = torch.device("cpu")
    file = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round((datetime.now(UTC) - STARTED).total_seconds(), 1),
        "load_before": LOAD_BEFORE,
        "commit": commit(),
        "silicon": silicon(where),
        "provenance": provenance(where),
        "hardware": hardware().to_dict(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # an interruption leaves the old file whole
    unfinished.write_text(json.dumps(file, indent=1) + "\n")
    unfinished.replace(path)
    print(f"written to {path}")


def commit() -> str:
    """The repository's commit, with "-dirty" where files other than results differ from it; "unknown" outside one."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)tools/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=RESULTS.parents[1], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, most: int | None = None, **options: Any
) -> dict[str, Timing]:
    """Times of calls in turns: of `rounds`, up to `most` within a `budget_s`; by default slow ones are not dropped."""
    from attn_dispatch.tuning.rounds import time_in_rounds

    options = {"budget_s": None, "hopeless": None, **options}
    return dict(time_in_rounds(calls, min_rounds=rounds, max_rounds=most or rounds, **options).timings)


def share_of(share: float, found: Timing) -> Timing:
    """This share of each sample: a limit in the same rounds."""
    from attn_dispatch.tuning.intervals import Timing

    return Timing(tuple(share * each for each in found.samples_ms), 0.0)


def timing(found: Timing) -> dict[str, float | int]:
    return {
        "median_ms": found.median_ms,
        "low_ms": found.low_ms,
        "high_ms": found.high_ms,
        "rounds": len(found.samples_ms),
    }


def ratio(slow: Timing, fast: Timing) -> dict[str, float]:
    """Median and 95 % interval of the paired ratios slow / fast of one interleaved run."""
    from attn_dispatch.tuning.intervals import ratio_interval

    interval = ratio_interval(slow, fast)
    ratios = sorted(a / b for a, b in zip(slow.samples_ms, fast.samples_ms))
    return {"median": ratios[len(ratios) // 2], "low": interval.low, "high": interval.high}
