"""Trials beside other programs that take the cores: samples, candidates that must not be dropped, choices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from attn_dispatch.machine.load import Load
from attn_dispatch.tuning.choice import Entrant, choose
from attn_dispatch.tuning.clocks import LONGEST_DISTURBED_MS, MOST_FAILURES, RETAKES, HostStopwatch
from attn_dispatch.tuning.intervals import Timing
from tests.support.simulated import Machine

COSTS = {"sdpa": 1.3, "native": 1.0, "tiles": 2.4, "manual": 9.0}


class Preempted:
    """A call that takes these milliseconds, one after another; past `own_ms` it lost a core every 4 ms."""

    def __init__(self, own_ms: float, *taken_ms: float) -> None:
        self.own_ms, self.now_s, self.cpu_s, self.switches, self.rests = own_ms, 0.0, 0.0, 0, 0
        self.taken_ms = iter(taken_ms)

    def __call__(self) -> None:
        ms = next(self.taken_ms, self.own_ms)
        self.now_s += ms / 1e3
        self.cpu_s += self.own_ms / 1e3
        self.switches += math.ceil((ms - self.own_ms) / 4)

    def rest(self, seconds: float) -> None:
        self.rests += 1

    def stopwatch(self, **more: Any) -> HostStopwatch:
        reading = partial(getattr, self, "load")
        return HostStopwatch(lambda: self.now_s, reading=reading, rest=self.rest, **more)

    @property
    def load(self) -> Load:
        return Load(self.cpu_s, self.now_s, self.switches)


def test_a_disturbed_sample_is_taken_again_after_a_rest() -> None:
    call = Preempted(1.0, 14.0)
    assert call.stopwatch().mean_ms(call) == pytest.approx(1.0)
    assert call.rests == 1


def test_an_undisturbed_sample_is_taken_once() -> None:
    call = Preempted(1.0)
    stopwatch = call.stopwatch()
    assert stopwatch.mean_ms(call) == pytest.approx(1.0)
    assert (call.rests, stopwatch.load.switches) == (0, 0)


def test_samples_are_taken_again_a_few_times_only() -> None:
    call = Preempted(1.0, *[4.0] * 99)
    assert call.stopwatch().mean_ms(call) == pytest.approx(4.0)
    assert call.rests == RETAKES


def test_after_a_rest_the_fastest_of_a_few_calls_counts() -> None:
    call = Preempted(0.5, 14.0, 3.0, 0.6)
    assert call.stopwatch().mean_ms(call) == pytest.approx(0.5)
    assert call.rests == 1


@pytest.mark.parametrize("first_ms", [LONGEST_DISTURBED_MS + 1, 20.0])
def test_long_calls_are_not_repeated_in_vain(first_ms: float) -> None:
    """One longer than a slice is preempted whenever it begins."""
    call = Preempted(1.0, *[first_ms] * 99)
    stopwatch = call.stopwatch()
    for _ in range(5):
        stopwatch.mean_ms(call)
    assert call.rests <= RETAKES * MOST_FAILURES


@pytest.mark.parametrize(("caller_share", "threads", "expected_ms"), [(1.0, 2, 60.0), (0.2, 2, 30.0), (0.2, 8, 12.0)])
def test_of_a_long_disturbed_call_the_processors_time_counts(
    caller_share: float, threads: int, expected_ms: float
) -> None:
    """That of the calling thread, or an even share of all threads' if that is more."""
    call = Preempted(60.0, 300.0)
    stopwatch = call.stopwatch(caller_clock=lambda: caller_share * call.cpu_s, threads=threads)
    assert stopwatch.mean_ms(call) == pytest.approx(expected_ms)
    assert stopwatch.mean_ms(call) == pytest.approx(60.0), "undisturbed: the clock's"


def test_a_disturbed_sample_is_never_longer_than_it_took() -> None:
    """Threads of the program beside it take processor time too."""
    call = Preempted(60.0, 70.0)
    assert call.stopwatch(caller_clock=lambda: 9 * call.cpu_s).mean_ms(call) == pytest.approx(70.0)


def test_switches_of_all_samples_make_a_race_disturbed() -> None:
    call = Preempted(1.0, 4.0)
    stopwatch = call.stopwatch()
    stopwatch.mean_ms(call)
    assert not stopwatch.load.disturbed, "one switch may occur on any machine"
    call.taken_ms = iter([4.0] * 99)
    stopwatch.mean_ms(call)
    assert stopwatch.load.disturbed


@pytest.mark.parametrize("neighbours", [1, 2, 4])
def test_a_disturbed_sample_drops_no_close_candidate(neighbours: int) -> None:
    for seed in range(50):
        found = Machine(0.02, seed, neighbours=neighbours).race(COSTS, budget_s=0.5)
        assert found.load.disturbed
        assert found.dropped.keys() <= {"manual"}


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("neighbours", [1, 2, 4])
def test_the_right_candidate_is_chosen_beside_busy_programs(neighbours: int, scale: float) -> None:
    """At most one choice in ten is another, here a worse one by three tenths or more."""
    right = 0
    for seed in range(50):
        machine = Machine(0.02, seed, neighbours=neighbours)
        found = machine.race(
            {name: scale * cost for name, cost in COSTS.items()},
            budget_s=0.8 * max(1.0, scale),
            incumbents=("sdpa",),
        )
        entrants = [
            Entrant(name, timing, dropped=found.dropped.get(name), rank=rank)
            for rank, (name, timing) in enumerate(found.timings.items())
        ]
        chosen, _ = choose(entrants, "sdpa", calls=1000, disturbed=found.load.disturbed)
        right += chosen == "native"
    assert right >= 45


def test_undisturbed_samples_are_the_fastest_quarter() -> None:
    timing = Timing(tuple(map(float, range(40, 0, -1))), 1.0)
    assert timing.undisturbed().samples_ms == tuple(map(float, range(1, 11)))
    assert Timing((3.0, 1.0, 2.0), 1.0).undisturbed().samples_ms == (1.0,)
