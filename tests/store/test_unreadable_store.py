"""A store whose folders cannot be read is no empty one: nothing is replaced by what was found in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch import cli
from attn_dispatch.settings import cache_folder
from attn_dispatch.store.folder import Store
from tests.store.test_store_exchange import BUNDLE, GIVEN, store_all
from tests.support.fakes import SILICON


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Listing it and what is in it fails, as a folder without permission does for all but root."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".") -> Any:
            if not isinstance(path, int) and Path(path).is_relative_to(folder):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path)

        return read

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))


@pytest.mark.parametrize("inner", [".", "v2", f"v2/{SILICON}"])
@pytest.mark.parametrize("options", [(), ("--key", "a")])
def test_an_unreadable_store_is_no_empty_one(
    inner: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What was exported before is not replaced."""
    store_all(GIVEN[0])
    assert cli.main(["export", str(tmp_path / "bundle.json")]) == 0
    before = (tmp_path / "bundle.json").read_bytes()
    unreadable(monkeypatch, cache_folder() / inner)
    assert cli.main(["export", str(tmp_path / "bundle.json"), *options]) == 1
    assert f"{cache_folder() / inner} cannot be read (Permission denied)" in capsys.readouterr().err
    assert (tmp_path / "bundle.json").read_bytes() == before


@pytest.mark.parametrize("inner", [".", "v2", f"v2/{SILICON}"])
def test_no_command_takes_an_unreadable_store_for_an_empty_one(
    inner: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_all(GIVEN[0])
    unreadable(monkeypatch, cache_folder() / inner)
    why = f"{cache_folder() / inner} cannot be read (Permission denied)"
    for options in ((), ("--json",), ("--key", "0"), ("--regret",), ("--thresholds",)):
        assert cli.main(["inspect", *options]) == 1
        assert f"attn-dispatch inspect: {why}" in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0
    assert f"0 in {cache_folder()}; {why}" in capsys.readouterr().out


def test_a_missing_cache_folder_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "mistyped"))
    (tmp_path / "bundle.json").write_bytes(BUNDLE)
    assert cli.main(["export", str(tmp_path / "bundle.json")]) == 1
    assert f"{tmp_path / 'mistyped'} cannot be read" in capsys.readouterr().err
    assert (tmp_path / "bundle.json").read_bytes() == BUNDLE
    (tmp_path / "mistyped").mkdir()
    assert cli.main(["export", str(tmp_path / "bundle.json")]) == 0  # an empty store is exported


def test_an_unreadable_folder_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store_all(GIVEN[0])
    unreadable(monkeypatch, cache_folder() / "v2" / SILICON)
    assert list(Store(cache_folder()).all()) == []
    assert f"{cache_folder()}/v2/{SILICON} cannot be read (Permission denied)" in caplog.text
    caplog.clear()
    assert list(Store(cache_folder() / "absent").all()) == []
    assert caplog.text == ""


def test_an_unreadable_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_all(*GIVEN)
    source = cache_folder()
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(tmp_path / "there"))
    unreadable(monkeypatch, source / "v2" / "cpu-other")
    assert cli.main(["import", str(source)]) == 1
    assert f"refused   {source}/v2/cpu-other: Permission denied" in capsys.readouterr().out
    assert len(list(Store(cache_folder()).all())) == len(GIVEN) - 1
