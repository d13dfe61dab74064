"""record() writes the problems of calls to a file, and profile() measures them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import attend, explain, profile, profiling, record, register
from attn_dispatch.errors import InvalidInput, NotDecided
from attn_dispatch.recording import Use, read_record
from attn_dispatch.spec.pattern import Dense, Window
from attn_dispatch.spec.problem import Problem
from tests.support.calls import NO_NUMBERS, Plugin, close, counted, forget, formula, qkv

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
    expected = [Problem.of(q, k, v), Problem.of(q, k, v, is_causal=True), Problem.of(q, k, v, return_lse=True)]
    found = read_record(path)
    assert list(found) == expected
    assert [use.calls for use in found.values()] == [3, 3, 1]  # a window over everything is causal
    assert all(use.seconds > 0 for use in found.values())
    assert len(path.read_text().splitlines()) == 2 * 3


def test_a_problem_is_recorded_before_it_fails(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    with record(tmp_path / "met.jsonl"), pytest.raises(NotDecided):
        attend(*qkv())
    assert read_record(tmp_path / "met.jsonl") == {Problem.of(*qkv()): Use(0, 0.0)}


def test_calls_and_seconds_add_up(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    """Over blocks, lines and intervals; those of other problems and of calls outside the block are not counted."""
    set_mode("predict")
    path, (q, k, v) = tmp_path / "met.jsonl", qkv()
    for _ in range(2):
        with record(path):
            for _ in range(5):
                attend(q, k, v)
        attend(q, k, v)
    with path.open("a") as file:
        file.write(json.dumps({**Problem.of(q, k, v).to_dict(), "calls": 90, "seconds": 7}) + "\n")
    (use,) = read_record(path).values()
    assert use.calls == 100
    assert 7 < use.seconds < 8


def test_the_time_of_calls_is_that_of_their_runs(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    """Without a first call, which may plan or compile, and without the trial of a new problem."""
    waits = iter([0.2, *[0.02] * 9])

    def slow(out: Any, lse: Any) -> Any:
        time.sleep(next(waits))
        return out, lse

    set_mode("predict")
    register(Plugin(slow))
    q, k, v = (x.requires_grad_() for x in qkv())
    with record(tmp_path / "met.jsonl"):
        for _ in range(10):
            attend(q, k, v, backend="planted")
    (use,) = read_record(tmp_path / "met.jsonl").values()
    assert use.calls == 10
    assert 0.2 <= use.seconds < 0.38


@pytest.mark.usefixtures("fresh_compiler")
def test_documents_and_compiled_calls_are_counted(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    q, k, v = qkv(24)
    with record(tmp_path / "met.jsonl"):
        for _ in range(4):
            attend(q, k, v, cu_seqlens=torch.tensor([0, 16, 24]), is_causal=True)
    assert sum(use.calls for use in read_record(tmp_path / "met.jsonl").values()) >= 4
    compiled: Any = torch.compile(attend, backend="eager", fullgraph=True)
    with record(tmp_path / "compiled.jsonl"):
        for _ in range(3):
            compiled(q, k, v)
    ((problem, use),) = read_record(tmp_path / "compiled.jsonl").items()
    assert (replace(problem, return_lse=False), use.calls) == (Problem.of(q, k, v), 3)


def test_the_backward_pass_of_an_operator_is_no_call(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    """It calls the backend's function for its graph alone, where the results of the forward pass are known."""
    set_mode("predict")
    q, k, v = (x.requires_grad_() for x in qkv())
    with record(tmp_path / "met.jsonl"), FlopCounterMode(display=False):
        for _ in range(3):
            attend(q, k, v).sum().backward()
    (use,) = read_record(tmp_path / "met.jsonl").values()
    assert use.calls == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no file that is always full")
def test_a_full_disk_fails_no_call(set_mode: Callable[[str], None], warnings: Callable[[], list[str]]) -> None:
    """Calls go on unrecorded, with one warning."""
    set_mode("predict")
    q, k, v = qkv()
    expected, _ = formula(q, k, v, Dense())
    with record("/dev/full"):
        for _ in range(2):
            assert close(attend(q, k, v), expected)
        attend(q, k, v, is_causal=True)
    (warning,) = [each for each in warnings() if "record" in each]
    assert warning == "calls are not recorded any more: /dev/full cannot be written (No space left on device)"


