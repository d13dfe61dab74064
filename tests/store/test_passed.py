"""Checks that were passed on this machine: what distinguishes them, and a folder that takes no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attn_dispatch.process_state import READ, forget
from attn_dispatch.settings import NOWHERE
from attn_dispatch.store import passed
from attn_dispatch.store.passed import has_passed, is_confirmed, note_confirmed, note_passed
from tests.support.entries import OTHER, chosen, decision
from tests.support.fakes import SILICON


def test_a_passed_check_is_known_to_the_next_process(tmp_path: Path) -> None:
    note_passed(tmp_path, SILICON, "a")
    for _ in range(2):
        assert has_passed(tmp_path, SILICON, "a")
        assert not has_passed(tmp_path, SILICON, "b")
        assert not has_passed(tmp_path, f"{SILICON}-other", "a")
        forget(READ)
    with pytest.raises(ValueError, match="not a fingerprint"):
        has_passed(tmp_path, "../x", "a")


def test_a_choice_is_confirmed_by_its_version_and_by_the_time_it_was_made(tmp_path: Path) -> None:
    found = decision()
    assert not is_confirmed(tmp_path, found)
    note_confirmed(tmp_path, found, "1.2")
    assert is_confirmed(tmp_path, found)
    assert is_confirmed(tmp_path, found, "1.2")
    assert not is_confirmed(tmp_path, found, "1.3")
    others = ({"key": OTHER}, chosen("other"), {"created": "2025-01-02T00:00:00+00:00"})
    assert not any(is_confirmed(tmp_path, decision(**changes)) for changes in others)


def test_the_older_half_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed, "MOST", 40)
    for number in range(10):
        note_passed(tmp_path, SILICON, f"{number:07}")
    forget(READ)
    known = [has_passed(tmp_path, SILICON, f"{number:07}") for number in range(10)]
    assert known == sorted(known)
    assert known[0] is False
    assert known[-1] is True


def test_a_folder_that_takes_no_file(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    (tmp_path / "passed").write_text("")
    for check in ("a", "b"):
        note_passed(tmp_path, SILICON, check)
        assert has_passed(tmp_path, SILICON, check)
    (text,) = warnings()
    assert text.startswith(f"passed checks are not remembered: {tmp_path / 'passed'} cannot be written (")
    note_passed(NOWHERE, SILICON, "c")
    assert has_passed(NOWHERE, SILICON, "c")
    assert len(warnings()) == 1
