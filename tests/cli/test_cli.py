"""The command line, mostly from outside: what it prints, where, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attn_dispatch
from attn_dispatch.cli import COMMANDS
from attn_dispatch.cli.tables import cells
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.store import files
from attn_dispatch.store.decision import Row
from attn_dispatch.store.folder import Store
from tests.support import made_up as planted
from tests.support.commands import COMMAND, SMALL, TWO, command, plain, problems, surroundings
from tests.support.fakes import raising

NAMES = (("a", "natural"), ("b", "natural"))
TOO_LONG = ("--shape", "1,8589934592,8,64", "--device", "cpu")  #: q alone takes 16 TiB


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("v2/*/*/*.json")
    return path


# --- help and wrong usage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str, tmp_path: Path) -> None:
    done = command(tmp_path, name, "--help")
    assert done.returncode == 0
    assert f"examples:\n  attn-dispatch {name}" in done.stdout
    assert "--json" in done.stdout


def test_help_names_the_commands(tmp_path: Path) -> None:
    done = command(tmp_path, "--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    assert command(tmp_path, "--version").stdout.strip() == attn_dispatch.__version__


NO_TORCH = """
import contextlib, io, json, sys
from attn_dispatch.cli import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(arguments)
    assert out.getvalue(), arguments
    assert not {"torch", "fsspec"} & set(sys.modules), arguments
