"""Mode `online`: trials are paid for out of the running calls, on a clock that moves by what backends take."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_dispatch import attend, counters, explain, process_state, profile
from attn_dispatch.calls import routes
from attn_dispatch.decisions import decide, look_up, online, trial_limits
from attn_dispatch.errors import BackendFailed, InvalidInput, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import quarantine
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.tuning import gate, race
from tests.decisions.test_foreign import give
from tests.support import planted
from tests.support.calls import close, counted, forget, formula, qkv
from tests.support.fakes import raising
from tests.support.ordered import DISTURBED, stored
from tests.support.timed import ENOUGH, MS, Machine, Timed, call_until_measured, row

pytestmark = pytest.mark.usefixtures("little_time")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None]) -> Machine:
    """`a` is the static choice, `b` is the fastest. A large share, so that few calls pay for a trial."""
    set_mode("online")
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "0.5")
    return Machine(monkeypatch, quick_cases=True, a=4, b=2, c=5)


def decisions() -> list[Any]:
    return list(Store(cache_folder()).all())


def call(times: int) -> None:
    for _ in range(times):
        attend(*qkv())


def choice(tensors: tuple[Tensor, Tensor, Tensor] | None = None) -> str | None:
    return explain(*(tensors or qkv())).choice


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
    decision = stored()
    assert (decision.choice, decision.source) == ("b", "measured")
    assert counted(heuristic=1, measured=1)
    before = machine.calls()
    call(2)
    assert machine.calls() == before | {"b": before["b"] + 2}
    (route,) = routes.routes.values()
    assert route.run.__name__ != "sampled_run", "a hit costs what it costs in other modes"
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
        if decisions():
            break
        start = machine.clock()
        attend(*qkv())
        longest_s = max(longest_s, machine.clock() - start)
        live_s += 4 * MS
        assert machine.clock() - live_s <= share * live_s + 5 * MS
    assert decisions()
    assert longest_s <= 1.5 * 4 * MS + 20 * MS


def test_without_overhead_nothing_is_measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "0")
    call(300)
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
    decision = stored()
    assert decision.choice == "a"
    assert row("b").status == "incorrect"


def test_a_candidate_that_hangs_is_left_behind(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_TIMEOUT_S", "0.1")
    waits = threading.Event()
    machine.add("b", 1, fault=lambda *given, **more: waits.wait(5) and planted.right(*given, **more))
    call_until_measured()
    waits.set()
    decision = stored()
    assert decision.choice == "a"
    assert "did not return" in row("b").reason


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


@pytest.mark.parametrize(
    ("call_ms", "work", "tries"), [(4, 2500.0, True), (4, 3500.0, False), (100, 1200.0, True), (100, 1300.0, False)]
)
def test_the_longest_call_of_a_candidate_grows_with_calls_of_the_guess(
    call_ms: float, work: float, tries: bool, machine: Machine
) -> None:
    """Up to 12 ms beside calls of 4 ms (half of one and 10 ms), up to 125 beside calls of 100 (a quarter longer)."""
    machine.by_name["a"].takes_s = call_ms * MS
    machine.add("d", 1, work=work)
    call_until_measured()
    assert (machine.calls()["d"] > 0) == tries
    assert ("too long to be tried between calls" in row("d").reason) != tries


def test_training_is_timed_forward_and_backward(machine: Machine) -> None:
    tensors = with_grad()

    def step() -> None:
        attend(*tensors).sum().backward()

    call_until_measured(step)
    assert stored().choice == "b"
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
        assert stored().choice == "b"
        runs = [getattr(route.run, "resolved", route).run for route in routes.routes.values()]
        assert all(run.__name__ != "sampled_run" for run in runs)
        forget()
        attend(*tensors)
        assert choice(tensors) == "b", "the next process takes the decision"


@pytest.mark.parametrize("mode", ["predict", "off"])
def test_other_modes_measure_nothing(mode: str, machine: Machine, set_mode: Callable[[str], None]) -> None:
    set_mode(mode)
    call(300)
    assert machine.calls() == {"a": 300, "b": 0, "c": 0}
    assert not online._trials
    set_mode("locked")
    with pytest.raises(NotDecided):
        attend(*qkv(24))


def test_nothing_is_measured_while_traced_or_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    attend(*qkv())
    monkeypatch.setattr(trial_limits, "cannot_measure", lambda device: True)
    call(300)
    assert machine.calls()["b"] == 0
    before = online._account.calls
    monkeypatch.setattr(online, "capturing", lambda device: True)
    attend(*qkv())
    assert online._account.calls == before, "captured calls take no time"


def test_two_threads_measure_once(machine: Machine) -> None:
    def calls(_: int) -> None:
        for _ in range(ENOUGH):
            attend(*qkv())
            if decisions():
                return

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(calls, range(2)))
    assert counters()["measured"] == 1
    assert choice() == stored().choice, "either: the other thread's calls move the clock too"


def test_a_forked_child_keeps_the_guess(machine: Machine) -> None:
    call(8)
    assert online._trials
    child = os.fork()
    if not child:
        try:
            for _ in range(200):
                attend(*qkv())
            os._exit(0 if not online._trials and not decisions() and explain(*qkv()).choice == "a" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    call_until_measured()
    assert choice() == "b"


def test_a_failing_slice_never_reaches_the_caller(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(gate.Gate, "admit", raising(RuntimeError("no luck")))
    call(300)
    assert machine.calls() == {"a": 300, "b": 0, "c": 0}
    assert any("was given up: RuntimeError: no luck" in text for text in warnings())
    assert not online._trials


def test_a_lost_device_is_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.Gate, "admit", raising(BackendFailed("the device is lost")))
    with pytest.raises(BackendFailed, match="the device is lost"):
        call_until_measured()


def test_a_trial_of_tensors_too_large_to_be_held_is_given_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(online, "HELD_SHARE", 0.0)
    call(600)
    (text,) = warnings()
    assert "was given up: MemoryError: its tensors need" in text
    assert not online._trials
    assert not decisions()


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
    call(300)
    assert choice() == "c"
    assert machine.calls()["b"] == 0
    assert counted(heuristic=1, learned=1)


def test_profile_ends_a_trial(machine: Machine) -> None:
    call(8)
    profile([Problem.of(*qkv())], budget_s=60.0, progress=False)
    before = machine.calls()
    call(100)
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


# --- as trials that a caller waits for --------------------------------------------------------------------------------


def test_one_beside_other_programs_is_provisional_and_goes_on_in_a_later_process(
    machine: Machine, busy: Callable[[bool], None]
) -> None:
    busy(True)
    call_until_measured()
    assert (stored().provisional, stored().attempts, stored().choice) == (DISTURBED, 1, "b")
    assert (stored().load or {})["switches"] > 0
    forget()
    before = machine.calls()
    call(300)
    assert machine.since(before) == {"a": 0, "b": 300, "c": 0}, "the machine is still busy"
    busy(False)
    forget()
    before = machine.calls()
    attend(*qkv())
    assert machine.since(before) == {"a": 0, "b": 1, "c": 0}, "the provisional choice, at once"
    call(2000)
    assert (stored().provisional, stored().attempts) == ("", 0)
    assert counted(loaded=1, measured=1)
    assert explain(*qkv()).choice == "b"


def test_another_machines_decision_delays_no_call_and_is_not_believed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None]
) -> None:
    call_until_measured()
    given = stored()
    Store(cache_folder()).path(*given.address).unlink()
    (cache_folder() / "passed" / f"{given.silicon}.txt").unlink()
    machine.restart(knows_nothing=True)
    give(given, tmp_path)
    assert (explain(*qkv()).choice, explain(*qkv()).source) == ("a", "heuristic"), "what the first call will run"
    before = machine.calls()
    attend(*qkv())
    assert machine.since(before) == {"a": 1, "b": 0, "c": 0}
    for _ in range(2000):
        attend(*qkv())
        if counted(heuristic=1, measured=1):
            break
    assert (stored().choice, stored().origin) == ("b", "")
    assert explain(*qkv()).source == "measured"
    assert look_up.is_confirmed(stored())


def test_a_backend_still_to_be_prepared_leaves_the_choice_open(
    machine: Machine, busy: Callable[[bool], None], set_mode: Callable[[str], None]
) -> None:
    @dataclass
    class Compiled(Timed):
        is_prepared: bool = False

        def prepare(self) -> None:
            self.is_prepared = True

        def prepared(self) -> bool:
            return self.is_prepared

    busy(False)
    fastest = Compiled(name="d", takes_s=1 * MS, clock=machine.clock)
    registry._added["d"] = machine.by_name["d"] = fastest
    call_until_measured()
    assert (stored().choice, fastest.calls, fastest.is_prepared) == ("b", 0, False)
    assert "has to be prepared" in row("d").reason
    assert stored().provisional == "no time was left to try d"
    set_mode("tune")
    forget()
    attend(*qkv())
    assert (stored().choice, stored().provisional) == ("d", "")


def test_a_candidate_that_proves_too_slow_for_a_step_is_called_once(machine: Machine) -> None:
    slow = machine.add("d", 60)
    call_until_measured()
    assert stored().choice == "b"
    assert slow.calls == 1, "that of the gate: nothing had said that it is slower"
    assert "times as long as the fastest's" in row("d").reason


def test_a_lack_of_memory_ends_a_trial_with_one_warning(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(race.Race, "choose", raising(MemoryError()))
    exact = formula(*qkv(), Dense())[0]
    for _ in range(600):
        assert close(attend(*qkv()), exact)
    (text,) = warnings()
    assert text.startswith("not measured, too little memory for a trial: ")
    assert counted(heuristic=1), "the guess stays"
    assert not online._trials
    assert not decisions()
    assert Quarantine(cache_folder(), silicon("cpu")).entries() == []


def test_no_crash_marker_is_left_between_slices(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed: list[Path] = []
    resume = quarantine.CrashMarker.resume

    def noted(self: quarantine.CrashMarker) -> None:
        resume(self)
        resumed.append(self.path)

    monkeypatch.setattr(quarantine.CrashMarker, "resume", noted)

    def call_and_look() -> None:
        attend(*qkv())
        assert not quarantine._own_markers

    call_until_measured(call_and_look)
    assert len(set(resumed)) > 1


@dataclass
class Event:
    """A CUDA event, at a time in milliseconds; of the first four, two calls, it has taken place."""

    number: int

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.number < 4

    def elapsed_time(self, end: Event) -> float:
        assert end.query()
        return 4.0


def test_calls_on_cuda_are_noted_once_they_have_ended(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait keep their order."""
    attend(*qkv())
    (trial,) = online._trials.values()
    made: list[Event] = []

    def event(**_: Any) -> Event:
        made.append(Event(len(made)))
        return made[-1]

    noted: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(trial, "note", noted.append)
    for _ in range(4):
        trial.timed_by_events(lambda: None)
    assert noted == [4 * MS] * 2
    assert [each for pair in trial._events for each in pair] == made[4:]
