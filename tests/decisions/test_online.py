"""Mode `online`: trials are paid for out of the running calls, on a clock that moves by what backends take."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_dispatch import attend, counters, explain, process_state, profile
from attn_dispatch.calls import routes
from attn_dispatch.decisions import decide, online
from attn_dispatch.errors import BackendFailed, InvalidInput, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning import gate
from tests.support import planted, virtual_clock
from tests.support.calls import close, counted, forget, formula, qkv
from tests.support.planted import Planted
from tests.support.virtual_clock import VirtualClock

MS = 1e-3
LENGTH = 16
ENOUGH = 6000  #: calls in which any trial here ends

pytestmark = pytest.mark.usefixtures("little_time")


@dataclass
class Timed(Planted):
    """The reference, whose calls of the problem take `takes_s` on a virtual clock, and hard cases next to nothing."""

    takes_s: float = 0.0
    clock: VirtualClock = field(default_factory=VirtualClock)
    work: float = 1000.0

    def flops(self, problem: Problem) -> float:
        return self.work

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        self.clock.sleep(self.takes_s if problem.q_len == LENGTH else 1e-6)
        return super().run(q, k, v, problem, **tensors)


class Machine:
    """Backends in the order of preference, on one clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_name: dict[str, Timed] = {}
        self.clock = VirtualClock()
        virtual_clock.install(self.clock, monkeypatch)
        monkeypatch.setattr(registry, "names", lambda: tuple(self.by_name))

    def add(self, name: str, takes_ms: float, work: float = 1000.0, fault: planted.Fault = planted.right) -> Timed:
        backend = Timed(fault, name=name, takes_s=takes_ms * MS, clock=self.clock, work=work)
        registry._added[name] = self.by_name[name] = backend
        return backend

    def calls(self) -> dict[str, int]:
        return {name: backend.calls for name, backend in self.by_name.items()}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None]) -> Machine:
    """`a` is the static choice, `b` is the fastest. A large share, so that few calls pay for a trial."""
    set_mode("online")
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "0.5")
    found = Machine(monkeypatch)
    for name, takes_ms in (("a", 4), ("b", 2), ("c", 5)):
        found.add(name, takes_ms)
    return found


def stored() -> list[Decision]:
    return [decision for _, decision in Store(cache_folder()).all()]


def choice(tensors: tuple[Tensor, Tensor, Tensor] | None = None) -> str | None:
    return explain(*(tensors or qkv())).choice


def call_until_measured(call: Callable[[], Any] = lambda: attend(*qkv())) -> int:
    """The calls that were made."""
    for number in range(ENOUGH):
        if stored():
            return number
        call()
    raise AssertionError("the trial did not end")


def with_grad() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv()
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def test_the_first_call_runs_the_guess_alone(machine: Machine) -> None:
    out = attend(*qkv())
    assert close(out, formula(*qkv(), Dense())[0])
    assert machine.calls() == {"a": 1, "b": 0, "c": 0}
    assert counted(heuristic=1)
    found = explain(*qkv())
    assert (found.choice, found.source) == ("a", "heuristic")
    assert "a trial goes on between calls" in next(row.reason for row in found.candidates if row.backend == "a")


def test_the_decision_is_right_stored_and_used_from_then_on(machine: Machine) -> None:
    assert call_until_measured() > 10
    (decision,) = stored()
    assert (decision.choice, decision.source) == ("b", "measured")
    assert counted(heuristic=1, measured=1)
    before = machine.calls()
    attend(*qkv())
    attend(*qkv())
    assert machine.calls() == before | {"b": before["b"] + 2}
    (route,) = routes.routes.values()
    assert not isinstance(route.run, online._SampledRun), "a hit costs what it costs in other modes"
    assert (choice(), explain(*qkv()).source) == ("b", "measured")
    forget()
    attend(*qkv())
    assert counted(loaded=1), "as another process does"


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_overhead_never_exceeds_the_share_by_more_than_a_step(
    share: float, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", str(share))
    live_s, longest_s = 0.0, 0.0
    for _ in range(ENOUGH):
        if stored():
            break
        start = machine.clock()
        attend(*qkv())
        longest_s = max(longest_s, machine.clock() - start)
        live_s += 4 * MS
        assert machine.clock() - live_s <= share * live_s + 5 * MS
    assert stored()
    assert longest_s <= 1.5 * 4 * MS + 20 * MS


def test_without_overhead_nothing_is_measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "0")
    for _ in range(300):
        attend(*qkv())
    assert machine.calls() == {"a": 300, "b": 0, "c": 0}
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "2")
    with pytest.raises(InvalidInput, match="ATTN_DISPATCH_OVERHEAD must be a number from 0 to 1"):
        attend(*qkv(24))


