"""Files in the cache folder that are not the store's: none is removed, and no link is followed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.store import address as names
from attn_dispatch.store import files, problem_files
from attn_dispatch.store.crash_markers import crash_marker, place_of
from attn_dispatch.store.decision import HEAD, encode
from attn_dispatch.store.folder import Store
from attn_dispatch.store.problem_files import note_missed
from attn_dispatch.store.quarantine import Quarantine
from tests.support.entries import GROUP, KEY, OTHER, decision, encoded
from tests.support.fakes import SILICON
from tests.support.quarantines import entry, path_of_new

LEVELS = (names.SILICON, names.GROUP, names.KEY)
OLD = 1_000_000_000.0
KEYS = [f"{number:020x}" for number in range(3)]
IN_GROUP = f"{SILICON}/{GROUP}"
FOREIGN = [
    *(f"{folder}{name}" for folder in ("", f"{SILICON}/", f"{IN_GROUP}/") for name in ("notes.json", "notes.tmp")),
    # The right name at another level, or below a folder of another name.
    *(f"{folder}{KEY}.json" for folder in ("", f"{SILICON}/", f"{IN_GROUP}/{GROUP}/", f"Mine/{GROUP}/")),
    *(f"{folder}/{KEY}.json" for folder in (f"{SILICON}/{GROUP}0", f"{SILICON}/mine", f"{SILICON}/{GROUP.upper()}")),
    # Another name at the right level.
    *(f"{IN_GROUP}/{name}.json" for name in (KEY[:-1], KEY + "0", KEY.upper(), f"{KEY}.old", f".{KEY}")),
    *(f"{IN_GROUP}/{KEY}{suffix}" for suffix in (".json.bak", ".JSON", "", ".tmp")),
    # Temporary files of other programs.
    *(f"{IN_GROUP}/{name}" for name in (".0123-abc.tmp", f".{KEY}.tmp", f".{KEY}-ABCD1234.tmp", "tmpabcd_123.tmp")),
    f"{SILICON}/.{KEY}-abcd_123.tmp",
    f".{KEY}-abcd_123.tmp",
]
#: Of files that have the names of decisions by accident, or are those of another version or another problem.
NOT_OURS = [
    b"x" * 100,
    b"",
    b"{}",
    b"\0" * 100,
    b'{"loss": [0.5, 0.25]}',
    b'["checksum"]',
    encoded(schema=3, key="9" + KEY[1:]),
    encoded(schema=1, key="a" + KEY[1:]),
    encode(decision(key=OTHER)),
]


def age(path: Path) -> None:
    os.utime(path, (OLD, OLD), follow_symlinks=False)


def plant(path: Path, content: bytes = b"x" * 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    age(path)
    return path


def link(path: Path, target: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    age(path)
    return path


def everything(folder: Path) -> set[Path]:
    """All but the locks, which stay."""
    return {path for path in folder.rglob("*") if path.name != files.LOCK}


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_MB", "0.000001")


@pytest.mark.usefixtures("little_room")
def test_foreign_files_stay(tmp_path: Path) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    root = Store(cache).root
    own = [plant(Store(cache).path(SILICON, GROUP, key), encode(decision(key=key))) for key in KEYS]
    temporary = encode(decision())[:50], HEAD[:5], b""
    own += [plant(root / IN_GROUP / f".{KEY}-abcd_12{n}.tmp", part) for n, part in enumerate(temporary)]
    foreign = [plant(root / name) for name in FOREIGN]
    foreign += [plant(root / IN_GROUP / f"{n:x}{KEY[1:]}.json", content) for n, content in enumerate(NOT_OURS, 3)]
    foreign += [plant(root / IN_GROUP / f".{KEY}-abcd_{n:03}.tmp", head) for n, head in enumerate(NOT_OURS[:6]) if head]
    foreign += [plant(cache / name) for name in ("notes.json", "notes.tmp", f"v1/{SILICON}/{KEY}.json")]
    foreign += [plant(outside / SILICON / GROUP / f"{KEY}.json"), plant(outside / f".{KEY}-abcd_123.tmp")]
    foreign += [
        link(root / "linked", outside / SILICON),
        link(root / SILICON / ("a" * 12), outside / SILICON / GROUP),
        link(root / IN_GROUP / f"{KEY}.json", outside / SILICON / GROUP / f"{KEY}.json"),
        link(root / IN_GROUP / f".{KEY}-linked_1.tmp", outside / f".{KEY}-abcd_123.tmp"),
        link(root / IN_GROUP / f"{'b' * 20}.json", tmp_path / "nowhere"),
    ]
    folder = root / IN_GROUP / f"{'c' * 20}.json"
    folder.mkdir()
    before = everything(tmp_path)
    written = Store(cache).put(decision(key=OTHER))
    assert written is not None
    assert before - everything(tmp_path) == set(own)
    assert everything(tmp_path) - before == {written}


@pytest.mark.usefixtures("little_room")
def test_clean_up_does_not_follow_a_link(tmp_path: Path) -> None:
    path = plant(Store(tmp_path / "other").path(SILICON, GROUP, KEY))
    link(tmp_path / "cache" / "v2", tmp_path / "other" / "v2")
    files.tidy(tmp_path / "cache" / "v2", LEVELS, 1.0, keep=tmp_path, is_own=lambda path: True, head=b"")
    assert path.exists()


@pytest.mark.usefixtures("little_room")
def test_the_cache_folder_may_be_a_link(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "real").mkdir()
    cache.symlink_to(tmp_path / "real")
    old = plant(Store(cache).path(SILICON, GROUP, KEY), encode(decision()))
    assert Store(cache).put(decision(key=OTHER)) is not None
    assert not old.exists()
    Quarantine(cache, SILICON).add(entry())
    assert len(list((tmp_path / "real" / "quarantine" / SILICON).iterdir())) == 1


@pytest.mark.parametrize("swap", ["folder", "file"])
@pytest.mark.usefixtures("little_room")
def test_a_link_that_appears_during_a_clean_up(swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing and the removal another process puts a link in the place of the file or of its folder."""
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    path = plant(Store(cache).path(SILICON, GROUP, KEY), encode(decision()))
    theirs = plant(outside / path.name, encode(decision()))
    real = files._shrink

    def swapped(*given: Any) -> None:
        target = path.parent if swap == "folder" else path
        target.rename(tmp_path / "moved")
        target.symlink_to(outside if swap == "folder" else theirs)
        real(*given)

    monkeypatch.setattr(files, "_shrink", swapped)
    Store(cache).put(decision(key=OTHER, group="f" * 12))
    assert theirs.exists()
    assert (tmp_path / "moved").exists()


