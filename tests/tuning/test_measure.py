"""Timing against a simulated clock with planted costs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from attn_dispatch.machine.load import NO_LOAD, Load
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning import intervals
from attn_dispatch.tuning.candidates import Request, incumbent_of, static_choice
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.clocks import ONE_TIME_MS, HostStopwatch, Stopwatch
from attn_dispatch.tuning.intervals import Timing
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import Rounds, sampled_in_rounds, time_in_rounds
from tests.support.retuning import Tuner, independent
from tests.support.simulated import Machine


class Doubling(Stopwatch):
    """A stopwatch that reads twice the time, and a quarter of a millisecond of the host."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def mean_ms(self, call: Callable[[], object], repeats: int = 1) -> float:
        start_s = self.machine.clock()
        for _ in range(repeats):
            call()
        return max((self.machine.clock() - start_s) * 2e3 / repeats, 1.0)

    def device_ms(self, call: Callable[[], object]) -> float | None:
        return 0.5

    def host_ms(self, call: Callable[[], object]) -> float | None:
        return 0.25


def winner(turns: Rounds) -> str:
    return min(turns.timings, key=lambda name: turns.timings[name].median_ms)


def test_the_same_times_give_the_same_result() -> None:
    """On all ranks of a mesh, which race by the times of the slowest one."""
    one, other = Machine(0.03, 1), Machine(0.03, 1)
    assert one.race({"a": 1.0, "b": 1.1}) == other.race({"a": 1.0, "b": 1.1})
    assert one.log == other.log


def test_every_round_runs_each_survivor_once() -> None:
    machine = Machine(0.03)
    turns = machine.race({"a": 1.0, "b": 1.1, "c": 1.2}, min_rounds=7, max_rounds=7)
    rounds = [machine.log[i : i + 3] for i in range(0, len(machine.log), 3)]
    assert rounds[0] == ["a", "b", "c"]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert turns.rounds == len(rounds) - 1 == 7
    assert all(len(timing.samples_ms) == 7 for timing in turns.timings.values())


def test_hopeless_candidate_is_dropped_with_its_one_sample() -> None:
    machine = Machine()
    turns = machine.race({"slow": 50.0, "fast": 10.0})
    assert turns.dropped == {"slow": pytest.approx(5.0)}
    assert list(turns.timings["slow"].samples_ms) == [pytest.approx(50.0)]
    assert machine.log.count("slow") == 2
    assert turns.rounds == len(turns.timings["fast"].samples_ms) == 5
    assert not turns.short_of_time


@pytest.mark.parametrize(("costs_ms", "dropped"), [([900.0, 10.0, 1.0], False), ([900.0, 10.0, 10.0], True)])
def test_candidate_with_a_slow_first_call_runs_again_before_it_is_dropped(costs_ms: list[float], dropped: bool) -> None:
    machine = Machine()
    planted = iter(costs_ms)
    calls = {"a": machine.call("a", 1.0), "b": lambda: machine.call("b", next(planted, 1.0))()}
    turns = time_in_rounds(calls, budget_s=None, clock=machine.clock)
    assert ("b" in turns.dropped) == dropped
    assert (len(turns.timings["b"].samples_ms) == 1) == dropped


@pytest.mark.parametrize(
    ("slow_ms", "more", "dropped"),
    [
        (170.0, {"incumbents": ("slow",)}, True),
        (150.0, {"incumbents": ("slow",)}, False),
        (150.0, {}, True),
        (150.0, {"hopeless": None}, False),
    ],
)
def test_incumbent_is_dropped_beyond_a_higher_limit(slow_ms: float, more: dict[str, Any], dropped: bool) -> None:
    turns = Machine().race({"slow": slow_ms, "fast": 10.0}, **more)
    assert (turns.dropped.keys() == {"slow"}) is dropped


def test_first_call_is_the_only_sample_once_the_budget_is_spent() -> None:
    machine = Machine()
    turns = machine.race({"slow": 500.0, "old": 150.0, "fast": 10.0}, budget_s=0.1, incumbents=("old",))
    assert turns.dropped == {"slow": pytest.approx(50.0)}
    assert turns.short_of_time == {"slow"}
    assert turns.timings["slow"].samples_ms == (turns.timings["slow"].first_ms,)
    assert machine.log.count("slow") == 1
    assert (machine.log.count("old"), machine.log.count("fast"), turns.rounds) == (2, 2, 1)


