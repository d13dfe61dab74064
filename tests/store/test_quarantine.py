"""Quarantined versions are excluded in every process, other versions are not; damaged files and failing disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attn_dispatch.store import files
from attn_dispatch.store.quarantine import FOLDER, Quarantine, crash_marker, place_of, silicons
from tests.support.fakes import SILICON, raising
from tests.support.quarantines import GROUP, entry, path_of, path_of_new

# --- entries ----------------------------------------------------------------------------------------------------------


def test_an_entry_is_found_in_later_processes(folder: Path, anew: Callable[[], Quarantine]) -> None:
    given = entry()
    for found in (Quarantine(folder, SILICON), Quarantine(folder, SILICON), anew()):
        if not place_of(folder, SILICON).exists():
            found.add(given)
        assert found.find("made_up", "1") == given
        assert found.entries() == [given]
    assert silicons(folder) == [SILICON]


@pytest.mark.parametrize(
    ("scope", "group", "is_out"),
    [("", "", True), ("", GROUP, True), (GROUP, GROUP, True), (GROUP, "", False), (GROUP, "f" * 12, False)],
)
def test_an_entry_applies_within_its_scope(folder: Path, scope: str, group: str, is_out: bool) -> None:
    quarantined = Quarantine(folder, SILICON)
    quarantined.add(entry(scope=scope))
    quarantined.add(entry(backend="versionless", version=None))
    assert (quarantined.find("made_up", "1", group) is not None) is is_out
    for backend, version in (("made_up", "2"), ("made_up", None), ("other", "1"), ("versionless", "")):
        assert quarantined.find(backend, version, group) is None
    assert Quarantine(folder, "cpu-other").find("made_up", "1", group) is None


@pytest.mark.parametrize("name", ["", "..", "../cpu", "a/b", "CPU", "a" * 129])
def test_paths_stay_in_the_folder(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="not a fingerprint"):
        Quarantine(folder, name)
    with pytest.raises(ValueError, match="not a fingerprint"), crash_marker(folder, name, "made_up", "1", ""):
        raise AssertionError
    Quarantine(folder, SILICON).add(entry(backend="../../../escaped", scope="../x"))
    assert path_of(folder).parent == folder / FOLDER / SILICON


def test_reasons_and_titles_are_one_line(folder: Path, anew: Callable[[], Quarantine]) -> None:
    """Also those of a file that something else wrote."""
    given = entry(reason="RuntimeError:\n  at \x1b[31m0x7", title="a\tb")
    Quarantine(folder, SILICON).add(given)
    for _ in range(2):
        (found,) = anew().entries()
        assert (found.reason, found.title) == ("RuntimeError: at ?[31m0x7", "a b")
        path_of(folder).write_bytes(files.encode_checked(given))


@pytest.mark.parametrize(
    ("name", "left"), [("made_up", ["other"]), (None, []), ("absent", ["made_up", "made_up", "other"])]
)
def test_lifting_removes_entries(
    folder: Path, name: str | None, left: list[str], anew: Callable[[], Quarantine]
) -> None:
    given = [entry(), entry(scope=GROUP), entry(backend="other")]
    for each in given:
        Quarantine(folder, SILICON).add(each)
    quarantined = Quarantine(folder, SILICON)
    assert quarantined.lift(name) == [each for each in given if each.backend not in left]
    for found in (quarantined, anew()):
        assert [each.backend for each in found.entries()] == left


# --- a bad disk -------------------------------------------------------------------------------------------------------


def resealed(**changes: Any) -> bytes:
    return files.encode_checked(entry(**changes))


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "flipped": resealed().replace(b"0.31", b"0.01"),
    "not-sealed": msgspec.json.encode(entry()),
    "not-json": b"\xff\xfe",
    "another-silicon": resealed(silicon="cpu-other"),
    "zone": resealed(kind="died", until="2026-01-01T13:00:00", strikes=2),
    "no-end": resealed(kind="died", strikes=2),
    "needless-end": resealed(until="2026-01-01T13:00:00+00:00"),
    "large": resealed() + b" " * files.MAX_CHECKED_BYTES,
    "nested": b'{"sha256":"","content":' + b"[" * 30_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_ignored_with_one_warning(
    folder: Path, content: bytes, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    Quarantine(folder, SILICON).add(entry())
    path = path_of(folder)
    assert content != path.read_bytes()
    path.write_bytes(content)
    for _ in range(2):
        assert anew().find("made_up", "1") is None
    (text,) = warnings()
    assert text.startswith(f"ignored {path}: ")
    anew().add(entry())
    assert anew().find("made_up", "1") is not None


def test_only_plain_files_are_opened(
    folder: Path, anew: Callable[[], Quarantine], warnings: Callable[[], list[str]]
) -> None:
    """Opening a pipe would block."""
    Quarantine(folder, SILICON).add(entry())
    there = path_of(folder).rename(folder / "elsewhere")
    path_of_new(folder, ".json").symlink_to(there)
    os.mkfifo(path_of_new(folder, ".mark"))
    for _ in range(2):
        assert anew().find("made_up", "1") is None
    assert ["ignored " in text for text in warnings()] == [True, True]


@pytest.mark.parametrize("target", ["os.fsync", "os.replace", "pathlib.Path.mkdir"])
def test_a_folder_that_cannot_be_written(
    target: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    anew: Callable[[], Quarantine],
    warnings: Callable[[], list[str]],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, raising(OSError(errno.EROFS, "Read-only file system")))
        quarantined = Quarantine(folder, SILICON)
        for scope in ("", GROUP):
            quarantined.add(entry(scope=scope))
        (text,) = warnings()
        assert "for this process only" in text
    quarantined.reread()
    assert [each.scope for each in quarantined.entries()] == ["", GROUP]
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert len(quarantined.lift()) == 2
    assert quarantined.lift() == anew().entries() == []
