"""`profile` under torchrun: problems distributed over ranks, and sequences sharded over all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.cli import main


def by_ranks(folder: Path, *options: str) -> Any:
    """The output of `profile --json` with two ranks."""
    launched = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "attn_dispatch", "profile"
    more = {"ATTN_DISPATCH_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launched, "--json", *options]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_problems_are_dealt_out_and_sequences_measured_together(tmp_path: Path) -> None:
    shapes = ("--shape", "1,96,2,16", "--shape", "1,112,2,16", "--shape", "1,128,2,16")
    alone = by_ranks(tmp_path, *shapes, "--budget", "3")["decisions"]
    assert [each["problem"].split("]")[0] for each in alone] == ["[1, 96, 2, 16", "[1, 112, 2, 16", "[1, 128, 2, 16"]
    assert [each["source"] for each in alone] == ["measured"] * 3
    shared = by_ranks(tmp_path, "--shape", "1,98,2,16", "--causal", "--sharded", "zigzag", "--budget", "2")["decisions"]
    assert [(each["choice"], each["source"]) for each in shared] == [("ring", "measured")]
    assert shared[0]["problem"].endswith("ranks 2")
    assert len(list(tmp_path.glob("v2/ring-2r-1h-zigzag-*/*/*.json"))) == 1


def test_sharded_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--shape", "1,64,2,16", "--sharded", "contiguous"]) == 2
    assert "--sharded needs ranks" in capsys.readouterr().err
