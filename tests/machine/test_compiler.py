"""Which C++ compiler $CXX names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.machine import environment
from attn_dispatch.machine.compiler import compiler


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PATH with fake executables only."""
    for name in ("g++", "clang++", "ccache", "env"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environment._installed.cache_clear()
    yield tmp_path
    environment._installed.cache_clear()


@pytest.fixture
def cxx(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets $CXX."""
    return lambda setting: monkeypatch.delenv("CXX", False) if setting is None else monkeypatch.setenv("CXX", setting)


@pytest.mark.parametrize(
    ("setting", "programs_in_front", "arguments"),
    [
        (None, ("g++",), ()),
        (" ", ("g++",), ()),
        ("clang++", ("clang++",), ()),
        ("ccache g++", ("ccache", "g++"), ()),
        ("ccache clang++ -m64 -I 'a b'", ("ccache", "clang++"), ("-m64", "-I", "a b")),
        ("env LANG=C g++", ("env",), ("LANG=C", "g++")),
    ],
)
def test_how_it_is_read(setting: Any, programs_in_front: Any, arguments: Any, programs: Path, cxx: Any) -> None:
    cxx(setting)
    assert compiler() == (*(str(programs / each) for each in programs_in_front), *arguments)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("icpx", "icpx is not on the PATH, and $CXX is 'icpx'"),
        ("ccache icpx", "icpx is not on the PATH, and $CXX is 'ccache icpx'"),
        ("sccache g++", "sccache is not on the PATH, and $CXX is 'sccache g++'"),
        ("g++ '", '$CXX is "g++ \'", which is no command: No closing quotation'),
        ("-m64", "$CXX is '-m64', which starts with no program"),
    ],
)
def test_the_reason_where_it_cannot_be_used(setting: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", setting)
    with pytest.raises(ImportError, match=f"^{re.escape(reason)}$"):
        compiler()
    assert environment.environment({})  # a look-up does not need one


def test_the_reason_where_none_is_installed(programs: Path, cxx: Any) -> None:
    cxx(None)
    (programs / "g++").unlink()
    with pytest.raises(ImportError, match=r"^g\+\+ is not on the PATH, and \$CXX is not set$"):
        compiler()


def test_the_environment_changes_with_the_compiler_behind_a_launcher(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "ccache g++")
    found = []
    for time_ns in (10**9, 2 * 10**9):
        os.utime(programs / "g++", ns=(time_ns, time_ns))
        environment._installed.cache_clear()
        found.append(environment.environment({}))
    assert found[0] != found[1]