def test_a_short_first_call_is_repeated_whatever_the_budget() -> None:
    """It may be one-time work, such as waking the threads of a pool."""
    machine = Machine()
    calls = {name: machine.call(name, cost_ms) for name, cost_ms in {"woken": 0.9, "ready": 1.0, "slow": 20.0}.items()}
    first_ms = {"woken": ONE_TIME_MS, "ready": 1.0, "slow": 20.0}
    turns = time_in_rounds(calls, budget_s=0.0, clock=machine.clock, first_ms=first_ms)
    assert turns.dropped == {"slow": pytest.approx(20.0)}
    assert turns.timings["woken"].samples_ms == pytest.approx((0.9,))
    assert machine.log == ["woken", "ready"] or machine.log == ["ready", "woken"]


def failing(error: BaseException, after: int = 0) -> Callable[[], None]:
    left = iter(range(after))

    def run() -> None:
        if next(left, None) is None:
            raise error

    return run


@pytest.mark.parametrize("after", [0, 1, 5])
def test_failure_ends_that_candidate_only(after: int) -> None:
    machine = Machine()
    error = RuntimeError("unsupported head_dim")
    calls = {"a": machine.call("a", 1.0), "bad": failing(error, after), "b": machine.call("b", 2.0)}
    turns = time_in_rounds(calls, budget_s=None, hopeless=None, clock=machine.clock)
    assert turns.failures == {"bad": error}
    assert list(turns.timings) == ["a", "b"]
    assert turns.rounds == 5
    assert gc.isenabled()


def test_failure_releases_the_objects_of_the_call() -> None:
    class Held:
        alive = 0

        def __init__(self) -> None:
            Held.alive += 1

        def __del__(self) -> None:
            Held.alive -= 1

    def run() -> None:
        held = Held()
        raise MemoryError(id(held))

    assert time_in_rounds({"bad": run}, budget_s=None).failures
    assert Held.alive == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_interrupts_propagate_with_the_collector_back_on(error: BaseException) -> None:
    seen: list[bool] = []
    with pytest.raises(type(error)):
        time_in_rounds({"a": lambda: seen.append(gc.isenabled()), "stop": failing(error, after=1)}, budget_s=None)
    assert not any(seen)
    assert gc.isenabled()


@pytest.mark.parametrize("budget_s", [0.05, 0.2, 1.0])
def test_budget_is_respected(budget_s: float) -> None:
    machine = Machine(0.03)
    machine.race({"a": 4.0, "b": 4.0, "c": 4.0}, budget_s=budget_s, resolution=0.0)
    assert 0.5 * budget_s < machine.now_s <= 1.03 * budget_s


@pytest.mark.parametrize(
    ("costs_ms", "rounds", "dropped"),
    [
        ([100.0, 105.0, 170.0], 8, {"c"}),  # far from the fastest: for fewer rounds than separate close ones
        ([100.0, 105.0, 140.0], 8, set()),
        ([100.0, 105.0, 140.0], 3, {"c"}),
        ([100.0, 105.0, 110.0], 3, set()),
        ([100.0, 105.0, 170.0], 16, set()),
    ],
)
def test_slowest_are_dropped_where_the_budget_is_short(costs_ms: list[float], rounds: float, dropped: set[str]) -> None:
    costs = dict(zip("abc", costs_ms, strict=True))
    budget_s = (rounds + 2.5) * sum(costs_ms) / 1e3  # the first calls and a warm round come first
    turns = Machine(0.001).race(costs, budget_s=budget_s, short_of_rounds=True)
    assert set(turns.dropped) == dropped
    assert not Machine(0.001).race(costs, budget_s=budget_s).dropped


def test_each_survivor_has_a_round_at_any_budget() -> None:
    turns = Machine().race({"a": 4.0, "b": 5.0}, budget_s=0.0)
    assert turns.rounds == 1
    assert [len(timing.samples_ms) for timing in turns.timings.values()] == [1, 1]


