"""Without a home folder, or with one that cannot be written, calls run, and nothing is stored."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_dispatch import NotDecided, attend, explain, process_state, settings
from attn_dispatch.cli import main
from attn_dispatch.settings import MODES, NO_HOME, cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store.bundle import write_bundle
from tests.support.calls import close, formula, qkv
from tests.support.commands import SMALL
from tests.support.entries import decision
from tests.support.fakes import raising

pytestmark = pytest.mark.usefixtures("short_trials")


@pytest.fixture(autouse=True)
def no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user whom the system does not know."""
    for name in ("ATTN_DISPATCH_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", raising(KeyError("user")))
    process_state.forget(process_state.READ)


@pytest.mark.parametrize("mode", MODES)
def test_calls_run_without_a_home_folder(
    mode: str, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    if mode == "predict":
        monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", "~/decisions")
    monkeypatch.setenv("ATTN_DISPATCH_MODE", mode)
    for length in (32, 48):
        q, k, v = qkv(length)
        if mode == "locked":
            with pytest.raises(NotDecided):
                attend(q, k, v)
        else:
            assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
        assert explain(q, k, v).candidates
    expected = [] if mode == "off" else [f"decisions and quarantined backends are not stored: {NO_HOME}"]
    assert warnings() == expected  # mode off reads and writes no file


@pytest.mark.parametrize("home", ["plain file", "absent"])
def test_a_home_that_cannot_be_written(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """A plain file stops root, too; a missing home, as in containers for users without a name, root would make."""
    if home == "absent":
        monkeypatch.setattr(os, "access", lambda path, how: False)
    else:
        (tmp_path / home).touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    q, k, v = qkv(32)
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    assert cache_folder() == settings.NOWHERE
    assert warnings() == [f"decisions and quarantined backends are not stored: {NO_HOME}"]


@pytest.mark.parametrize("command", ["export", "import"])
def test_commands_that_need_the_store_fail(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decisions.json"
    if command == "import":
        path.write_bytes(write_bundle([decision()]))
    assert main([command, str(path)]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.strip()) == ("", f"attn-dispatch {command}: {NO_HOME}")
    assert path.exists() == (command == "import")


def test_commands_report_that_nothing_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["inspect"], ["inspect", "--regret"], ["inspect", "--thresholds"], ["doctor"]):
        assert main(arguments) == 0
        shown = capsys.readouterr()
        assert str(settings.NOWHERE) not in shown.out or arguments[1:]
        if not arguments[1:]:
            assert NO_HOME in shown.out
    assert main(["profile", *SMALL, "--quick"]) == 1
    assert f"not stored: {NO_HOME}" in capsys.readouterr().out
    assert main(["inspect", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == []
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["writable"], report["missed"]["count"]) == (False, 0)
    assert not os.path.lexists("~")
