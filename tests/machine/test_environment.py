"""When what is installed counts as the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attn_dispatch.machine import environment as surroundings
from attn_dispatch.machine.environment import environment


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are installed into, on the path."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(folder)])
    monkeypatch.delenv("CXX", raising=False)
    surroundings._installed.cache_clear()
    yield folder
    surroundings._installed.cache_clear()


def install(place: Path) -> None:
    (place / "some-1.dist-info").mkdir()
    os.utime(place, ns=(1, 1))


def upgrade_compiler(place: Path, patch: pytest.MonkeyPatch) -> None:
    """Another g++ comes first."""
    patch.setenv("PATH", str(place.parent))
    compiler = place.parent / "g++"
    compiler.write_text("")
    compiler.chmod(0o755)


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "package": lambda place, patch: install(place),
    "compiler": upgrade_compiler,
    "cxx": lambda place, patch: patch.setenv("CXX", "clang++"),
    "interpreter": lambda place, patch: patch.setenv("TRITON_INTERPRET", "1"),
    "path": lambda place, patch: patch.setattr(sys, "path", []),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_makes_it_another(
    change: Callable[[Path, pytest.MonkeyPatch], object], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment({})
    surroundings._installed.cache_clear()
    assert environment({}) == before
    change(place, monkeypatch)
    surroundings._installed.cache_clear()
    assert environment({}) != before


def test_a_scripts_own_folder_does_not_count(place: Path) -> None:
    before = environment({})
    (place.parent / "notes.txt").write_text("")
    os.utime(place.parent, ns=(1, 1))
    surroundings._installed.cache_clear()
    assert environment({}) == before


def test_registered_backends_count() -> None:
    found = [environment({}), environment({"mine": "1"}), environment({"mine": "2"}), environment({"mine": None})]
    assert len(set(found)) == 4


def test_the_packages_own_files_count() -> None:
    found = list(surroundings._own_files(str(Path(surroundings.__file__).parent.parent)))
    assert {"sdpa.py", "native.py"} <= {name for name in found if isinstance(name, str)}
    about = {each[0].rsplit("/", 1)[-1]: each[1:] for each in found if isinstance(each, tuple)}
    assert {"attention.cpp", "forward.h"} <= about.keys()
    assert all(None not in each for each in about.values())
