"""The quick tests in environments of their own: versions of Python and torch, and without g++ or Triton.

    python -m tools.checks matrix                                      every environment whose Python is on the PATH
    python -m tools.checks matrix --only py3.11-torch2.6.0 no-triton   these; the table's other rows stay
    python -m tools.checks matrix --help                               their names

Each environment is made by venv and pip in `.venv-matrix/`, and used again by a later run: remove its folder to have
it made anew. torch's builds for CUDA, the ones of PyPI, take 3 GB of downloads and 6 GB of disk for each version.
It needs nothing but Python itself: run it in another system, with the same checkout, for a Python that this one lacks.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tools.lib.common import parser
from tools.lib.tables import Table

TAKES = "4 min an environment, and its downloads"
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-matrix"
LIMIT_S = 1800  #: of one run of the tests
#: Rooms of tests/ that ask how the package runs; not this checkout's layout, its programs, optional libraries.
ROOMS = (
    "backends", "call", "cli", "compat", "decisions", "kernels", "learning", "machine", "nn", "ring", "spec", "store",
    "testing", "tuning",
)  # fmt: skip
COMPILERS = re.compile(r"(.*-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+|c89|c99)(-[\d.]+)?")
#: Read in the environment itself, with the PATH that its tests have.
FACTS = """
import json, platform, shutil
from importlib.metadata import distributions
import torch
found = {each.metadata["Name"]: each.version for each in distributions()}
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "numpy": found.get("numpy"),
    "triton": found.get("triton"), "compiler": shutil.which("g++") is not None,
}))
"""
#: Compiles what a wheel has of `native` into the checkout, for an environment that has no compiler.
AS_IN_A_WHEEL = """
from attn_dispatch.kernels.native.library import FOLDER
from attn_dispatch.kernels.native.variants import VARIANTS, build
from attn_dispatch.machine.compiler import compiler
for each in VARIANTS:
    build(compiler(), each.options, FOLDER / each.file)
    (FOLDER / each.file).with_suffix(".o").unlink()
    print(FOLDER / each.file)
"""


class Environment(NamedTuple):
    """A Python, a torch, and what a user may not have: "g++" or "triton". `simulated`: a system (test_systems.py)."""

    name: str
    python: str
    torch: str
    without: str = ""
    simulated: str = ""


SIMULATED = {"win32": "Windows", "darwin": "macOS"}
PINNED = "2.13.0"  #: the version that the README's commands install
ENVIRONMENTS = (
    *(Environment(f"py3.11-torch{torch}", "3.11", torch) for torch in ("2.6.0", "2.9.1", PINNED, "2.14.1", "2.15.0")),
    *(Environment(f"py{python}-torch{PINNED}", python, PINNED) for python in ("3.12", "3.13", "3.14")),
    *(Environment(f"no-{what}", "3.11", PINNED, what) for what in ("g++", "triton")),
    *(Environment(name, "3.11", PINNED, "", system) for system, name in SIMULATED.items()),
)


# --- environments -----------------------------------------------------------------------------------------------------


def interpreter(version: str) -> str | None:
    """The program of a version of Python; None where the PATH has none."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    return shutil.which(f"python{version}")


