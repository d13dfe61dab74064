"""The native kernel as compiled for aarch64 and run in an emulator, held to float64, at each level that a wheel has.

    python -m tools.checks arm

It needs Debian's `g++-aarch64-linux-gnu` and `qemu-user`. Each call of the kernel is a process of the emulator; what is
around it runs here. An emulator gives no times.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native.run import DTYPES
from attn_dispatch.kernels.native.variants import Variant, variants
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import CASES, DATA_CASES
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.gate import HardCase, case_of
from attn_dispatch.tuning.hard_cases import class_key
from attn_dispatch.tuning.oracle import Oracle
from tests.support.native_driver import Program
from tools.lib.common import parser, write
from tools.lib.tables import Table

TAKES = "5 minutes"
COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64", "qemu-aarch64-static")
#: Cases whose hard cases are run, one for each kind of pattern.
HARD = ("dense-grouped", "causal", "window-causal", "longnet-causal", "neighborhood-2d", "ranges", "blocks")


def programs() -> tuple[str, str]:
    """The compiler and the emulator. Raises SystemExit where one is not installed."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    compiler = shutil.which(COMPILER)
    if emulator is None or compiler is None:
        sys.exit(f"{COMPILER} and {EMULATORS[0]} are needed: apt-get install g++-aarch64-linux-gnu qemu-user")
    return compiler, emulator


def asked() -> dict[Problem, bool]:
    """A problem of every kind with gradients, in the kernel's dtypes by turns; and whether its hard cases are due."""
    dtypes = cycle(DTYPES)
    found = {case.problem(next(dtypes), needs_grad=True): case.id in HARD for case in (*CASES, *DATA_CASES)}
    few = next(case for case in CASES if case.id == "causal-one-token")
    return found | {few.problem(dtype, needs_grad=False): True for dtype in DTYPES}


def held(level: Variant, compiler: str, emulator: str) -> dict[str, Any]:
    """A row of the table: how much the kernel computed, and what was wrong."""
    backend = registry.load("native")
    linked = *level.options, "-static", "-fopenmp"
    counts, failures = Counter[str](), list[str]()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        program = Program.used(patch, Path(folder), [compiler], *linked, emulator=emulator)
        for problem, is_hard in asked().items():
            due = class_key(problem) if is_hard else ()
            for case in (HardCase.of("a call", Oracle.of(make(problem))), *map(case_of, due)):
                counts["problems" if case.name == "a call" else "hard cases"] += 1
                failures += [f"{case.problem}: {text}" for text in case.check(case.run(backend)).failures]
        return {"level": level.name, **counts, "calls": program.calls, "failures": failures}


def table(found: Any) -> Table:
    """A row for each level, and what failed."""
    rows = []
    for row in found["levels"]:
        counts = (f"{row[name]:,}" for name in ("problems", "hard cases", "calls"))
        rows.append((f"`{row['level']}`", *counts, str(len(row["failures"]))))
    head = ("level", "problems", "hard cases", "passes of the kernel", "failures")
    emulator = found["emulator"].partition(" (")[0]
    about = f"By `python -m tools.checks arm`, {found['measured'][:10]}: {found['compiler']}, {emulator}."
    return Table(head, rows, about)


def first_line(command: str) -> str:
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def main() -> None:
    given = parser(__doc__, "arm.json").parse_args()
    compiler, emulator = programs()
    rows = [held(each, compiler, emulator) for each in variants("aarch64")]
    for row in rows:
        print(f"{row['level']}: {len(row['failures'])} failures", *row["failures"], sep="\n")
    figures = {"compiler": first_line(compiler), "emulator": first_line(emulator), "levels": rows}
    write(given, figures)
    sys.exit(any(row["failures"] for row in rows))


if __name__ == "__main__":
    main()
