"""`tools.bench.kernels_compiled`: preferred blocks fit as estimated, and spill little, where Triton compiles them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compiling import compiled
from tools.lib.common import RESULTS

COMPILE = """
import json
from tools.bench.kernels_compiled import items, row_of

wanted = [each for each in items([{capability}]) if (each["dtype"], each["precision"]) == ("bfloat16", "highest")]
print(json.dumps([row_of(each) for each in wanted if each["head_dim"] in (64, 96, 128)]))
"""
MOST_SPILLED = 512  #: bytes of a thread: with unfit blocks it is kilobytes


@compiled
@pytest.mark.full
@pytest.mark.parametrize("capability", [90])
def test_preferred_blocks_as_they_are_compiled(capability: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE.format(capability=capability)]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=RESULTS.parents[1], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 9
    for row in rows:
        assert not row["too_large"], row
        assert row["registers"] > 0, row
        assert row["stack_bytes"] <= MOST_SPILLED, row
        assert row["shared_bytes"] <= row["estimated_bytes"], row