def test_settled_candidates_end_at_min_rounds_and_noisy_ones_at_max_rounds() -> None:
    assert Machine(0.001).race({"a": 1.0, "b": 1.1}, min_rounds=8).rounds == 8
    assert Machine(0.3).race({"a": 1.0, "b": 1.1}, max_rounds=12).rounds == 12


def test_beaten_candidates_retire_and_close_ones_race_on() -> None:
    turns = Machine(0.03).race({"a": 1.0, "b": 1.0, "far": 1.5})
    rounds = {name: len(timing.samples_ms) for name, timing in turns.timings.items()}
    assert turns.retired == {"far"}
    assert 5 <= rounds["far"] <= 12
    assert rounds["a"] == rounds["b"] == turns.rounds > 50
    assert turns.timings["far"].median_ms == pytest.approx(1.5, rel=0.05)


def test_candidate_that_surely_does_not_beat_the_incumbent_retires() -> None:
    turns = Machine(0.01).race(
        {"old": 1.0, "tie": 1.0, "near": 0.98}, incumbents=("old",), max_rounds=100, resolution=0.0
    )
    rounds = {name: len(timing.samples_ms) for name, timing in turns.timings.items()}
    assert turns.retired == {"tie"}
    assert rounds["tie"] < rounds["near"] == turns.rounds == 100


def test_incumbent_races_until_all_remaining_candidates_surely_beat_it() -> None:
    turns = Machine(0.03).race({"old": 1.5, "a": 1.0, "b": 1.0}, incumbents=("old",))
    rounds = {name: len(timing.samples_ms) for name, timing in turns.timings.items()}
    assert turns.retired == {"old"}
    assert intervals.ratio_test(turns.timings["a"], turns.timings["old"]) == "faster"
    assert rounds["old"] < rounds["a"] == rounds["b"]


def test_single_candidate_ends_once_its_median_is_resolved() -> None:
    assert Machine(0.01).race({"a": 1.0}).rounds == 5
    assert 5 < Machine(0.03).race({"a": 1.0}).rounds <= 30
    assert 24 <= Machine(0.5).race({"a": 1.0}).rounds <= 30


@pytest.mark.parametrize(("cost_ms", "least", "most"), [(0.2, 500, 1000), (2.0, 300, 300), (1000.0, 24, 24)])
def test_slow_calls_get_fewer_rounds_at_any_budget(cost_ms: float, least: int, most: int) -> None:
    turns = Machine(0.3).race({"a": cost_ms, "b": cost_ms}, resolution=0.0)
    assert least <= turns.rounds <= most


def test_extra_cost_counts_in_comparisons_and_in_no_sample() -> None:
    costs_ms, extra_ms = {"dear first": 1.0, "plain": 5.0}, {"dear first": 20.0}
    turns = Machine().race(costs_ms, extra_ms=extra_ms)
    assert turns.dropped == {"dear first": pytest.approx(4.2)}
    assert list(turns.timings["dear first"].samples_ms) == pytest.approx([1.0])
    turns = Machine().race(costs_ms, extra_ms={"dear first": 6.0})
    assert not turns.dropped
    assert turns.retired == {"dear first"}
    assert list(Machine().race(costs_ms).dropped) == ["plain"]


def test_stopwatch_can_be_replaced_and_survivors_get_host_and_device_times() -> None:
    machine = Machine()
    a, far = machine.race({"a": 1.0, "far": 2.0}, stopwatch=Doubling(machine)).timings.values()
    assert (a.median_ms, a.host_ms, a.device_ms) == pytest.approx((2.0, 0.25, 0.5))
    assert (far.median_ms, far.host_ms, far.device_ms) == (4.0, None, None)


def test_a_step_is_one_sample() -> None:
    machine = Machine()
    found = {name: machine.call(name, cost_ms) for name, cost_ms in {"a": 1.0, "far": 2.0}.items()}
    steps = sampled_in_rounds(found, budget_s=None, clock=machine.clock, stopwatch=Doubling(machine))
    calls = [*(len(machine.log) for _ in steps), len(machine.log)]
    assert max(after - before for before, after in pairwise(calls)) == 1


