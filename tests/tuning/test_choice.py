"""The choice: planted timings for its rules, and re-tunings on a simulated clock for how far it can be trusted."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.kernels.contract import Backend
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning import choice
from attn_dispatch.tuning.candidates import Request
from attn_dispatch.tuning.choice import Admitted, Entrant, Outcome, choose
from attn_dispatch.tuning.intervals import Timing, faster_at_last_look
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import Rounds
from tests.support import retuning
from tests.support.pairwise import thinned
from tests.support.retuning import CLOSE, NOISE, Tuner

ROUNDS = 20


def entrant(name: str, cost_ms: float, *, rounds: int = ROUNDS, wobble: float = 0.001, **more: Any) -> Entrant:
    """An entrant with nearly equal samples, so that different costs are surely different."""
    shift = sum(map(ord, name))
    samples = (cost_ms * (1.0 + wobble * math.sin(shift + 2.0 * index)) for index in range(rounds))
    return Entrant(name, Timing(tuple(samples), cost_ms + more.get("plan_ms", 0.0)), **more)


def outcome(name: str, entrants: list[Entrant], incumbent: str | None = "old", calls: int = 1000) -> Outcome:
    return choose(entrants, incumbent, calls=calls)[1][name]


@pytest.mark.parametrize(("cost_ms", "chosen"), [(0.97, "new"), (0.985, "old"), (1.0, "old"), (1.1, "old")])
def test_incumbent_is_replaced_only_beyond_the_margin(cost_ms: float, chosen: str) -> None:
    better_in_order = entrant("new", cost_ms, workspace_bytes=0, rank=0)
    entrants = [better_in_order, entrant("old", 1.0, workspace_bytes=10, rank=1)]
    assert choose(entrants, "old", calls=1)[0] == chosen


@pytest.mark.parametrize("incumbent", [None, "gone"])
def test_without_an_incumbent_the_order_decides_among_close_candidates(incumbent: str | None) -> None:
    entrants = [
        entrant("fastest", 1.0, workspace_bytes=2, rank=0),
        entrant("complex", 1.01, workspace_bytes=1, rank=2),
        entrant("simple", 1.015, workspace_bytes=1, rank=1),
        entrant("slow", 1.1),
    ]
    assert choose(entrants, incumbent, calls=1)[0] == "simple"


@pytest.mark.parametrize("incumbent", ["a", "b"])
def test_a_race_keeps_its_incumbent_among_close_candidates(incumbent: str) -> None:
    """Wherever it stands in the order of preference."""
    timings = {name: entrant(name, cost_ms).timing for name, cost_ms in (("a", 1.0), ("b", 1.005))}
    candidate = SimpleNamespace(workspace_bytes=0, backend=Backend())
    runners: Any = {name: (candidate, Admitted(1.0, 1.0, None, 0.0)) for name in timings}
    problem = Case("small", Dense(), (1, 16, 2, 8)).problem(torch.float32, needs_grad=False)
    race = Race(Request.of(problem), runners, incumbent)
    race.rounds = Rounds(timings, {}, {}, ROUNDS)
    assert race.choose() == incumbent


def test_least_median_is_chosen_if_all_are_beaten() -> None:
    """Each beats the next one in two thirds of all rounds."""
    samples = {"a": (1.0, 2.0, 3.0), "b": (2.0, 3.0, 1.0), "c": (2.9, 0.9, 1.9)}
    entrants = [Entrant(name, Timing(each * 40, 1.0)) for name, each in samples.items()]
    beaten = {b.name for a, b in product(entrants, entrants) if faster_at_last_look(a.timing, b.timing)}
    assert beaten == samples.keys()
    assert choose(entrants, None, calls=1)[0] == "c"


def test_first_call_is_spread_over_the_calls() -> None:
    entrants = [entrant("old", 1.0), entrant("built", 0.5, plan_ms=500.0)]
    assert [choose(entrants, "old", calls=calls)[0] for calls in (900, 1100, 10_000)] == ["old", "built", "built"]
    found = outcome("built", entrants, calls=900)
    assert (found.status, found.reason) == ("slower", "its dearer first call does not surely pay within 900 calls")
    assert found.ratio == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("plan_ms", "per_call_ms"), [(9.99, 0.0), (10.0, 2.0), (100.0, 20.0), (-3.0, 0.0)])
def test_first_calls_that_only_warm_up_are_free(plan_ms: float, per_call_ms: float) -> None:
    assert choice.per_call_ms(plan_ms, 5) == per_call_ms


def test_dropped_candidates_are_not_chosen() -> None:
    entrants = [entrant("old", 1.0), entrant("hopeless", 0.1, rounds=1, dropped=5.0)]
    chosen, outcomes = choose(entrants, None, calls=1)
    assert chosen == "old"
    assert outcomes["hopeless"].status == "slower"
    assert outcomes["hopeless"].reason == "5.0 times the fastest in first calls, not tried again"
    assert not outcomes["hopeless"].open


def test_dropped_candidate_is_chosen_if_there_is_no_other() -> None:
    assert choose([entrant("hopeless", 1.0, dropped=5.0)], "hopeless", calls=1)[0] == "hopeless"


TIES = [
    ({"cost_ms": 1.0}, "old", "a tie goes to the incumbent, old"),
    ({"cost_ms": 1.0, "workspace_bytes": 2**21}, None, "a tie goes to less workspace: 2.0 MiB less"),
    ({"cost_ms": 1.0, "rank": 1}, None, "a tie goes to the simpler candidate"),
    ({"cost_ms": 0.89, "rounds": 2}, "old", "2 rounds are too few to tell"),
    ({"cost_ms": 0.8, "rounds": 1}, "old", "1 round is too few to tell"),
    ({"cost_ms": 0.97, "wobble": 0.5}, "old", "20 rounds are too few to tell"),
]


@pytest.mark.parametrize(("new", "incumbent", "reason"), TIES)
def test_tie_has_its_reason(new: dict[str, Any], incumbent: str | None, reason: str) -> None:
    found = outcome("new", [entrant("old", 1.0), entrant("new", **new)], incumbent)
    assert (found.status, found.reason) == ("tie", reason)


@pytest.mark.parametrize(("cost_ms", "rounds"), [(0.7, 1), (0.8, 2), (0.85, 3), (0.85, 7)])
def test_the_better_bet_is_taken_without_proof(cost_ms: float, rounds: int) -> None:
    entrants = [entrant("old", 1.0), entrant("new", cost_ms, rounds=rounds, wobble=0.2)]
    assert not faster_at_last_look(entrants[1].timing, entrants[0].timing)
    found = outcome("new", entrants, "old")
    assert found.status == "chosen"
    assert found.reason == f"the better bet: {rounds} round{'s are' if rounds > 1 else ' is'} too few to prove it"


def test_a_choice_is_open_where_another_may_be_much_faster() -> None:
    entrants = [entrant("old", 1.0), entrant("unclear", 0.97, wobble=0.5), entrant("close", 0.97), entrant("slow", 2.0)]
    _, outcomes = choose(entrants, "old", calls=1)
    assert {name for name, each in outcomes.items() if each.open} == {"unclear"}


@pytest.mark.parametrize(("cost", "is_open"), [(0.96, True), (1.2, False)])
@pytest.mark.parametrize("rounds", [1, 2])
def test_few_rounds_settle_no_close_choice(rounds: int, cost: float, is_open: bool) -> None:
    """Samples that follow one another agree more than later ones will."""
    entrants = [entrant("old", 1.0, rounds=rounds), entrant("new", cost, rounds=rounds)]
    chosen, outcomes = choose(entrants, "old", calls=1)
    assert (chosen, outcomes["new"].open) == ("old", is_open)


def test_tie_with_the_winner_that_does_not_beat_the_incumbent() -> None:
    entrants = [entrant("old", 1.0), entrant("winner", 0.975), entrant("near", 0.985)]
    chosen, outcomes = choose(entrants, "old", calls=1)
    assert chosen == "winner"
    assert (outcomes["near"].status, outcomes["near"].reason) == ("tie", "not surely 2% faster than old")


def test_ratio_is_the_time_over_that_of_the_chosen_candidate() -> None:
    found = outcome("slow", [entrant("old", 1.0), entrant("slow", 3.0)])
    low, median, high = found.ratio_low, found.ratio, found.ratio_high
    assert median == pytest.approx(3.0, rel=0.01)
    assert low is not None and median is not None and high is not None  # noqa: PT018
    assert low < median < high
    own = outcome("old", [entrant("old", 1.0)])
    assert (own.status, own.reason, own.ratio, own.ratio_low, own.ratio_high) == ("chosen", "", 1.0, 1.0, 1.0)


# Trust: 3 % noise on every sample, candidates 0.5 % apart.


@pytest.mark.full
def test_picks_of_close_candidates_do_not_flip() -> None:
    for incumbent, (flips, changes, too_slow) in retuning.stability(Tuner(), CLOSE, 25).items():
        assert max(flips, changes) <= 0.01, incumbent
        assert too_slow == 0.0, incumbent


@thinned("machine", [{"noise": NOISE, "swing": 0.2}, {"noise": NOISE, "tail": 0.05}], 2)
def test_picks_on_a_disturbed_machine_do_not_flip(machine: dict[str, float]) -> None:
    tuner = Tuner(machine)
    assert set(retuning.independent(tuner, CLOSE, "c4", 30)) == {"c4"}
    assert set(retuning.independent(tuner, {"slow": 1.2, "fast": 1.0}, "slow", 30)) == {"fast"}


def test_picks_of_spread_candidates_lose_little() -> None:
    found = retuning.spreads(Tuner(), 50)
    assert found["mean_loss"] <= 0.01
    assert found["worst"] <= 0.04


@pytest.mark.full
def test_candidate_four_percent_faster_is_found() -> None:
    for cost_ms in (0.96, 0.95, 0.9):
        picks = retuning.independent(Tuner(), {"old": 1.0, "new": cost_ms}, "old", 30)
        assert picks.count("new") >= 0.95 * 30
