"""Distances between problems, buckets of sizes, group titles, and the kriging estimate."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from attn_dispatch.learning.features import (
    KV_GROUPS_DISTANCE,
    LSE_DISTANCE,
    OF_DATA_DISTANCES,
    PRECISION_DISTANCE,
    STRIDES_DISTANCE,
    bucket,
    features,
)
from attn_dispatch.learning.kriging import covariance, covariances, estimate
from attn_dispatch.spec.groups import SIZES, group_of, title
from tests.support.made_up import PROBLEM, problem_at

DILATED: dict[str, Any] = {"kind": "Dilated", "dilation_rates": [1, 2], "is_causal": True}
DILATED |= {"segment_lengths": [512, 1024], "offsets": "mod", "heads": "all"}
WINDOW: dict[str, Any] = {"kind": "Window", "left": 255, "right": 0}
FORM: dict[str, Any] = {"kind": "BlocksForm", "size": [64, 64], "density": -4, "imbalance": 1}
GRID: dict[str, Any] = {"kind": "Neighborhood", "grid": [32, 32], "window": [13, 13], "dilation": [1, 1]}
GRID |= {"is_causal": [False, False], "edges": "clip"}


def distance(**changes: Any) -> float:
    """Octaves between a problem and the same with changes."""
    return math.dist(features(PROBLEM), features({**PROBLEM, **changes}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),
        ({"q_len": 2048}, 1),
        ({"q_len": 2048, "k_len": 512}, math.sqrt(2)),
        ({"batch": 8}, 3),
        ({"batch": 4, "heads": 1, "kv_heads": 1}, 0),
        ({"kv_heads": 1}, 2 * KV_GROUPS_DISTANCE),
        ({"return_lse": True}, LSE_DISTANCE),
        ({"matmul_precision": "high"}, PRECISION_DISTANCE),
        ({"strides": ["bnhd", "nhd", "bnh"]}, 0),
        ({"strides": ["bhnd", "bnhd", "bnhd"]}, STRIDES_DISTANCE / 3),
        ({"strides": ["bnhd+gaps+unaligned"] * 3}, STRIDES_DISTANCE * math.sqrt(2)),
    ],
    ids=str,
)
def test_distances(changes: dict[str, Any], expected: float) -> None:
    assert distance(**changes) == pytest.approx(expected)


def test_sizes_of_a_pattern_weigh_as_one() -> None:
    for pattern in (DILATED, GRID):
        doubled = {name: [2 * size for size in pattern[name]] for name in SIZES if name in pattern}
        one, other = (features({**PROBLEM, "pattern": {**pattern, **more}}) for more in ({}, doubled))
        assert math.dist(one, other) == pytest.approx(1)


def test_density_and_imbalance_are_sizes_where_they_are_known() -> None:
    def of(**changes: Any) -> dict[str, Any]:
        return {**PROBLEM, "pattern": {**FORM, **changes}}

    def away(**changes: Any) -> float:
        return math.dist(features(of()), features(of(**changes)))

    assert away(density=-6) == 2 * away(density=-5) == 2 * OF_DATA_DISTANCES["density"]
    assert away(imbalance=2) == OF_DATA_DISTANCES["imbalance"]
    assert group_of(of()) == group_of(of(density=-9, imbalance=0)) != group_of(of(density=None, imbalance=None))
    assert group_of(of()) != group_of(of(size=[32, 32]))
    assert title(of()) == "float32 d64 Blocks(size=64,64) forward"
    more: dict[str, Any] = {"within": WINDOW, "is_list": True, "by_row": True, "heads": "kv_heads"}
    assert "Blocks(heads=kv_heads size=64,64 within Window(causal) lists by row)" in title(of(**more))
    ranges = {"kind": "RangesForm", "intervals": 2, "by_row": False}
    assert "Ranges(intervals=2)" in title({**PROBLEM, "pattern": ranges})
    assert len({bucket(of()), bucket(of(density=-5)), bucket(of(imbalance=0)), bucket(of(density=None))}) == 4


@pytest.mark.parametrize("name", ["q_len", "batch", "pattern", "head_dim", "strides"])
def test_invalid_problems_are_refused(name: str) -> None:
    with pytest.raises(KeyError):
        features({key: value for key, value in PROBLEM.items() if key != name})
    with pytest.raises((TypeError, ValueError, KeyError)):
        features({**PROBLEM, name: None})


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_a_bucket_is_a_quarter_of_an_octave() -> None:
    found = [bucket(problem_at(length)) for length in range(1024, 2048)]
    assert len(set(found)) == 4
    for one in set(found):
        inside = [length for length, each in zip(range(1024, 2048), found) if each == one]
        assert inside == list(range(inside[0], inside[-1] + 1))
        assert inside[-1] / inside[0] < 1.19


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2},
        {"batch": 2, "heads": 2},
        {"kv_heads": 2},
        {"scale": 1.0},
        {"return_lse": True},
        {"deterministic": True},
        {"strides": ["bhnd"] * 3},
        {"matmul_precision": "high"},
        {"flash_kernel": "FA3"},
        {"dtype": "bfloat16"},
        {"head_dim": 32, "scale": 32**-0.5},
        {"needs_grad": True},
        {"pattern": DILATED},
        {"pattern": WINDOW},
    ],
    ids=str,
)
def test_any_other_difference_is_another_bucket(changes: dict[str, Any]) -> None:
    assert bucket({**PROBLEM, **changes}) != bucket(PROBLEM)


def test_the_axes_of_a_bias_and_of_slopes_have_buckets() -> None:
    """A bias of its own for each head is more to read than one for all."""

    def of(batch: int = 8, **changes: Any) -> tuple[Any, ...]:
        return bucket({**PROBLEM, "batch": batch, **changes})

    heads = PROBLEM["heads"]
    assert len({of(bias=[rows, columns]) for rows in (1, 8) for columns in (1, heads)}) == 4
    assert of(100, bias=[100, heads]) == of(99, bias=[99, heads])
    assert of(alibi_axes=1) != of(alibi_axes=2)


def test_sizes_of_a_pattern_have_buckets() -> None:
    def of(**changes: Any) -> tuple[Any, ...]:
        return bucket({**PROBLEM, "pattern": {**WINDOW, **changes}})

    assert of(left=258) == of(left=300)
    assert len({of(left=None), of(left=0), of(left=1), of(left=2), of(left=255), of(left=511)}) == 6


def test_the_estimate_equals_the_dense_solution() -> None:
    chance = random.Random(0)
    points = [[chance.uniform(-3, 3) for _ in range(3)] for _ in range(9)]
    values, noises = [0.1 * math.sin(sum(point)) for point in points], [0.05] * 9
    matrix, right = covariances(points), [covariance(math.hypot(*point)) for point in points]
    found = estimate(matrix, right, noises, values)
    whole = np.array([[matrix[max(i, j)][min(i, j)] for j in range(9)] for i in range(9)]) + 0.05**2 * np.eye(9)
    assert np.array(values) @ np.linalg.solve(whole, values) / 9 < 1  # the misfit does not scale the noise
    weights = np.linalg.solve(whole, right)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-9)
    assert found.mean == pytest.approx(weights @ values)
    assert found.deviation == pytest.approx(math.sqrt(covariance(0) - weights @ right))


def estimated(*pairs: tuple[float, float], noise: float = 0.01) -> tuple[float, float]:
    """Mean and standard deviation at 0, from (point, value) pairs on a line."""
    points = [[point] for point, _ in pairs]
    right = [covariance(abs(point)) for point, _ in pairs]
    found = estimate(covariances(points), right, [noise] * len(pairs), [value for _, value in pairs])
    return found.mean, found.deviation


def test_the_deviation_grows_with_distance_and_noise() -> None:
    deviations = [estimated((distance, 0.1))[1] for distance in (0, 0.5, 1, 2, 4, 8, 16)]
    assert deviations == sorted(deviations)
    assert len(set(deviations)) == len(deviations)
    assert estimated((1, 0.1), noise=0.2)[1] > estimated((1, 0.1), noise=0.1)[1]
