"""`python -m tools.bench --quick` and `--full`: what they run exists and takes these options; where they write."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attn_dispatch.machine.hardware import hardware
from attn_dispatch.machine.memory import host_psutil
from tools.lib import common, listing, suite


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would be run; the first one fails."""
    found: list[list[str]] = []

    def succeeds(command: list[str]) -> bool:
        found.append(command[2:])
        return len(found) > 1

    monkeypatch.setattr(suite, "succeeds", succeeds)
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
    assert all(option in shown for option in ("--output", *suite.QUICK[name]))


def test_quick_benchmarks_write_a_file() -> None:
    assert dict.fromkeys(suite.QUICK, ()).items() <= suite.full().items()


def test_full_runs_whatever_writes_a_file() -> None:
    written = {each.writes for each in listing.programs("bench") if each.name in suite.full()}
    by_checks = {each.writes for each in listing.programs("checks")}
    assert written == {path.name for path in suite.RESULTS.glob("*.json")} - by_checks


def test_a_failure_does_not_end_the_run(commands: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"failed: {next(iter(suite.QUICK))}$"):
        suite.main(["--quick", "-o", str(tmp_path)])
    written = [tmp_path / f"{name}.json" for name in suite.QUICK]
    assert commands == [
        ["tools.bench", name, *options, "-o", str(path)] for (name, options), path in zip(suite.QUICK.items(), written)
    ]


@pytest.mark.parametrize("folder", [suite.RESULTS, suite.RESULTS / "gpu"])
def test_quick_never_writes_over_the_results(
    folder: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        suite.main(["--quick", "-o", str(folder)])
    assert ended.value.code == 2
    assert "give another folder" in capsys.readouterr().err
    assert commands == []


def test_full_writes_over_the_results(commands: list[list[str]]) -> None:
    with pytest.raises(SystemExit, match="failed"):
        suite.main(["--full"])
    assert {Path(each[-1]).parent for each in commands} == {suite.RESULTS}
    assert len(commands) == len(suite.full())


def test_resume_leaves_out_what_this_commit_has_measured(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "commit", lambda: "0123456789ab")
    machine = {"hardware": {"cpu": {"model": hardware().cpu.model}}}
    other = {"hardware": {"cpu": {"model": "another"}}}
    files = {
        "decode": {"commit": "0123456789ab"} | machine,
        "longnet": {"commit": "0123456789ab"} | other,
        "native": {"commit": "0123456789ab-dirty"} | machine,
        "trust": machine,
    }
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="failed"):
        suite.main(["--full", "--resume", "-o", str(tmp_path)])
    assert {each[1] for each in commands} == suite.full().keys() - {"decode"}


def test_resume_measures_what_no_commit_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for named in ("unknown", "0123456789ab-dirty"):
        monkeypatch.setattr(common, "commit", lambda named=named: named)
        found = {"commit": named, "hardware": {"cpu": {"model": hardware().cpu.model}}}
        (tmp_path / "decode.json").write_text(json.dumps(found))
        assert suite.unmeasured({"decode": ()}, tmp_path) == {"decode": ()}


@pytest.mark.parametrize("text", ['{"commit": "0123', "[]", '{"commit": "0123456789ab"}'])
def test_resume_measures_again_what_is_no_whole_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "decode.json").write_text(text)
    assert suite.unmeasured({"decode": ()}, tmp_path) == {"decode": ()}


def test_a_part_does_not_replace_the_file_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    for folder, written in (("results", False), ("others", True)):
        common.write(tmp_path / folder / "hilbert.json", {}, whole=False)
        assert (tmp_path / folder / "hilbert.json").exists() == written
    common.write(tmp_path / "results" / "hilbert.json", {})
    assert [each.name for each in (tmp_path / "results").iterdir()] == ["hilbert.json"]


def test_what_takes_too_long_is_stopped_with_all_it_has_started(tmp_path: Path) -> None:
    path = tmp_path / "child"
    assert not suite.succeeds(["sh", "-c", f"sleep 600 & echo $! > {shlex.quote(str(path))}; wait"], limit_s=2)
    until = time.monotonic() + 60  # a signal is sent at once; a process ends when a processor has time for it
    while not (ended := has_ended(int(path.read_text()))) and time.monotonic() < until:
        time.sleep(0.01)
    assert ended, "it runs on"
    assert suite.succeeds([sys.executable, "-c", ""])
    assert not suite.succeeds([sys.executable, "-c", "raise SystemExit(1)"])


def has_ended(process_id: int) -> bool:
    """Whether there is no such process, or only its exit status is left."""
    psutil = host_psutil()
    try:
        return bool(psutil.Process(process_id).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True


def test_compare_takes_the_last_quick_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "LAST_QUICK", tmp_path)
    assert suite.latest() == suite.RESULTS
    (tmp_path / "decode.json").write_text("{}")
    suite.main(["--compare", str(suite.RESULTS)])
    assert "rows in both: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--quick", "--full"],
        ["--quick", "--resume"],
        ["--compare"],
        ["--compare", "a", "b", "c"],
        ["--compare", "no-such-folder"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        suite.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m tools.bench" in capsys.readouterr().err


def test_the_command_reaches_them() -> None:
    command = [sys.executable, "-m", "tools.bench", "--compare", str(suite.RESULTS), str(suite.RESULTS)]
    done = subprocess.run(command, cwd=suite.ROOT, capture_output=True, text=True, check=True)
    assert "rows in both: " in done.stdout.splitlines()[-1]


def test_results_name_the_commit() -> None:
    here = subprocess.run(["git", "rev-parse", "HEAD"], cwd=suite.ROOT, capture_output=True, text=True, check=False)
    if here.returncode:
        pytest.skip("this is no git repository")
    assert here.stdout.startswith(common.commit().removesuffix("-dirty"))
