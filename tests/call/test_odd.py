"""Plug-ins with invalid answers, late crashes or reused results, and calls from forks, threads and torch.func."""

from __future__ import annotations

import math
import os
import resource
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, profile, register
from attn_dispatch.decisions import decide as decisions
from attn_dispatch.decisions import trial_limits
from attn_dispatch.decisions.call import observing
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense, Dilated
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.tuning.hard_cases import hard_cases
from tests.support import planted, processes
from tests.support.calls import close, counted, forget, formula, qkv, status
from tests.support.pairwise import crossed, thinned
from tests.support.planted import Planted

pytestmark = pytest.mark.usefixtures("little_time")

CPU = torch.device("cpu")


def planted_row() -> Any:
    return next(row for row in explain(*qkv()).candidates if row.backend == "planted")


# --- invalid answers --------------------------------------------------------------------------------------------------


class Version(str):
    """A version as torch's own, a subclass of str."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raising(*_: object) -> Any:
    raise Unprintable


ODD: dict[str, dict[str, Any]] = {
    "version-class": {"version": lambda: Version("1.2")},
    "version-number": {"version": lambda: 5},
    "version-surrogate": {"version": lambda: "\ud800"},
    "version-raises": {"version": raising},
    "workspace-none": {"workspace_bytes": lambda problem: None},
    "workspace-float": {"workspace_bytes": lambda problem: 1.5},
    "workspace-negative": {"workspace_bytes": lambda problem: -1},
    "flops-raises": {"flops": raising},
    "flops-nan": {"flops": lambda problem: math.nan},
    "flops-huge": {"flops": lambda problem: 10**400},
    "flops-none": {"flops": lambda problem: None},
    "first-call-raises": {"first_call_ms": raising},
    "first-call-negative": {"first_call_ms": lambda problem: -1e9},
    "first-call-inf": {"first_call_ms": lambda problem: math.inf},
    "refusals-generator": {"refusals": lambda problem: iter(())},
    "refusal-surrogate": {"refusals": lambda problem: [Refusal("moon", "\ud800")]},
    "run-untold": {"run": raising},
    "release-raises": {"release": raising},
}


@thinned("changes", ODD.values(), 2, ODD)
def test_odd_answers_do_not_reach_the_caller(changes: dict[str, Any]) -> None:
    backend = Planted()
    for name, value in changes.items():
        setattr(backend, name, value)
    register(backend)
    q, k, v = qkv()
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    assert len(list(Store(cache_folder()).all())) == 1, "what was measured is kept"
    forget()
    attend(q, k, v)
    assert counted(loaded=1)
    assert planted_row().status != "chosen" or changes.keys() & {
        "version",
        "flops",
        "first_call_ms",
        "refusals",
        "release",
    }


@pytest.mark.parametrize("budget", ["inf", "0", "1e300"])
def test_zero_and_infinite_budgets(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", budget)
    monkeypatch.setattr(registry, "names", lambda: ("sdpa", "manual"))
    attend(*qkv())
    forget()
    attend(*qkv())
    assert counted(loaded=1)


def test_invalid_problems() -> None:
    with pytest.raises(InvalidInput, match="problems must be Problems"):
        profile(["dense"], progress=False)  # type: ignore[list-item]


# --- temporary statuses -----------------------------------------------------------------------------------------------


def test_a_candidate_over_memory_is_measured_when_memory_is_free() -> None:
    backend = Planted()
    reasons = [Refusal("over_memory", "too much for now")]
    backend.refusals = lambda problem: reasons  # type: ignore[method-assign]
    register(backend)
    attend(*qkv())
    assert planted_row().status == "over_memory"
    reasons.clear()
    forget()
    attend(*qkv())
    assert counted(measured=1)
    assert planted_row().status in ("chosen", "slower", "tie")


@pytest.mark.parametrize("fault", [planted.wrong_out, planted.lies])
def test_a_candidate_released_from_quarantine_is_measured_again(fault: planted.Fault) -> None:
    backend = Planted(fault)
    register(backend)
    attend(*qkv())
    assert planted_row().status in ("incorrect", "quarantined")
    backend.compute = planted.right
    assert Quarantine(cache_folder(), silicon("cpu")).lift("planted")
    forget()
    attend(*qkv())
    assert planted_row().status in ("chosen", "slower", "tie")


# --- late crashes -----------------------------------------------------------------------------------------------------

LATE = """
import os, sys, torch
from attn_dispatch import attend, explain, register
from tests.support.planted import Planted
torch.set_num_threads(1)
class Late(Planted):
    seen = 0
    def run(self, q, k, v, problem, **tensors):
        Late.seen += q.shape[1] == 48
        if Late.seen > 1:
            os.abort()
        return super().run(q, k, v, problem, **tensors)
    def prepare(self):
        if {prepare}:
            os.abort()
