"""`doctor`: its report, and how it lifts quarantines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.cli import main
from attn_dispatch.cli.machine import is_writable, missed
from attn_dispatch.kernels import registry
from attn_dispatch.store.quarantine import Entry, Quarantine
from tests.support.commands import SMALL, command, plain, problems
from tests.support.fakes import raising


def test_doctor_reports_hardware_backends_and_the_store(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = measured
    report = plain(command(folder, "doctor", "--json", ATTN_DISPATCH_MODE="predict", ATTN_DISPATCH_BUDGET_MS="500"))
    cpu = report["devices"][0]
    assert (cpu["device"], cpu["silicon"].startswith("cpu-"), cpu["free_bytes"] > 0) == ("cpu", True, True)
    backends = {backend["name"]: backend for backend in report["backends"]}
    assert list(backends) == [*registry.BUILT_IN, registry.LAST_RESORT]
    assert all(backend["usable"] or backend["reason"] for backend in backends.values())
    assert backends["sdpa"] == {"name": "sdpa", "version": str(torch.__version__), "usable": True, "reason": ""}
    assert (report["folder"], report["writable"], report["decisions"]) == (str(folder), True, 2)
    assert (report["mode"], report["budget_ms"]) == ("predict", 500.0)
    assert report["leaves"][0] == str(folder)
    assert report["missed"] == {"count": 0, "path": str(folder / "missed.jsonl"), "command": None, "reason": ""}


def test_doctor_counts_undecided_problems(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = measured
    (decided,) = problems(*SMALL)
    (undecided,) = problems("--shape", "1,96,2,16")
    path = folder / "missed.jsonl"
    path.write_text("".join(f"{json.dumps(problem.to_dict())}\n" for problem in (decided, undecided, undecided)))
    try:
        done = command(folder, "doctor")
    finally:
        path.unlink()
    assert done.returncode == 0
    assert f"missed    1; measure them with: attn-dispatch profile --from {path}" in done.stdout
    assert "\nmode      tune " in done.stdout


@pytest.fixture
def quarantined(tmp_path: Path) -> Path:
    """A folder with three entries on two machines."""
    given = [
        ("flash", "2.7", "cpu-one", ""),
        ("flash", "2.7", "cpu-two", "0123456789ab"),
        ("made_up", None, "cpu-one", ""),
    ]
    for backend, version, silicon, scope in given:
        entry = Entry(
            backend=backend, version=version, silicon=silicon, kind="incorrect", scope=scope, reason="dq is wrong",
            title="dense", created=datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC),
        )  # fmt: skip
        Quarantine(tmp_path / "cache", silicon).add(entry)
    return tmp_path / "cache"


def test_doctor_lists_quarantined_versions(quarantined: Path, tmp_path: Path) -> None:
    shown = command(quarantined, "doctor").stdout.splitlines()
    start = next(index for index, text in enumerate(shown) if text.startswith("quarantine "))
    since, what = ("2025-01-02", "03:04", "lifted"), ("dense", "dq", "is", "wrong")
    assert [text.split() for text in shown[start + 1 : start + 4]] == [
        ["flash", "2.7", "incorrect", "all", *since, "cpu-one", *what],
        ["made_up", "-", "incorrect", "all", *since, "cpu-one", *what],
        ["flash", "2.7", "incorrect", "0123456789ab", *since, "cpu-two", *what],
    ]
    found = plain(command(quarantined, "doctor", "--json"))["quarantines"]
    assert [(each["backend"], each["silicon"], each["scope"]) for each in found] == [
        *(("flash", "cpu-one", ""), ("made_up", "cpu-one", ""), ("flash", "cpu-two", "0123456789ab"))
    ]
    assert all(each.keys() == set(Entry.__struct_fields__) for each in found)
    assert "\nquarantine none\n" in command(tmp_path / "empty", "doctor").stdout


def test_doctor_lifts(quarantined: Path) -> None:
    unknown = command(quarantined, "doctor", "--lift", "nobody")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "nothing was lifted for 'nobody'; in quarantine: flash, made_up" in unknown.stderr
    one = command(quarantined, "doctor", "--lift", "flash")
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == "lifted    flash 2.7 on cpu-one: dq is wrong\nlifted    flash 2.7 on cpu-two: dq is wrong\n"
    every = plain(command(quarantined, "doctor", "--lift", "all", "--json"))
    assert [each["backend"] for each in every["lifted"]] == ["made_up"]
    assert every["quarantines"] == []
    again = command(quarantined, "doctor", "--lift", "all")
    assert (again.returncode, again.stdout, again.stderr) == (0, "nothing is in quarantine\n", "")


def test_doctor_reports_entries_that_cannot_be_lifted(
    quarantined: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(quarantined))
    monkeypatch.setattr(Path, "unlink", raising(PermissionError(13, "Permission denied")))
    assert main(["doctor", "--lift", "flash"]) == 1
    monkeypatch.undo()
    assert "nothing was lifted for 'flash'; in quarantine: flash, made_up" in capsys.readouterr().err


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 33)  # sparse


@pytest.mark.parametrize(("make", "message"), [(a_pipe, "not a plain file"), (a_huge_file, "8589934592 bytes, over")])
def test_doctor_does_not_wait_for_the_misses(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "missed.jsonl")
    found = missed(tmp_path)
    assert (found["count"], found["command"]) == (0, None)
    assert message in found["reason"]


def test_a_circular_link_is_notis_writable(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "cache")
    assert not is_writable(tmp_path / "cache")
    assert is_writable(tmp_path / "absent" / "below")


def test_doctor_reports_unusable_folders_and_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    package = tmp_path / "site" / "made_up-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[attn_dispatch.backends]\nmade_up = made_up\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(registry, "_entry_points", registry._entry_points.__wrapped__)  # found anew in every call
    done = command(tmp_path / "file" / "cache", "doctor")
    assert done.returncode == 0
    assert "which cannot be written" in done.stdout
    (broken,) = [text for text in done.stdout.splitlines() if text.startswith("made_up ")]
    assert "no: backend 'made_up' (entry point made_up of made-up 1) cannot be loaded" in broken
