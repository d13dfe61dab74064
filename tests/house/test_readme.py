"""The README says what is so: its first code stands early, its figures are those in tools/results/."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tools.docs import build

ROOT = Path(__file__).parents[2]
TEXT = build.README.read_text()


def test_figures_are_those_in_the_results() -> None:
    assert build.stale(build.made()) == []


def test_what_differs_is_named(tmp_path: Path) -> None:
    other = tmp_path / "README.md"
    other.write_text(TEXT.replace("<!-- /explain -->", "made up\n<!-- /explain -->"))
    assert build.stale({**build.made(other), tmp_path / "none.svg": ""}) == ["README.md", "none.svg"]


def test_first_code_stands_early() -> None:
    assert TEXT.splitlines().index("```python") < 12


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


def test_relative_paths_that_are_named_exist() -> None:
    for name in re.findall(r"`((?:attn_dispatch|backends|tests|tools)/[\w./]+|\w+\.md)`", TEXT):
        assert (ROOT / name).exists(), name
