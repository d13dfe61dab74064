"""The first crash quarantines a version for an hour; a second crash after that, permanently."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attn_dispatch.backends import sdpa
from attn_dispatch.cli import main
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import crash_markers, files, quarantine
from attn_dispatch.store.crash_markers import MarkerContent, place_of
from attn_dispatch.store.quarantine import Entry, Quarantine
from attn_dispatch.tuning.candidates import Request
from tests.support.calls import qkv
from tests.support.fakes import SILICON
from tests.support.quarantines import entry, markers, path_of

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


class Clock:
    now = START

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(quarantine, "clock", found)
    return found


def crash(folder: Path, at: datetime, token: int = 0, where: str = SILICON, **changes: Any) -> None:
    """Write the marker of a process that was killed in a trial begun at `at`, without its lock."""
    values = {"backend": "made_up", "version": "1", "scope": "", **changes}
    marker = MarkerContent(
        **values, silicon=where, title="x", process=crash_markers._this_process(), locked=True, began=at.timestamp()
    )
    name = crash_markers.digest(values["backend"], values["version"], values["scope"])
    path = place_of(folder, where) / f"{name}-{token:012x}.mark"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(files.encode_checked(marker))


def found_entry(quarantined: Quarantine) -> Entry | None:
    return quarantined.find("made_up", "1")


def test_the_first_crash_quarantines_for_an_hour(
    folder: Path, clock: Clock, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    crash(folder, START - MINUTE)
    quarantined = anew()
    first = found_entry(quarantined)
    assert first is not None
    assert first.until == "2026-01-01T13:00:00+00:00"
    (text,) = warnings()
    assert "quarantined until 2026-01-01 13:00 UTC" in text
    for after, is_out in ((HOUR - MINUTE, True), (HOUR, False), (30 * HOUR, False)):
        clock.now = START + after
        for each in (quarantined, anew()):  # the process that runs on, too
            assert (found_entry(each) is not None) is is_out
            assert bool(each.entries()) is is_out


def test_the_second_crash_quarantines_permanently(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    for number, after in enumerate((0 * HOUR, HOUR)):
        clock.now = START + after
        crash(folder, clock.now, number)
        assert found_entry(anew()) is not None
    clock.now += 1000 * HOUR
    found = found_entry(anew())
    assert found is not None
    assert found.until is None
    assert "an earlier process died likewise, recorded on 2026-01-01 12:00 UTC" in found.reason
    assert markers(folder) == []


def test_crashes_within_the_hour_count_once(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """All ranks of a job at once, and trials that began before the first crash was recorded."""
    for rank in range(4):
        crash(folder, START - MINUTE, rank)
    first = found_entry(anew())
    for number in range(30):
        clock.now = START + number * MINUTE
        crash(folder, clock.now, number)
        assert found_entry(anew()) == first
    clock.now = START + 2 * HOUR
    crash(folder, START + HOUR - MINUTE)  # found late
    assert found_entry(anew()) is None
    assert markers(folder) == []


def test_versions_and_groups_count_crashes_separately(
    folder: Path, clock: Clock, anew: Callable[[], Quarantine]
) -> None:
    crash(folder, START)
    assert found_entry(anew()) is not None
    clock.now = START + HOUR
    crash(folder, clock.now, version="2")
    crash(folder, clock.now, scope="a" * 12)
    assert [each.until for each in anew().entries()] == ["2026-01-01T14:00:00+00:00"] * 2


def test_lifting_removes_the_first_crash(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    crash(folder, START)
    assert found_entry(anew()) is not None
    clock.now = START + 2 * HOUR
    assert [each.backend for each in anew().lift("made_up")] == ["made_up"]
    crash(folder, clock.now)
    found = found_entry(anew())
    assert found is not None
    assert found.until is not None


def test_a_wrong_clock_does_not_extend_a_quarantine(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    clock.now = START + 9000 * HOUR
    crash(folder, START)
    assert found_entry(anew()) is not None
    clock.now = START
    assert found_entry(anew()) is None
    crash(folder, START)
    found = found_entry(anew())
    assert found is not None
    assert found.until is None


def test_an_entry_without_an_end_is_permanent(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """Entries of wrong results have none, nor have any that an earlier version of this package wrote."""
    Quarantine(folder, SILICON).add(entry(kind="died"))
    path = path_of(folder)
    written = msgspec.json.decode(path.read_bytes())["content"]
    del written["until"]
    content = msgspec.json.encode(written)
    digest = sha256(content).hexdigest()
    path.write_bytes(msgspec.json.encode({"sha256": digest, "content": msgspec.Raw(content)}) + b"\n")
    clock.now += 1000 * HOUR
    assert found_entry(anew()) is not None
    crash(folder, clock.now)
    found = found_entry(anew())
    assert found is not None
    assert found.until is None


@pytest.mark.parametrize("until", ["soon", "2026-01-01T13:00:00", "2026-01-01T13:00:00+00:00\n\x1b[31m"])
def test_an_invalid_end_is_damage(
    until: str, folder: Path, clock: Clock, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    Quarantine(folder, SILICON).add(entry())
    path_of(folder).write_bytes(files.encode_checked(entry(until=until)))
    assert anew().entries() == []
    (text,) = warnings()
    assert text.startswith(f"ignored {path_of(folder)}: ")


def test_the_end_of_a_quarantine_is_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    where = silicon("cpu")
    crash(cache_folder(), START, where=where, backend="sdpa", version=registry.version_of(sdpa))
    problem = Problem.of(*qkv(32), Dense())
    (row,) = (each.row for each in Request.of(problem).candidates if each.name == "sdpa")
    assert row is not None
    assert row.status == "quarantined"
    assert "quarantined until 2026-01-01 13:00 UTC" in row.reason
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "until (UTC)" in shown
    assert "2026-01-01 12:00   2026-01-01 13:00" in shown
    clock.now += HOUR
    assert all(each.row is None for each in Request.of(problem).candidates if each.name == "sdpa")
