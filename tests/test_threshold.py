"""From which length on an order of tokens pays: planted gains, what is passed over, and what a call may go by."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from attn_dispatch.choice import Entrant, choose
from attn_dispatch.gains import Gain, all_series, apart, family_of, family_title, gains_of
from attn_dispatch.intervals import Timing
from attn_dispatch.learned import Evidence
from attn_dispatch.store import Decision, Row
from attn_dispatch.threshold import Threshold, allowed, decide_order, threshold, threshold_of
from tools.planted import decision, problem_at

LENGTHS = tuple(256 << step for step in range(10))
NEVER_SEEDS = 200
ROUNDS = 25
NOISE = 0.03  #: of one sample
NATURAL, HILBERT, RESIDUE = ("tiles", "natural"), ("tiles", "hilbert"), ("tiles", "residue")
FAMILY = {"kind": "Neighborhood", "window": [13, 13]}

Curve = Callable[[int], float]


def grid(tokens: int, window: int = 13, **more: Any) -> dict[str, Any]:
    pattern = {"kind": "Neighborhood", "grid": [1, tokens], "window": [window, window], "dilation": [1, 1]}
    return problem_at(tokens, **{"pattern": {**pattern, "is_causal": [False, False], "edges": "clip"}, **more})


@cache
def samples(seed: int, tokens: int, name: str) -> tuple[float, ...]:
    """Of a candidate that takes 1 ms."""
    chance = random.Random(f"{seed} {tokens} {name}")
    return tuple(math.exp(chance.gauss(0, NOISE)) for _ in range(ROUNDS))


def measured(tokens: int, times: Mapping[tuple[str, str], float], seed: int = 0, **more: Any) -> Decision:
    """The decision of a race with the natural candidate as the incumbent: intervals, ratios and verdicts as they are
    stored.
    """
    names = {f"{backend} {order}": (backend, order) for backend, order in times}
    timings = {
        text: Timing(tuple(times[name] * x for x in samples(seed, tokens, text)), 1.0) for text, name in names.items()
    }
    entrants = [Entrant(text, timing, rank, 0, 0.0) for rank, (text, timing) in enumerate(timings.items())]
    chosen, outcomes = choose(entrants, "tiles natural", calls=1000)
    made = decision(grid(tokens, **more), times)
    rows = [_row(*names[text], timings[text], outcomes[text]) for text in names]
    return replace(made, choice=names[chosen][0], order=names[chosen][1], candidates=tuple(rows))


def _row(backend: str, order: str, timing: Timing, outcome: Any) -> Row:
    return Row(
        backend=backend,
        order=order,
        status=outcome.status,
        median_ms=timing.median_ms,
        low_ms=timing.low_ms,
        high_ms=timing.high_ms,
        rounds=len(timing.samples_ms),
        ratio=outcome.ratio,
        ratio_low=outcome.ratio_low,
        ratio_high=outcome.ratio_high,
    )


def planted(gain: Curve, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Decision]:
    return [measured(n, {NATURAL: gain(n), HILBERT: 1.0}, seed) for n in lengths]


def learned(decisions: list[Decision]) -> Threshold | None:
    (series,) = all_series(decisions)
    return threshold_of(series)


def crossing(tokens: int, slope: float = 0.25) -> Curve:
    return lambda n: (n / tokens) ** slope


def points(*gains: tuple[int, float] | tuple[int, float, float, float]) -> list[Gain]:
    """Lengths with gains known to within 1 %, or with the interval given."""
    return [Gain(*each) if len(each) == 4 else Gain(*each, 0.99 * each[1], 1.01 * each[1]) for each in gains]


def told(*gains: tuple[int, float] | tuple[int, float, float, float]) -> tuple[int | None, int | None, int | None]:
    found = threshold("hilbert", FAMILY, points(*gains))
    assert found is not None
    return found.tokens, found.low, found.high


# --- planted gains, with noise ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("gain", [0.5, 0.9, 1.0])
def test_what_never_wins_is_never_chosen(gain: float) -> None:
    for seed in range(NEVER_SEEDS):
        found = learned(planted(lambda n: gain, seed))
        assert found is not None
        assert (found.tokens, found.high, found.low) == (None, None, LENGTHS[-1])


def test_what_always_wins_does_from_the_shortest_on() -> None:
    for seed in range(20):
        found = learned(planted(lambda n: 1.2, seed))
        assert found is not None
        assert (found.tokens, found.low, found.high) == (LENGTHS[0], None, LENGTHS[0])


def test_a_win_that_does_not_last_is_none() -> None:
    for seed in range(20):
        found = learned(planted(lambda n: 1.5 if n < 10_000 else 0.8, seed))
        assert found is not None
        assert found.tokens is None


def test_no_length_measured_is_slower_for_it_by_more_than_noise() -> None:
    """Wherever the order is taken, it was not seen to lose."""
    for seed in range(20):
        chance = random.Random(seed)
        gains = {n: math.exp(chance.gauss(0.05, 0.15)) for n in LENGTHS}
        found = learned(planted(gains.__getitem__, seed))
        assert found is not None
        assert all(gains[n] > 0.97 for n in LENGTHS if found.pays(n))


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_between_two_lengths_the_gain_is_straight() -> None:
    assert told((1024, 0.8), (4096, 1 / 0.8)) == (2048, 1024, 4096)
    assert told((1000, 0.5), (8000, 2**0.5)) == (4000, 1000, 8000)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        # a length that is open does not move the threshold, one where it loses moves it past
        (((1, 1.5), (2, 1.2, 0.98, 1.3), (4, 1.5)), (1, None, 1)),
        (((1, 1.5), (2, 1.0, 0.979, 1.3), (4, 1.5)), (3, 2, 4)),
        (((1, 1.5), (2, 0.99, 0.985, 0.999), (4, 1.5)), (3, 2, 4)),
        (((1, 1.5), (2, 0.9), (4, 1.5), (8, 1.0, 0.99, 1.01), (16, 1.5)), (3, 2, 4)),
        # never: the longest does not pay, or nothing from there on does by more than 2 %
        (((1, 1.5), (2, 1.5), (4, 1.1, 1.0, 1.2)), (None, 4, None)),
        (((1, 0.9), (2, 1.02, 1.01, 1.04), (4, 1.02, 1.02, 1.03)), (None, 4, None)),
        (((1, 0.9), (2, 1.02, 1.01, 1.04), (4, 1.03, 1.021, 1.04)), (2, 1, 2)),
        (((1, 1.5), (2, 0.9), (4, 1.015, 1.01, 1.02)), (None, 4, None)),
        # open lengths before the first that pays: it may lie among them
        (((100, 0.9), (1000, 0.99, 0.985, 1.01), (10_000, 1.2)), (1128, 100, 10_000)),
        (((100, 0.9), (1000, 1.01, 0.985, 1.03), (10_000, 1.2)), (820, 100, 10_000)),
        (((1000, 1.01, 0.99, 1.03), (10_000, 1.2)), (1136, 1000, 10_000)),
        # the last time that the gain rises past 1
        (((100, 0.9), (1000, 1.01, 0.985, 1.03), (3000, 0.99, 0.985, 1.01), (10_000, 1.2)), (3195, 100, 10_000)),
        # no crossing of the gain itself: that of its lower end
        (((100, 1.5, 0.5, 3.0), (10_000, 2.5, 2.0, 3.0)), (1000, 100, 10_000)),
    ],
)
def test_where_the_threshold_lies(gains: Any, expected: tuple[int | None, int | None, int | None]) -> None:
    assert told(*gains) == expected


def test_two_lengths_are_needed() -> None:
    assert threshold("hilbert", FAMILY, []) is None
    assert threshold("hilbert", FAMILY, points((1024, 2.0), (1024, 1.9))) is None
    assert told((1024, 2.0), (1025, 2.0)) == (1024, None, 1024)


def test_a_length_measured_often_is_judged_by_its_worst() -> None:
    assert told((1, 0.9), (2, 1.5), (2, 1.4), (4, 1.5)) == told((1, 0.9), (2, 1.45), (4, 1.5))
    assert told((1, 0.9), (2, 1.5), (2, 0.95), (4, 1.5))[1:] == (2, 4)
    assert told((1, 1.5), (4, 1.5), (4, 0.9))[0] is None
    once = points((1, 0.9), (2, 1.1), (4, 1.5))
    assert threshold("hilbert", FAMILY, once * 3).tokens == threshold("hilbert", FAMILY, once).tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_damaged_points_are_passed_over(bad: float) -> None:
    good = points((1024, 0.8), (4096, 1.25))
    assert threshold("hilbert", FAMILY, [*good, Gain(8192, bad, bad, bad)]) is not None
    with_bad = threshold("hilbert", FAMILY, [*good, Gain(8192, bad, 0.5, 0.6), Gain(2048, 1.0, bad, 1.0)])
    assert with_bad is not None
    assert (with_bad.tokens, with_bad.low, with_bad.high) == (2048, 1024, 4096)
    assert list(with_bad.points) == good


def some_points() -> st.SearchStrategy[list[Gain]]:
    value = st.floats(0.5, 2.0)
    made = st.builds(
        lambda n, *each: Gain(n, *(sorted(each)[i] for i in (1, 0, 2))), st.integers(1, 9), value, value, value
    )
    return st.lists(made, max_size=12)


@given(some_points(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_order_of_points_does_not_matter(given_points: list[Gain], chance: random.Random) -> None:
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


# --- from decisions to gains ------------------------------------------------------------------------------------------


def row(name: tuple[str, str], status: str, median_ms: float | None, **more: Any) -> Row:
    return Row(backend=name[0], order=name[1], status=status, median_ms=median_ms, **more)


def gain(*rows: Row) -> tuple[float, float, float]:
    ((order, found),) = gains_of(grid(1024), rows)
    assert order == "hilbert"
    return found.low, found.gain, found.high


PAIRED = {"ratio_low": 1.8, "ratio": 2.0, "ratio_high": 2.5}
TIMES = {"low_ms": 0.9, "high_ms": 1.2}


def test_the_ratio_to_the_chosen_one_is_the_interval() -> None:
    assert gain(row(HILBERT, "chosen", 1.0), row(NATURAL, "slower", 2.1, **PAIRED)) == (1.8, 2.0, 2.5)
    found = gain(row(NATURAL, "chosen", 1.0), row(HILBERT, "slower", 2.1, **PAIRED))
    assert found == pytest.approx((0.4, 0.5, 1 / 1.8))


def test_without_a_ratio_the_ends_are_the_worst_and_the_best() -> None:
    natural = row(NATURAL, "slower", 1.0, low_ms=0.9, high_ms=1.2)
    hilbert = row(HILBERT, "tie", 0.5, low_ms=0.4, high_ms=0.6, **PAIRED)
    third = row(("other", "residue"), "chosen", 0.1)
    found = dict(gains_of(grid(1024), (natural, hilbert, third)))["hilbert"]
    assert (found.low, found.gain, found.high) == pytest.approx((0.9 / 0.6, 2.0, 1.2 / 0.4))
    damaged = row(NATURAL, "slower", 1.0, **TIMES, **{**PAIRED, "ratio_low": 9.0})
    assert gain(damaged, row(HILBERT, "chosen", 1.0, **TIMES)) == pytest.approx((0.9 / 1.2, 1.0, 1.2 / 0.9))


def test_the_best_of_each_order_counts() -> None:
    rows = [
        row(("slow", "natural"), "slower", 9.0, **TIMES),
        row(("sdpa", "natural"), "slower", 1.0, **TIMES),
        row(("wrong", "natural"), "incorrect", 0.1, **TIMES),
        row(("slow", "hilbert"), "slower", 3.0, **TIMES),
        row(("tiles", "hilbert"), "chosen", 0.5, **TIMES),
    ]
    assert gain(*rows)[1] == gain(*reversed(rows))[1] == 2.0


def test_a_tie_is_taken_by_the_one_whose_ratios_are_known() -> None:
    rows = [
        row(("a", "natural"), "tie", 1.0),
        row(("b", "natural"), "chosen", 1.0),
        row(HILBERT, "slower", 2.0, **PAIRED),
    ]
    assert gain(*rows) == gain(*reversed(rows)) == pytest.approx((0.4, 0.5, 1 / 1.8))


@pytest.mark.parametrize("rounds", range(1, 12))
def test_few_rounds_say_little(rounds: int) -> None:
    many = gain(row(HILBERT, "chosen", 1.0, rounds=99), row(NATURAL, "slower", 2.0, **PAIRED, rounds=99))
    few = gain(row(HILBERT, "chosen", 1.0, rounds=99), row(NATURAL, "slower", 2.0, **PAIRED, rounds=rounds))
    assert (few == many) == (rounds >= 8)
    assert few[0] <= many[0]
    assert few[2] >= many[2]
    assert (few[0] > 1.3) == (rounds >= 2)


@pytest.mark.parametrize(
    "rows",
    [
        [row(NATURAL, "chosen", 1.0)],
        [row(HILBERT, "chosen", 1.0)],
        [row(NATURAL, "chosen", None), row(HILBERT, "slower", 1.0)],
        [row(NATURAL, "chosen", 1.0), row(HILBERT, "slower", None)],
        [row(NATURAL, "chosen", 1.0), row(HILBERT, "failed", 1.0)],
        [row(NATURAL, "not_measured", 1.0), row(HILBERT, "chosen", 1.0)],
        [row(NATURAL, "chosen", math.nan), row(HILBERT, "slower", 1.0)],
        [row(NATURAL, "chosen", 1.0), row(HILBERT, "slower", math.inf)],
        [row(NATURAL, "chosen", 0.0), row(HILBERT, "slower", 1.0)],
    ],
)
def test_what_was_not_timed_in_both_orders_is_passed_over(rows: list[Row]) -> None:
    assert list(gains_of(grid(1024), rows)) == []


def test_one_length_is_needed() -> None:
    rows = (row(NATURAL, "slower", 2.0), row(HILBERT, "chosen", 1.0))
    assert len(list(gains_of(grid(64), rows))) == 1
    for odd in ({"q_len": 1}, {"q_len": 0, "k_len": 0}, {"q_len": "x", "k_len": "x"}, {"q_len": None}):
        assert list(gains_of({**grid(64), **odd}, rows)) == []


def test_damaged_decisions_are_passed_over() -> None:
    good = planted(crossing(3000))
    broken = [replace(good[0], problem={}, group=""), replace(good[1], problem={"pattern": 3})]
    pattern = {**good[2].problem["pattern"], "window": ["x"]}
    broken += [replace(good[2], problem={**good[2].problem, "pattern": pattern})]
    odd = [replace(good[2], candidates=(), key="0" * 20)]
    assert all_series([*broken, *odd, *good]) == all_series(good)


# --- families ---------------------------------------------------------------------------------------------------------


CHANGES: tuple[dict[str, Any], ...] = ({"window": 7}, {"dtype": "bfloat16"}, {"head_dim": 128}, {"needs_grad": True})


def test_a_family_shares_all_but_the_length() -> None:
    decisions = [measured(n, {NATURAL: 2.0, HILBERT: 1.0}) for n in LENGTHS]
    same = [measured(n, {NATURAL: 2.0, HILBERT: 1.0}, heads=8, batch=2) for n in LENGTHS]
    assert len(all_series(decisions + same)) == 1
    others = [measured(512, {NATURAL: 2.0, HILBERT: 1.0}, **more) for more in CHANGES]
    assert len(all_series(decisions + others)) == 5
    elsewhere = [replace(each, silicon="cpu-other") for each in decisions]
    assert [each.silicon for each in all_series(decisions + elsewhere)] == [decisions[0].silicon, "cpu-other"]
    residue = measured(512, {NATURAL: 2.0, HILBERT: 1.0, RESIDUE: 1.0})
    assert [(each.order, len(each.gains)) for each in all_series([*decisions, residue])] == [
        ("hilbert", 11),
        ("residue", 1),
    ]


def test_a_family_for_a_person() -> None:
    assert family_title(family_of(grid(64))) == "Neighborhood(window=13,13)"
    pattern = {"kind": "Neighborhood", "grid": (8, 8), "window": (5, 3), "dilation": (2, 1), "edges": "shift"}
    title = "Neighborhood(window=5,3 dilation=2,1 edges=shift causal=1,0)"
    assert family_title(family_of({"pattern": {**pattern, "is_causal": (True, False)}})) == title
    assert family_title({"kind": "Window", "left": None, "right": 0}) == "Window(left=open right=0)"
    dilated = {"kind": "Dilated", "segment_lengths": [64, 128], "dilation_rates": [1, 2], "is_causal": True}
    title = "Dilated(segment_lengths=64,128 dilation_rates=1,2 causal)"
    assert family_title({**dilated, "offsets": "mod", "heads": "all"}) == title


def test_distances_between_families() -> None:
    assert apart({"window": [7, 7]}, {"window": [7, 7]}) == 0
    assert apart({"window": [7, 7]}, {"window": [15, 15]}) == pytest.approx(1)
    assert apart({"window": [7, 7]}, {"window": [7, 31]}) == pytest.approx(math.sqrt(2))
    assert apart({"segment_lengths": [1, 3]}, {"segment_lengths": [1]}) == math.inf
    assert apart({"left": None, "right": 0}, {"left": 255, "right": 0}) > 8
    assert apart({"kind": "Dense"}, {"kind": "Dense"}) == 0


# --- what a call goes by ----------------------------------------------------------------------------------------------


def made(order: str, *gains: tuple[int, float]) -> Threshold | None:
    return threshold(order, FAMILY, points(*gains))


def test_the_order_at_a_length() -> None:
    hilbert = made("hilbert", (1024, 0.8), (4096, 1.25), (16_384, 2.0))
    residue = made("residue", (1024, 1.1), (4096, 1.5), (16_384, 1.6))
    never, unknown = made("hilbert", (1024, 0.8), (4096, 0.9)), made("hilbert", (1024, 2.0))
    assert [decide_order([hilbert], n) for n in (1, 2047, 2048, 1 << 30)] == [
        "natural",
        "natural",
        "hilbert",
        "hilbert",
    ]
    for both in ([hilbert, residue], [residue, hilbert]):
        assert [decide_order(both, n) for n in (512, 1500, 4096, 16_384)] == [
            "natural",
            "residue",
            "residue",
            "hilbert",
        ]
    assert decide_order([never, unknown, None], 1 << 30) == "natural"
    assert decide_order([], 1) == "natural"


def test_the_gain_between_lengths() -> None:
    found = made("hilbert", (1024, 0.8), (4096, 1.25))
    assert found is not None
    expected = {1: 0.8, 1024: 0.8, 2048: 1.0, 4096: 1.25, 1 << 20: 1.25}
    assert {n: pytest.approx(found.gain_at(n)) for n in expected} == expected


def test_confidence_is_least_at_the_threshold() -> None:
    found = made("hilbert", (1024, 0.8), (4096, 1.25))
    assert found is not None
    assert [found.confidence(n) for n in (16, 1024, 2048, 4096, 1 << 20)] == [1, 1, 0.5, 1, 1]
    assert [found.confidence(n) for n in (1448, 2896)] == pytest.approx([0.75, 0.75], abs=0.001)
    always, never = made("hilbert", (1024, 2.0), (4096, 2.0)), made("hilbert", (1024, 0.5), (4096, 0.5))
    assert always is not None
    assert never is not None
    assert [always.confidence(n) for n in (512, 1024, 1 << 20)] == [0.5, 1, 1]
    assert [never.confidence(n) for n in (1, 4096, 8192, 16_384, 1 << 20)] == [1, 1, 0.75, 0.5, 0.5]


def test_allowed_above_the_threshold_only() -> None:
    decisions = planted(crossing(3000, 0.5))
    for evidence in (decisions, Evidence(decisions)):
        assert allowed(grid(1500), evidence) == {"natural"}
        assert allowed(grid(6000), evidence) == {"natural", "hilbert"}
        assert allowed(grid(1 << 22, batch=4, heads=16), evidence) == {"natural", "hilbert"}
    assert allowed(grid(6000), decisions[-1:]) == {"natural"}
    assert allowed(grid(6000), []) == {"natural"}
    assert allowed(grid(6000), planted(lambda n: 0.8)) == {"natural"}
    assert allowed({**grid(6000), "q_len": 1}, decisions) == {"natural"}
    assert allowed(grid(6000, dtype="bfloat16"), decisions) == {"natural"}


def test_a_family_that_was_not_measured_goes_by_the_nearest() -> None:
    wide = [measured(n, {NATURAL: 2.0, HILBERT: 1.0}, window=31) for n in LENGTHS]
    narrow = [measured(n, {NATURAL: 0.5, HILBERT: 1.0}, window=15) for n in LENGTHS]
    for decisions in (wide + narrow, narrow + wide):
        assert allowed(grid(4096, window=27), decisions) == {"natural", "hilbert"}
        assert allowed(grid(4096, window=17), decisions) == {"natural"}
        assert allowed(grid(4096, window=61), decisions) == {"natural", "hilbert"}
        assert allowed(grid(4096, window=127), decisions) == {"natural"}
    one_length = [measured(4096, {NATURAL: 2.0, HILBERT: 1.0}, window=17)]
    assert allowed(grid(4096, window=17), narrow + one_length) == {"natural"}


def test_allowed_needs_a_problem() -> None:
    with pytest.raises(KeyError):
        allowed({}, [])
