"""A smooth function between and beyond the places where it was seen, with how uncertain that is. No torch, no numpy.

A Gaussian process in the coordinates of the place that is asked for: a level, a slope on every axis, and a smooth
remainder (Matern 3/2). Between places it bends little, so that it crosses zero where a line between them would; beyond
them the slope that they show is followed, the less the fewer they are; far from all of them little is certain.

Source: Krige 1951; Rasmussen & Williams 2006, Gaussian Processes for Machine Learning, sections 2.2, 2.7 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

# Of the natural logarithm of the ratio of two times, over octaves: calibrated by tools/checks/trust_learned.py.
LEVEL = 1.5  #: standard deviation of the level
SLOPE = 0.3  #: of the slope, for an octave
BEND = 0.4  #: of the remainder
REACH = 4.0  #: octaves over which the remainder is alike

Vector = Sequence[float]


def covariances(places: Sequence[Vector]) -> list[list[float]]:
    """Between all pairs of places, given relative to the one that is asked for; the lower triangle, with diagonal."""
    return [
        [LEVEL**2 + SLOPE**2 * _dot(a, b) + _remainder(math.dist(a, b)) for b in places[: i + 1]]
        for i, a in enumerate(places)
    ]


def covariance(distance: float) -> float:
    """Between the place that is asked for and one at this distance, in octaves."""
    return LEVEL**2 + _remainder(distance)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the function at the place that is asked for: mean, standard deviation, and how much each place counts."""

    mean: float
    deviation: float
    weights: tuple[float, ...]


def estimate(matrix: Sequence[Vector], right: Vector, noises: Vector, values: Vector) -> Estimate:
    """What the values say of the place that is asked for.

    Args:
        matrix: `covariances` of the places; right: `covariance` of each with the one that is asked for.
        noises: standard deviation of each value, above 0. Where the values scatter more than that and a smooth function
            explain, they are taken to be as much noisier.
    """
    lower, misfit = _fit(matrix, noises, values)
    if misfit > 1:
        noises = [noise * math.sqrt(misfit) for noise in noises]
        lower, misfit = _fit(matrix, noises, values)
    half = _forward(lower, right)
    weights = _backward(lower, half)
    variance = max(covariance(0.0) - _dot(half, half), 0.0) * max(misfit, 1.0)
    return Estimate(_dot(weights, values), math.sqrt(variance), tuple(weights))


def _fit(matrix: Sequence[Vector], noises: Vector, values: Vector) -> tuple[list[list[float]], float]:
    """The Cholesky factor, and the mean square of what it makes of the values: about 1 where all is as assumed."""
    lower: list[list[float]] = []
    for row, noise in zip(matrix, noises):
        found: list[float] = []
        for other, value in zip(lower, row):
            found.append((value - _dot(found, other)) / other[-1])
        found.append(math.sqrt(row[-1] + noise**2 - _dot(found, found)))
        lower.append(found)
    whitened = _forward(lower, values)
    return lower, _dot(whitened, whitened) / len(whitened)


def _forward(lower: Sequence[Vector], right: Vector) -> list[float]:
    found: list[float] = []
    for row, value in zip(lower, right):
        found.append((value - _dot(found, row)) / row[-1])
    return found


def _backward(lower: Sequence[Vector], right: Vector) -> list[float]:
    found = list(right)
    for i in reversed(range(len(found))):
        found[i] /= lower[i][i]
        for j in range(i):
            found[j] -= lower[i][j] * found[i]
    return found


def _remainder(distance: float) -> float:
    scaled = math.sqrt(3) * distance / REACH
    return BEND**2 * (1 + scaled) * math.exp(-scaled)


def _dot(a: Vector, b: Vector) -> float:
    """Of as many entries as the shorter one has."""
    return float(sum(map(mul, a, b)))
