"""Backends that are wrong in some calls only: in a thread, a mode, beside another call, or one time in many."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, register
from attn_dispatch.backends import manual
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Result
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense, Dilated
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning import race
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.gate import Gate
from attn_dispatch.tuning.oracle import Incorrect
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import exhausted
from tests.support.calls import close, formula, qkv
from tests.support.flaws import Planted, buffer, changed, memo, scratch, where

pytestmark = pytest.mark.usefixtures("little_time")

TRAINED = Case("", Dense(is_causal=True), (2, 64, 4, 16), kv_heads=2).problem(torch.float32, needs_grad=True)
CALLED = replace(TRAINED, needs_grad=False)
DILATED = Case("", Dilated((16, 32), (1, 2)), (2, 64, 4, 16)).problem(torch.float32, needs_grad=False)


def one_key(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    """Its value is the result."""
    out, lse = manual.run(q, k, v, problem, **tensors)
    return (v if problem.k_len == 1 else out), lse


def in_main_thread(**_: Any) -> bool:
    return threading.current_thread() is threading.main_thread()


def alternating(wrong: Callable[[Tensor], Tensor]) -> Callable[..., Result]:
    """Another result in every second call, after those of the gate; each takes longer than a sample must."""
    calls = count()

    def run(out: Tensor, lse: Tensor, problem: Problem) -> Result:
        time.sleep(0.0005)
        return (wrong(out) if (number := next(calls)) > 2 and number % 2 else out), lse

    return changed(run)


LATER: dict[str, tuple[Problem, Callable[..., Result], str]] = {
    "in this thread": (TRAINED, where(in_main_thread), "in the caller's thread, with a gradient of k alone: out is"),
    "in inference mode": (CALLED, where(lambda **_: torch.is_inference_mode_enabled()), "in inference mode: out is"),
    "gradient of k": (TRAINED, where(lambda q, **_: not q.requires_grad), "with a gradient of k alone: out is off"),
    "beside another call": (CALLED, scratch(), "two calls at once: out is off by"),
    "after another call": (CALLED, buffer(), "a second call changed the result of the first"),
    "of tensors that had other values": (CALLED, memo(), "a second call on the same tensors: out is off by"),
    "in the memory of v": (DILATED, one_key, "returned the memory of an input"),
    "into q": (CALLED, lambda q, k, v, problem, **_: manual.run(q.mul_(1), k, v, problem), "wrote into its inputs"),
}


def gate_of(problem: Problem) -> Gate:
    return Gate(problem, Request.of(problem).address, make(problem))


@pytest.mark.parametrize(("problem", "flaw", "named"), LATER.values(), ids=LATER)
def test_what_is_wrong_in_some_calls_is_found_and_named(
    problem: Problem, flaw: Callable[..., Result], named: str
) -> None:
    found = exhausted(gate_of(problem).check_hard_cases(Candidate(Planted(flaw), NATURAL, "1")))
    assert found is not None
    assert named in found.reason
    (entry,) = Quarantine(cache_folder(), silicon("cpu")).entries()
    assert (found.status, entry.kind, entry.reason) == ("incorrect", "incorrect", found.reason)


@pytest.mark.parametrize("problem", [TRAINED, CALLED], ids=["trained", "called"])
def test_what_is_right_in_all_calls_passes(problem: Problem) -> None:
    assert exhausted(gate_of(problem).check_hard_cases(Candidate(Planted(manual.run), NATURAL, "1"))) is None


# --- results of timed calls -------------------------------------------------------------------------------------------


@pytest.fixture
def all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "LOOK_SHARE", 1e9)


def raced(problem: Problem, flaw: Callable[..., Result]) -> Exception | None:
    candidate = Candidate(Planted(flaw), NATURAL, "1")
    runners = {candidate.title: (candidate, Admitted(1.0, 1.0, 0, 0.0))}
    found = Race(Request.of(problem), runners, candidate.title, differences=gate_of(problem).differences)
    exhausted(found.run(lambda each: make(problem).call(*each.backend_and_order), math.inf))
    return found.rounds.failures.get(candidate.title)


def hooked(out: Tensor) -> Tensor:
    if out.requires_grad:
        out.register_hook(lambda grad: 3 * grad)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.usefixtures("all_looked_at")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("problem", "wrong", "found"),
    [
        (CALLED, lambda out: 1.5 * out, True),
        (CALLED, lambda out: out / 0 * 0, True),
        (CALLED, lambda out: out * (1 + 1e-7), False),
        (replace(CALLED, dropout_p=0.5), lambda out: 1.5 * out, False),
        (TRAINED, lambda out: 1.5 * out, True),
        (TRAINED, hooked, True),
        (TRAINED, lambda out: out * (1 + 1e-7), False),
    ],
    ids=["larger", "NaN", "rounded", "dropout", "trained, larger", "trained, gradients", "trained, rounded"],
)
def test_results_of_timed_calls(
    problem: Problem, wrong: Callable[[Tensor], Tensor], found: bool, dtype: torch.dtype
) -> None:
    assert isinstance(raced(replace(problem, dtype=dtype), alternating(wrong)), Incorrect) == found


def test_looks_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, part = list[Tensor](), race._part

    def slow(x: Tensor) -> Tensor:
        looks.append(x)
        time.sleep(0.1)
        return part(x)

    monkeypatch.setattr(race, "_part", slow)
    assert raced(CALLED, alternating(lambda out: out)) is None
    assert len(looks) == 1, "each takes as long as two hundred calls"


@pytest.mark.usefixtures("all_looked_at")
def test_a_result_that_changes_in_the_race_is_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    register(Planted(alternating(lambda out: 1.5 * out)))
    monkeypatch.setattr(registry, "names", lambda: ("planted", "manual"))
    q, k, v = qkv(32)
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    row = next(row for row in explain(q, k, v).candidates if row.backend == "planted")
    assert f"{row.status}: {row.reason}".startswith("incorrect: a timed call gave another result than the first one")
    (entry,) = Quarantine(cache_folder(), silicon("cpu")).entries()
    assert (entry.backend, entry.kind) == ("planted", "incorrect")
