"""All benchmarks, or a quick run of those that a sceptic asks for first; and the comparison of two runs.

    python -m tools.bench --quick [-o FOLDER]          under 10 minutes
    python -m tools.bench --full [--resume]            all of them, over tools/results/: hours
    python -m tools.bench --compare OLD [NEW]          folders or files of results

Each benchmark writes a JSON file with the hardware, versions, commit, load and intervals. --resume goes on with a run
that was stopped: what this commit has measured on this processor is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.lib import common, compare
from tools.lib.listing import TOOLS, programs

ROOT, RESULTS = TOOLS.parent, TOOLS / "results"
LAST_QUICK = ROOT / "build" / "bench"  #: where --quick writes unless told otherwise, and --compare looks first
#: Benchmarks of --quick, and their arguments.
QUICK: dict[str, tuple[str, ...]] = {
    "choices": ("--quick",),
    "longnet": ("--quick",),
    "native": ("--quick",),
    "decode": ("--quick",),
    "dispatch": ("--quick",),
    "hilbert": ("--quick",),
}
LIMIT_S = 3600.0  #: after which a benchmark is stopped, and has failed
OPTIONS = ("--quick", "--full", "--compare")  #: of `python -m tools.bench`, instead of a NAME


def full() -> dict[str, tuple[str, ...]]:
    """Every benchmark that writes a file."""
    return {name: () for name, file in writes().items() if file != "-"}


def writes() -> dict[str, str]:
    """The file that each benchmark writes, by name."""
    return {each.name: each.writes for each in programs("bench")}


def unmeasured(benchmarks: Mapping[str, Sequence[str]], folder: Path) -> dict[str, Sequence[str]]:
    """Those without a file in this folder that this commit wrote on this processor."""
    from attn_dispatch.machine.hardware import hardware

    now = common.commit(), hardware().cpu.model
    return {name: each for name, each in benchmarks.items() if _measured(folder / writes()[name]) != now}


def _measured(path: Path) -> tuple[str, str] | None:
    """The commit and the processor of a file; None where there is none, or no commit says what was measured."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        commit, processor = str(found["commit"]), str(found["hardware"]["cpu"]["model"])
    except (ValueError, KeyError, TypeError):  # cut short, or another program's
        return None
    return None if commit == "unknown" or commit.endswith("-dirty") else (commit, processor)


def run(benchmarks: Mapping[str, Sequence[str]], folder: Path) -> list[str]:
    """Run each in a process of its own, with its file in this folder; the names of those that failed."""
    files = writes()
    failed = []
    start = time.monotonic()
    for name, arguments in benchmarks.items():
        print(f"--- {name}, after {time.monotonic() - start:.0f} s", flush=True)
        command = [sys.executable, "-m", "tools.bench", name, *arguments, "-o", str(folder / files[name])]
        if not succeeds(command):
            failed.append(name)
    print(f"--- done after {time.monotonic() - start:.0f} s: {folder}")
    return failed


def succeeds(command: Sequence[str], limit_s: float = LIMIT_S) -> bool:
    """Run a command; stop it after `limit_s`, with all that it has started, which would run beside the next one."""
    process = subprocess.Popen(command, cwd=ROOT, process_group=0)
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit_s:g} s: {shlex.join(command)}", file=sys.stderr, flush=True)
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def latest() -> Path:
    """The last quick run, or the repository's own results."""
    return LAST_QUICK if any(LAST_QUICK.glob("*.json")) else RESULTS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run or compare, as the options say; exit status 1 where a benchmark failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--quick", action="store_true", help=f"run {', '.join(QUICK)}, each for a minute or two")
    kind.add_argument("--full", action="store_true", help="run every benchmark")
    kind.add_argument("--compare", nargs="+", type=Path, metavar=("OLD", "NEW"), help="compare, row by row")
    parser.add_argument("-o", "--output", type=Path, help=f"folder of the results; of --quick {LAST_QUICK.name}")
    parser.add_argument("--resume", action="store_true", help="with --full: leave out what has been measured")
    given = parser.parse_args(arguments)
    if given.resume and not given.full:
        parser.error("--resume needs --full")
    if given.compare:
        if len(given.compare) > 2 or given.output:
            parser.error("--compare takes OLD and NEW, and writes no file")
        old, new = (*given.compare, latest())[:2]
        try:
            print(*compare.report(old, new), sep="\n")
        except compare.NotResults as error:
            parser.error(str(error))
        return
    folder = (given.output or (LAST_QUICK if given.quick else RESULTS)).resolve()
    if given.quick and folder.is_relative_to(RESULTS.resolve()):
        parser.error(f"--quick does not write to {RESULTS}: give another folder by --output")
    benchmarks = QUICK if given.quick else full()
    failed = run(unmeasured(benchmarks, folder) if given.resume else benchmarks, folder)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    if folder == RESULTS.resolve():
        print("now run `python -m tools.docs.build`, which writes the documentation's figures from these files")


if __name__ == "__main__":
    main()
