"""The first death keeps a version out for an hour; another one after that, for good."""

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


def die(folder: Path, at: datetime, token: int = 0, where: str = SILICON, **changes: Any) -> None:
    """Leave the marker of a process that was killed in a trial begun then; its lock has gone with it."""
    values = {"backend": "made_up", "version": "1", "scope": "", **changes}
    marker = MarkerContent(
        **values, silicon=where, title="x", process=crash_markers._this_process(), locked=True, began=at.timestamp()
    )
    name = crash_markers.digest(values["backend"], values["version"], values["scope"])
    path = place_of(folder, where) / f"{name}-{token:012x}.mark"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(files.encode_checked(marker))


def out(kept: Quarantine) -> Entry | None:
    return kept.find("made_up", "1")


def test_the_first_death_counts_for_an_hour(
    folder: Path, clock: Clock, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    die(folder, START - MINUTE)
    kept = anew()
    first = out(kept)
    assert first is not None
    assert first.until == "2026-01-01T13:00:00+00:00"
    (text,) = warnings()
    assert "quarantined until 2026-01-01 13:00 UTC" in text
    for after, is_out in ((HOUR - MINUTE, True), (HOUR, False), (30 * HOUR, False)):
        clock.now = START + after
        for each in (kept, anew()):  # the process that runs on, too
            assert (out(each) is not None) is is_out
            assert bool(each.entries()) is is_out


def test_the_second_death_counts_for_good(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    for number, after in enumerate((0 * HOUR, HOUR)):
        clock.now = START + after
        die(folder, clock.now, number)
        assert out(anew()) is not None
    clock.now += 1000 * HOUR
    found = out(anew())
    assert found is not None
    assert found.until is None
    assert "an earlier process died likewise, recorded on 2026-01-01 12:00 UTC" in found.reason
    assert markers(folder) == []


def test_many_kills_within_the_hour_are_one_death(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """All ranks of a job at once; and trials that began before others knew."""
    for rank in range(4):
        die(folder, START - MINUTE, rank)
    first = out(anew())
    for number in range(30):
        clock.now = START + number * MINUTE
        die(folder, clock.now, number)
        assert out(anew()) == first
    clock.now = START + 2 * HOUR
    die(folder, START + HOUR - MINUTE)  # found late
    assert out(anew()) is None
    assert markers(folder) == []


def test_versions_and_groups_have_deaths_of_their_own(
    folder: Path, clock: Clock, anew: Callable[[], Quarantine]
) -> None:
    die(folder, START)
    assert out(anew()) is not None
    clock.now = START + HOUR
    die(folder, clock.now, version="2")
    die(folder, clock.now, scope="a" * 12)
    assert [each.until for each in anew().entries()] == ["2026-01-01T14:00:00+00:00"] * 2


def test_lifting_forgets_the_first_death(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    die(folder, START)
    assert out(anew()) is not None
    clock.now = START + 2 * HOUR
    assert [each.backend for each in anew().lift("made_up")] == ["made_up"]
    die(folder, clock.now)
    found = out(anew())
    assert found is not None
    assert found.until is not None


def test_a_wrong_clock_keeps_nothing_out_for_longer(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    clock.now = START + 9000 * HOUR
    die(folder, START)
    assert out(anew()) is not None
    clock.now = START
    assert out(anew()) is None
    die(folder, START)
    found = out(anew())
    assert found is not None
    assert found.until is None


def test_what_is_known_otherwise_counts_for_good(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """A result that was wrong, and what an earlier version of this package wrote."""
    Quarantine(folder, SILICON).add(entry(kind="died"))
    path = path_of(folder)
    written = msgspec.json.decode(path.read_bytes())["content"]
    del written["until"]
    content = msgspec.json.encode(written)
    digest = sha256(content).hexdigest()
    path.write_bytes(msgspec.json.encode({"sha256": digest, "content": msgspec.Raw(content)}) + b"\n")
    clock.now += 1000 * HOUR
    assert out(anew()) is not None
    die(folder, clock.now)
    found = out(anew())
    assert found is not None
    assert found.until is None


@pytest.mark.parametrize("until", ["soon", "2026-01-01T13:00:00", "2026-01-01T13:00:00+00:00\n\x1b[31m"])
def test_a_time_that_is_none(
    until: str, folder: Path, clock: Clock, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    Quarantine(folder, SILICON).add(entry())
    path_of(folder).write_bytes(files.encode_checked(entry(until=until)))
    assert anew().entries() == []
    (text,) = warnings()
    assert text.startswith(f"ignored {path_of(folder)}: ")


def test_it_is_shown_until_when(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    where = silicon("cpu")
    die(cache_folder(), START, where=where, backend="sdpa", version=registry.version_of(sdpa))
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
