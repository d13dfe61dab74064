"""A release: one version, and a source distribution from which a wheel is made that runs in a new environment."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

import attn_dispatch
from tests.support.distributions import built, copied, skip_without

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CODE = """
import torch, attn_dispatch
from attn_dispatch.store.folder import shipped
x = torch.ones(1, 2, 1, 4)
print(attn_dispatch.__file__, attn_dispatch.__version__, attn_dispatch.attend(x, x, x).sum().item(), sep="\\n")
print(*(len(shipped(name)) for name in {names!r}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a wheel of the source distribution."""
    skip_without("pip", "setuptools")
    folder = tmp_path_factory.mktemp("release")
    source, _ = built("sdist", without_links(copied(ROOT, folder / "tree")), folder, CXX="no-such-compiler")
    shutil.unpack_archive(source, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel, _ = built("wheel", unpacked, folder, CXX="no-such-compiler")
    return environment_of(wheel, folder / "new")


def without_links(tree: Path) -> Path:
    """A checkout as git makes it on Windows: a link is a file that names its target."""
    for each in filter(Path.is_symlink, (tree / "attn_dispatch").iterdir()):
        target = each.readlink()
        each.unlink()
        each.write_text(str(target))
    return tree


def environment_of(wheel: Path, folder: Path) -> Path:
    """A new environment with a wheel, and this one's libraries behind it."""
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(each for each in sys.path if each.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", str(wheel)], check=True, capture_output=True)
    return folder


def ran(installed: Path, program: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(installed / "bin" / program), *arguments]
    done = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_release_computes_and_has_the_shipped_profiles(installed: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "profiles").glob("*.json"))
    where, version, total, counts = ran(installed, "python", "-c", CODE.format(names=names)).splitlines()
    assert Path(where).is_relative_to(installed)
    assert version == PROJECT["version"]
    assert float(total) == 8
    assert names
    assert all(int(count) > 0 for count in counts.split())


@pytest.mark.full
def test_an_editable_installation_needs_no_links(tmp_path: Path) -> None:
    skip_without("pip", "setuptools")
    wheel, _ = built("editable", without_links(copied(ROOT, tmp_path / "tree")), tmp_path, CXX="no-such-compiler")
    where, *_ = ran(environment_of(wheel, tmp_path / "new"), "python", "-c", CODE.format(names=[])).splitlines()
    assert Path(where).is_relative_to(tmp_path / "tree")


@pytest.mark.full
def test_its_command_runs(installed: Path) -> None:
    found = json.loads(ran(installed, "attn-dispatch", "explain", "--shape", "1,64,2,16", "--json"))
    assert found
    assert "usage: attn-dispatch" in ran(installed, "attn-dispatch", "--help")


def test_the_version_stands_in_one_place() -> None:
    assert attn_dispatch.__version__ == PROJECT["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^(version|license|title): (\S+)$", citation, flags=re.MULTILINE))
    assert stated == {"version": PROJECT["version"], "license": PROJECT["license"], "title": PROJECT["name"]}


YAML = ["CITATION.cff", *(f".github/workflows/{name}.yml" for name in ("ci", "newest", "nightly", "systems", "wheels"))]


@pytest.mark.parametrize("name", YAML)
def test_yaml_can_be_read_and_installs_what_the_readme_does(name: str) -> None:
    yaml: Any = importlib.import_module("yaml")
    text, readme = ((ROOT / each).read_text(encoding="utf-8") for each in (name, "README.md"))
    jobs = yaml.safe_load(text).get("jobs", {})
    assert all(len({"uses", "run"} & set(step)) == 1 for job in jobs.values() for step in job["steps"])
    assert set(re.findall(r"torch==[\d.]+", text)) <= set(re.findall(r"torch==[\d.]+", readme))
