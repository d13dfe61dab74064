"""The size limit of the cache folder, its clean-up, and the locks of writers."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from attn_dispatch import system
from attn_dispatch.errors import InvalidInput
from attn_dispatch.process_state import READ, forget
from attn_dispatch.store import files, passed
from attn_dispatch.store.decision import Row, encode
from attn_dispatch.store.folder import Store
from attn_dispatch.store.passed import has_passed, is_confirmed, note_confirmed, note_missed, note_passed
from tests.support.entries import GROUP, KEY, OTHER, chosen, decision, files_in
from tests.support.fakes import SILICON, raising

SIZE = len(encode(decision()))
DAY = 86400


def plant_many(folder: Path, count: int) -> list[Path]:
    """Decisions, the least recently used first."""
    paths = []
    for number in range(count):
        key = f"{number:020x}"
        path = Store(folder).path(SILICON, f"{number % 3:012x}", key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(decision(key=key, group=f"{number % 3:012x}")))
        os.utime(path, (0, time.time() - (count - number) * DAY))
        paths.append(path)
    return paths


def bound(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_MB", repr(count * SIZE / 1e6))


# --- size -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_decisions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = plant_many(tmp_path, 20)
    bound(monkeypatch, 10)
    assert Store(tmp_path).get(SILICON, paths[0].parent.name, paths[0].stem) is not None
    written = Store(tmp_path).put(decision(key=OTHER))
    assert written is not None
    assert set(files_in(tmp_path)) == {paths[0], *paths[-7:], written}


def test_a_file_that_is_used_during_a_clean_up_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes one, and writes to another."""
    paths = plant_many(tmp_path, 6)
    real = files._remove

    def meanwhile(path: Path, seen: os.stat_result) -> None:
        paths[0].unlink(missing_ok=True)
        os.utime(paths[1])
        real(path, seen)

    bound(monkeypatch, 5)
    monkeypatch.setattr(files, "_remove", meanwhile)
    Store(tmp_path).put(decision(key=OTHER))
    assert [path.exists() for path in paths] == [False, True, False, True, True, True]


@pytest.mark.parametrize("value", ["0", "nan", "1 MB"])
def test_an_invalid_limit_is_refused(tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_MB", value)
    with pytest.raises(InvalidInput, match=r"ATTN_DISPATCH_CACHE_MB.*" + value):
        Store(tmp_path).put(decision())
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(("age_s", "stays"), [(2 * 3600, False), (60, True), (-10 * DAY, True)])
def test_temporary_files(tmp_path: Path, age_s: float, stays: bool) -> None:
    """A file time in the future gives no age."""
    left = Store(tmp_path).path(SILICON, GROUP, KEY).with_name(f".{KEY}-abcd0123.tmp")
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a")
    os.utime(left, (0, time.time() - age_s))
    Store(tmp_path).put(decision(key=OTHER))
    assert left.exists() == stays


def test_a_time_in_the_future_does_not_win_a_merge(tmp_path: Path) -> None:
    ahead = (datetime.now(UTC) + timedelta(days=900)).isoformat()
    wrong = decision(created=ahead, candidates=(Row(backend="sdpa", order="natural", status="chosen", measured=ahead),))
    path = Store(tmp_path).path(SILICON, GROUP, KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(wrong))
    now = datetime.now(UTC).isoformat()
    fresh = decision(created=now, candidates=(Row(backend="sdpa", order="natural", status="chosen", measured=now),))
    Store(tmp_path).put(fresh)
    assert Store(tmp_path).get(SILICON, GROUP, KEY) == fresh


# --- locks ----------------------------------------------------------------------------------------------------------


def test_a_held_lock_is_waited_for_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(files, "LOCK_S", 0.05)
    folder = Store(tmp_path).path(SILICON, GROUP, KEY).parent
    folder.mkdir(parents=True)
    with (folder / files.LOCK).open("w") as held:
        assert system.lock(held.fileno())
        assert Store(tmp_path).put(decision()) is not None
    assert Store(tmp_path).get(SILICON, GROUP, KEY) == decision()
    assert warnings() == []


@pytest.mark.parametrize(
    ("platform", "refusals", "written"), [("win32", 3, True), ("win32", 999, False), ("linux", 1, False)]
)
def test_windows_waits_while_a_file_is_in_use(
    platform: str, refusals: int, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not let an open file be replaced; elsewhere such an error is final."""
    left, replace = [PermissionError(errno.EACCES, "in use")] * refusals, os.replace

    def refused(*paths: Path) -> None:
        if left:
            raise left.pop()
        replace(*paths)

    monkeypatch.setattr(os, "replace", refused)
    monkeypatch.setattr(system, "IN_USE_S", 0.05)
    monkeypatch.setattr(sys, "platform", platform)
    with nullcontext() if written else pytest.raises(PermissionError):
        files.write(tmp_path / "one", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["one"] * written


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "lock", raising(OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    before = len(os.listdir("/proc/self/fd"))
    assert Store(tmp_path).put(decision()) is not None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    path = Store(tmp_path).path(SILICON, GROUP, KEY)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert Store(tmp_path).get(SILICON, GROUP, KEY) is None
    assert list(Store(tmp_path).all()) == []
    (text,) = warnings()
    assert "not a plain file" in text
    os.mkfifo(tmp_path / passed.MISSED)
    note_missed(tmp_path, {"batch": 1})
    assert len(warnings()) == 2


def test_a_missed_problem_is_recorded_once_per_process(tmp_path: Path) -> None:
    for batch in (1, 2, 1):
        note_missed(tmp_path, {"batch": batch})
    assert (tmp_path / passed.MISSED).read_text() == '{"batch":1}\n{"batch":2}\n'


def test_missed_problems_that_cannot_be_written(folder: Path, warnings: Callable[[], list[str]]) -> None:
    folder.write_text("not a folder")
    for _ in range(2):
        note_missed(folder, {"batch": 1})
    (text,) = warnings()
    assert text.startswith("misses are not recorded: ")


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
