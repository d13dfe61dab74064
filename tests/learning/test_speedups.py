"""Speed-ups of token orders, from decisions, and the families of problems they are grouped by."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from attn_dispatch.learning.speedups import all_series, family_distance, family_of, family_title, speedups_of
from attn_dispatch.store.decision import Row
from tests.support.crossovers import HILBERT, LENGTHS, NATURAL, RESIDUE, crossing, grid, measured, planted

# --- from decisions to speed-ups --------------------------------------------------------------------------------------


def row(name: tuple[str, str], status: str, median_ms: float | None, **more: Any) -> Row:
    return Row(backend=name[0], order=name[1], status=status, median_ms=median_ms, **more)


def speedup(*rows: Row) -> tuple[float, float, float]:
    ((order, found),) = speedups_of(grid(1024), rows)
    assert order == "hilbert"
    return found.low, found.factor, found.high


PAIRED = {"ratio_low": 1.8, "ratio": 2.0, "ratio_high": 2.5}
TIMES = {"low_ms": 0.9, "high_ms": 1.2}


def test_the_ratio_to_the_chosen_one_is_the_interval() -> None:
    assert speedup(row(HILBERT, "chosen", 1.0), row(NATURAL, "slower", 2.1, **PAIRED)) == (1.8, 2.0, 2.5)
    found = speedup(row(NATURAL, "chosen", 1.0), row(HILBERT, "slower", 2.1, **PAIRED))
    assert found == pytest.approx((0.4, 0.5, 1 / 1.8))


def test_without_a_ratio_the_bounds_are_the_extreme_ratios() -> None:
    natural = row(NATURAL, "slower", 1.0, low_ms=0.9, high_ms=1.2)
    hilbert = row(HILBERT, "tie", 0.5, low_ms=0.4, high_ms=0.6, **PAIRED)
    third = row(("other", "residue"), "chosen", 0.1)
    found = dict(speedups_of(grid(1024), (natural, hilbert, third)))["hilbert"]
    assert (found.low, found.factor, found.high) == pytest.approx((0.9 / 0.6, 2.0, 1.2 / 0.4))
    damaged = row(NATURAL, "slower", 1.0, **TIMES, **{**PAIRED, "ratio_low": 9.0})
    assert speedup(damaged, row(HILBERT, "chosen", 1.0, **TIMES)) == pytest.approx((0.9 / 1.2, 1.0, 1.2 / 0.9))


def test_the_fastest_of_each_order_counts() -> None:
    rows = [
        row(("slow", "natural"), "slower", 9.0, **TIMES),
        row(("sdpa", "natural"), "slower", 1.0, **TIMES),
        row(("wrong", "natural"), "incorrect", 0.1, **TIMES),
        row(("slow", "hilbert"), "slower", 3.0, **TIMES),
        row(("tiles", "hilbert"), "chosen", 0.5, **TIMES),
    ]
    assert speedup(*rows)[1] == speedup(*reversed(rows))[1] == 2.0


@pytest.mark.parametrize("rounds", range(1, 12))
def test_few_rounds_widen_the_interval(rounds: int) -> None:
    many = speedup(row(HILBERT, "chosen", 1.0, rounds=99), row(NATURAL, "slower", 2.0, **PAIRED, rounds=99))
    few = speedup(row(HILBERT, "chosen", 1.0, rounds=99), row(NATURAL, "slower", 2.0, **PAIRED, rounds=rounds))
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
def test_orders_not_both_timed_are_skipped(rows: list[Row]) -> None:
    assert list(speedups_of(grid(1024), rows)) == []


def test_one_length_is_needed() -> None:
    rows = (row(NATURAL, "slower", 2.0), row(HILBERT, "chosen", 1.0))
    assert len(list(speedups_of(grid(64), rows))) == 1
    for odd in ({"q_len": 1}, {"q_len": 0, "k_len": 0}, {"q_len": "x", "k_len": "x"}, {"q_len": None}):
        assert list(speedups_of({**grid(64), **odd}, rows)) == []


def test_damaged_decisions_are_skipped() -> None:
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
    assert [(each.order, len(each.speedups)) for each in all_series([*decisions, residue])] == [
        ("hilbert", 10),
        ("residue", 1),
    ]


def test_family_titles() -> None:
    assert family_title(family_of(grid(64))) == "Neighborhood(window=13,13)"
    pattern = {"kind": "Neighborhood", "grid": (8, 8), "window": (5, 3), "dilation": (2, 1), "edges": "shift"}
    title = "Neighborhood(window=5,3 dilation=2,1 edges=shift causal=1,0)"
    assert family_title(family_of({"pattern": {**pattern, "is_causal": (True, False)}})) == title
    assert family_title({"kind": "Window", "left": None, "right": 0}) == "Window(left=open right=0)"
    dilated = {"kind": "Dilated", "segment_lengths": [64, 128], "dilation_rates": [1, 2], "is_causal": True}
    title = "Dilated(segment_lengths=64,128 dilation_rates=1,2 causal)"
    assert family_title({**dilated, "offsets": "mod", "heads": "all"}) == title


def test_distances_between_families() -> None:
    assert family_distance({"window": [7, 7]}, {"window": [7, 7]}) == 0
    assert family_distance({"window": [7, 7]}, {"window": [15, 15]}) == pytest.approx(1)
    assert family_distance({"window": [7, 7]}, {"window": [7, 31]}) == pytest.approx(math.sqrt(2))
    assert family_distance({"segment_lengths": [1, 3]}, {"segment_lengths": [1]}) == math.inf
    assert family_distance({"left": None, "right": 0}, {"left": 255, "right": 0}) > 8
    assert family_distance({"kind": "Dense"}, {"kind": "Dense"}) == 0
