"""All checks that need a CUDA device, in one run: rates, results, block sizes, CUDA graphs, decisions and tests.

    python -m tools.checks.gpu_check --output FOLDER [--minutes 9] [--only STEP...] [--backends NAME...]
        [--resume] [--dry-run]

Needs, besides a PyTorch with CUDA and Triton: msgspec and platformdirs, which images with PyTorch often lack
(tools/checks/gpu/wheels.py gathers them), and for `conformance` pytest, pytest-xdist and hypothesis. The steps, in
their order, are modules in tools/checks/gpu:

    device       hardware, versions, clocks; rates of copying and of matrix products
    edges        ranks on one device, graphs that outlive trials, streams, strides of masks, documents
    smoke        each backend and dtype against float64, in a process of its own
    conformance  the tests marked `cuda`
    graphs       attend() in CUDA graphs; times on the host; decoding
    decisions    trials, and a profile <silicon>.json that can be shipped
    blocks       every block size of Triton's kernels

Each writes FOLDER/STEP.json after every item, so that a run that is ended keeps what it has. A step may take its part
of the time that is left. --dry-run runs all of it on a CPU, with tiny problems and without CUDA; it writes to a
temporary folder unless --output names one. Results of another machine are never replaced.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attn_dispatch.text import one_line
from tools.checks.gpu.workers import Item, Phase, Row, Setup, command_of, rows_of

TAKES = "9 min"  #: unless --minutes says otherwise
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "results" / "gpu"
#: The steps in their order, and the seconds of each in a run of nine minutes; unused ones go to later steps.
STEPS = {"device": 15, "edges": 70, "smoke": 80, "conformance": 60, "graphs": 60, "decisions": 150, "blocks": 100}
#: Of every step's summary, and what they are called in the table.
COUNTS = {"items": "items", "failed": "failed", "left_out": "left out", "took_s": "s"}
WIDEST = 240  #: characters of a line on the terminal


class Results:
    """The rows of a step, in a file from the first one on. Rows may be added by several threads."""

    def __init__(self, path: Path, step: Any, head: dict[str, Any]) -> None:
        self._path, self._step, self._lock = path, step, threading.Lock()
        self._head = {"measured": datetime.now(UTC).isoformat(timespec="seconds"), **head}
        self._begun = time.monotonic()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        found = " ".join(f"{key} {value}" for key, value in row.items() if isinstance(value, str | float | bool))
        with self._lock:
            self.rows.append(row)
            self._write({})
            print(f"{self._path.stem}  {self._step.label(row)}  {found}"[:WIDEST], flush=True)

    def _write(self, summary: dict[str, Any]) -> None:
        """Replace the file: one that is ended while it writes leaves the one before."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({**self._head, "summary": summary, "rows": self.rows}, indent=1) + "\n")
        new.replace(self._path)

    def end(self, left_out: int) -> dict[str, Any]:
        """The summary, which the file then has too. `left_out`: items that no time was left for."""
        failed = sum("failed" in row for row in self.rows)
        took_s = round(time.monotonic() - self._begun, 1)
        counts = dict(zip(COUNTS, (len(self.rows), failed, left_out, took_s)))
        summary = {**counts, **self._step.summary(self.rows)}
        self._write(summary)
        return summary


def run_step(
    name: str, setup: Setup, seconds: float, environment: dict[str, str], head: dict[str, Any], resume: bool = False
) -> dict[str, Any]:
    """Measure all phases of a step, and return its summary. `head`: what its file says beside. `resume`: but for the
    items that the file has, those that failed and were compiled apart.
    """
    step: Any = importlib.import_module(f"tools.checks.gpu.{name}")
    path = Path(setup.output, f"{name}.json")
    results = Results(path, step, head)
    if resume and path.exists():
        results.rows = [row for row in json.loads(path.read_text())["rows"] if not {"failed", "compiled"} & row.keys()]
    if name == "conformance":
        results.rows = step.run(path, setup, seconds, environment)
        return results.end(0)
    done, end, number, left_out = set(map(step.label, results.rows)), time.monotonic() + seconds, 0, 0
    while (phase := step.phase(number, results.rows, setup)) is not None:
        now = time.monotonic()
        before = len(results.rows)
        left = ([item for item in group if step.label(item) not in done] for group in phase.groups)
        wanted = (None, *setup.backends)  # the items of these backends, and those of none
        groups = [[item for item in group if not setup.backends or item.get("backend") in wanted] for group in left]
        phase = phase._replace(groups=list(filter(None, groups)))
        run_phase(phase, command_of(name, setup), now + (end - now) * phase.share, environment, results)
        left_out += max(0, sum(map(len, phase.groups)) - (len(results.rows) - before))
        number += 1
    return results.end(left_out)


