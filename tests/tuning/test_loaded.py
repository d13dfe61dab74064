"""Trials beside other programs that take the cores: candidates that must not be dropped, and choices."""

from __future__ import annotations

import pytest
import torch

from attn_dispatch.machine.load import NO_LOAD, Load
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.candidates import Request, incumbent_of, static_choice
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.clocks import HostStopwatch
from attn_dispatch.tuning.intervals import Timing
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import Rounds
from tests.support.retuning import Tuner, independent
from tests.support.simulated import Machine

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