register(Late())
q = torch.randn(1, 48, 2, 8)
attend(q, q, q)
rows = explain(q, q, q).candidates
print(*(row.backend for row in rows if row.status == "quarantined"))
"""


@pytest.mark.full
@thinned("prepare", [True, False], 2, ["prepare", "race"])
def test_a_crash_in_the_race_or_before_it(prepare: bool) -> None:
    """Only the backend that ran is quarantined."""
    for _ in range(2):
        assert processes.run(LATE.format(prepare=prepare)).returncode < 0
    second = processes.run(LATE.format(prepare=prepare))
    assert (second.returncode, second.stdout.strip()) == (0, "planted"), second.stderr


# --- forks, threads, torch.func ---------------------------------------------------------------------------------------


def test_after_a_fork_while_another_thread_decides() -> None:
    """The thread does not exist in the child, which must not wait for its lock."""
    taken, over = threading.Event(), threading.Event()

    def decide() -> None:
        with decisions.lock:
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=decide)
    thread.start()
    taken.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if decisions.lock.acquire(timeout=5) else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_inside_torch_func_nothing_is_measured() -> None:
    q, k, v = qkv()

    def loss(x: Tensor) -> Tensor:
        out: Tensor = attend(x, k, v, is_causal=True)
        return out.sum()

    found = torch.func.grad(loss)(q)
    assert counted(heuristic=2)  # in either direction
    x = q.clone().requires_grad_()
    assert close(found, torch.autograd.grad(loss(x), x)[0].double())
    assert counted(heuristic=2, measured=1)


def test_random_numbers_of_other_threads_do_not_repeat() -> None:
    register(Drawing())
    torch.manual_seed(0)
    attend(*qkv())
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert drawn not in [torch.rand(()) for _ in range(Drawing.count)]


class Drawing(Planted):
    """Simulates another thread that draws random numbers during a trial."""

    count = 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        torch.rand(())
        Drawing.count += 1
        return super().run(q, k, v, problem, **tensors)


def test_memory_limits_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_TIMEOUT_S", "0.5")
    before = resource.getrlimit(resource.RLIMIT_AS)
    register(Planted(planted.hangs))
    attend(*qkv())
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert status(explain(*qkv()), "planted") == "quarantined"


# --- the gate is not too strict ---------------------------------------------------------------------------------------


@pytest.mark.full
@crossed(
    lambda backend, dtype, head_dim: {"backend": backend},
    backend=("sdpa", "sdpa_mask", "native", "manual"),
    dtype=(torch.float32, torch.float64, torch.bfloat16),
    head_dim=(72, 128, 255),
)
def test_right_backends_pass_the_hard_cases(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    loaded = registry.load(backend)
    for pattern in (Dense(is_causal=True), Dilated((64, 128), (1, 2))):
        for heads in (1, 2):
            problem = problem_of((1, 256, heads, head_dim), pattern, dtype, CPU, backward=True)
            if loaded.refusals(problem):
                continue
            for case in hard_cases(problem):
                assert case.refused_by(loaded) or case.check(case.run(loaded)).failures == ()


def test_a_stored_decision_waits_for_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread measures a new problem meanwhile."""
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")
    attend(*qkv(24))
    forget()
    trial_begun, go_on = threading.Event(), threading.Event()
    measure = trial_limits.measure

    def slow_measure(*given: Any, **named: Any) -> Any:
        trial_begun.set()
        assert go_on.wait(60)
        return measure(*given, **named)

    monkeypatch.setattr(decisions, "measure", slow_measure)
    thread = threading.Thread(target=attend, args=qkv(40))
    thread.start()
    try:
        assert trial_begun.wait(60)
        attend(*qkv(24))  # would wait for ever for a lock that the trial holds
        attend(*qkv(40), backend="manual")
    finally:
        go_on.set()
        thread.join()
    assert counted(loaded=1, measured=1, forced=1)


def test_threads_with_the_same_new_problem_measure_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")
    threads = [threading.Thread(target=attend, args=qkv(24)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted(measured=1)


def test_only_the_latest_decisions_are_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")
    monkeypatch.setattr(decisions, "WHOLE_DECISIONS", 2)
    for length in (16, 24, 32, 40):
        attend(*qkv(length), backend=None)
    kept = [len(each.candidates) > 0 for each in decisions._decided.values()]
    assert kept == [False, False, True, True]
    found = explain(*qkv(16))
    assert found.source == "measured" or found.source == "learned"
    assert any(row.status == "chosen" and row.backend == found.choice for row in found.candidates)


def test_a_call_that_was_decided_before_an_observer_began_is_observed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")
    decide, seen = decisions.decision_for, list[Problem]()
    with ExitStack() as stack:

        def decide_slowly(problem: Problem) -> Any:
            found = decide(problem)
            monkeypatch.setattr(decisions, "decision_for", decide)
            stack.enter_context(observing(seen.append))
            return found

        monkeypatch.setattr(decisions, "decision_for", decide_slowly)
        attend(*qkv(24))
        assert seen == []
        attend(*qkv(24))
        assert len(seen) == 1, "a route made before would hide the problem"


def test_a_thread_learns_from_a_trial_that_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads with problems of nearly the same size measure one of them."""
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")
    monkeypatch.setattr(decisions, "MIN_CONFIDENCE", 0.0)
    begun, looked = threading.Event(), threading.Event()
    measure, sure = trial_limits.measure, decisions._DeviceSteps._sure

    def slow_measure(*given: Any, **named: Any) -> Any:
        begun.set()
        assert looked.wait(60)
        return measure(*given, **named)

    def noted_sure(self: Any) -> Any:
        found = sure(self)
        if begun.is_set():
            looked.set()
        return found

    monkeypatch.setattr(decisions, "measure", slow_measure)
    monkeypatch.setattr(decisions._DeviceSteps, "_sure", noted_sure)
    first = threading.Thread(target=attend, args=qkv(64))
    first.start()
    assert begun.wait(60)
    attend(*qkv(65))
    first.join()
    assert counted(measured=1, learned=1)