def requirements() -> list[str]:
    """What the package, its builds and its tests need, read from pyproject.toml, without torch."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, builds = given["project"], given["build-system"]["requires"]
    lines = [*builds, *project["dependencies"], *project["optional-dependencies"]["test"]]
    # torch brings the Triton that it was built with, and asks for exactly that one.
    return [line for line in lines if re.split(r"\W", line)[0] not in ("torch", "triton")]


def made(environment: Environment, python: str) -> Path:
    """The environment's Python, installed if it is not there.

    Raises:
        RuntimeError: venv or pip failed; the message holds the end of what it printed.
    """
    folder = FOLDER / environment.name
    program, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return program
    _run([python, "-m", "venv", str(folder)])
    pip = [str(program), "-m", "pip", "install", "-q"]
    _run([*pip, f"torch=={environment.torch}", *requirements()])
    _run([*pip, "--no-deps", "--editable", str(ROOT)])
    if environment.without == "triton":
        _run([str(program), "-m", "pip", "uninstall", "-q", "-y", "triton"])  # brought by torch itself
    elif "+cpu" in _facts(program, None)["torch"]:
        _run([*pip, "triton"])  # builds for the CPU bring none
    complete.touch()
    return program


def path_without_compilers() -> str:
    """A PATH with every program of this one but C and C++ compilers, as a folder of links."""
    folder = FOLDER / "programs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for place in map(Path, os.get_exec_path()):
        for each in place.iterdir() if place.is_dir() else ():
            if not COMPILERS.fullmatch(each.name) and not (folder / each.name).is_symlink():
                (folder / each.name).symlink_to(each)
    return str(folder)


def _run(command: list[str], **variables: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _facts(program: Path, path: str | None) -> dict[str, Any]:
    variables = {} if path is None else {"PATH": path}
    found: dict[str, Any] = json.loads(_run([str(program), "-W", "ignore", "-c", FACTS], **variables).splitlines()[-1])
    return found


# --- tests ------------------------------------------------------------------------------------------------------------


def tested(environment: Environment, program: Path) -> dict[str, Any]:
    """A row of the table: what the environment has, and how its tests ended."""
    compiles = environment.without != "g++"
    path = None if compiles else path_without_compilers()
    libraries = () if compiles else _run([str(program), "-W", "ignore", "-c", AS_IN_A_WHEEL]).split()
    report = FOLDER / f"{environment.name}.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-n", "2", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Nor does it have what a compiler has made in the user's cache folder.
    without = {} if path is None else {"PATH": path, "CXX": "", "XDG_CACHE_HOME": str(FOLDER / "cache")}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **without}
    begun = time.monotonic()
    tests = [f"tests/{room}" for room in ROOMS]
    if environment.simulated:
        tests = ["tests/house/test_systems.py", "--rest", "-k", environment.simulated]
    command = [str(program), "-m", "pytest", *options, *tests]
    try:
        with (FOLDER / f"{environment.name}.log").open("w", encoding="utf-8") as log:
            subprocess.run(command, cwd=ROOT, env=variables, stdout=log, stderr=log, timeout=LIMIT_S)
    finally:
        for each in libraries:
            Path(each).unlink()
    return {
        "name": environment.name,
        "without": environment.without,
        **_facts(program, path),
        **counted(report),
        "seconds": round(time.monotonic() - begun),
        "system": f"{environment.name}, simulated" if environment.simulated else _system(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def counted(report: Path) -> dict[str, Any]:
    """How many tests of a JUnit report passed and were skipped, and the names of those that failed."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = sorted({_name(case) for case in cases if {child.tag for child in case} & {"failure", "error"}})
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = {_name(case) for case in cases}  # one that fails again at its end is there twice
    return {"passed": len(names) - skipped - len(failed), "skipped": skipped, "failed": failed}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


def _system() -> str:
    release = platform.freedesktop_os_release() if sys.platform == "linux" else {}
    return f"{release.get('PRETTY_NAME', platform.system())}, {platform.machine()}"


def tables(found: Any) -> Table:
    """A row for each environment, and the names of the tests that failed."""
    rows = found["environments"]
    head = ("Python", "torch", "NumPy", "Triton", "without", "system", "passed", "skipped", "failed", "date")
    return Table(
        head,
        [_cells(row) for row in rows],
        " ".join(f"{row['name']}: `{name}`." for row in rows for name in row["failed"]),
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    versions = (row[name] or "-" for name in ("python", "torch", "numpy", "triton", "without"))
    counts = (f"{row['passed']:,}", f"{row['skipped']:,}", str(len(row["failed"])))
    return (*versions, row["system"], *counts, row["measured"][:10])


def main() -> None:
    options = parser(__doc__, "platforms.json")
    names = [each.name for each in ENVIRONMENTS]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    given = options.parse_args()
    FOLDER.mkdir(exist_ok=True)
    failed = False
    for environment in (each for each in ENVIRONMENTS if each.name in given.only):
        if (python := interpreter(environment.python)) is None:
            print(f"{environment.name}: python{environment.python} is not on the PATH: left out")
            continue
        row = tested(environment, made(environment, python))
        print(f"{environment.name}: {row['passed']} passed, {row['skipped']} skipped", *row["failed"], sep="\n")
        failed |= bool(row["failed"])
        rows = json.loads(given.output.read_text())["environments"] if given.output.exists() else []
        by_name = {each["name"]: each for each in (*rows, row)}
        kept = [by_name[name] for name in names if name in by_name]
        given.output.write_text(json.dumps({"environments": kept}, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
