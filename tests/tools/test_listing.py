"""`python -m tools.bench` and `python -m tools.checks`: what they list can be run."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest

from tests.support.processes import printed
from tools.lib import listing

ROOT = Path(__file__).parents[2]
ROOMS = ("bench", "checks")
PROGRAMS = [(room, program) for room in ROOMS for program in listing.programs(room)]


@pytest.mark.parametrize(("room", "program"), PROGRAMS, ids=lambda given: getattr(given, "name", given))
def test_each_has_a_summary_and_a_main_without_arguments(room: str, program: listing.Program) -> None:
    found = importlib.import_module(f"tools.{room}.{program.name}")
    assert program.summary
    assert " ".join((found.__doc__ or "").split()).startswith(program.summary)
    assert not inspect.signature(found.main).parameters
    assert getattr(found, "TAKES", "-") == program.takes


@pytest.mark.parametrize("room", ROOMS)
def test_the_list_names_every_module(room: str) -> None:
    modules = [path.stem for path in sorted((ROOT / "tools" / room).glob("[!_]*.py"))]
    assert [line.split()[0] for line in printed("-m", f"tools.{room}").splitlines()] == ["name", *modules]


def test_results_are_measured_here_or_kept_with_their_commit() -> None:
    written = {program.writes for room, program in PROGRAMS if room == "bench" or program.name in ("arm", "matrix")}
    there = {path.name: json.loads(path.read_text()) for path in (ROOT / "tools" / "results").glob("*.json")}
    kept = {name for name, found in there.items() if "tables" in found and found["commit"]}
    assert written == there.keys() - kept
    assert not written & kept
