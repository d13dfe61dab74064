"""`python -m tools.bench --quick` and `--full`: what they run exists and takes these options; where they write."""

from __future__ import annotations

import importlib
import subprocess
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import printed
from tools.lib import common, listing, suite
from tools.lib.tables import Table


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would be run; the first one fails."""
    found: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        found.append(command[2:])
        if len(found) == 1:
            raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(subprocess, "run", run)
    return found


@pytest.mark.parametrize("name", suite.QUICK)
def test_quick_benchmarks_take_their_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"tools.bench.{name}").main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--output" in shown
    assert "--quick" in shown


def test_each_benchmark_writes_the_file_of_its_name() -> None:
    assert set(suite.QUICK) <= set(suite.full())
    assert {each.writes for each in listing.programs("bench")} == {f"{name}.json" for name in suite.full()}


def test_a_failure_does_not_end_the_run(commands: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"failed: {suite.QUICK[0]}$"):
        suite.main(["--quick", "-o", str(tmp_path)])
    written = [tmp_path / f"{name}.json" for name in suite.QUICK]
    assert commands == [["tools.bench", name, "--quick", "-o", str(path)] for name, path in zip(suite.QUICK, written)]


def test_a_part_does_not_replace_the_file_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    given = Namespace(output=tmp_path / "results" / "hilbert.json")
    for folder, part in product(("results", "others"), ({"whole": False}, {"quick": True})):
        found = Namespace(output=tmp_path / folder / "hilbert.json", quick=part.get("quick", False))
        common.write(found, {}, lambda _: [Table(("a",), [("seen",)])], whole=part.get("whole", True))
        assert "seen" in capsys.readouterr().out
        assert found.output.exists() == (folder == "others")
        found.output.unlink(missing_ok=True)
    common.write(given, {})
    assert [each.name for each in (tmp_path / "results").iterdir()] == ["hilbert.json"]


OVER_RESULTS = [["--quick", "-o", str(folder)] for folder in (suite.RESULTS, suite.RESULTS / "gpu")]
WRONG = ("--quick --full", "--compare", "--compare a b c", "--compare no-such-folder")


@pytest.mark.parametrize("arguments", [*map(str.split, WRONG), *OVER_RESULTS])
def test_wrong_usage(arguments: list[str], commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        suite.main(arguments)
    shown = capsys.readouterr().err
    assert (ended.value.code, commands) == (2, [])
    assert "usage: python -m tools.bench" in shown
    assert ("give another folder" in shown) == (arguments in OVER_RESULTS)


def test_the_command_compares_with_the_last_quick_run() -> None:
    shown = printed("-m", "tools.bench", "--compare", str(suite.RESULTS), str(suite.RESULTS))
    assert "rows in both: " in shown.splitlines()[-1]
    assert suite.latest() in (suite.LAST_QUICK, suite.RESULTS)
