"""All benchmarks, or a quick run of those that a sceptic asks for first; and the comparison of two runs.

python -m tools.bench --quick [-o FOLDER]          under 10 minutes
python -m tools.bench --full                       all of them, over tools/results/: hours
python -m tools.bench --compare OLD [NEW]          folders or files of results
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.lib import compare
from tools.lib.listing import TOOLS, programs

ROOT, RESULTS = TOOLS.parent, TOOLS / "results"
LAST_QUICK = ROOT / "build" / "bench"  #: where --quick writes unless told otherwise, and --compare looks first
QUICK = ("choices", "longnet", "native", "decode", "dispatch", "hilbert")  #: all take --quick
LIMIT_S = 3600.0  #: after which a benchmark is stopped, and has failed
OPTIONS = ("--quick", "--full", "--compare")  #: of `python -m tools.bench`, instead of a NAME


def full() -> list[str]:
    """Every benchmark that writes a file."""
    return [each.name for each in programs("bench") if each.writes != "-"]


def run(names: Iterable[str], folder: Path, *arguments: str) -> list[str]:
    """Run each in a process of its own, with its file in this folder; the names of those that failed."""
    failed = []
    for name in names:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", "tools.bench", name, *arguments, "-o", str(folder / f"{name}.json")]
        try:
            subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr, flush=True)
            failed.append(name)
    return failed


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
    given = parser.parse_args(arguments)
    if given.compare:
        if len(given.compare) > 2 or given.output:
            parser.error("--compare takes OLD and NEW, and writes no file")
        try:
            print(*compare.report(*(*given.compare, latest())[:2]), sep="\n")
        except compare.NotResults as error:
            parser.error(str(error))
        return
    folder = (given.output or (LAST_QUICK if given.quick else RESULTS)).resolve()
    if given.quick and folder.is_relative_to(RESULTS.resolve()):
        parser.error(f"--quick does not write to {RESULTS}: give another folder by --output")
    failed = run(QUICK, folder, "--quick") if given.quick else run(full(), folder)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print(f"written to {folder}; where that is tools/results, run `python -m tools.docs.build`")
