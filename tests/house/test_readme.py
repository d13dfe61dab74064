"""The README: short, code at its top, two commands that set everything up."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_first_code_stands_early() -> None:
    """Six lines, the last of them by line 12."""
    lines = TEXT.splitlines()
    first, end = lines.index("```python"), lines.index("```")
    assert end <= 12
    assert len(list(filter(None, lines[first + 1 : end]))) == 6


def test_two_set_up_commands() -> None:
    """Each makes its own environment; the second is the one that CI runs."""
    commands = re.findall(r"```sh\n(.*?)\n```", TEXT, flags=re.DOTALL)
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && ") and "\n" not in command for command in commands)
    assert "attn-dispatch profile --quick" in commands[0]
    assert commands[1].endswith("-m pytest -q")


def test_changelog_has_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
