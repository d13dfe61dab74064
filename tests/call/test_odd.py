"""Plug-ins with invalid answers, late crashes or reused results, and calls from forks, threads and torch.func."""

from __future__ import annotations

import math
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Window, attend, explain, register
from attn_dispatch.calls import packing, routes
from attn_dispatch.decisions import call as calls
from attn_dispatch.decisions import decide as decisions
from attn_dispatch.decisions import trial_limits
from attn_dispatch.decisions.call import observing
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Quarantine
from tests.support import planted
from tests.support.calls import close, counted, forget, formula, qkv, status
from tests.support.fakes import raising
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


RAISES = raising(Unprintable())
ODD: dict[str, dict[str, Any]] = {
    "version_class": {"version": lambda: Version("1.2")},
    "version_number": {"version": lambda: 5},
    "version_surrogate": {"version": lambda: "\ud800"},
    "version_raises": {"version": RAISES},
    "workspace_none": {"workspace_bytes": lambda problem: None},
    "workspace_float": {"workspace_bytes": lambda problem: 1.5},
    "workspace_negative": {"workspace_bytes": lambda problem: -1},
    "flops_raises": {"flops": RAISES},
    "flops_nan": {"flops": lambda problem: math.nan},
    "flops_huge": {"flops": lambda problem: 10**400},
    "flops_none": {"flops": lambda problem: None},
    "first_call_raises": {"first_call_ms": RAISES},
    "first_call_negative": {"first_call_ms": lambda problem: -1e9},
    "first_call_inf": {"first_call_ms": lambda problem: math.inf},
    "refusals_generator": {"refusals": lambda problem: iter(())},
    "refusal_surrogate": {"refusals": lambda problem: [Refusal("moon", "\ud800")]},
    "run_untold": {"run": RAISES},
    "release_raises": {"release": RAISES},
}


def test_odd_answers_do_not_reach_the_caller() -> None:
    for name, changes in ODD.items():
        backend = Planted(name=name)
        for member, value in changes.items():
            setattr(backend, member, value)
        register(backend)
    q, k, v = qkv()
    assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    assert len(list(Store(cache_folder()).all())) == 1, "what was measured is kept"
    forget()
    attend(q, k, v)
    assert counted(loaded=1)
    may_win = {"version", "flops", "first_call_ms", "refusals", "release"}
    assert ODD.get(str(explain(q, k, v).choice), {"version": None}).keys() & may_win


@pytest.mark.parametrize("budget", ["inf", "0", "1e300"])
def test_zero_and_infinite_budgets(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", budget)
    monkeypatch.setattr(registry, "names", lambda: ("sdpa", "manual"))
    attend(*qkv())
    forget()
    attend(*qkv())
    assert counted(loaded=1)


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


# --- forks, threads, torch.func ---------------------------------------------------------------------------------------


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


# --- ever new lengths -------------------------------------------------------------------------------------------------

MOST = 6  #: entries
LIMITS = {"MAX_ROUTES", "MAX_CALLS", "MAX_DECISIONS", "MAX_ON_TRIAL"}


def sizes() -> dict[str, int]:
    """The entries of every table at the top of a module, and of every cache that has no limit of its own."""
    found = {}
    for name, module in list(sys.modules.items()):
        for what, value in list(vars(module).items()) if name.startswith("attn_dispatch.") else ():
            if isinstance(value, dict | set | list | deque):
                found[f"{name}.{what}"] = len(value)
            elif getattr(value, "cache_info", None) and value.cache_info().maxsize is None:
                found[f"{name}.{what}"] = value.cache_info().currsize
    return found


@pytest.mark.parametrize("mode", ["off", "predict", "online", "tune"])
def test_no_table_grows_with_the_lengths_that_were_called(
    mode: str, set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode(mode)
    monkeypatch.setenv("ATTN_DISPATCH_TRIAL_SECONDS", "0")
    for module in (routes, calls, packing, decisions):
        for name in vars(module).keys() & LIMITS:
            monkeypatch.setattr(module, name, MOST)

    def run(lengths: range) -> None:
        for length in lengths:
            x, keys = torch.ones(1, length, 1, 8), torch.ones(1, 100 + length, 1, 8)
            attend(x, x, x, is_causal=True)
            attend(x, x, x, Window(2, 0), backend="manual", order="natural")
            attend(x[:, :1], keys, keys)
            attend(x, x, x, documents=(torch.arange(length) // 9)[None])

    run(range(20, 21 + MOST))
    before = sizes()
    run(range(30, 31 + 2 * MOST))
    assert {
        name: n - before.get(name, 0) for name, n in sizes().items() if n > max(before.get(name, 0) + 2, MOST)
    } == {}
