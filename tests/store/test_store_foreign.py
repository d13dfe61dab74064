"""Files in the cache folder that are not the store's: none is removed, and no link is followed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_dispatch.cli import main
from attn_dispatch.store import files, passed
from attn_dispatch.store.decision import encode
from attn_dispatch.store.folder import Store
from attn_dispatch.store.passed import note_missed
from attn_dispatch.store.quarantine import FOLDER, Quarantine, crash_marker
from tests.support.entries import GROUP, KEY, OTHER, decision
from tests.support.fakes import SILICON
from tests.support.quarantines import entry, path_of_new

OLD = 1_000_000_000.0
IN_GROUP = f"{SILICON}/{GROUP}"
LEFT = f".{KEY}-abcd0123.tmp"
FOREIGN = [
    *(f"{folder}{name}" for folder in ("", f"{SILICON}/", f"{IN_GROUP}/") for name in ("notes.json", "notes.tmp")),
    # The right name at another level, or below a folder of another name.
    *(f"{folder}{KEY}.json" for folder in ("", f"{SILICON}/", f"{IN_GROUP}/{GROUP}/", f"Mine/{GROUP}/")),
    *(f"{folder}/{KEY}.json" for folder in (f"{SILICON}/{GROUP}0", f"{SILICON}/mine")),
    *(f"{folder}{LEFT}" for folder in ("", f"{SILICON}/")),
    # Another name at the right level.
    *(f"{IN_GROUP}/{name}.json" for name in (KEY[:-1], KEY + "0", KEY.upper(), f"{KEY}.old", f".{KEY}")),
    *(f"{IN_GROUP}/{name}" for name in (f"{KEY}.json.bak", KEY, f".{KEY}.tmp", f".{KEY}-ABCD0123.tmp", LEFT[1:])),
]


def plant(path: Path, content: bytes = b"x" * 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (OLD, OLD))
    return path


def link(path: Path, target: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    os.utime(path, (OLD, OLD), follow_symlinks=False)
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
    keys = [f"{number:020x}" for number in range(3)]
    own = [plant(Store(cache).path(SILICON, GROUP, key), encode(decision(key=key))) for key in keys]
    own.append(plant(root / IN_GROUP / LEFT, b"half a"))
    for name in FOREIGN:
        plant(root / name)
    for name in ("notes.json", "notes.tmp", f"v1/{SILICON}/{KEY}.json"):
        plant(cache / name)
    theirs = plant(outside / SILICON / GROUP / f"{KEY}.json")
    link(root / "linked", outside / SILICON)
    link(root / SILICON / ("a" * 12), theirs.parent)
    link(root / IN_GROUP / f"{KEY}.json", theirs)
    link(root / IN_GROUP / f"{'b' * 20}.json", tmp_path / "nowhere")
    (root / IN_GROUP / f"{'c' * 20}.json").mkdir()
    before = everything(tmp_path)
    written = Store(cache).put(decision(key=OTHER))
    assert written is not None
    assert before - everything(tmp_path) == set(own)
    assert everything(tmp_path) - before == {written}


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
    for path in (Store(cache).path(SILICON, GROUP, KEY), cache / passed.MISSED, cache / files.LOCK):
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


@pytest.mark.parametrize("linked", ["quarantine", f"{FOLDER}/{SILICON}"])
def test_a_linked_quarantine_is_not_changed(linked: str, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    for suffix in (".mark", ".json"):
        plant(outside / path_of_new(cache, suffix).relative_to(cache / linked), b"")
    link(cache / linked, outside)
    before = everything(outside)
    quarantined = Quarantine(cache, SILICON)
    with crash_marker(cache, SILICON, "made_up", "1", "x"):
        assert everything(outside) == before
    assert quarantined.entries() == []
    quarantined.add(entry())
    assert quarantined.lift() == []
    assert everything(outside) == before
    assert all("symbolic link" in text for text in warnings())


# --- folders that others can write to -------------------------------------------------------------------------------


def looks_like(about: tuple[int, ...], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a path had this mode and owner."""
    real = os.stat
    made = os.stat_result(about)
    monkeypatch.setattr(os, "stat", lambda of, **named: made if of == path else real(of, **named))


@pytest.mark.parametrize("open_folder", ["", "v2"])
def test_one_warning_and_a_line_of_doctor(
    open_folder: str, folder: Path, warnings: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Store(folder).path(SILICON, GROUP, KEY).parent.mkdir(parents=True)
    (folder / open_folder).chmod(0o777)
    for key in (KEY, OTHER):
        assert Store(folder).put(decision(key=key)) is not None
        assert Store(folder).get(SILICON, GROUP, key) is not None
    reason = f"{folder / open_folder} can be written by everyone"
    assert warnings() == [f"other users can choose this user's backends: {reason}"]
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shared"] == reason
    assert main(["doctor"]) == 0
    assert f"shared    {reason}" in capsys.readouterr().out


def test_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path.stat().st_uid
    for user, reason in ((mine, ""), (mine + 1, f"{tmp_path} belongs to user {mine}" if mine else "")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert files.open_to_others(tmp_path) == reason
    looks_like((0o40755, 0, 0, 1, 4321, 0, 0, 0, 0, 0), tmp_path, monkeypatch)
    assert files.open_to_others(tmp_path) == f"{tmp_path} belongs to user 4321"


@pytest.mark.parametrize(("group", "private"), [(0, True), (1000, True), (50, False)])
def test_the_group_of_this_users_files_is_private(
    group: int, private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_like((0o40775, 0, 0, 1, 1000, group, 0, 0, 0, 0), tmp_path, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    assert files.open_to_others(tmp_path) == ("" if private else f"{tmp_path} can be written by group {group}")