def run_phase(phase: Phase, command: Sequence[str], end: float, environment: dict[str, str], results: Results) -> None:
    """Measure the groups, several at a time; with several, each computes with one thread on the CPU."""
    alone = environment if phase.parallel == 1 else {**environment, "OMP_NUM_THREADS": "1"}

    def run_group(items: list[Item]) -> None:
        for row in rows_of(items, command, phase.item_s, end, alone):
            results.add(row)

    with ThreadPoolExecutor(phase.parallel) as pool:
        for _ in pool.map(run_group, phase.groups):
            pass


def table(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """A few lines for each step: what the run found, short enough for the end of a log."""
    lines = []
    for name, summary in summaries.items():
        counts = ", ".join(f"{summary[key]} {word}" for key, word in COUNTS.items() if key in summary)
        lines.append(f"{name}: {counts}")
        for key, found in summary.items():
            if key not in COUNTS:
                lines.append(f"  {key}: {found}"[:WIDEST])
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    options.add_argument("--output", type=Path, help="folder of results (default: tools/results/gpu)")
    options.add_argument("--minutes", type=float, default=9.0, help="of the whole run (default: 9)")
    options.add_argument("--only", nargs="+", choices=list(STEPS), metavar="STEP", help="some of the steps")
    options.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="some of them (default: all)")
    options.add_argument("--resume", action="store_true", help="leave out what the output folder has already")
    options.add_argument("--dry-run", action="store_true", help="tiny problems on the CPU")
    given = options.parse_args(arguments)
    if not given.minutes > 0:
        options.error(f"--minutes must be over 0, not {given.minutes}")
    if given.output is None:
        given.output = Path(tempfile.mkdtemp(prefix="gpu-check-")) if given.dry_run else RESULTS
    return given


def refuse_other_machines(output: Path, steps: Sequence[str], silicon: str) -> None:
    """Exit where a step would replace results of another machine."""
    for path in (output / f"{name}.json" for name in steps):
        there = json.loads(path.read_text()).get("silicon") if path.exists() else silicon
        if there != silicon:
            sys.exit(f"{path} holds results of {there}, not of {silicon}: nothing was measured; name another --output")


def main() -> None:
    given = parse()
    start = time.monotonic()
    given.output.mkdir(parents=True, exist_ok=True)
    import torch

    from attn_dispatch.machine.hardware import hardware, provenance, silicon

    if not (given.dry_run or torch.cuda.is_available()):
        sys.exit("there is no CUDA device: nothing was checked (--dry-run checks this program on a CPU)")
    device = "cpu" if given.dry_run else "cuda:0"
    head = {"silicon": silicon(device), "provenance": provenance(torch.device(device))}
    setup = Setup(str(given.output.resolve()), given.dry_run, hardware().cpu.cores, given.backends)
    steps = [name for name in STEPS if given.only is None or name in given.only]
    refuse_other_machines(given.output, steps, silicon(device))
    summaries = {}
    with tempfile.TemporaryDirectory() as cache:
        interpreted = {"TRITON_INTERPRET": "1"} if given.dry_run else {}
        environment = {**os.environ, "ATTN_DISPATCH_CACHE_DIR": cache, **interpreted}
        for at, name in enumerate(steps):
            left_s = given.minutes * 60 - (time.monotonic() - start)
            seconds = left_s * STEPS[name] / sum(STEPS[each] for each in steps[at:])
            try:
                summaries[name] = run_step(name, setup, seconds, environment, head, given.resume)
            except Exception as error:  # noqa: BLE001 - the other steps are worth the time that is left
                traceback.print_exc()
                summaries[name] = {"failed": 1, "error": one_line(error)}
    print(*table(summaries), f"results: {given.output}", sep="\n")
    sys.exit(any(summary["failed"] for summary in summaries.values()))


if __name__ == "__main__":
    main()
