"""From what an order of tokens gained at measured lengths to "above N tokens", for lengths never measured. No torch.

An order pays at a length where the lower end of its gain is above 1. Its threshold is the length from which on it pays
at all that were measured, so that no call is made slower by a win that was noise. "Never" is an answer too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

from attn_dispatch.learning.gains import Gain, Series, apart, family_of, group_series
from attn_dispatch.learning.predict import Evidence
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Decision
from attn_dispatch.tuning.intervals import MARGIN

LEAST_LENGTHS = 2  #: that a threshold rests on
REACH = 1.0  #: octaves of window and segments; what was measured farther away says nothing of a family


class Verdict(IntEnum):
    """Whether an order pays at a length. `OPEN`: it may, and loses no more than 2 % if it does not."""

    NOT = 0
    OPEN = 1
    PAYS = 2


@dataclass(frozen=True, slots=True)
class Length:
    """All that was measured at one length, by its worst: the gain is the geometric mean, the interval spans all."""

    tokens: int
    gain: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Threshold:
    """From how many tokens on an order pays in a family; `tokens` of None: never, as far as was measured.

    `low` is the last length where it did not pay, None where there is none; `high` the first from which on it does,
    None for never. `tokens` lies above `low` and at or below `high`, where the gain crosses 1 between them.
    """

    order: str
    family: Mapping[str, Any]
    tokens: int | None
    low: int | None
    high: int | None
    points: tuple[Gain, ...]

    def pays(self, tokens: int) -> bool:
        """Whether to take the order at this length."""
        return self.tokens is not None and tokens >= self.tokens


def threshold(order: str, family: Mapping[str, Any], points: Iterable[Gain]) -> Threshold | None:
    """What measured gains say of all lengths; None where they are of fewer than two.

    The longest must pay, and one of those from the threshold on by more than 2 %: less is no reason to change anything,
    and a lucky interval must not be taken for a gain. A length that is open does not move the threshold; one where the
    order does not pay moves it past.
    """
    points = tuple(sorted(filter(_is_sound, points), key=astuple))
    lengths = by_length(points)
    if len(lengths) < LEAST_LENGTHS:
        return None
    last_not = max((i for i, each in enumerate(lengths) if each.verdict == Verdict.NOT), default=-1)
    tail = lengths[last_not + 1 :]
    if lengths[-1].verdict != Verdict.PAYS or all(each.low <= 1 + MARGIN for each in tail):
        return Threshold(order, family, None, lengths[-1].tokens, None, points)
    first = next(i for i, each in enumerate(lengths) if i > last_not and each.verdict == Verdict.PAYS)
    path = lengths[max(last_not, 0) : first + 1]
    low = path[0].tokens if len(path) > 1 else None
    return Threshold(order, family, _crossing(path), low, path[-1].tokens, points)


def by_length(points: Iterable[Gain]) -> list[Length]:
    """What was measured at each length, the shortest first."""
    found: defaultdict[int, list[Gain]] = defaultdict(list)
    for point in points:
        if _is_sound(point):
            found[point.tokens].append(point)
    return [_length(tokens, found[tokens]) for tokens in sorted(found)]


def threshold_of(series: Series) -> Threshold | None:
    return threshold(series.order, series.family, series.gains)


def allowed(problem: Mapping[str, Any], evidence: Iterable[Decision] | Evidence) -> set[str]:
    """The orders worth choosing at a length that was never measured: the natural one, and those that pay there.

    What was measured in the problem's own family decides; where that is too little, that of the nearest, whose window
    or segments are within a factor of about two; where there is none, nothing speaks for another order.

    Args:
        problem: as `Problem.to_dict` writes it.
        evidence: decisions of this silicon; those of other groups are passed over.

    Raises:
        KeyError, TypeError: `problem` is not one.
    """
    tokens, family = problem["q_len"], family_of(problem)
    if problem["k_len"] != tokens:
        return {NATURAL}
    nearest: dict[str, tuple[float, Threshold]] = {}
    for series in group_series(problem, evidence):
        distance, found = apart(family, series.family), threshold_of(series)
        if found is not None and distance <= min(REACH, nearest.get(series.order, (REACH,))[0]):
            nearest[series.order] = (distance, found)
    return {NATURAL} | {order for order, (_, found) in nearest.items() if found.pays(tokens)}


def _is_sound(point: Gain) -> bool:
    return 0 < point.low <= point.gain <= point.high < math.inf


def _length(tokens: int, points: Sequence[Gain]) -> Length:
    gain = math.exp(sum(math.log(point.gain) for point in points) / len(points))
    low, high = min(point.low for point in points), max(point.high for point in points)
    return Length(tokens, gain, low, high, min(map(_verdict, points)))


def _verdict(point: Gain) -> Verdict:
    if point.low > 1:
        return Verdict.PAYS
    return Verdict.OPEN if point.low >= 1 - MARGIN and point.high >= 1 else Verdict.NOT


def _crossing(path: Sequence[Length]) -> int:
    """Tokens where the gain rises past 1 for the last time; its lower end, where the gain is above 1 throughout."""
    if len(path) == 1:
        return path[0].tokens
    last = _last_rise([(each.tokens, each.gain) for each in path])
    found = _last_rise([(each.tokens, each.low) for each in path]) if last is None else last
    assert found is not None
    return min(max(math.ceil(found), path[0].tokens + 1), path[-1].tokens)


def _last_rise(curve: Sequence[tuple[int, float]]) -> float | None:
    for (a, before), (b, after) in reversed(list(pairwise(curve))):
        if before <= 1 < after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            return a * math.pow(b / a, share)
    return None
