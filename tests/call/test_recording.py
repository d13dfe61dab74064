"""record() writes the problems of calls to a file, and profile() measures them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_dispatch import attend, counters, explain, profile, record
from attn_dispatch.errors import InvalidInput, NotDecided
from attn_dispatch.spec.pattern import Dense, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.problem_files import read_record
from tests.support.calls import counted, forget, qkv

pytestmark = pytest.mark.usefixtures("little_time")


# --- record -----------------------------------------------------------------------------------------------------------


def test_each_distinct_problem_is_recorded_once(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    path = tmp_path / "met.jsonl"
    q, k, v = qkv()
    set_mode("predict")
    attend(q, k, v)
    with record(path):
        for _ in range(2):
            attend(q, k, v)
            attend(q, k, v, is_causal=True)
        attend(q.clone(), k, v, order="natural")
        attend(q, k, v, Window(99, 0))
        attend(q, k, v, return_lse=True, backend="manual")
    attend(q, k, v, Window(3, 3))
    expected = [
        Problem.of(q, k, v),
        Problem.of(q, k, v, is_causal=True),
        Problem.of(q, k, v, return_lse=True),
    ]
    assert read_record(path) == expected
    assert len(path.read_text().splitlines()) == 3


def test_a_second_record_appends(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    path = tmp_path / "met.jsonl"
    for pattern in (Dense(), Window(2, 2)):
        with record(path):
            attend(*qkv(), pattern)
    assert [problem.pattern for problem in read_record(path)] == [Dense(), Window(2, 2)]


def test_a_problem_is_recorded_before_it_fails(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    with record(tmp_path / "met.jsonl"), pytest.raises(NotDecided):
        attend(*qkv())
    assert read_record(tmp_path / "met.jsonl") == [Problem.of(*qkv())]


def test_nested_records(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    q, k, v = qkv()
    with record(tmp_path / "outer"):
        attend(q, k, v)
        with record(tmp_path / "inner"):
            attend(q, k, v)
    assert read_record(tmp_path / "outer") == read_record(tmp_path / "inner") == [Problem.of(q, k, v)]


# --- profile ----------------------------------------------------------------------------------------------------------


def test_profile_measures_recorded_problems(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    q, k, v = qkv()
    set_mode("predict")
    with record(tmp_path / "met.jsonl"):
        attend(q, k, v)
        attend(q, k, v, Window(3, 0))
    assert explain(q, k, v).source == "heuristic"
    seen = []
    found = profile(tmp_path / "met.jsonl", budget_s=0.6, progress=False, report=lambda i, each: seen.append((i, each)))
    assert [each.source for each in found] == ["measured", "measured"]
    assert seen == list(enumerate(found))
    assert found[0] == explain(q, k, v)
    assert found[1] == explain(q, k, v, Window(3, 0))
    forget()
    set_mode("locked")
    attend(q, k, v)
    attend(q, k, v, Window(3, 0))
    assert counted(loaded=2)


def test_profile_measures_again_only_if_forced() -> None:
    problems = [replace(Problem.of(*qkv()), needs_grad=True)]  # FlexAttention, which takes long to compile, has no part
    for force, measured in ((False, 1), (False, 1), (True, 2)):
        profile(problems, budget_s=60.0, progress=False, force=force)
        assert counters()["measured"] == measured


def test_training_is_profiled_from_inference_mode() -> None:
    problem = replace(Problem.of(*qkv()), needs_grad=True)
    with torch.inference_mode():
        (found,) = profile([problem], budget_s=0.3, progress=False)
    assert found.source == "measured"
    assert all(row.status != "failed" for row in found.candidates)


def test_profile_without_problems() -> None:
    assert profile([], progress=False) == []


@pytest.mark.parametrize("budget", [0, -1, math.nan])
def test_profile_refuses_an_invalid_budget(budget: float) -> None:
    with pytest.raises(InvalidInput, match="budget_s must be a number > 0 or None"):
        profile([], budget_s=budget, progress=False)
