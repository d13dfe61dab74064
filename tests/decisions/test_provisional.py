"""Provisional decisions: what makes them so, and when a later process measures them again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from attn_dispatch import attend, explain, profile
from attn_dispatch.cli import main
from attn_dispatch.decisions import look_up
from attn_dispatch.machine import load
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import passed
from attn_dispatch.tuning import gate
from tests.support.calls import counted, forget, forget_all, qkv
from tests.support.ordered import DISTURBED, replace_stored, stored

pytestmark = pytest.mark.usefixtures("little_time")


def test_measured_beside_other_programs_and_again_on_a_calm_machine(
    busy: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    busy(True)
    attend(*qkv())
    assert (stored().provisional, stored().attempts) == (DISTURBED, 1)
    found = explain(*qkv())
    assert found.provisional == DISTURBED
    assert f"provisional: {DISTURBED}; a later process measures it again" in str(found)
    assert main(["inspect"]) == 0
    assert "provisional" in capsys.readouterr().out
    forget()
    attend(*qkv())
    assert counted(loaded=1), "the machine is still busy"
    busy(False)
    attend(*qkv())
    assert counted(loaded=1), "a process keeps its decision"
    forget()
    attend(*qkv())
    assert counted(measured=1)
    assert stored().provisional != DISTURBED


def test_profile_measures_a_provisional_decision_again(busy: Callable[[bool], None]) -> None:
    busy(True)
    attend(*qkv())
    busy(False)
    forget()
    (found,) = profile([Problem.of(*qkv())], budget_s=2.0, progress=False)
    assert found.source == "measured"
    assert found.provisional != DISTURBED
    assert counted(measured=1)


@pytest.mark.parametrize(
    ("attempts", "minutes_ago", "again"), [(1, 0, True), (2, 9, False), (3, 41, True), (6, 10**6, False)]
)
def test_again_with_growing_pauses_and_not_for_ever(
    attempts: int, minutes_ago: int, again: bool, busy: Callable[[bool], None]
) -> None:
    busy(True)
    attend(*qkv())
    made = (datetime.now(UTC) - timedelta(minutes=minutes_ago)).isoformat()
    replace_stored(attempts=attempts, created=made)
    busy(False)
    forget()
    attend(*qkv())
    assert counted(**{"measured" if again else "loaded": 1})


def test_attempts_are_counted(busy: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    busy(True)
    monkeypatch.setattr(load, "is_calm", lambda: True)
    monkeypatch.setattr(look_up, "FIRST_PAUSE", timedelta(0))
    for attempts in range(1, look_up.MOST_ATTEMPTS + 1):
        attend(*qkv())
        assert stored().attempts == attempts
        forget()
    attend(*qkv())
    assert counted(loaded=1)


def test_a_clock_that_was_set_back_delays_nothing(busy: Callable[[bool], None]) -> None:
    busy(True)
    attend(*qkv())
    replace_stored(attempts=2, created=(datetime.now(UTC) + timedelta(hours=20)).isoformat())
    busy(False)
    forget()
    attend(*qkv())
    assert counted(measured=1)


# --- hard cases that were passed --------------------------------------------------------------------------------------


def runs_of_hard_cases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    check = gate.Gate._case_checks

    def counted_check(self: gate.Gate, candidate: Any, cases: Any, brief: bool) -> Any:
        found.append(candidate.title)
        return check(self, candidate, cases, brief)

    monkeypatch.setattr(gate.Gate, "_case_checks", counted_check)
    return found


def test_the_chosen_candidate_passes_the_hard_cases_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gate._passed.clear()
    runs = runs_of_hard_cases(monkeypatch)
    attend(*qkv(32))
    assert explain(*qkv(32)).choice in runs
    count = len(runs)
    attend(*qkv(40))
    forget_all()
    gate._passed.clear()
    attend(*qkv(48))
    choices = {explain(*qkv(length)).choice for length in (32, 40, 48)}
    assert len(runs) - count == len(choices) - 1, "only versions that had not been chosen before"


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\n", b"deadbeef"])
def test_a_damaged_file_of_passed_checks_costs_a_check(damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    gate._passed.clear()
    attend(*qkv(32))
    (file,) = (cache_folder() / "passed").glob("*.txt")
    file.write_bytes(damage)
    forget_all()
    gate._passed.clear()
    runs = runs_of_hard_cases(monkeypatch)
    attend(*qkv(40))
    assert explain(*qkv(40)).choice in runs


def test_the_file_of_passed_checks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed, "MOST", 210)
    for number in range(100):
        passed.note_passed(cache_folder(), "cpu-x", f"{number:020d}")
    (file,) = (cache_folder() / "passed").glob("*.txt")
    assert file.stat().st_size <= 210
    forget_all()
    assert passed.has_passed(cache_folder(), "cpu-x", f"{99:020d}")
    assert not passed.has_passed(cache_folder(), "cpu-x", f"{0:020d}")


def test_no_path_of_passed_checks_leaves_the_folder() -> None:
    with pytest.raises(ValueError, match="not a fingerprint"):
        passed.note_passed(cache_folder(), "../x", "0" * 20)
