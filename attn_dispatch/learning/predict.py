"""A choice for a problem that was never measured, from what was measured near it. No torch here.

For every two candidates the logarithm of the ratio of their times is a smooth function over octaves of sizes, known at
the nearest evidence up to noise; `kriging` says what it is at the problem, and how uncertain. A crossover lies where it
is zero. The choice is the candidate whose least lead over the others is greatest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attn_dispatch.learning.features import bucket, features
from attn_dispatch.learning.kriging import covariance, covariances, estimate
from attn_dispatch.spec.groups import group_of
from attn_dispatch.store.decision import Decision, Row

NEAREST = 16  #: pieces of evidence that a choice rests on, at most
WALK = 1000  #: pieces of evidence that are looked at for them, at most
SPREAD = 0.3  #: a piece of evidence is passed over that lies nearer than this share of its distance to a nearer one
MARGIN = 1.02  #: a rival that is faster by no more than this does not make a choice wrong
NOISE = 0.03  #: relative standard deviation of a median, at least
FEW = 2  #: rounds; a median of no more of them is one of ROUGH
ROUGH = 0.1
OUTDATED = 0.15  #: of what another version of a backend took, to what this one takes
HEAVY = 0.05  #: a weight from which on a piece of evidence is named
UNSEEN = 0.5  #: a candidate of which nothing is known near here makes the others this share as certain

TIMED = {"chosen", "slower", "tie"}
KNOWN = {"failed", "incorrect", "quarantined", "not_measured"}
WRONG = {"incorrect", "quarantined"}
FOREIGN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, ArithmeticError)

Name = tuple[str, str]  #: backend and order


@dataclass(frozen=True, slots=True)
class Prediction:
    """A learned choice.

    `confidence` is the probability that no candidate is more than 2 % faster: one less the sum, over the rivals, of
    the probability that this one is. Each is that of a normal variable with the predicted lead's mean and deviation,
    which grows with the distance from the evidence. `evidence` are the keys of the decisions it rests on, the
    weightiest first; `ratios` predicted times over that of the choice; `in_bucket` whether a decision of the
    problem's bucket, with the backend's version of now, is among the nearest.
    """

    backend: str
    order: str
    confidence: float
    evidence: tuple[str, ...]
    ratios: dict[Name, float]
    in_bucket: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """What one decision knows of a candidate. `noise` is the standard deviation of `log_ms`."""

    log_ms: float
    noise: float
    version: str | None


@dataclass(frozen=True)
class Point:
    """A decision as evidence: where it lies, and when it is asked, what it knows of the candidates."""

    key: str
    place: tuple[float, ...]
    problem: Mapping[str, Any]
    rows: tuple[Row, ...]

    @cached_property
    def seen(self) -> dict[Name, Seen]:
        """Those that were timed."""
        return {(row.backend, row.order): _seen(row) for row in self.rows if is_timed(row)}

    @cached_property
    def known(self) -> frozenset[Name]:
        """Those that came to nothing."""
        return frozenset((row.backend, row.order) for row in self.rows if row.status in KNOWN)

    @cached_property
    def wrong(self) -> frozenset[tuple[Name, str | None]]:
        """Those with wrong results, by version."""
        return frozenset(((row.backend, row.order), row.version) for row in self.rows if row.status in WRONG)


class Evidence:
    """Decisions of one silicon, made ready once, for many predictions."""

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        self.groups: dict[str, dict[str, Point]] = {}
        for decision in decisions:
            self.add(decision)

    def add(self, decision: Decision) -> None:
        """Take one more, or the newer one of the same key. What is no problem or timed nothing is passed over."""
        try:
            place, group = features(decision.problem), group_for(decision)
        except FOREIGN:
            return
        if not all(map(math.isfinite, place)):
            return
        point = Point(decision.key, place, decision.problem, decision.candidates)
        self.groups.setdefault(group, {})[decision.key] = point

    def near(self, place: tuple[float, ...], group: str, able: Collection[Name], without: str | None) -> list[Point]:
        """The nearest that timed a candidate which is able, the nearest first, not all on one heap."""
        # A pattern that lacks a size is in the group all the same.
        points = [point for point in self.groups.get(group, {}).values() if len(point.place) == len(place)]
        distances = [math.dist(point.place, place) for point in points]
        found: list[Point] = []
        walk = (i for i in sorted(range(len(points)), key=distances.__getitem__)[:WALK])
        for index in walk:
            point, apart = points[index], SPREAD * distances[index]
            if point.key == without or point.seen.keys().isdisjoint(able):
                continue
            if all(math.dist(point.place, other.place) > apart for other in found):
                found.append(point)
                if len(found) == NEAREST:
                    break
        return found


def predict(
    problem: Mapping[str, Any],
    evidence: Iterable[Decision] | Evidence,
    able: Collection[Name],
    versions: Mapping[str, str | None] | None = None,
    *,
    without: str | None = None,
) -> Prediction | None:
    """The candidate that is likely the fastest, of those that are able and were timed near the problem.

    Args:
        problem: as `Problem.to_dict` writes it.
        evidence: decisions of this silicon; those of other groups are passed over.
        able: (backend, order) of every candidate that can run the problem now.
        versions: of the backends, now. What another version took is a prior: it counts, with more doubt.
        without: the key of a decision that is not to be looked at.

    Returns:
        None where no able candidate was timed in the problem's group.

    Raises:
        KeyError, TypeError, ValueError: `problem` is not one.
    """
    group, place = group_of(problem), features(problem)
    ready = evidence if isinstance(evidence, Evidence) else Evidence(evidence)
    near = ready.near(place, group, able, without)
    view = _View(problem, place, near, versions)
    rivals = [name for name in sorted(set(able)) if view.can_win(name)]
    if not rivals:
        return None
    return view.choose(rivals, unseen=not all(view.knows(name) for name in able))


@dataclass(frozen=True, slots=True)
class Lead:
    """How much longer a rival takes: the logarithm of the ratio, its deviation, the weights of the evidence."""

    mean: float
    deviation: float
    weights: dict[str, float] = field(default_factory=dict)

    def safety(self) -> float:
        """The probability that the rival is not faster by more than the margin."""
        return math.erfc(-(self.mean + math.log(MARGIN)) / self.deviation / math.sqrt(2)) / 2


class _View:
    """The nearest evidence, seen from a problem."""

    def __init__(
        self,
        problem: Mapping[str, Any],
        place: tuple[float, ...],
        near: list[Point],
        versions: Mapping[str, str | None] | None,
    ) -> None:
        self.problem = problem
        self.near = near
        self.versions = versions
        places = [tuple(a - b for a, b in zip(point.place, place)) for point in near]
        self.matrix = covariances(places)
        self.right = [covariance(math.hypot(*each)) for each in places]
        self.wrong = frozenset[tuple[Name, str | None]]().union(*(point.wrong for point in near))
        self.leads: dict[tuple[Name, Name], Lead] = {}

    def can_win(self, name: Name) -> bool:
        """Timed by the nearest that knows of it, and not found wrong by any in the version of now."""
        nearest = next((point for point in self.near if name in point.seen or name in point.known), None)
        if nearest is None or name not in nearest.seen:
            return False
        version = nearest.seen[name].version if self.versions is None else self.versions.get(name[0])
        return (name, version) not in self.wrong

    def knows(self, name: Name) -> bool:
        return any(name in point.seen or name in point.known for point in self.near)

    def choose(self, rivals: list[Name], unseen: bool) -> Prediction:
        chosen = self.champion(rivals)
        leads = {other: self.lead(chosen, other) for other in rivals if other != chosen}
        doubt = sum(1 - lead.safety() for lead in leads.values())
        closest = min(leads.values(), key=Lead.safety, default=None)
        weights = {} if closest is None else closest.weights
        heavy = sorted((key for key in weights if abs(weights[key]) >= HEAVY), key=lambda key: -abs(weights[key]))
        return Prediction(
            backend=chosen[0],
            order=chosen[1],
            confidence=max(1 - doubt, 0.0) * (UNSEEN if unseen else 1.0),
            evidence=tuple(heavy) or (next(point.key for point in self.near if chosen in point.seen),),
            ratios={chosen: 1.0} | {other: math.exp(lead.mean) for other, lead in leads.items()},
            in_bucket=self.in_bucket(chosen),
        )

    def champion(self, rivals: list[Name]) -> Name:
        """Who beats all others; where each is beaten by someone, the last in a row of winners."""
        first = next(point for point in self.near if not point.seen.keys().isdisjoint(rivals))
        champion = min((name for name in rivals if name in first.seen), key=lambda name: first.seen[name].log_ms)
        beaten: set[Name] = set()
        while True:
            rest = (name for name in rivals if name != champion and name not in beaten)
            winner = next((name for name in rest if self.lead(champion, name).mean < 0), None)
            if winner is None:
                return champion
            beaten.add(champion)
            champion = winner

    def in_bucket(self, name: Name) -> bool:
        where = bucket(self.problem)
        current = (point for point in self.near if name in point.seen and not self.outdated(point, name))
        return any(bucket(point.problem) == where for point in current)

    def lead(self, name: Name, other: Name) -> Lead:
        if (name, other) not in self.leads:
            self.leads[name, other] = self._lead(name, other)
        return self.leads[name, other]

    def _lead(self, name: Name, other: Name) -> Lead:
        """Of one candidate over another. Never timed together: the nearer one's, by nothing, with all the doubt."""
        shared = [i for i, point in enumerate(self.near) if name in point.seen and other in point.seen]
        if not shared:
            first = next(point for point in self.near if name in point.seen or other in point.seen)
            return Lead(math.ulp(0.0) if name in first.seen else -math.ulp(0.0), math.sqrt(covariance(0.0)))
        points = [self.near[i] for i in shared]
        found = estimate(
            [[self.matrix[i][j] for j in shared[: n + 1]] for n, i in enumerate(shared)],
            [self.right[i] for i in shared],
            [math.hypot(point.seen[name].noise, point.seen[other].noise) for point in points],
            [point.seen[other].log_ms - point.seen[name].log_ms for point in points],
        )
        # All that an outdated backend's rows are off by, they may be off by together.
        aged = [sum(w for w, p in zip(found.weights, points) if self.outdated(p, each)) for each in (name, other)]
        deviation = math.hypot(found.deviation, *(OUTDATED * share for share in aged))
        return Lead(found.mean, deviation, {p.key: weight for p, weight in zip(points, found.weights)})

    def outdated(self, point: Point, name: Name) -> bool:
        return self.versions is not None and point.seen[name].version != self.versions.get(name[0])


def group_for(decision: Decision) -> str:
    """The group that a decision says it is in, else that of its problem."""
    return getattr(decision, "group", None) or group_of(decision.problem)


def is_timed(row: Row) -> bool:
    """Whether a row says how long a candidate takes, in a number that can be true."""
    value = row.median_ms
    return row.status in TIMED and isinstance(value, int | float) and 0 < value < math.inf


def _seen(row: Row) -> Seen:
    """The interval of a median is about four of its deviations wide; that of a few rounds says nothing."""
    assert row.median_ms is not None
    rounds, low, high = getattr(row, "rounds", None), row.low_ms, row.high_ms
    noise = ROUGH if rounds is not None and rounds <= FEW else NOISE
    if low is not None and high is not None and 0 < low <= row.median_ms <= high < math.inf:
        noise = max(noise, math.log(high / low) / 4)
    return Seen(math.log(row.median_ms), noise, row.version)