def test_results_of_a_wrong_candidate_are_never_used(machine: Machine) -> None:
    machine.add("b", 1, fault=planted.wrong_out)
    exact = formula(*qkv(), Dense())[0]

    def call() -> None:
        assert close(attend(*qkv()), exact)

    call_until_measured(call)
    (decision,) = stored()
    assert decision.choice == "a"
    assert next(row.status for row in decision.candidates if row.backend == "b") == "incorrect"


def test_a_candidate_that_hangs_is_left_behind(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_TIMEOUT_S", "0.1")
    waits = threading.Event()
    machine.add("b", 1, fault=lambda *given, **more: waits.wait(5) and planted.right(*given, **more))
    call_until_measured()
    waits.set()
    (decision,) = stored()
    assert decision.choice == "a"
    assert "did not return" in next(row.reason for row in decision.candidates if row.backend == "b")


def test_far_less_work_is_the_guess_once_it_passed_the_hard_cases(machine: Machine) -> None:
    machine.add("b", 2, work=100.0)
    attend(*qkv())
    assert choice() == "a", "nothing is known of b"
    call_until_measured()
    registry_calls = machine.calls()
    forget()
    attend(*qkv(24))
    assert choice(qkv(24)) == "b"
    assert machine.calls() == registry_calls | {"b": registry_calls["b"] + 1}


def test_a_candidate_that_would_delay_a_call_too_long_is_not_tried(machine: Machine) -> None:
    slow = machine.add("d", 400, work=100_000.0)
    call_until_measured()
    (decision,) = stored()
    assert slow.calls == 0
    assert "too long to be tried between calls" in next(r.reason for r in decision.candidates if r.backend == "d")


@pytest.mark.parametrize(
    ("call_ms", "work", "tries"), [(4, 2500.0, True), (4, 3500.0, False), (100, 1200.0, True), (100, 1300.0, False)]
)
def test_the_longest_call_of_a_candidate_grows_with_calls_of_the_guess(
    call_ms: float, work: float, tries: bool, machine: Machine
) -> None:
    """Up to 12 ms beside calls of 4 ms (half of one and 10 ms), up to 125 beside calls of 100 (a quarter longer)."""
    machine.by_name["a"].takes_s = call_ms * MS
    machine.add("d", 1, work=work)  # in calls of `a`, which has 1000: its own rate is unknown before
    call_until_measured()
    assert (machine.calls()["d"] > 0) == tries


def test_training_is_timed_forward_and_backward(machine: Machine) -> None:
    tensors = with_grad()

    def step() -> None:
        attend(*tensors).sum().backward()

    call_until_measured(step)
    assert stored()[0].choice == "b"
    step()
    assert choice(tensors) == "b"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_goes_the_way_of_its_forward_pass(use_reentrant: bool, machine: Machine) -> None:
    tensors = with_grad()
    ran: list[list[str]] = []

    def step() -> None:
        before = machine.calls()
        out = checkpoint(attend, *tensors, use_reentrant=use_reentrant)
        middle = machine.calls()
        trials = online._account.spent_s
        out.sum().backward()
        ran.append([name for name, count in machine.calls().items() if count > middle[name]])
        assert online._account.spent_s == trials, "nothing is measured in a backward pass"
        assert any(count > before[name] for name, count in middle.items())

    call_until_measured(step)
    step()
    assert {tuple(each) for each in ran} == {("a",)}, "every recomputation"
    if not use_reentrant:
        assert choice(tensors) == "a", "this process keeps the guess"
        assert stored()[0].choice == "b"
        assert not isinstance(next(iter(routes.routes.values())).run, online._SampledRun)
        forget()
        attend(*tensors)
        assert choice(tensors) == "b", "the next process takes the decision"


@pytest.mark.parametrize("mode", ["predict", "off"])
def test_other_modes_measure_nothing(mode: str, machine: Machine, set_mode: Callable[[str], None]) -> None:
    set_mode(mode)
    for _ in range(300):
        attend(*qkv())
    assert machine.calls() == {"a": 300, "b": 0, "c": 0}
    assert not online._trials
    set_mode("locked")
    with pytest.raises(NotDecided):
        attend(*qkv(24))


def test_nothing_is_measured_while_traced_or_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    attend(*qkv())
    monkeypatch.setattr(online, "cannot_measure", lambda device: True)
    for _ in range(300):
        attend(*qkv())
    assert machine.calls()["b"] == 0
    before = online._account.calls
    monkeypatch.setattr(online, "capturing", lambda device: True)
    attend(*qkv())
    assert online._account.calls == before, "captured calls take no time"


def test_two_threads_measure_once(machine: Machine) -> None:
    failures: list[Exception] = []

    def calls() -> None:
        try:
            for _ in range(ENOUGH):
                attend(*qkv())
                if stored():
                    return
        except Exception as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counters()["measured"] == 1
    assert choice() == stored()[0].choice, "either: the other thread's calls move the clock too"


def test_a_forked_child_keeps_the_guess(machine: Machine) -> None:
    for _ in range(8):
        attend(*qkv())
    assert online._trials
    child = os.fork()
    if not child:
        try:
            for _ in range(200):
                attend(*qkv())
            os._exit(0 if not online._trials and not stored() and explain(*qkv()).choice == "a" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    call_until_measured()
    assert choice() == "b"


def test_a_failing_slice_never_reaches_the_caller(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(gate.Gate, "admit", fail)
    for _ in range(300):
        attend(*qkv())
    assert machine.calls() == {"a": 300, "b": 0, "c": 0}
    assert any("was given up: RuntimeError: no luck" in text for text in warnings())
    assert not online._trials


def test_a_lost_device_is_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*given: Any) -> None:
        raise BackendFailed("the device is lost")

    monkeypatch.setattr(gate.Gate, "admit", lose)
    with pytest.raises(BackendFailed, match="the device is lost"):
        call_until_measured()


def test_a_trial_of_tensors_too_large_to_be_held_is_given_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(online, "HELD_SHARE", 0.0)
    for _ in range(600):
        attend(*qkv())
    (text,) = warnings()
    assert "was given up: MemoryError: its tensors need" in text
    assert not online._trials
    assert list(Store(cache_folder()).all()) == []


def test_random_numbers_are_as_without_a_trial(machine: Machine) -> None:
    torch.manual_seed(0)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    call_until_measured()
    assert torch.equal(torch.rand(4), drawn)


def test_a_trial_ends_where_neighbours_are_sure_meanwhile(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    attend(*qkv())
    (guess,) = decide._decided.values()
    sure = msgspec.structs.replace(guess, source="learned", choice="c")
    monkeypatch.setattr(decide, "sure_prediction", lambda request: sure)
    for _ in range(300):
        attend(*qkv())
    assert choice() == "c"
    assert machine.calls()["b"] == 0
    assert counted(heuristic=1, learned=1)


def test_profile_ends_a_trial(machine: Machine) -> None:
    for _ in range(8):
        attend(*qkv())
    profile([Problem.of(*qkv())], budget_s=60.0, progress=False)
    before = machine.calls()
    for _ in range(100):
        attend(*qkv())
    assert machine.calls() == before | {"b": before["b"] + 100}
    assert counters()["measured"] == 1


def test_a_route_made_while_the_trial_ends_takes_its_decision(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has taken the guess, and makes its route of it."""
    attend(*qkv())
    (guess,) = decide._decided.values()
    call_until_measured()
    process_state.forget(process_state.ROUTES)
    monkeypatch.setattr(decide, "decision_for", lambda problem: guess)
    before = machine.calls()
    attend(*qkv())
    assert machine.calls() == before | {"b": before["b"] + 1}
