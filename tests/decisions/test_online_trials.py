"""What holds for trials that a caller waits for holds for those beside its calls, in mode `online`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import attend, explain, process_state
from attn_dispatch.decisions import look_up, online
from attn_dispatch.errors import NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.store import quarantine
from attn_dispatch.store.decision import Row
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.tuning import race
from tests.decisions.test_foreign import give
from tests.decisions.test_online import MS, Machine, Timed, call_until_measured
from tests.support.calls import close, counted, forget, formula, qkv
from tests.support.ordered import stored

DISTURBED = "other programs took the cores while it was measured"

pytestmark = pytest.mark.usefixtures("little_time")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None]) -> Machine:
    """`a` is the static choice, `b` is the fastest."""
    set_mode("online")
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "0.5")
    found = Machine(monkeypatch)
    for name, takes_ms in (("a", 4), ("b", 2), ("c", 5)):
        found.add(name, takes_ms)
    return found


def row(name: str) -> Row:
    return next(each for each in stored().candidates if each.backend == name)


def called(machine: Machine, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in machine.calls().items()}


def call(times: int) -> None:
    for _ in range(times):
        attend(*qkv())


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
    assert called(machine, before) == {"a": 0, "b": 300, "c": 0}, "the machine is still busy"
    busy(False)
    forget()
    before = machine.calls()
    attend(*qkv())
    assert called(machine, before) == {"a": 0, "b": 1, "c": 0}, "the provisional choice, at once"
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
    process_state.forget_all()
    registry._added.update(machine.by_name)
    give(given, tmp_path)
    assert (explain(*qkv()).choice, explain(*qkv()).source) == ("a", "heuristic"), "what the first call will run"
    before = machine.calls()
    attend(*qkv())
    assert called(machine, before) == {"a": 1, "b": 0, "c": 0}
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


@pytest.mark.full
def test_three_percent_are_seen_as_by_profile(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits, so that the race may go on until its comparisons are resolved."""
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "2000")
    machine.add("b", 3.88)
    drawn, sleep = random.Random(1), machine.clock.sleep
    monkeypatch.setattr(machine.clock, "sleep", lambda seconds: sleep(seconds * drawn.lognormvariate(0.0, 0.01)))
    call_until_measured()
    assert (stored().choice, stored().provisional) == ("b", "")


def test_a_candidate_that_proves_too_slow_for_a_step_is_called_once(machine: Machine) -> None:
    slow = machine.add("d", 60)
    call_until_measured()
    assert stored().choice == "b"
    assert slow.calls == 1, "that of the gate: nothing had said that it is slower"
    assert "times as long as the fastest's" in row("d").reason


def test_a_lack_of_memory_ends_a_trial_with_one_warning(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def run_out(*given: object, **named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(race.Race, "run", run_out)
    exact = formula(*qkv(), Dense())[0]
    for _ in range(600):
        assert close(attend(*qkv()), exact)
    (text,) = warnings()
    assert text.startswith("not measured, too little memory for a trial: ")
    assert counted(heuristic=1), "the guess stays"
    assert not online._trials
    assert not list(Store(cache_folder()).all())
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


def test_strikes_are_forgotten_once_a_trial_admits_the_version(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[str] = []
    monkeypatch.setattr(Quarantine, "clear_strikes", lambda self, name, *given: cleared.append(name))
    call_until_measured()
    assert set(cleared) == {"a", "b", "c"}


def test_locked_mode_takes_what_a_trial_decided(machine: Machine, set_mode: Callable[[str], None]) -> None:
    call_until_measured()
    set_mode("locked")
    forget()
    before = machine.calls()
    attend(*qkv())
    assert called(machine, before) == {"a": 0, "b": 1, "c": 0}
    with pytest.raises(NotDecided):
        attend(*qkv(24))


@dataclass
class Ended:
    """A CUDA event. While one that has taken place is asked, another thread takes what it finds in the queue."""

    queue: Callable[[], deque[Any]]
    done: bool = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        if self.done and self.queue():
            self.queue().popleft()
        return self.done

    def elapsed_time(self, end: Ended) -> float:
        assert end.done
        return 4.0


def test_threads_share_the_events_of_calls_on_cuda(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is read twice or before it has taken place, and those that wait keep their order."""
    attend(*qkv())
    (trial,) = online._trials.values()
    made: list[Ended] = []

    def event(**_: Any) -> Ended:
        made.append(Ended(lambda: trial._events, done=len(made) < 2))
        return made[-1]

    noted: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(trial, "note", noted.append)
    for _ in range(3):
        trial.timed_by_events(lambda: None)
    assert noted == [4 * MS]
    assert [each for pair in trial._events for each in pair] == made[2:]
