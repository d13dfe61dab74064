"""What `.ci/run` installs: every tool whose version its verdict depends on is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
PINNED = {(found := Requirement(line)).name: found for line in LINES if not line.startswith("#")}

EXTRAS = PROJECT["project"]["optional-dependencies"]
PARTS = [PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"]]
PARTS += [EXTRAS[name] for name in ("test", "dev", "docs")]
REQUIRED = [Requirement(line) for part in PARTS for line in part]


@pytest.mark.parametrize("required", REQUIRED, ids=str)
def test_each_requirement_has_one_version(required: Requirement) -> None:
    if required.name in ("attn-dispatch", "torch"):  # the README's test command names torch's
        return
    (pin,) = PINNED[required.name].specifier
    assert pin.operator == "=="
    assert required.specifier.contains(pin.version)


def test_ci_installs_by_them() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.index("export PIP_CONSTRAINT=.ci/constraints.txt") < script.index("$test_command")
    assert re.search(r"^python3 -m venv .*torch==[\d.]+ ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)


def test_libraries_that_are_read_have_one_version() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    loop = re.search(r"^for library in (.+); do$", script, flags=re.MULTILINE)
    assert loop is not None
    extras = [Requirement(line) for lines in EXTRAS.values() for line in lines]
    for name in loop[1].split():
        (pin,) = PINNED[name].specifier
        assert pin.operator == "=="
        (found,) = (each for each in extras if each.name == name)
        assert found.specifier.contains(pin.version, prereleases=True)
