"""How long strikes exclude a version, and when they are forgotten."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attn_dispatch.cli import main
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import crash_markers, files, quarantine
from attn_dispatch.store.crash_markers import MarkerContent, place_of
from attn_dispatch.store.quarantine import FIRST_HOLD, LONGEST_HOLD, Entry, Quarantine
from attn_dispatch.tuning.candidates import Request
from tests.support.calls import qkv
from tests.support.fakes import SILICON
from tests.support.quarantines import blamed, entry, markers, path_of, path_of_new

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


def crash(folder: Path, at: datetime, token: int = 0, where: str = SILICON, noted: bool = True, **changes: Any) -> None:
    """Write the marker, and the notes, of a process that crashed in a trial begun at `at`, without its lock."""
    values = {"backend": "made_up", "version": "1", "scope": "", **changes}
    marker = MarkerContent(
        **values, silicon=where, title="x", process=crash_markers._this_process(), locked=True, began=at.timestamp()
    )
    name = crash_markers.digest(values["backend"], values["version"], values["scope"])
    path = place_of(folder, where) / f"{name}-{token << 16:012x}.mark"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(files.encode_checked(marker))
    if noted:
        path.with_name(f"{token:08x}" + ".notes").write_text("{}\nFatal Python error: Segmentation fault\n\n")


def found_entry(quarantined: Quarantine) -> Entry | None:
    return quarantined.find("made_up", "1")


def test_the_first_crash_excludes_for_minutes(
    folder: Path, clock: Clock, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    crash(folder, START - MINUTE)
    quarantined = anew()
    first = found_entry(quarantined)
    assert first is not None
    assert first.until == "2026-01-01T12:10:00+00:00"
    (text,) = warnings()
    assert "quarantined until 2026-01-01 12:10 UTC" in text
    for after, is_out in ((FIRST_HOLD - MINUTE, True), (FIRST_HOLD, False), (30 * HOUR, False)):
        clock.now = START + after
        for each in (quarantined, anew()):  # the process that runs on, too
            assert (found_entry(each) is not None) is is_out
            assert bool(each.entries()) is is_out


def holds(folder: Path, clock: Clock, anew: Callable[[], Quarantine], notes: str) -> list[timedelta]:
    """The holds after trials that each begin when the last hold ends, and crash ("c"), die ("d") or succeed ("s")."""
    found = []
    for number, note in enumerate(notes):
        if note == "s":
            anew().clear_strikes("made_up", "1")
            continue
        crash(folder, clock.now, number, noted=note == "c")
        quarantined = anew()
        (entry,) = (*quarantined.entries(), *quarantined.strikes())
        end = entry.end
        assert end is not None
        found.append(end - clock.now)
        clock.now = end
    return found


DAY = 24 * HOUR
TEN = 10 * MINUTE


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("ccccccccc", [TEN, DAY, 2 * DAY, 4 * DAY, 8 * DAY, 16 * DAY, 30 * DAY, 30 * DAY, 30 * DAY]),
        ("ddddddd", [0 * HOUR, TEN, HOUR, 6 * HOUR, 12 * HOUR, 12 * HOUR, 12 * HOUR]),
        ("cd", [TEN, TEN]),
        ("dcc", [0 * HOUR, TEN, DAY]),
        ("ccsc", [TEN, DAY, TEN]),
        ("ddsd", [0 * HOUR, TEN, 0 * HOUR]),
    ],
)
def test_holds(
    notes: str, expected: list[timedelta], folder: Path, clock: Clock, anew: Callable[[], Quarantine]
) -> None:
    assert holds(folder, clock, anew, notes) == expected
    assert markers(folder) == []


@pytest.mark.parametrize(("notes", "after"), [("c", DAY), ("cc", DAY), ("ccc", 2 * DAY), ("dd", DAY)])
def test_strikes_are_forgotten(
    notes: str, after: timedelta, folder: Path, clock: Clock, anew: Callable[[], Quarantine]
) -> None:
    """A day after their hold, or after as long as it lasted."""
    first = holds(folder, clock, anew, notes)[0]
    clock.now += after - MINUTE
    assert [each.backend for each in anew().strikes()] == ["made_up"]
    clock.now += MINUTE
    assert blamed(anew()) == []
    assert holds(folder, clock, anew, notes[0]) == [first]


def test_the_number_of_strikes_is_in_the_reason(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    holds(folder, clock, anew, "dcc")
    clock.now -= HOUR
    found = found_entry(anew())
    assert found is not None
    assert found.reason.endswith("(Segmentation fault); 2 strikes before")


def test_processes_that_die_together_are_one_strike(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """All ranks of a job at once, and trials that began before the first crash was recorded."""
    for noted, hold in ((False, 0 * HOUR), (True, FIRST_HOLD)):
        for rank in range(4):
            crash(folder, clock.now - MINUTE, rank, noted=noted)
        quarantined = anew()
        (first,) = (*quarantined.entries(), *quarantined.strikes())
        assert (first.strikes + first.unsure, first.end) == (1, clock.now + hold)
        crash(folder, clock.now - MINUTE)  # found late
        clock.now += HOUR
        assert anew().strikes() == [first]
        assert len(anew().lift()) == 1
    assert markers(folder) == []


def test_versions_and_groups_have_separate_strikes(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    crash(folder, START)
    assert found_entry(anew()) is not None
    clock.now = START + HOUR
    crash(folder, clock.now, version="2")
    crash(folder, clock.now, scope="a" * 12)
    assert [each.until for each in anew().entries()] == ["2026-01-01T13:10:00+00:00"] * 2


def test_a_success_clears_strikes_of_the_version_alone(
    folder: Path, clock: Clock, anew: Callable[[], Quarantine]
) -> None:
    given: list[dict[str, Any]] = [{}, {"scope": "a" * 12}, {"scope": "b" * 12}, {"version": "2"}]
    for token, changes in enumerate(given):
        crash(folder, START, token, **changes)
    anew().add(entry(backend="wrong"))
    quarantined = anew()
    quarantined.clear_strikes("made_up", "1", "a" * 12)
    quarantined.clear_strikes("wrong", "1")
    for each in (quarantined, anew()):
        assert [(e.version, e.scope) for e in each.entries()] == [("1", "b" * 12), ("2", ""), ("1", "")]


def test_lifting_removes_strikes(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    crash(folder, START)
    assert found_entry(anew()) is not None
    clock.now = START + 2 * HOUR
    assert [each.backend for each in anew().lift("made_up")] == ["made_up"]
    assert holds(folder, clock, anew, "c") == [FIRST_HOLD]


def test_a_hang_of_this_process_is_a_sure_strike(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    for hold in (FIRST_HOLD, DAY):
        Quarantine(folder, SILICON).add(entry(kind="hung"))
        Quarantine(folder, SILICON).add(entry(kind="hung"))  # by another rank, which began as early
        found = found_entry(anew())
        assert found is not None
        assert found.end == clock.now + hold
        clock.now += hold
        assert found_entry(anew()) is None


def test_what_is_proven_is_not_replaced_by_a_strike(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    Quarantine(folder, SILICON).add(entry())
    crash(folder, START)
    clock.now += 1000 * HOUR
    found = found_entry(anew())
    assert found is not None
    assert (found.kind, found.end) == ("incorrect", None)


def test_a_wrong_clock_does_not_extend_a_quarantine(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    clock.now = START + 9000 * HOUR
    crash(folder, START)
    assert found_entry(anew()) is not None
    clock.now = START
    assert blamed(anew()) == []
    assert holds(folder, clock, anew, "c") == [FIRST_HOLD]


def test_a_crash_recorded_without_an_end(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """By an earlier version of this package, in which a second one had none."""
    path = path_of_new(folder, ".json")
    path.parent.mkdir(parents=True)
    written = msgspec.to_builtins(entry(kind="died", created=START.isoformat()))
    for name in ("until", "strikes", "unsure"):
        del written[name]
    content = msgspec.json.encode(written)
    path.write_bytes(msgspec.json.encode({"sha256": sha256(content).hexdigest(), "content": msgspec.Raw(content)}))
    clock.now += LONGEST_HOLD - MINUTE
    assert found_entry(anew()) is not None
    clock.now += MINUTE
    assert found_entry(anew()) is None


@pytest.mark.parametrize("until", ["soon", "2026-01-01T13:00:00", "2026-01-01T13:00:00+00:00\n\x1b[31m"])
def test_an_invalid_end_is_damage(
    until: str, folder: Path, clock: Clock, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    Quarantine(folder, SILICON).add(entry())
    for changes in ({"until": until}, {"kind": "died", "created": until}):
        path_of(folder).write_bytes(files.encode_checked(entry(**changes)))
        assert anew().entries() == []
    assert {text.split(": ")[0] for text in warnings()} == {f"ignored {path_of(folder)}"}


def test_the_end_of_a_quarantine_is_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    where = silicon("cpu")
    crash(cache_folder(), START, where=where, backend="sdpa", version=registry.version_of(registry.load("sdpa")))
    problem = Problem.of(*qkv(32), Dense())
    (row,) = (each.row for each in Request.of(problem).candidates if each.name == "sdpa")
    assert row is not None
    assert row.status == "quarantined"
    assert "quarantined until 2026-01-01 12:10 UTC" in row.reason
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "until (UTC)" in shown
    assert "2026-01-01 12:00   2026-01-01 12:10" in shown
    clock.now += HOUR
    assert all(each.row is None for each in Request.of(problem).candidates if each.name == "sdpa")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "quarantine none\n" in shown
    assert "strike" in shown
    assert "2026-01-01 12:00" in shown


def test_two_kills_leave_no_problem_to_far_more_work(clock: Clock) -> None:
    """A window of 64 in 4,096: `manual` and PyTorch's kernels compute all pairs, 32 times as many."""
    where, long = silicon("cpu"), Problem.of(*qkv(4096), Window(64, 64))
    out = ("native", "tiles", "flex")
    able = [name for name in out if name in {each.name for each in Request.of(long).able}]
    assert able

    def died(number: int, noted: bool) -> None:
        for place, name in enumerate(out):
            version = registry.version_of(registry.load(name))
            crash(
                cache_folder(), clock.now, 4 * number + place, where=where, noted=noted, backend=name, version=version
            )
        clock.now += MINUTE
        Quarantine(cache_folder(), where).reread()

    def excluded(problem: Problem) -> set[str]:
        rows = [each.row for each in Request.of(problem).candidates]
        return {row.backend for row in rows if row is not None and row.status == "quarantined"} & set(able)

    died(0, noted=False)
    died(1, noted=False)
    assert excluded(Problem.of(*qkv(4096), Dense())) == set(able)
    assert excluded(long) == set()
    clock.now += FIRST_HOLD
    died(2, noted=False)  # tried again, it died again: that is no accident
    assert excluded(long) == set(able)
