"""Step `conformance`: the tests marked `cuda`, in as many processes as there are cores, with what time is left.

Loaded by pytest as a plug-in it writes every test's outcome into a file of results at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checks.gpu.workers import ROOT, Row, Setup

if TYPE_CHECKING:
    import pytest

RESULTS = "GPU_CHECK_CONFORMANCE"  #: the environment variable with the file to write
TEST_S = 120  #: seconds of one test
FIRST, LAST = ("triton", "sdpa"), "flex"  #: in the names of tests
MOST_TEXT = 2000  #: characters of a failure that are kept
DRY_TESTS = "tests/tuning/test_on_a_device.py"


def run(path: Path, setup: Setup, seconds: float, environment: dict[str, str]) -> list[Row]:
    """The outcomes of all tests that ended within `seconds`, which `path` has too."""
    inherited = {name: text for name, text in environment.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        command_of(setup), cwd=ROOT, env={**inherited, RESULTS: str(path), "OMP_NUM_THREADS": "1"}, process_group=0
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"conformance: ended after {seconds:.0f} s", flush=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        code = process.wait()
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    if code not in (0, 1, -9) or not rows:
        rows.append({"test": "pytest", "outcome": "failed", "failed": f"pytest ended with {code}"})
    return rows


def command_of(setup: Setup) -> list[str]:
    tests = [DRY_TESTS] if setup.dry_run else marked()
    # pytest-benchmark warns under xdist, which `filterwarnings = error` makes an error of pytest itself.
    off = ["-p", "no:benchmark", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    limit = [f"--timeout={TEST_S}"] if find_spec("pytest_timeout") else ["-o", f"faulthandler_timeout={TEST_S}"]
    # One test at a time for each process, in order.
    parallel = ["-n", str(1 if setup.dry_run else setup.cores), "--dist", "load", "--maxschedchunk", "1"]
    return [
        *(sys.executable, "-m", "pytest", "-q", "--tb=no", "-m", "cuda", "-p", "tools.checks.gpu.conformance"),
        *(*parallel, *off, *limit, *tests),
    ]


def marked() -> list[str]:
    """The files with tests marked `cuda`: collecting the others takes longer than these."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.cuda" in path.read_text(encoding="utf-8")]


_rows: list[Row] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (LAST in item.nodeid, not any(name in item.nodeid for name in FIRST)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that starts the others: they have no file to write."""
    path = os.environ.get(RESULTS)
    if path is None or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    row: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "took_s": round(report.duration, 3)}
    if report.failed:
        row["failed"] = report.longreprtext[-MOST_TEXT:]
    _rows.append(row)
    Path(path).write_text(json.dumps({"rows": _rows}, indent=1) + "\n")


def summary(rows: list[Row]) -> dict[str, Any]:
    """How many tests had each outcome, and which failed."""
    failed = [row["test"] for row in rows if row["outcome"] == "failed"]
    return {**Counter(row["outcome"] for row in rows), **({"failed tests": failed} if failed else {})}
