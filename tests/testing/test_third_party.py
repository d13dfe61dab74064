"""The example of a backend in a package of its own: installed by pip, found by its entry point, and conforming."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributions import skip_without

EXAMPLE = Path(__file__).parents[2] / "examples" / "blocked_window"
#: In a process that has it installed: it is asked, and computes what the others do.
USED = """
import torch
from attn_dispatch import Window, attend, explain
q, k, v = (torch.randn(1, 300, 4, 16) for _ in range(3))
out = attend(q, k, v, Window(20, 0), backend="blocked_window")
torch.testing.assert_close(out, attend(q, k, v, Window(20, 0), backend="manual"))
print(next(row.status for row in explain(q, k, v, Window(20, 0)).candidates if row.backend == "blocked_window"))
print(next(row.reason for row in explain(q, k, v).candidates if row.backend == "blocked_window"))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it was installed into, from a copy: the build leaves files beside the source."""
    skip_without("pip", "setuptools")  # which install the example
    base = tmp_path_factory.mktemp("third party")
    source, site = base / "source", base / "site"
    shutil.copytree(EXAMPLE, source)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def python(code: str, site: Path, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "ATTN_DISPATCH_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "ATTN_DISPATCH_MODE": "predict", "OMP_NUM_THREADS": "1"},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_it_is_found_by_its_entry_point(installed: Path, tmp_path: Path) -> None:
    status, reason = python(USED, installed, tmp_path).splitlines()
    assert status == "not_measured"
    assert reason == "computes Window, not Dense()"


@pytest.mark.full
def test_its_own_tests_pass(installed: Path, tmp_path: Path) -> None:
    code = f"import pytest; raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(EXAMPLE)!r}]))"
    assert " passed" in python(code, installed, tmp_path)


@pytest.mark.full
def test_pytest_is_not_needed(tmp_path: Path) -> None:
    code = "import sys, attn_dispatch.testing; assert not {'pytest', 'hypothesis', 'numpy.testing'} & set(sys.modules)"
    python(code, tmp_path, tmp_path)
