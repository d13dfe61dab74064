"""`profile` under torchrun: problems distributed over ranks, and sequences sharded over all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.cli import main
from attn_dispatch.profiling import profile_over
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.folder import Store
from attn_dispatch.testing.cases import Case
from tests.support import ring_ranks
from tests.support.ring_ranks import Ranks


def by_ranks(folder: Path, *options: str) -> Any:
    """The output of `profile --json` with two ranks."""
    launched = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "attn_dispatch", "profile"
    more = {"ATTN_DISPATCH_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launched, "--json", *options]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def profiled(problems: list[Problem]) -> tuple[list[tuple[str | None, str]], set[tuple[int, int]]]:
    """A job: choices and sources, and of all decisions that this rank has stored the q_len and the number of ranks."""
    torch.set_num_threads(1)
    found = profile_over(problems, ring_ranks.group(), kind="zigzag", budget_s=1.0, progress=False)
    stored = [decision.problem for _, decision in Store(cache_folder()).all()]
    return [(each.choice, each.source) for each in found], {(each["q_len"], each["ranks"]) for each in stored}


def test_every_rank_has_every_decision(ranks: Ranks) -> None:
    lengths = (96, 112, 128)
    problems = [Case("", Dense(), (1, length, 2, 16)).problem(torch.float32, needs_grad=False) for length in lengths]
    shared = Case("", Dense(is_causal=True), (1, 98, 2, 16)).problem(torch.float32, needs_grad=False)
    first, second = ranks.everywhere(profiled, [*problems, replace(shared, ranks=2)], ranks=2)
    assert first == second
    choices, stored = first
    assert [source for _, source in choices] == ["measured"] * 4
    assert choices[3][0] == "ring"
    assert {(96, 1), (112, 1), (128, 1), (98, 2)} <= stored


@pytest.mark.full
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
