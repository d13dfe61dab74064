"""Thresholds: the sequence length from which a token order is faster, estimated from measured speed-ups. No torch here.

An order pays at a length if the lower bound of its speed-up is above 1. Its threshold is the length from which on it
pays at all measured lengths, so that noise at one length makes no call slower; it may be "never".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

from attn_dispatch.learning.predict import Evidence
from attn_dispatch.learning.speedups import Speedup, SpeedupSeries, family_distance, family_of, group_series
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Decision
from attn_dispatch.tuning.intervals import MARGIN

MIN_LENGTHS = 2  #: measured lengths needed for a threshold
MAX_DISTANCE = 1.0  #: octaves between families (window, segments) up to which a threshold is transferred


class Benefit(IntEnum):
    """Whether an order pays at a length; `POSSIBLE`: undecided, and at most 2 % slower."""

    NONE = 0
    POSSIBLE = 1
    PROVEN = 2


class LengthSpeedup(NamedTuple):
    """All speed-ups measured at one length: geometric mean, the union of their intervals, the least benefit."""

    tokens: int
    factor: float
    low: float
    high: float
    benefit: Benefit


@dataclass(frozen=True, slots=True)
class Threshold:
    """The number of tokens from which an order pays in a family; `tokens` is None if it never does.

    `low` is the last measured length where the order does not pay, None if there is none; `high` the first from which
    on it pays, None for never. low < tokens <= high: `tokens` is where the speed-up crosses 1.
    """

    order: str
    family: Mapping[str, Any]
    tokens: int | None
    low: int | None
    high: int | None
    points: tuple[Speedup, ...]

    def pays(self, tokens: int) -> bool:
        """Whether the order pays at this length."""
        return self.tokens is not None and tokens >= self.tokens


def threshold(order: str, family: Mapping[str, Any], points: Iterable[Speedup]) -> Threshold | None:
    """Estimate the threshold from measured speed-ups; None with fewer than two lengths.

    The order must pay at the longest length, and by more than 2 % at one length from the threshold on: less is not
    worth a change and may be noise. The threshold lies above every length with `Benefit.NONE`; lengths with
    `Benefit.POSSIBLE` do not move it.
    """
    points = tuple(sorted(filter(_is_valid, points)))
    lengths = by_length(points)
    if len(lengths) < MIN_LENGTHS:
        return None
    last_without = max((i for i, each in enumerate(lengths) if each.benefit == Benefit.NONE), default=-1)
    tail = lengths[last_without + 1 :]
    if lengths[-1].benefit != Benefit.PROVEN or all(each.low <= 1 + MARGIN for each in tail):
        return Threshold(order, family, None, lengths[-1].tokens, None, points)
    first = next(i for i, each in enumerate(lengths) if i > last_without and each.benefit == Benefit.PROVEN)
    path = lengths[max(last_without, 0) : first + 1]
    low = path[0].tokens if len(path) > 1 else None
    return Threshold(order, family, _crossing(path), low, path[-1].tokens, points)


def by_length(points: Iterable[Speedup]) -> list[LengthSpeedup]:
    """The valid speed-ups combined by length, the shortest first."""
    found: defaultdict[int, list[Speedup]] = defaultdict(list)
    for point in points:
        if _is_valid(point):
            found[point.tokens].append(point)
    return [_at_length(tokens, found[tokens]) for tokens in sorted(found)]


def threshold_of(series: SpeedupSeries) -> Threshold | None:
    return threshold(series.order, series.family, series.speedups)


def allowed_orders(problem: Mapping[str, Any], evidence: Iterable[Decision] | Evidence) -> set[str]:
    """The token orders to consider at a length that was never measured: natural order, and the orders that pay there.

    An order pays by the threshold of the problem's own family, else by that of the nearest family with a threshold,
    at most `MAX_DISTANCE` away.

    Args:
        problem: as `Problem.to_dict` writes it.
        evidence: decisions of this silicon; decisions of other groups are ignored.

    Raises:
        KeyError, TypeError: `problem` is invalid.
    """
    tokens, family = problem["q_len"], family_of(problem)
    if problem["k_len"] != tokens:
        return {NATURAL}
    nearest: dict[str, tuple[float, Threshold]] = {}
    for series in group_series(problem, evidence):
        distance, found = family_distance(family, series.family), threshold_of(series)
        if found is not None and distance <= min(MAX_DISTANCE, nearest.get(series.order, (MAX_DISTANCE,))[0]):
            nearest[series.order] = (distance, found)
    return {NATURAL} | {order for order, (_, found) in nearest.items() if found.pays(tokens)}


def _is_valid(point: Speedup) -> bool:
    return 0 < point.low <= point.factor <= point.high < math.inf


def _at_length(tokens: int, points: Sequence[Speedup]) -> LengthSpeedup:
    factor = math.exp(sum(math.log(point.factor) for point in points) / len(points))
    low, high = min(point.low for point in points), max(point.high for point in points)
    return LengthSpeedup(tokens, factor, low, high, min(map(_benefit, points)))


def _benefit(point: Speedup) -> Benefit:
    if point.low > 1:
        return Benefit.PROVEN
    return Benefit.POSSIBLE if point.low >= 1 - MARGIN and point.high >= 1 else Benefit.NONE


def _crossing(path: Sequence[LengthSpeedup]) -> int:
    """Tokens where the speed-up last rises past 1; where it is above 1 throughout, its lower bound."""
    if len(path) == 1:
        return path[0].tokens
    last = _last_rise_past_1([(each.tokens, each.factor) for each in path])
    found = _last_rise_past_1([(each.tokens, each.low) for each in path]) if last is None else last
    assert found is not None
    return min(max(math.ceil(found), path[0].tokens + 1), path[-1].tokens)


def _last_rise_past_1(points: Sequence[tuple[int, float]]) -> float | None:
    """Tokens where the values last cross 1 upward, interpolated linearly in log-log; None if they do not."""
    for (a, before), (b, after) in reversed(list(pairwise(points))):
        if before <= 1 < after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            return a * math.pow(b / a, share)
    return None
