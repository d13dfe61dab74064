"""`tools.bench.kernels_compiled`: preferred blocks fit as estimated, and spill little, where Triton compiles them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.compiling import compiled
from tests.support.processes import printed

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
    rows = json.loads(printed("-c", COMPILE.format(capability=capability), TRITON_CACHE_DIR=str(tmp_path)))
    assert len(rows) == 9
    for row in rows:
        assert not row["too_large"], row
        assert row["registers"] > 0, row
        assert row["stack_bytes"] <= MOST_SPILLED, row
        assert row["shared_bytes"] <= row["estimated_bytes"], row
