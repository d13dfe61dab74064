"""`profile` under torchrun: problems distributed over ranks, and sequences sharded over all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from attn_dispatch import profiling
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


def budgets(problems: list[Problem], weights: list[float]) -> list[tuple[int, int, float]]:
    """A job: of what this rank measures, in order, the q_len, the number of ranks and the seconds."""
    given: list[tuple[int, int, float]] = []

    def alone(problem: Problem, seconds: float, force: bool) -> Any:
        given.append((problem.q_len, problem.ranks, seconds))

    def together(problem: Problem, link: Any, kind: str, seconds: float, force: bool) -> Any:
        given.append((problem.q_len, problem.ranks, seconds))

    with (
        mock.patch.object(profiling, "_measure_problem", alone),
        mock.patch.object(profiling, "_measure_sharded", together),
    ):
        profile_over(problems, ring_ranks.group(), budget_s=100.0, progress=False, weights=weights)
    return given


def test_budgets_go_where_the_time_went(ranks: Ranks) -> None:
    """As in one process: in proportion to the weights, largest first; of a rank's own problems, and of shared ones."""
    plain = [
        Case("", Dense(), (1, length, 2, 16)).problem(torch.float32, needs_grad=False) for length in range(96, 102)
    ]
    shared = [replace(problem, ranks=2) for problem in plain[4:]]
    first, second = ranks.everywhere(budgets, [*plain[:4], *shared], [1.0, 3.0, 9.0, 6.0, 1.0, 4.0], ranks=2)
    together = [(101, 2, 80.0), (100, 2, 100.0)]
    for found, expected in ((first, [(98, 1, 75.0), (97, 1, 100.0)]), (second, [(99, 1, 600 / 7), (96, 1, 100.0)])):
        assert [each[:2] for each in found] == [each[:2] for each in [*expected, *together]]
        seconds = [each[2] for each in [*expected, *together]]
        assert [each[2] for each in found] == pytest.approx(seconds, abs=0.5)


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
