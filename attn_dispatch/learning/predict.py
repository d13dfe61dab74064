"""Predicts the fastest candidate of a problem that was never measured, from measured neighbours. No torch here.

For each pair of candidates the log of the ratio of their times is modelled as a smooth function of the sizes, observed
with noise at the nearest decisions; `kriging` estimates it, with its uncertainty, at the problem.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from attn_dispatch.learning.features import bucket, features
from attn_dispatch.learning.kriging import covariance, covariances, estimate
from attn_dispatch.spec.groups import group_of
from attn_dispatch.store.address import PROBLEM_ERRORS
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row

MAX_NEIGHBOURS = 16  #: decisions used for one prediction
MAX_SEARCHED = 1000  #: nearest decisions among which the neighbours are selected
MIN_SEPARATION = 0.3  #: least distance between two neighbours / distance to the problem; nearer ones are redundant
NEAR_BEST = 1.02  #: time of a choice / the fastest time up to which the choice counts as right
NOISE = 0.03  #: least relative standard deviation of a median
NOISY_ROUNDS = 2  #: medians of at most this many rounds have at least NOISY_MEDIAN_SD
NOISY_MEDIAN_SD = 0.1
OUTDATED_NOISE = 0.15  #: relative standard deviation between the times of two versions of a backend
MIN_WEIGHT = 0.05  #: weight in the estimate from which a decision is cited as evidence
UNKNOWN_FACTOR = 0.5  #: scales the confidence where a candidate has no row near the problem

WITHOUT_TIME = {"failed", "incorrect", "quarantined", "not_measured"}
WRONG_RESULTS = {"incorrect", "quarantined"}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A learned choice.

    `confidence` is the probability that no candidate is more than 2 % faster: 1 less the sum of the probabilities of
    each other candidate to be so (normal distributions of the log ratios). `evidence` are the keys of the decisions
    with the largest weights, sorted by weight; `ratios` the predicted times / the time of the choice; `in_bucket`
    whether a neighbour in the problem's bucket timed the choice in the backend's current version.
    """

    backend: str
    order: str
    confidence: float
    evidence: tuple[str, ...]
    ratios: dict[CandidateId, float]
    in_bucket: bool


class LogTime(NamedTuple):
    """The log of a candidate's median time in one decision. `noise` is its standard deviation."""

    log_ms: float
    noise: float
    version: str | None


@dataclass(frozen=True)
class EvidencePoint:
    """A decision with the coordinates of its problem; times and failures by candidate, computed on first use."""

    key: str
    coordinates: tuple[float, ...]
    problem: Mapping[str, Any]
    rows: tuple[Row, ...]

    @cached_property
    def times(self) -> dict[CandidateId, LogTime]:
        """The timed candidates."""
        return {row.id: _log_time(row) for row in self.rows if is_timed(row)}

    @cached_property
    def untimed(self) -> frozenset[CandidateId]:
        """The candidates that failed or were not measured."""
        return frozenset(row.id for row in self.rows if row.status in WITHOUT_TIME)

    @cached_property
    def incorrect(self) -> frozenset[tuple[CandidateId, str | None]]:
        """The candidates with wrong results, by version."""
        return frozenset((row.id, row.version) for row in self.rows if row.status in WRONG_RESULTS)


