"""How long strikes exclude a version, when they are forgotten, and which ones count as one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from attn_dispatch.kernels import registry
from attn_dispatch.store import quarantine
from attn_dispatch.store.quarantine import Entry, Quarantine
from tests.support.fakes import SILICON
from tests.support.quarantines import abandon, blamed, entry, markers

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR, MINUTE, NO = timedelta(hours=1), timedelta(minutes=1), timedelta(0)
TEN = 10 * MINUTE


class Clock:
    now = START

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(quarantine, "clock", found)
    return found


def found_entry(quarantined: Quarantine) -> Entry | None:
    return quarantined.find("made_up", "1")


def holds(folder: Path, clock: Clock, anew: Callable[[], Quarantine], notes: str) -> list[timedelta]:
    """The holds after trials that each begin when the last hold ends: deaths (d), hangs seen (h), successes (s)."""
    found = []
    for note in notes:
        if note == "s":
            anew().clear_strikes("made_up", "1")
            continue
        if note == "d":
            abandon(folder, clock.now)
        else:
            anew().add(entry(kind="hung"))
        quarantined = anew()
        (each,) = (*quarantined.entries(), *quarantined.strikes())
        found.append(each.hold)
        assert each.until is not None
        clock.now = each.until + MINUTE
    return found


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("dddddd", [NO, TEN, HOUR, 6 * HOUR, 12 * HOUR, 12 * HOUR]),
        ("hhhhh", [TEN, HOUR, 6 * HOUR, 12 * HOUR, 12 * HOUR]),
        ("dhd", [NO, TEN, HOUR]),
        ("dsdd", [NO, NO, TEN]),
        ("ddsd", [NO, TEN, NO]),
    ],
)
def test_holds(
    notes: str, expected: list[timedelta], folder: Path, clock: Clock, anew: Callable[[], Quarantine]
) -> None:
    assert holds(folder, clock, anew, notes) == expected
    assert markers(folder) == []
    assert anew().strikes()[0].reason.endswith(f"; strike {len(notes)}") is ("s" not in notes)


def test_a_hold_ends_in_processes_that_run_on_too(
    folder: Path, clock: Clock, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    holds(folder, clock, anew, "d")
    abandon(folder, clock.now)
    quarantined, first = anew(), clock.now
    assert found_entry(quarantined) is not None
    assert "made_up` lets it be tried again" in warnings()[1]
    assert f"quarantined until {quarantine.shown_time(first + TEN)} UTC" in warnings()[1]
    for after, is_out in ((TEN - MINUTE, True), (TEN, False), (30 * HOUR, False)):
        clock.now = first + after
        for each in (quarantined, anew()):
            assert (found_entry(each) is not None) is is_out
            assert bool(each.entries()) is is_out


def test_processes_that_die_together_are_one_strike(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """All ranks of a job at once: trials that began before the first death was recorded."""
    for number in (1, 2):
        began = clock.now
        clock.now += MINUTE
        for _ in range(4):
            abandon(folder, began)
        anew().sweep()
        clock.now += MINUTE
        abandon(folder, began)  # found late
        quarantined = anew()
        (found,) = (*quarantined.entries(), *quarantined.strikes())
        assert (found.strikes, found.holds) == (number, number == 2)
    assert markers(folder) == []


def test_a_trial_within_a_hold_adds_nothing(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    """As of a process that read the quarantine before."""
    holds(folder, clock, anew, "dd")
    clock.now -= 5 * MINUTE
    for _ in range(3):
        abandon(folder, clock.now)
        found = found_entry(anew())
        assert found is not None
        assert (found.strikes, found.hold) == (2, TEN)
        clock.now += MINUTE
    assert markers(folder) == []


def test_what_is_proven_is_not_replaced_by_a_strike(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    Quarantine(folder, SILICON).add(entry())
    abandon(folder, START)
    clock.now += 1000 * HOUR
    found = found_entry(anew())
    assert found is not None
    assert (found.kind, found.until) == ("incorrect", None)


def test_a_wrong_clock_excludes_nothing(folder: Path, clock: Clock, anew: Callable[[], Quarantine]) -> None:
    clock.now = START + 9000 * HOUR
    assert holds(folder, clock, anew, "dd") == [NO, TEN]
    clock.now = START
    assert anew().entries() == []
    assert holds(folder, clock, anew, "dd") == [NO, TEN]


def test_the_last_resort_is_never_quarantined(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """There would be nothing else to run."""
    assert quarantine.LAST_RESORT == registry.LAST_RESORT
    abandon(folder, START, backend=registry.LAST_RESORT)
    assert blamed(anew()) == []
    assert markers(folder) == []
