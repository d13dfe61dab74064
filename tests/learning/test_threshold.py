"""Thresholds of token orders: synthetic speed-ups, invalid points, and the orders allowed for a call."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_dispatch.learning.predict import Evidence
from attn_dispatch.learning.speedups import Speedup, all_series
from attn_dispatch.learning.thresholds import Threshold, allowed_orders, threshold, threshold_of
from attn_dispatch.store.decision import Decision
from tests.support.crossovers import HILBERT, LENGTHS, NATURAL, crossing, grid, measured, planted

FAMILY = {"kind": "Neighborhood", "window": [13, 13]}


def learned(decisions: list[Decision]) -> Threshold | None:
    (series,) = all_series(decisions)
    return threshold_of(series)


def points(*factors: tuple[int, float] | tuple[int, float, float, float]) -> list[Speedup]:
    """Speed-ups with an interval of 1 %, or with the interval given."""
    return [Speedup(*each) if len(each) == 4 else Speedup(*each, 0.99 * each[1], 1.01 * each[1]) for each in factors]


def limits(*factors: tuple[int, float] | tuple[int, float, float, float]) -> tuple[int | None, int | None, int | None]:
    found = threshold("hilbert", FAMILY, points(*factors))
    assert found is not None
    return found.tokens, found.low, found.high


@pytest.mark.parametrize("tokens", [1000, 3000, 10_000, 40_000])
@pytest.mark.parametrize("slope", [0.15, 0.5])
def test_planted_crossovers_are_found_within_an_octave(tokens: int, slope: float) -> None:
    for seed in range(20):
        found = learned(planted(crossing(tokens, slope), seed))
        assert found is not None
        assert found.tokens is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.tokens <= found.high
        assert abs(math.log2(found.tokens / tokens)) < 1


def test_no_measured_length_becomes_slower_by_more_than_noise() -> None:
    """Where the order pays, its true speed-up is above 0.97."""
    for seed in range(20):
        chance = random.Random(seed)
        factors = {n: math.exp(chance.gauss(0.05, 0.15)) for n in LENGTHS}
        found = learned(planted(factors.__getitem__, seed))
        assert found is not None
        assert all(factors[n] > 0.97 for n in LENGTHS if found.pays(n))


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        # POSSIBLE lengths do not move the threshold; it is above those with NONE
        (((1, 1.5), (2, 1.2, 0.98, 1.3), (4, 1.5)), (1, None, 1)),
        (((1, 1.5), (2, 1.0, 0.979, 1.3), (4, 1.5)), (3, 2, 4)),
        (((1, 1.5), (2, 0.99, 0.985, 0.999), (4, 1.5)), (3, 2, 4)),
        (((1, 1.5), (2, 0.9), (4, 1.5), (8, 1.0, 0.99, 1.01), (16, 1.5)), (3, 2, 4)),
        # never: the longest does not pay, or no length from the threshold on pays by more than 2 %
        (((1, 1.5), (2, 1.5), (4, 1.1, 1.0, 1.2)), (None, 4, None)),
        (((1, 0.9), (2, 1.02, 1.01, 1.04), (4, 1.02, 1.02, 1.03)), (None, 4, None)),
        (((1, 0.9), (2, 1.02, 1.01, 1.04), (4, 1.03, 1.021, 1.04)), (2, 1, 2)),
        (((1, 1.5), (2, 0.9), (4, 1.015, 1.01, 1.02)), (None, 4, None)),
        # POSSIBLE lengths before the first that pays: the threshold may be among them
        (((100, 0.9), (1000, 0.99, 0.985, 1.01), (10_000, 1.2)), (1128, 100, 10_000)),
        (((100, 0.9), (1000, 1.01, 0.985, 1.03), (10_000, 1.2)), (820, 100, 10_000)),
        (((1000, 1.01, 0.99, 1.03), (10_000, 1.2)), (1136, 1000, 10_000)),
        # the last crossing counts
        (((100, 0.9), (1000, 1.01, 0.985, 1.03), (3000, 0.99, 0.985, 1.01), (10_000, 1.2)), (3195, 100, 10_000)),
        # the factor does not cross 1: its lower bound does
        (((100, 1.5, 0.5, 3.0), (10_000, 2.5, 2.0, 3.0)), (1000, 100, 10_000)),
    ],
)
def test_thresholds_of_given_intervals(factors: Any, expected: tuple[int | None, int | None, int | None]) -> None:
    assert limits(*factors) == expected


def test_two_lengths_are_needed() -> None:
    assert threshold("hilbert", FAMILY, []) is None
    assert threshold("hilbert", FAMILY, points((1024, 2.0), (1024, 1.9))) is None
    assert limits((1024, 2.0), (1025, 2.0)) == (1024, None, 1024)


def test_a_length_measured_twice_counts_by_its_least_benefit() -> None:
    assert limits((1, 0.9), (2, 1.5), (2, 1.4), (4, 1.5)) == limits((1, 0.9), (2, 1.45), (4, 1.5))
    assert limits((1, 0.9), (2, 1.5), (2, 0.95), (4, 1.5))[1:] == (2, 4)
    assert limits((1, 1.5), (4, 1.5), (4, 0.9))[0] is None
    once = points((1, 0.9), (2, 1.1), (4, 1.5))
    assert threshold("hilbert", FAMILY, once * 3).tokens == threshold("hilbert", FAMILY, once).tokens  # type: ignore[union-attr]


def some_points() -> st.SearchStrategy[list[Speedup]]:
    value = st.floats(0.5, 2.0)
    made = st.builds(
        lambda n, *each: Speedup(n, *(sorted(each)[i] for i in (1, 0, 2))), st.integers(1, 9), value, value, value
    )
    return st.lists(made, max_size=12)


@given(some_points(), st.randoms(use_true_random=False))
def test_the_order_of_points_does_not_matter(given_points: list[Speedup], chance: random.Random) -> None:
    found = threshold("hilbert", FAMILY, given_points)
    shuffled = chance.sample(given_points, len(given_points))
    assert threshold("hilbert", FAMILY, shuffled) == found
    if found is None or found.tokens is None:
        return
    above = [point for point in given_points if point.tokens >= found.tokens]
    assert above
    assert all(point.low > 1 or (point.low >= 0.98 and point.high >= 1) for point in above)
    assert found.high is not None
    assert (found.low or 0) < found.tokens <= found.high


# --- orders allowed for a call ----------------------------------------------------------------------------------------


def test_allowed_above_the_threshold_only() -> None:
    decisions = planted(crossing(3000, 0.5))
    for evidence in (decisions, Evidence(decisions)):
        assert allowed_orders(grid(1500), evidence) == {"natural"}
        assert allowed_orders(grid(6000), evidence) == {"natural", "hilbert"}
        assert allowed_orders(grid(1 << 22, batch=4, heads=16), evidence) == {"natural", "hilbert"}
    assert allowed_orders(grid(6000), decisions[-1:]) == {"natural"}
    assert allowed_orders(grid(6000), []) == {"natural"}
    assert allowed_orders(grid(6000), planted(lambda n: 0.8)) == {"natural"}
    assert allowed_orders({**grid(6000), "q_len": 1}, decisions) == {"natural"}
    assert allowed_orders(grid(6000, dtype="bfloat16"), decisions) == {"natural"}


def test_an_unmeasured_family_takes_the_threshold_of_the_nearest() -> None:
    wide = [measured(n, {NATURAL: 2.0, HILBERT: 1.0}, window=31) for n in LENGTHS]
    narrow = [measured(n, {NATURAL: 0.5, HILBERT: 1.0}, window=15) for n in LENGTHS]
    for decisions in (wide + narrow, narrow + wide):
        assert allowed_orders(grid(4096, window=27), decisions) == {"natural", "hilbert"}
        assert allowed_orders(grid(4096, window=17), decisions) == {"natural"}
        assert allowed_orders(grid(4096, window=61), decisions) == {"natural", "hilbert"}
        assert allowed_orders(grid(4096, window=127), decisions) == {"natural"}
    one_length = [measured(4096, {NATURAL: 2.0, HILBERT: 1.0}, window=17)]
    assert allowed_orders(grid(4096, window=17), narrow + one_length) == {"natural"}


def test_allowed_needs_a_problem() -> None:
    with pytest.raises(KeyError):
        allowed_orders({}, [])
