"""Intervals of medians and ratios, and which of two candidates is faster, by planted costs."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest

from attn_dispatch.tuning import intervals
from attn_dispatch.tuning.intervals import (
    Interval,
    Timing,
    faster_at_last_look,
    median_interval,
    ratio_interval,
    ratio_test,
    sure_interval,
)
from tests.support.pairwise import thinned
from tests.support.simulated import Machine

DRAWS = 300


def exact_coverage(n: int, rank: int) -> float:
    return 1.0 - 2.0 * sum(math.comb(n, k) for k in range(rank)) / 2.0**n


@pytest.mark.parametrize("n", range(6, 60))
def test_median_interval_is_the_shortest_with_exact_coverage(n: int) -> None:
    interval = median_interval(range(1, n + 1))
    rank = int(interval.low)
    assert interval.high == n + 1 - rank
    assert exact_coverage(n, rank) >= 0.95 > exact_coverage(n, rank + 1)


def test_median_interval_of_few_samples_is_their_range() -> None:
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == Interval(1.0, 5.0)
    assert median_interval([7.0]) == Interval(7.0, 7.0)


def test_median_interval_of_more_samples_than_a_float_has_powers() -> None:
    interval = median_interval(range(2001))
    # Normal approximation of the sign test: 1000 -+ 1.96 * sqrt(2001) / 2.
    assert (interval.low, interval.high) == pytest.approx((956, 1044), abs=1)


@pytest.mark.parametrize("samples_ms", [(), (1.0, math.nan)])
def test_timing_refuses_no_samples_and_nan(samples_ms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="samples_ms"):
        Timing(samples_ms, 1.0)


def test_ratio_interval_pairs_shared_rounds_only() -> None:
    baseline = Timing((1.0, 2.0, 4.0, 8.0), 1.0)
    assert ratio_interval(Timing((0.5, 1.0), 1.0), baseline) == Interval(0.5, 0.5)


def is_faster(costs_ms: dict[str, float], seed: int, margin: float = 0.02, **options: Any) -> bool:
    turns = Machine(0.03, seed).race(costs_ms, seed=seed, **options)
    return faster_at_last_look(turns.timings["new"], turns.timings["old"], margin)


@thinned("options", [{"max_rounds": 5}, {}, {"max_rounds": 25}, {"max_rounds": 2}, {"max_rounds": 1}], 2)
def test_equal_candidates_are_not_faster(options: dict[str, Any]) -> None:
    equal = {"new": 1.0, "old": 1.0}
    assert fmean(not is_faster(equal, seed, **options) for seed in range(DRAWS)) >= 0.99


@pytest.mark.parametrize(("cost_ms", "margin"), [(0.94, 0.0), (0.92, 0.02)])
def test_faster_candidate_is_found_in_25_rounds(cost_ms: float, margin: float) -> None:
    costs_ms = {"new": cost_ms, "old": 1.0}
    assert fmean(is_faster(costs_ms, seed, margin, min_rounds=25, max_rounds=25) for seed in range(DRAWS)) >= 0.95


def test_common_drift_cancels_out() -> None:
    for seed in range(50):
        machine = Machine(0.01, seed, slow_from_s=0.026)
        turns = machine.race({"new": 1.0, "old": 1.0, "better": 0.9}, min_rounds=25, max_rounds=25, seed=seed)
        new, old, better = (turns.timings[name] for name in ("new", "old", "better"))
        assert old.high_ms > 1.9 * old.low_ms
        assert not faster_at_last_look(new, old)
        assert not faster_at_last_look(old, new)
        assert faster_at_last_look(better, old)


@pytest.mark.parametrize(("rounds", "share_of_range"), [(4, 0.0), (5, 0.5), (6, 0.25), (10, 1 / 64), (11, 0.0)])
def test_sure_interval_of_few_rounds_is_widened(rounds: int, share_of_range: float) -> None:
    ratios = [0.9 + 0.1 * index / (rounds - 1) for index in range(rounds)]
    interval = sure_interval(Timing(tuple(ratios), 1.0), Timing((1.0,) * rounds, 1.0))
    wider = 0.1 * share_of_range
    assert (interval.low, interval.high) == pytest.approx((0.9 - wider, 1.0 + wider))


@pytest.mark.parametrize("n", range(11, 60))
def test_sure_interval_is_the_shortest_with_exact_coverage(n: int) -> None:
    interval = sure_interval(Timing(tuple(range(1, n + 1)), 1.0), Timing((1.0,) * n, 1.0))
    rank = int(interval.low)
    assert interval.high == n + 1 - rank
    assert exact_coverage(n, rank) >= 0.999 > exact_coverage(n, rank + 1)


VERDICTS: list[tuple[list[float], float, str]] = [
    ([0.97] * 11, 0.0, "faster"),
    ([0.97] * 5, 0.0, "open"),
    ([0.95] * 5, 0.0, "faster"),
    ([0.98] * 5, 0.0, "not"),
    ([0.979, 0.982] * 10, 0.0, "open"),
    ([0.979, 0.982] * 10, 0.0015, "close"),
    ([0.979, 0.982] * 5, 0.0015, "open"),
    ([*[0.979, 0.982] * 5, 0.979], 0.0015, "close"),  # the fewest rounds with such an interval
]


@pytest.mark.parametrize(("ratios", "resolution", "verdict"), VERDICTS)
def test_ratio_test(ratios: list[float], resolution: float, verdict: str) -> None:
    candidate, baseline = Timing(tuple(ratios), 1.0), Timing((1.0,) * len(ratios), 1.0)
    assert intervals.ratio_test(candidate, baseline, 0.02, resolution + 1e-12) == verdict
    assert (ratio_test(candidate, baseline) == "faster") == (verdict == "faster")


@thinned("noise", [0.03, 0.01, 0.1], 3)
def test_one_look_at_few_rounds_errs_seldom(noise: float) -> None:
    """At the worst place: a true ratio right at the margin."""
    machine = Machine(noise, seed=1)
    for rounds in (5, 7, 9, 12):
        options = {"min_rounds": rounds, "max_rounds": rounds}
        turns = (machine.race({"old": 1.0, "new": 0.98}, seed=seed, **options).timings for seed in range(1000))
        errors = fmean(ratio_test(each["new"], each["old"]) == "faster" for each in turns)
        # 0.0033 by Student's t at 5 rounds, less later on, and three standard errors of 1,000 draws.
        assert errors <= 0.0033 + 0.0055


@pytest.mark.parametrize(
    ("rounds", "guard"), [(1, 0.64), (3, 0.16), (4, 0.08), (5, 0.04), (7, 0.04), (8, 0.02), (11, 0.02)]
)
def test_last_look_requires_more_of_few_rounds(rounds: int, guard: float) -> None:
    baseline = Timing((1.0,) * rounds, 1.0)
    # Ratios apart, so that no interval is surely below the margin before there are 11.
    near, far = (tuple(1.0 - guard + step - 0.5 * (i % 2) for i in range(rounds)) for step in (0.001, -0.001))
    assert faster_at_last_look(Timing(far, 1.0), baseline)
    assert not faster_at_last_look(Timing(near, 1.0), baseline)


def test_last_look_requires_99_percent() -> None:
    # 12 rounds, one of which is no gain: ranks 2 and 11 bound the median with 0.9936, and 1 and 12 with 0.9995.
    candidate, baseline = Timing((0.9,) * 11 + (1.1,), 1.0), Timing((1.0,) * 12, 1.0)
    assert faster_at_last_look(candidate, baseline)
    assert ratio_test(candidate, baseline) != "faster"