def test_fast_calls_are_repeated_within_a_sample() -> None:
    machine = Machine()
    turns = machine.race({"fast": 0.002, "slow": 0.3}, hopeless=None, max_rounds=5)
    assert turns.timings["fast"].median_ms == pytest.approx(0.002)
    assert machine.log.count("slow") == 6
    assert machine.log.count("fast") >= 5 * 100


def test_calls_too_fast_for_the_clock_end() -> None:
    machine = Machine()
    turns = machine.race({"a": 0.0, "b": 0.0}, max_rounds=1)
    assert turns.timings["a"].median_ms == 0.0
    assert machine.log.count("a") <= 20_000


# --- beside other programs that take the cores ------------------------------------------------------------------------


COSTS = {"sdpa": 1.3, "native": 1.0, "tiles": 2.4, "manual": 9.0}


@pytest.mark.parametrize(
    ("calls_ms", "expected_ms", "rests"),
    [((1.0,), 1.0, 0), ((14.0, 1.0), 1.0, 1), ((4.0, 3.0, 5.0, 6.0, 1.0), 3.0, 3), ((41.0, 1.0), 41.0, 0)],
)
def test_a_short_disturbed_sample_is_taken_again_after_a_rest(
    calls_ms: tuple[float, ...], expected_ms: float, rests: int
) -> None:
    """A few times only. A call of 1 ms, that loses a core where it takes longer."""
    now_ms, switches, rested, left = 0.0, 0, list[float](), iter(calls_ms)

    def call() -> None:
        nonlocal now_ms, switches
        now_ms += (took_ms := next(left))
        switches += took_ms > 1.0

    stopwatch = HostStopwatch(lambda: now_ms / 1e3, lambda: Load(now_ms / 1e6, 0.0, switches), rested.append)
    assert stopwatch.mean_ms(call) == pytest.approx(expected_ms)
    assert (len(rested), stopwatch.load.switches) == (rests, switches)


@pytest.mark.parametrize("neighbours", [1, 2, 4])
def test_a_disturbed_sample_drops_no_close_candidate(neighbours: int) -> None:
    for seed in range(50):
        found = Machine(0.02, seed, neighbours=neighbours).race(COSTS, budget_s=0.5)
        assert found.load.disturbed
        assert found.dropped.keys() <= {"manual"}


@pytest.mark.parametrize("switches", [0, 1000])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_calm_process_tries_again_what_a_disturbed_race_dropped(switches: int, is_late: bool) -> None:
    """By its first calls alone, six times as long as the others'."""
    problem = Case("small", Dense(), (1, 16, 2, 8)).problem(torch.float32, needs_grad=False)
    request = Request.of(problem)
    first, late = (each for each in request.able if each.title in ("sdpa", "manual"))
    runners = {each.title: (each, Admitted(ms, ms, None, 0.0)) for each, ms in ((first, 20.0), (late, 120.0))}
    timings = {first.title: Timing((20.0,) * 5, 20.0), late.title: Timing((120.0,), 120.0)}
    race = Race(request, runners, first.title)
    short = frozenset({late.title} if is_late else ())
    race.rounds = Rounds(timings, {}, {late.title: 6.0}, 5, short, load=NO_LOAD._replace(cpu_s=1.0, switches=switches))
    assert race.choose() == first.title
    row = race.row(late)
    assert row is not None
    assert bool(row.open) == race.rounds.load.disturbed == bool(switches)


def test_ties_go_to_the_backend_that_mostly_is_the_fastest() -> None:
    problem = Case("small", Dense(), (1, 16, 2, 8)).problem(torch.float32, needs_grad=False)
    able = Request.of(problem).able
    without = [each for each in able if each.name != "native"]
    found = static_choice(able), incumbent_of(able), incumbent_of(without)
    assert [each and each.title for each in found] == ["sdpa", "native", "sdpa"]


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("neighbours", [1, 2, 4])
def test_the_right_candidate_is_chosen_beside_busy_programs(neighbours: int, scale: float) -> None:
    """At most one choice in ten is another, here a worse one by three tenths or more."""
    tuner = Tuner({"noise": 0.02, "neighbours": neighbours}, {"budget_s": 0.8 * max(1.0, scale)})
    costs = {name: scale * cost for name, cost in COSTS.items()}
    assert independent(tuner, costs, "sdpa", 50).count("native") >= 45
