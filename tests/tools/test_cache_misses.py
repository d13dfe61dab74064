"""`python -m tools.bench.cache_misses`: its program attends, with tables as the kernel of today reads them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from attn_dispatch.spec.orders import HILBERT, NATURAL
from tools.bench import cache_misses


@pytest.mark.full
def test_the_program_ends_with_the_result(tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("it is compiled for x86-64, by g++")
    program, data = cache_misses.compiled(tmp_path), tmp_path / "tables"
    for order in (NATURAL, HILBERT):
        cache_misses.dump(cache_misses.problem_of(1024), order, data)
        for works in ("0", "1"):
            assert subprocess.run([program, data, works], check=False, timeout=60).returncode == 0