@pytest.mark.parametrize("linked", ["v2", f"v2/{SILICON}", f"v2/{SILICON}/{GROUP}"])
def test_nothing_is_written_through_a_linked_folder(
    linked: str, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    there = plant(outside / Store(cache).path(SILICON, GROUP, KEY).relative_to(cache / linked), encode(decision()))
    link(cache / linked, outside)
    before = everything(outside)
    for key in (KEY, OTHER):
        assert Store(cache).put(decision(key=key, choice="sdpa")) is None
    Store(cache).amend(decision(), environment="changed")
    assert everything(outside) == before
    assert there.read_bytes() == encode(decision())
    assert not list(outside.rglob(files.LOCK))
    (text,) = warnings()
    assert str(cache / linked) in text
    assert "symbolic link" in text


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_a_file_is_replaced_or_refused(
    exists: bool, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    cache, target = tmp_path / "cache", tmp_path / "target"
    if exists:
        plant(target, encode(decision()))
    before = target.read_bytes() if exists else None
    for path in (Store(cache).path(SILICON, GROUP, KEY), cache / problem_files.MISSED, cache / files.LOCK):
        link(path, target)
    link(Store(cache).path(SILICON, GROUP, KEY).parent / files.LOCK, target)
    Store(cache).get(SILICON, GROUP, KEY)  # notes its use
    assert Store(cache).put(decision(choice="sdpa", title="other", created="2026-01-01T00:00:00+00:00")) is not None
    note_missed(cache, {"batch": 1})
    assert target.exists() == exists
    if exists:
        assert target.read_bytes() == before
        assert target.stat().st_mtime == OLD
    assert not Store(cache).path(SILICON, GROUP, KEY).is_symlink()
    texts = warnings()
    assert ["symbolic link," in text for text in texts] == [True, False]
    assert texts[1].startswith("misses are not recorded")


@pytest.mark.parametrize("linked", ["quarantine", f"quarantine/{SILICON}"])
def test_a_linked_quarantine_is_not_changed(
    linked: str, tmp_path: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    place = place_of(cache, SILICON)
    marker = plant(outside / path_of_new(cache, ".mark").relative_to(cache / linked), b"half a line")
    link(cache / linked, outside)
    before = everything(outside)
    quarantined = Quarantine(cache, SILICON)
    with crash_marker(cache, SILICON, "made_up", "1", "x"):
        assert everything(outside) == before
    assert quarantined.entries() == []
    quarantined.add(entry())
    assert everything(outside) == before
    plant(outside / (place / f"{path_of_new(cache, '.json').name}").relative_to(cache / linked))
    assert quarantined.lift() == []
    assert everything(outside) - before
    assert marker.exists()
    assert all("symbolic link" in text for text in warnings())


def test_markers_of_another_name_stay(folder: Path, anew: Callable[[], Quarantine]) -> None:
    place = place_of(folder, SILICON)
    notes = plant(place / "notes.mark", b"half a line")
    own = plant(path_of_new(folder, ".mark"), b"half a line")
    assert time.time() - OLD > 7200
    assert anew().entries() == []
    assert notes.exists()
    assert not own.exists()