class Evidence:
    """Decisions of one silicon, indexed by group for many predictions."""

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        self.groups: dict[str, dict[str, EvidencePoint]] = {}
        for decision in decisions:
            self.add(decision)

    def add(self, decision: Decision, most: int | None = None) -> None:
        """Add a decision, or replace the decision of the same key. One with an invalid problem is ignored.

        Past `most` decisions of its group the oldest is forgotten.
        """
        try:
            coordinates = features(decision.problem)
        except PROBLEM_ERRORS:
            return
        if not all(map(math.isfinite, coordinates)):
            return
        point = EvidencePoint(decision.key, coordinates, decision.problem, decision.candidates)
        known = self.groups.setdefault(decision.group, {})
        known[decision.key] = point
        if most is not None and len(known) > most:
            known.pop(list(known)[0], None)  # noqa: RUF015 - an iterator fails where another thread adds

    def neighbours(
        self, coordinates: tuple[float, ...], group: str, able: Collection[CandidateId], exclude: str | None
    ) -> list[EvidencePoint]:
        """The nearest decisions that timed a candidate of `able`, nearest first, at least `MIN_SEPARATION` apart."""
        # Patterns of one group may have different numbers of sizes.
        everywhere = list(self.groups.get(group, {}).values())  # another thread may add to it
        points = [point for point in everywhere if len(point.coordinates) == len(coordinates)]
        distances = [math.dist(point.coordinates, coordinates) for point in points]
        found: list[EvidencePoint] = []
        searched = (i for i in sorted(range(len(points)), key=distances.__getitem__)[:MAX_SEARCHED])
        for index in searched:
            point, min_distance = points[index], MIN_SEPARATION * distances[index]
            if point.key == exclude or point.times.keys().isdisjoint(able):
                continue
            if all(math.dist(point.coordinates, other.coordinates) > min_distance for other in found):
                found.append(point)
                if len(found) == MAX_NEIGHBOURS:
                    break
        return found


def predict(
    problem: Mapping[str, Any],
    evidence: Iterable[Decision] | Evidence,
    able: Collection[CandidateId],
    versions: Mapping[str, str | None] | None = None,
    *,
    exclude: str | None = None,
) -> Prediction | None:
    """Predict the fastest of the candidates in `able` that were timed near the problem.

    Args:
        problem: as `Problem.to_dict` writes it.
        evidence: decisions of this silicon; decisions of other groups are ignored.
        able: (backend, order) of every candidate that can run the problem now.
        versions: current version of each backend; times of another version count with more noise.
        exclude: key of a decision that is not used.

    Returns:
        None if no candidate of `able` was timed in the problem's group.

    Raises:
        KeyError, TypeError, ValueError: `problem` is invalid.
    """
    group, coordinates = group_of(problem), features(problem)
    indexed = evidence if isinstance(evidence, Evidence) else Evidence(evidence)
    neighbours = indexed.neighbours(coordinates, group, able, exclude)
    model = _Neighbours(problem, coordinates, neighbours, versions)
    eligible = [name for name in sorted(set(able)) if model.is_eligible(name)]
    if not eligible:
        return None
    return model.choose(eligible, has_unknown=not all(model.has_row(name) for name in able))


@dataclass(frozen=True, slots=True)
class LogRatio:
    """log(another candidate's time / this one's): mean, standard deviation, weights of the decisions by key."""

    mean: float
    deviation: float
    weights: dict[str, float] = field(default_factory=dict)

    def probability(self) -> float:
        """The probability that the other candidate is not faster by more than `NEAR_BEST`."""
        return math.erfc(-(self.mean + math.log(NEAR_BEST)) / self.deviation / math.sqrt(2)) / 2


