"""Gaussian process regression (kriging) of a smooth function, with its uncertainty. No torch, no numpy.

Coordinates are relative to the query point. The prior is a level, a slope on every axis and a smooth residual (Matern
3/2), so that interpolation between two points is nearly linear. Extrapolation follows the observed slope, less so with
fewer points; the uncertainty grows with the distance from all points.

Source: Krige 1951; Rasmussen & Williams 2006, Gaussian Processes for Machine Learning, sections 2.2, 2.7 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

# The function is the natural logarithm of a ratio of times, over octaves; tests/learning checks the calibration.
LEVEL_SD = 1.5  #: standard deviation of the level
SLOPE_SD = 0.3  #: standard deviation of the slope, per octave
RESIDUAL_SD = 0.4  #: standard deviation of the residual
LENGTH_SCALE = 4.0  #: octaves over which the residual is correlated

Vector = Sequence[float]


def covariances(points: Sequence[Vector]) -> list[list[float]]:
    """The prior covariances of all pairs of points, relative to the query point: lower triangle with diagonal."""
    return [
        [LEVEL_SD**2 + SLOPE_SD**2 * _dot(a, b) + _matern(math.dist(a, b)) for b in points[: i + 1]]
        for i, a in enumerate(points)
    ]


def covariance(distance: float) -> float:
    """The prior covariance of the query point and a point at this distance, in octaves."""
    return LEVEL_SD**2 + _matern(distance)


class Estimate(NamedTuple):
    """The function at the query point: mean, standard deviation, and the weight of each point's value in the mean."""

    mean: float
    deviation: float
    weights: tuple[float, ...]


def estimate(matrix: Sequence[Vector], right: Vector, noises: Vector, values: Vector) -> Estimate:
    """Estimate the function at the query point from values at other points.

    Args:
        matrix: `covariances` of the points.
        right: `covariance` of each point with the query point.
        noises: standard deviation of each value, above 0; all are scaled up where the values scatter more than noise
            and prior explain.
        values: of the function, one for each point.
    """
    lower, misfit = _factorize(matrix, noises, values)
    if misfit > 1:
        noises = [noise * math.sqrt(misfit) for noise in noises]
        lower, misfit = _factorize(matrix, noises, values)
    half = _solve_lower(lower, right)
    weights = _solve_lower_transposed(lower, half)
    variance = max(covariance(0.0) - _dot(half, half), 0.0) * max(misfit, 1.0)
    return Estimate(_dot(weights, values), math.sqrt(variance), tuple(weights))


def _factorize(matrix: Sequence[Vector], noises: Vector, values: Vector) -> tuple[list[list[float]], float]:
    """The Cholesky factor, and the mean square of the whitened values: about 1 where noise and prior hold."""
    lower: list[list[float]] = []
    for row, noise in zip(matrix, noises):
        found: list[float] = []
        for other, value in zip(lower, row):
            found.append((value - _dot(found, other)) / other[-1])
        found.append(math.sqrt(row[-1] + noise**2 - _dot(found, found)))
        lower.append(found)
    whitened = _solve_lower(lower, values)
    return lower, _dot(whitened, whitened) / len(whitened)


def _solve_lower(lower: Sequence[Vector], right: Vector) -> list[float]:
    found: list[float] = []
    for row, value in zip(lower, right):
        found.append((value - _dot(found, row)) / row[-1])
    return found


def _solve_lower_transposed(lower: Sequence[Vector], right: Vector) -> list[float]:
    found = list(right)
    for i in reversed(range(len(found))):
        found[i] /= lower[i][i]
        for j in range(i):
            found[j] -= lower[i][j] * found[i]
    return found


def _matern(distance: float) -> float:
    scaled = math.sqrt(3) * distance / LENGTH_SCALE
    return RESIDUAL_SD**2 * (1 + scaled) * math.exp(-scaled)


def _dot(a: Vector, b: Vector) -> float:
    """The dot product over the length of the shorter vector."""
    return float(sum(map(mul, a, b)))
