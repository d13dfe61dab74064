"""Building distributions of the package, as installers do."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = """
import sys
sys.modules["torch"] = None  # importing it fails: a build does without
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


def skip_without(*names: str) -> None:
    """Skip where one is not installed, or setuptools makes no wheels by itself. They are not looked for as modules:
    setuptools would replace distutils.
    """
    for name in names:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not in this environment: pip install {name}")
        if name == "setuptools" and not Path(str(found.locate_file("setuptools/command/bdist_wheel.py"))).exists():
            pytest.skip(f"setuptools {found.version} makes no wheels: pip install --upgrade setuptools")


def copied(root: Path, to: Path) -> Path:
    """What a distribution is made of, without what earlier builds left."""
    to.mkdir(exist_ok=True)
    for name in ("attn_dispatch", "backends", "profiles"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(root / name, to / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, to)
    return to


def built(kind: str, tree: Path, to: Path, **variables: str) -> tuple[Path, str]:
    """The wheel or source distribution, and what building it printed."""
    to.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, kind, str(to)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True, timeout=600)
    return to / done.stdout.splitlines()[-1], done.stderr