class _Neighbours:
    """The candidates of a problem compared by its neighbours."""

    def __init__(
        self,
        problem: Mapping[str, Any],
        coordinates: tuple[float, ...],
        neighbours: list[EvidencePoint],
        versions: Mapping[str, str | None] | None,
    ) -> None:
        self.problem = problem
        self.neighbours = neighbours
        self.versions = versions
        offsets = [tuple(a - b for a, b in zip(point.coordinates, coordinates)) for point in neighbours]
        self.matrix = covariances(offsets)
        self.right = [covariance(math.hypot(*each)) for each in offsets]
        self.incorrect = frozenset[tuple[CandidateId, str | None]]().union(*(point.incorrect for point in neighbours))
        self.log_ratios: dict[tuple[CandidateId, CandidateId], LogRatio] = {}

    def is_eligible(self, name: CandidateId) -> bool:
        """Whether the nearest decision with this candidate timed it, and no neighbour found its version incorrect."""
        nearest = next((point for point in self.neighbours if name in point.times or name in point.untimed), None)
        if nearest is None or name not in nearest.times:
            return False
        version = nearest.times[name].version if self.versions is None else self.versions.get(name[0])
        return (name, version) not in self.incorrect

    def has_row(self, name: CandidateId) -> bool:
        return any(name in point.times or name in point.untimed for point in self.neighbours)

    def choose(self, eligible: list[CandidateId], has_unknown: bool) -> Prediction:
        chosen = self.fastest(eligible)
        ratios = {other: self.log_ratio(chosen, other) for other in eligible if other != chosen}
        doubt = sum(1 - ratio.probability() for ratio in ratios.values())
        closest = min(ratios.values(), key=LogRatio.probability, default=None)
        weights = {} if closest is None else closest.weights
        cited = sorted((key for key in weights if abs(weights[key]) >= MIN_WEIGHT), key=lambda key: -abs(weights[key]))
        return Prediction(
            backend=chosen[0],
            order=chosen[1],
            confidence=max(1 - doubt, 0.0) * (UNKNOWN_FACTOR if has_unknown else 1.0),
            evidence=tuple(cited) or (next(point.key for point in self.neighbours if chosen in point.times),),
            ratios={chosen: 1.0} | {other: math.exp(ratio.mean) for other, ratio in ratios.items()},
            in_bucket=self.in_bucket(chosen),
        )

    def fastest(self, eligible: list[CandidateId]) -> CandidateId:
        """The candidate predicted faster than all others; where predictions form a cycle, one of the cycle."""
        first = next(point for point in self.neighbours if not point.times.keys().isdisjoint(eligible))
        best = min((name for name in eligible if name in first.times), key=lambda name: first.times[name].log_ms)
        slower: set[CandidateId] = set()
        while True:
            rest = (name for name in eligible if name != best and name not in slower)
            faster = next((name for name in rest if self.log_ratio(best, name).mean < 0), None)
            if faster is None:
                return best
            slower.add(best)
            best = faster

    def in_bucket(self, name: CandidateId) -> bool:
        where = bucket(self.problem)
        current = (point for point in self.neighbours if name in point.times and not self.outdated(point, name))
        return any(bucket(point.problem) == where for point in current)

    def log_ratio(self, name: CandidateId, other: CandidateId) -> LogRatio:
        if (name, other) not in self.log_ratios:
            self.log_ratios[name, other] = self._log_ratio(name, other)
        return self.log_ratios[name, other]

    def _log_ratio(self, name: CandidateId, other: CandidateId) -> LogRatio:
        """Estimate from the decisions that timed both; with none, about 0 with the prior's deviation."""
        shared = [i for i, point in enumerate(self.neighbours) if name in point.times and other in point.times]
        if not shared:
            first = next(point for point in self.neighbours if name in point.times or other in point.times)
            return LogRatio(math.ulp(0.0) if name in first.times else -math.ulp(0.0), math.sqrt(covariance(0.0)))
        points = [self.neighbours[i] for i in shared]
        found = estimate(
            [[self.matrix[i][j] for j in shared[: n + 1]] for n, i in enumerate(shared)],
            [self.right[i] for i in shared],
            [math.hypot(point.times[name].noise, point.times[other].noise) for point in points],
            [point.times[other].log_ms - point.times[name].log_ms for point in points],
        )
        # The errors of an outdated backend's rows are fully correlated.
        aged = [sum(w for w, p in zip(found.weights, points) if self.outdated(p, each)) for each in (name, other)]
        deviation = math.hypot(found.deviation, *(OUTDATED_NOISE * share for share in aged))
        return LogRatio(found.mean, deviation, {p.key: weight for p, weight in zip(points, found.weights)})

    def outdated(self, point: EvidencePoint, name: CandidateId) -> bool:
        return self.versions is not None and point.times[name].version != self.versions.get(name[0])


def is_timed(row: Row) -> bool:
    """Whether a row has a valid median time."""
    return row.status in TIMED and row.median_ms is not None and 0 < row.median_ms < math.inf


def _log_time(row: Row) -> LogTime:
    """Noise from the 95 % interval, about 4 standard deviations wide; too few rounds have none."""
    assert row.median_ms is not None
    low, high = row.low_ms, row.high_ms
    noise = NOISY_MEDIAN_SD if row.rounds is not None and row.rounds <= NOISY_ROUNDS else NOISE
    if low is not None and high is not None and 0 < low <= row.median_ms <= high < math.inf:
        noise = max(noise, math.log(high / low) / 4)
    return LogTime(math.log(row.median_ms), noise, row.version)
