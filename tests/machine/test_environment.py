"""When what is installed counts as the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from attn_dispatch.machine import environment as surroundings
from attn_dispatch.machine.environment import environment
from attn_dispatch.tuning.candidates import current_environment


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are installed into, on the path."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(folder)])
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield folder
    forget()


def forget() -> None:
    surroundings._installed.cache_clear()
    surroundings.installed.cache_clear()


def install(place: Path) -> None:
    (place / "some-1.dist-info").mkdir()
    os.utime(place, ns=(1, 1))


def install_elsewhere(name: str, place: Path, patch: pytest.MonkeyPatch) -> None:
    """As `pip install --target` and images with normalised times have it."""
    about = place.parent / f"{name.replace('-', '_')}-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    os.utime(place.parent, ns=(1, 1))


def upgrade_compiler(place: Path, patch: pytest.MonkeyPatch) -> None:
    """Another g++ comes first."""
    patch.setenv("PATH", str(place.parent))
    compiler = place.parent / "g++"
    compiler.write_text("")
    compiler.chmod(0o755)


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "package": lambda place, patch: install(place),
    **{name: partial(install_elsewhere, name) for name in surroundings.LIBRARIES},
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
    forget()
    assert environment({}) == before
    change(place, monkeypatch)
    forget()
    assert environment({}) != before


def test_a_scripts_own_folder_does_not_count(place: Path) -> None:
    before = environment({})
    (place.parent / "notes.txt").write_text("")
    os.utime(place.parent, ns=(1, 1))
    forget()
    assert environment({}) == before


def test_pytorchs_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current_environment()
    monkeypatch.setattr("torch.__version__", "9.9")
    assert current_environment() != before


def test_registered_backends_count() -> None:
    found = [environment({}), environment({"mine": "1"}), environment({"mine": "2"}), environment({"mine": None})]
    assert len(set(found)) == 4


def test_the_packages_own_files_count(tmp_path: Path) -> None:
    """By what they hold: neither a copy's times nor its size need differ."""
    own = tmp_path / "attn_dispatch"
    names = ("backends/a.py", "kernels/native/attention.cpp", "kernels/native/attention/forward.h",
             "kernels/native/attention/arm/neon.h", "kernels/native/variants.py", "kernels/triton/forward.py",
             "kernels/native/attention-v3.so")  # fmt: skip
    found = []
    for name in ("", *names):
        path = own / name
        for there in names:
            (own / there).parent.mkdir(parents=True, exist_ok=True)
            (own / there).write_text("old")
        if name.endswith((".so", "a.py")):
            path.rename(path.with_suffix(f".new{path.suffix}"))
        elif name:
            path.write_text("new")
        found.append(tuple(surroundings._own_files(str(own), str(own / "backends"))))
    assert len({*found}) == len(found)