def test_a_path_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), record(tmp_path / "no folder" / "met.jsonl"):
        pass
    path: Any
    for path in (0, True, None, 1.5):
        with pytest.raises(InvalidInput, match="path must be a path"), record(path):
            pass


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        *(
            ("{}, " + f'"seconds": {n}}}', "line 1: (Expected `float`|Number out of range)")
            for n in ("-1", "true", "1e999")
        ),
        ("{}}\n{}", r"met\.jsonl, line 2: not JSON .* if a run was cut off there, delete the line"),
    ],
)
def test_wrong_lines_are_named(lines: str, text: str, tmp_path: Path) -> None:
    path, line = tmp_path / "met.jsonl", json.dumps(Problem.of(*qkv()).to_dict())[:-1]
    path.write_text(lines.replace("{}", line))
    with pytest.raises(InvalidInput, match=text):
        read_record(path)


@pytest.mark.full
def test_a_process_records_by_its_environment(tmp_path: Path) -> None:
    code = (
        "import torch, attn_dispatch\nx = torch.ones(1, 16, 2, 8)\nfor _ in range(3): attn_dispatch.attend(x, x, x)\n"
    )
    path = tmp_path / "met.jsonl"
    environment = {**os.environ, "ATTN_DISPATCH_MODE": "predict", "ATTN_DISPATCH_RECORD": str(path)}
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=environment, check=True)
    ((problem, use),) = read_record(path).items()
    assert (problem.q_len, use.calls) == (16, 3)
    environment |= {"HOME": str(tmp_path), "ATTN_DISPATCH_RECORD": "~/home.jsonl"}
    subprocess.run(command, env=environment, check=True)
    assert read_record(tmp_path / "home.jsonl").keys() == {problem}
    environment["ATTN_DISPATCH_RECORD"] = str(tmp_path)
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert f"InvalidInput: $ATTN_DISPATCH_RECORD: {tmp_path} cannot be written" in done.stderr


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
    assert sorted(index for index, _ in seen) == [0, 1]
    assert all(each is found[index] for index, each in seen)
    assert found[0] == explain(q, k, v)
    assert found[1] == explain(q, k, v, Window(3, 0))
    forget()
    set_mode("locked")
    attend(q, k, v)
    attend(q, k, v, Window(3, 0))
    assert counted(loaded=2)


def test_the_budget_goes_where_the_time_went(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In proportion, largest first; what one leaves goes to the others. Calls with gradients have a backward pass."""
    plain = Problem.of(*qkv())
    problems = [plain, replace(plain, pattern=Window(3, 0)), replace(plain, needs_grad=True)]
    uses = zip((30, 5, 2), (3.0, 10.0, 2.0))
    lines = ({**each.to_dict(), "calls": n, "seconds": s} for each, (n, s) in zip(problems, uses))
    (tmp_path / "met.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    given: list[tuple[Problem, float]] = []

    def measured(problem: Problem, share_s: float, force: bool) -> Any:
        given.append((problem, share_s))
        return problem

    monkeypatch.setattr(profiling, "_measure_problem", measured)
    found: Any = profile(tmp_path / "met.jsonl", budget_s=200.0, progress=False)
    assert found == problems
    assert [problem for problem, _ in given] == [problems[1], problems[2], problems[0]]
    expected = [100.0, 200 * 7 / 10, 200.0]  # of 10, 7 and 3 seconds; the first problems took no time of the budget
    assert [seconds for _, seconds in given] == pytest.approx(expected, abs=0.5)
    profile(problems, budget_s=30.0, progress=False, weights=[0.0, 0.0, 0.0])
    assert [seconds for _, seconds in given[3:]] == pytest.approx([10.0, 15.0, 30.0], abs=0.5)
    profile(problems, budget_s=30.0, progress=False, weights=[1e308] * 3)
    assert [seconds for _, seconds in given[6:]] == pytest.approx([10.0, 15.0, 30.0], abs=0.5)
    wrong: Any
    for wrong in ([1.0], 1.0, "111", *([1.0, 1.0, each] for each in (None, math.inf, *NO_NUMBERS))):
        with pytest.raises(InvalidInput, match="weights must be a number >= 0 for each of the 3 problems"):
            profile(problems, progress=False, weights=wrong)


def test_training_is_profiled_from_inference_mode() -> None:
    problem = replace(Problem.of(*qkv()), needs_grad=True)
    with torch.inference_mode():
        (found,) = profile([problem], budget_s=0.3, progress=False)
    assert found.source == "measured"
    assert all(row.status != "failed" for row in found.candidates)


@pytest.mark.parametrize("budget", [0, *NO_NUMBERS], ids=str)
def test_profile_refuses_an_invalid_budget(budget: Any) -> None:
    assert profile([], progress=False) == []
    with pytest.raises(InvalidInput, match="budget_s must be a number > 0 or None"):
        profile([], budget_s=budget, progress=False)