"""


def test_no_torch(measured: tuple[Path, dict[str, Any]]) -> None:
    """In one process: the first command that loads it is named."""
    commands = [["inspect", *options] for options in ([], ["--json"], ["--regret"], ["--thresholds"])]
    commands += [["doctor", "--lift", "all", "--json"], *([name, "--help"] for name in COMMANDS)]
    env = surroundings(measured[0])
    command = [sys.executable, "-c", NO_TORCH, json.dumps(commands)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND"),
        (("profiel",), "invalid choice"),
        (("profile",), "--quick"),
        (("profile", "--quick", "--causal"), "--shape"),
        (("profile", "--quick", "--full"), "not allowed with"),
        (("profile", *SMALL, "--budget", "0"), "expected a number > 0, got '0'"),
        (("profile", *SMALL, "--from", "x"), "remove --shape"),
        (("profile", "--from", "no-such-file"), "--from no-such-file: cannot be read"),
        (("profile", *SMALL, "--tokens", "3"), "unrecognized arguments"),
        (("inspect", "--regret", "--key", "3f"), "not allowed with"),
        (("inspect", "--thresholds", "--regret"), "not allowed with"),
        (("explain",), "give the length of the sequence"),
        (("explain", "--lengths", "4k:2k"), "expected A:B with A <= B, got '4k:2k'"),
        (("explain", "--lengths", "4x"), "expected an integer >= 1 such as 4096 or 4k, got '4x'"),
        (("explain", "--shape", "1,64,2"), "expected batch,length,heads,head_dim"),
        (("explain", *SMALL, "--dtype", "int8"), "expected some of float16, bfloat16, float32, float64"),
        (("explain", *SMALL, "--segments", "16"), "--segments and --dilations go together"),
        (("explain", *SMALL, "--segments", "16", "--dilations", "1", "--window", "3"), "give one of them"),
        (("explain", *SMALL, "--grid", "8,8"), "--grid needs --window"),
        (("explain", *SMALL, "--window", "1,2,3,4"), "is LEFT,RIGHT,SINKS"),
        (("explain", *SMALL, "--window", "8", "--causal"), "RIGHT = 0 is causal"),
        (("profile", *SMALL), "$ATTN_DISPATCH_MODE must be one of"),
        (("explain", *SMALL, "--backend", "fast"), "got 'fast'"),
        (("explain", "--lengths", "64", "--device", "abacus"), "device must be one of cpu"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    more = {"ATTN_DISPATCH_MODE": "fast"} if "ATTN_DISPATCH_MODE" in message else {}
    done = command(tmp_path, *arguments, **more)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


# --- profile, inspect, explain ----------------------------------------------------------------------------------------


def test_profile_prints_its_decisions(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = measured
    assert printed["folder"] == str(folder)
    assert printed["interrupted"] is False
    for decision in printed["decisions"]:
        assert decision["source"] == "measured"
        chosen = [row for row in decision["candidates"] if row["status"] == "chosen"]
        assert [row["backend"] for row in chosen] == [decision["choice"]]
        assert chosen[0]["median_ms"] > 0


def test_inspect_and_explain_agree_with_profile(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = measured
    seen = plain(command(folder, "inspect", "--json"))
    assert seen["folder"] == str(folder)
    by_key = {decision["key"]: decision for decision in seen["decisions"]}
    assert len(by_key) == 2
    for decision in printed["decisions"]:
        found = by_key[decision["key"]]
        assert {name: found[name] for name in decision} == decision
        assert set(found) - set(decision) == {"silicon", "created", "path"}
        assert Path(found["path"]).is_file()
    assert plain(command(folder, "explain", *TWO, "--json")) == {"decisions": printed["decisions"]}


def test_profile_measures_once(tmp_path: Path) -> None:
    first = command(tmp_path, "profile", *SMALL, "--quick")
    assert first.returncode == 0
    assert "measured" in first.stdout
    assert f"stored in {tmp_path}\n" in first.stdout
    assert "measuring" in first.stderr
    before = only_file(tmp_path).read_bytes(), only_file(tmp_path).stat().st_ino
    again = command(tmp_path, "profile", *SMALL, "--quick")
    assert again.stdout == first.stdout
    assert only_file(tmp_path).stat().st_ino == before[1]  # not written again
    forced = command(tmp_path, "profile", *SMALL, "--force", "--budget", "1")
    assert forced.returncode == 0
    assert only_file(tmp_path).read_bytes() != before[0]


def test_profile_from_a_record(tmp_path: Path) -> None:
    record = tmp_path / "problems.jsonl"
    found = problems("--shape", "1,32,2,8", "--window", "4")
    record.write_text("".join(f"{json.dumps(problem.to_dict())}\n" for problem in found))
    done = plain(command(tmp_path, "profile", "--from", str(record), "--quick", "--json"))
    assert [decision["problem"] for decision in done["decisions"]] == [str(problem) for problem in found]
    record.write_text("{}\n")
    broken = command(tmp_path, "profile", "--from", str(record))
    assert (broken.returncode, f"{record}, line 1" in broken.stderr) == (2, True)


def test_profile_fails_where_it_cannot_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "decisions"
    monkeypatch.setattr(files, "write", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    done = command(folder, "profile", *SMALL, "--quick", "--force")
    assert done.returncode == 1
    assert f"not stored: {folder}" in done.stdout
    assert "cannot be written (No space left on device)" in done.stdout
    printed = plain(command(Path("/dev/null/x"), "profile", *SMALL, "--quick", "--json"), code=1)
    assert printed["unstored"] == "/dev/null cannot be written (Not a directory)"


def test_a_problem_that_no_backend_can_run(tmp_path: Path) -> None:
    done = command(tmp_path, "profile", *TOO_LONG, "--causal", "both")
    assert done.returncode == 1
    assert "no backend can run it" in done.stdout
    assert done.stdout.count("problem   [1, 8589934592, 8, 64]") == 2
    assert "over memory" in done.stdout
    assert "not stored: no decision was measured" in done.stdout
    assert not list(tmp_path.iterdir())
    (decision,) = plain(command(tmp_path, "explain", *TOO_LONG, "--json"), code=1)["decisions"]
    assert (decision["choice"], decision["order"]) == (None, None)
    assert {row["status"] for row in decision["candidates"]} <= {"over_memory", "unsupported", "not_installed"}
    assert {row["status"] for row in decision["candidates"] if row["backend"] == "sdpa"} == {"over_memory"}


def test_explain_runs_nothing(tmp_path: Path) -> None:
    done = command(tmp_path, "explain", *SMALL)
    assert done.returncode == 0
    assert "(heuristic)" in done.stdout
    assert "the first call of attend() measures, and may take another backend" in done.stdout
    forced = command(tmp_path, "explain", *SMALL, "--backend", "manual")
    assert "manual in natural order (forced)" in forced.stdout
    refused = command(tmp_path, "explain", *SMALL, "--window", "3", "--backend", "sdpa")
    assert (refused.returncode, refused.stderr) == (1, "")
    assert re.search(r" unsupported\n +computes Dense, Dilated, not Window\(left=3, right=0\)", refused.stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_measured_decisions_are_stored_after_ctrl_c(tmp_path: Path) -> None:
    lengths = ",".join(["64", *map(str, range(1500, 1510))])
    arguments = ("profile", "--shape", "1,1,8,64", "--lengths", lengths, "--device", "cpu", "--quick", "--json")
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=surroundings(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not list(tmp_path.glob("v2/*/*/*.json")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert "of 11 problems are decided" in stderr
    printed = json.loads(stdout)
    assert printed["interrupted"] is True
    stored_keys = {path.stem for path in tmp_path.glob("v2/*/*/*.json")}
    printed_keys = {decision["key"] for decision in printed["decisions"]}
    # A decision is stored a moment before it is reported.
    assert printed_keys <= stored_keys
    assert 1 <= len(stored_keys) < 11


@pytest.mark.parametrize("coding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize(
    "arguments",
    [
        *(["inspect"], ["inspect", "--regret"], ["inspect", "--thresholds"], ["doctor"]),
        *(["export", "FILE"], ["import", "FOLDER"], ["profile", *TWO, "--share", "FILE"], ["explain", *SMALL]),
        *(["plan", "--tokens", "64", "--ranks", "2", "--link", "1", "--rate", "1"], ["profile", *TWO]),
    ],
)
def test_names_that_are_no_text_are_printed_in_any_encoding(
    arguments: list[str], coding: str, measured: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path / "é日") + b"\xff"))
    shutil.copytree(measured[0], folder)
    names = {"FILE": str(folder / "file"), "FOLDER": str(folder)}
    arguments = [names.get(each, each) for each in arguments]
    done = command(folder, *arguments, PYTHONIOENCODING=coding)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    printed = plain(command(folder, *arguments, "--json", PYTHONIOENCODING=coding))
    assert printed.get("folder", str(folder)) == str(folder)


def test_inspect_prints_a_table(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = measured
    done = command(folder, "inspect")
    assert done.returncode == 0
    rows = done.stdout.splitlines()
    for decision in printed["decisions"]:
        (row,) = [row for row in rows if row.startswith(decision["key"][:10])]
        assert f"   {decision['choice']}" in row
    (device,) = [row for row in rows if row.startswith("device")]
    assert device.removeprefix("device").strip() == printed["decisions"][0]["device"]
    assert any(row.startswith(f"stored in {folder}/v2/") for row in rows)


def test_inspect_one_key(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = measured
    decision = printed["decisions"][0]
    done = command(folder, "inspect", "--key", decision["key"][:12].upper())
    assert done.returncode == 0
    assert f"problem   {decision['problem']}" in done.stdout
    assert all(row["backend"] in done.stdout for row in decision["candidates"])
    assert f"{decision['key']}.json" in done.stdout
    unknown = command(folder, "inspect", "--key", "xyz")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no key in" in unknown.stderr
    assert plain(command(folder, "inspect", "--key", "xyz", "--json"), code=1)["decisions"] == []


def test_inspect_an_empty_and_a_damaged_folder(tmp_path: Path) -> None:
    empty = command(tmp_path, "inspect")
    assert empty.returncode == 0
    assert "attn-dispatch profile --quick" in empty.stdout
    damaged = tmp_path / "v2" / "cpu-x" / ("0" * 12) / f"{'0' * 20}.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"schema": 1, ')
    done = command(tmp_path, "inspect", "--json")
    assert plain(done) == {"folder": str(tmp_path), "decisions": []}
    assert f"ignored {damaged}" in done.stderr


def plant(folder: Path, *medians: tuple[int, float, float]) -> None:
    """Decisions at these lengths, with the times of the backends a and b."""
    for length, *times in medians:
        Store(folder).put(planted.decision(planted.problem_at(length), dict(zip(NAMES, times))))


def test_inspect_regret(tmp_path: Path) -> None:
    plant(tmp_path, (1000, 1.0, 2.0), (1001, 1.0, 2.0), (1002, 1.25, 1.0))
    printed = plain(command(tmp_path, "inspect", "--regret", "--json"))
    (group,) = printed["groups"]
    assert group["title"] == "float32 d64 Dense() forward"
    assert (group["count"], group["alone"], group["hits"]) == (3, 0, 2)
    assert group["mean"] == pytest.approx(0.25 / 3)
    assert group["worst"] == group["p95"] == pytest.approx(0.25)
    assert group["worst_key"] in {path.stem for path in tmp_path.rglob("*.json")}
    assert printed["total"]["mean"] == group["mean"]
    done = command(tmp_path, "inspect", "--regret")
    assert done.returncode == 0
    assert re.search(r"predicting .*100%", done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if group["title"] in line]
    assert line.split("   ")[-1].strip() == f"{100 * group['confidence']:.0f} %"
    assert ["8.3 %", "25.0 %", "25.0 %", group["worst_key"][:10], "67 %"] == re.split(r"\s{2,}", line)[3:8]
    assert "too little evidence" in done.stdout


def test_inspect_regret_needs_evidence(tmp_path: Path) -> None:
    for medians in ((), ((1000, 1.0, 2.0),)):
        plant(tmp_path, *medians)
        done = command(tmp_path, "inspect", "--regret")
        assert done.returncode == 0
        assert "too little evidence" in done.stdout
        printed = plain(command(tmp_path, "inspect", "--regret", "--json"))
        assert (printed["total"]["count"], printed["total"]["alone"]) == (0, len(medians))
        assert printed["total"]["mean"] is None


FULL = "attn-dispatch inspect: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("to", "reader", "said"), [(">&-", "", "0\n"), (">/dev/full", "", f"{FULL}1\n"), ("", "| true", "1\n")]
)
def test_an_output_that_cannot_be_written(
    to: str, reader: str, said: str, measured: tuple[Path, dict[str, Any]]
) -> None:
    line = f"{{ sleep 0.2; {shlex.join([*COMMAND, 'inspect'])} {to}; echo $? >&2; }} {reader}"
    done = subprocess.run(line, shell=True, env=surroundings(measured[0]), capture_output=True, text=True, check=False)
    assert done.stderr == said


def row(backend: str, status: str, median_ms: float | None = None, rounds: int = 99, **more: Any) -> Row:
    times = dict.fromkeys(("median_ms", "low_ms", "high_ms"), median_ms)
    return Row(backend=backend, order="natural", status=status, reason="", rounds=rounds, **times, **more)


PAIRED: dict[str, Any] = {"ratio_low": 2.3, "ratio": 2.4, "ratio_high": 2.5}


def found(*rows: Row, choice: str | None = "a", **more: Any) -> list[str]:
    order = None if choice is None else "natural"
    made = Explanation(choice, order, "measured", "0123456789", rows, "[1]   float32", "cpu")
    problem, *rest = cells(replace(made, **more))
    assert problem == "[1] float32"
    return rest


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (found(row("a", "chosen", 2.0), row("sdpa", "slower", 5.0)), ["a", "2 ms", "2.50x", "measured"]),
        (found(row("a", "chosen", 2.0), row("sdpa", "slower", 5.0, **PAIRED)), ["a", "2 ms", "2.40x", "measured"]),
        (
            found(row("a", "chosen", 2.0), row("sdpa_mask", "tie", 1.9, rounds=1), provisional="why"),
            ["a", "2 ms", "0.95x", "measured, provisional, 1 sample"],
        ),
        (found(row("a", "chosen", 2.0), row("sdpa", "incorrect", 1.0)), ["a", "2 ms", "-", "measured"]),
        (found(row("a", "chosen", 0.0), row("sdpa", "tie", 1.0)), ["a", "0 us", "-", "measured"]),
        (found(row("sdpa", "chosen", 2.0), choice="sdpa"), ["sdpa", "2 ms", "1.00x", "measured"]),
        (found(row("a", "chosen"), source="heuristic"), ["a", "-", "-", "heuristic, not measured"]),
        (found(row("a", "over_memory"), choice=None), ["none", "-", "-", "no backend can run it"]),
    ],
)
def test_the_line_of_a_problem(cells: list[str], expected: list[str]) -> None:
    assert cells == expected
