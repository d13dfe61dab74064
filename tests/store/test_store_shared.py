"""A cache folder that other users can write to: it is used, with one warning and a line of `doctor`."""

from __future__ import annotations

import grp
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_dispatch.cli import main
from attn_dispatch.store import files
from attn_dispatch.store.folder import Store
from tests.support.entries import GROUP, KEY, OTHER, decision
from tests.support.fakes import SILICON


def looks_like(about: tuple[int, ...], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a path had this mode and owner."""
    real = os.stat
    made = os.stat_result(about)
    monkeypatch.setattr(os, "stat", lambda of, **named: made if of == path else real(of, **named))


def owned(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process were run by another user."""
    monkeypatch.setattr(os, "geteuid", lambda: user)


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


def test_a_private_folder_is_not_reported(folder: Path, warnings: Callable[[], list[str]]) -> None:
    Store(folder).put(decision())
    assert Store(folder).get(SILICON, GROUP, KEY) is not None
    assert (warnings(), Store(folder).shared()) == ([], "")


def test_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path.stat().st_uid
    for user, reason in ((mine, ""), (mine + 1, f"{tmp_path} belongs to user {mine}" if mine else "")):
        owned(user, monkeypatch)
        assert files.open_to_others(tmp_path) == reason
    looks_like((0o40755, 0, 0, 1, 4321, 0, 0, 0, 0, 0), tmp_path, monkeypatch)
    assert files.open_to_others(tmp_path) == f"{tmp_path} belongs to user 4321"


@pytest.mark.parametrize(
    ("name", "members", "private"),
    [("alice", [], True), ("alice", ["alice"], True), ("alice", ["bob"], False), ("staff", [], False)],
)
def test_a_group_of_one_user_is_private(
    name: str, members: list[str], private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_like((0o40775, 0, 0, 1, 1000, 1000, 0, 0, 0, 0), tmp_path, monkeypatch)
    owned(1000, monkeypatch)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: pwd.struct_passwd(("alice", "x", user, 1000, "", "/", "")))
    monkeypatch.setattr(grp, "getgrgid", lambda group: grp.struct_group((name, "x", group, members)))
    assert files.open_to_others(tmp_path) == ("" if private else f"{tmp_path} can be written by group 1000")
