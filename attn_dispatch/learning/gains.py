"""What an order of tokens gains at the lengths where it was measured, family by family. No torch here.

A family is a group of problems (see `group`) whose patterns share every size but the grid: what is left is the length.
Heads and batch may differ within it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attn_dispatch.learning.features import features
from attn_dispatch.learning.predict import FOREIGN, NOISE, Evidence, group_for, is_timed
from attn_dispatch.spec.groups import SIZES, USUAL, group_of
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.tuning.intervals import LAST_LOOK, MARGIN, ONE_LOOK, fewest

OPEN_SIDE = 2**20  #: tokens that an open side of a window counts as, where families are compared

Interval = tuple[float, float, float]  #: low, middle, high


@dataclass(frozen=True, slots=True)
class Gain:
    """Time of the best candidate in natural order over that of the best in another, at one length in tokens.

    `low` and `high` are an interval: the paired 99 % one where one of the two was chosen, else the worst and the best
    of both 95 % ones. `key` names the decision that measured it.
    """

    tokens: int
    gain: float
    low: float
    high: float
    key: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """The gains of one order in one family on one silicon; `problem` is any one of the family."""

    silicon: str
    group: str
    problem: Mapping[str, Any]
    order: str
    gains: tuple[Gain, ...]

    @property
    def family(self) -> dict[str, Any]:
        return family_of(self.problem)


def family_of(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The pattern without its grid, in plain values. Raises KeyError, TypeError."""
    plain = json.loads(json.dumps(problem["pattern"]))
    return {name: value for name, value in plain.items() if name != "grid"}


def family_title(family: Mapping[str, Any]) -> str:
    """A family for a person: `Neighborhood(window=13,13 causal)`."""
    words = []
    for name, value in family.items():
        values = value if isinstance(value, list | tuple) else [value]
        usual = name in ("kind", "is_causal") or (name, value) in USUAL.items() or {name, *values} == {"dilation", 1}
        words += [] if usual else [f"{name}={','.join('open' if each is None else str(each) for each in values)}"]
    causal = family.get("is_causal", False)
    axes = causal if isinstance(causal, list | tuple) else [causal]
    words += ["causal" if all(axes) else "causal=" + ",".join("1" if axis else "0" for axis in axes)] * any(axes)
    return f"{family.get('kind', '?')}({' '.join(words)})"


def apart(family: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How far two families of a group are from one another: octaves, the root mean square over their sizes."""
    one, two = list(_sizes(family)), list(_sizes(other))
    if len(one) != len(two):
        return math.inf
    return math.dist(one, two) / math.sqrt(max(len(one), 1))


def all_series(decisions: Iterable[Decision]) -> list[Series]:
    """Everything that decisions measured, of any silicon, by silicon, group, family and order."""
    problems: dict[tuple[str, ...], Mapping[str, Any]] = {}
    found: defaultdict[tuple[str, ...], list[Gain]] = defaultdict(list)
    for decision in decisions:
        try:
            features(decision.problem)
            start = (decision.silicon, group_for(decision), json.dumps(family_of(decision.problem), sort_keys=True))
        except FOREIGN:
            continue
        for order, gain in gains_of(decision.problem, decision.candidates, decision.key):
            problems.setdefault((*start, order), decision.problem)
            found[*start, order].append(gain)
    return [Series(name[0], name[1], problems[name], name[-1], tuple(found[name])) for name in sorted(found)]


def group_series(problem: Mapping[str, Any], evidence: Iterable[Decision] | Evidence) -> list[Series]:
    """The same of the problem's own group. Decisions are taken to be of one silicon.

    Raises:
        KeyError, TypeError: `problem` is not one.
    """
    ready = evidence if isinstance(evidence, Evidence) else Evidence(evidence)
    group = group_of(problem)
    problems: dict[tuple[str, str], Mapping[str, Any]] = {}
    found: defaultdict[tuple[str, str], list[Gain]] = defaultdict(list)
    for point in ready.groups.get(group, {}).values():
        for order, gain in gains_of(point.problem, point.rows, point.key):
            name = (json.dumps(family_of(point.problem), sort_keys=True), order)
            problems.setdefault(name, point.problem)
            found[name].append(gain)
    return [Series("", group, problems[name], name[1], tuple(found[name])) for name in sorted(found)]


def gains_of(problem: Mapping[str, Any], rows: Collection[Row], key: str = "") -> Iterator[tuple[str, Gain]]:
    """Every order that was timed beside the natural one, with its gain. Nothing where q and k differ in length, or
    where the fastest backend in an order is not known in the natural one.
    """
    tokens = problem.get("q_len")
    if type(tokens) is not int or tokens < 1 or problem.get("k_len") != tokens:
        return
    best: dict[str, Row] = {}
    for row in sorted(filter(is_timed, rows), key=_speed):
        best.setdefault(row.order, row)
    natural = best.pop(NATURAL, None)
    if natural is None:
        return
    timed = {row.backend for row in rows if row.order == NATURAL and is_timed(row)}
    left_out = {row.backend for row in rows if row.order == NATURAL} - timed
    for order, row in sorted(best.items()):
        if row.backend in left_out:
            continue
        low, middle, high = _guarded(_paired(natural, row) or _unpaired(natural, row), natural, row)
        yield order, Gain(tokens, middle, low, high, key)


def _speed(row: Row) -> tuple[float, bool, str]:
    """The fastest first; of equal ones the chosen, whose ratios are known."""
    return row.median_ms or math.inf, row.status != "chosen", row.backend


def _paired(natural: Row, row: Row) -> Interval | None:
    """Where one of the two was chosen, the other's ratio to it."""
    if row.status == "chosen":
        return _ratio(natural)
    found = _ratio(row) if natural.status == "chosen" else None
    return None if found is None else (1 / found[2], 1 / found[1], 1 / found[0])


def _ratio(row: Row) -> Interval | None:
    low, middle, high = row.ratio_low, row.ratio, row.ratio_high
    if low is None or middle is None or high is None or not 0 < low <= middle <= high < math.inf:
        return None
    return low, middle, high


def _unpaired(natural: Row, row: Row) -> Interval:
    one, two = _times(natural), _times(row)
    return one[0] / two[2], one[1] / two[1], one[2] / two[0]


def _times(row: Row) -> Interval:
    """Milliseconds. A median that says nothing of its interval is taken to be known to within two of its deviations."""
    low, middle, high = row.low_ms, row.median_ms or 0.0, row.high_ms
    if low is None or high is None or not 0 < low <= middle <= high < math.inf:
        return middle * math.exp(-2 * NOISE), middle, middle * math.exp(2 * NOISE)
    return low, middle, high


def _guarded(found: Interval, *rows: Row) -> Interval:
    """The interval of a few rounds says little: it is widened as `intervals` guards a choice by as few."""
    rounds = min(fewest(LAST_LOOK) if row.rounds is None else max(row.rounds, 1) for row in rows)
    if rounds >= fewest(LAST_LOOK):
        return found
    wider = 1 + max(MARGIN * 2.0 ** (fewest(ONE_LOOK) - rounds), 2 * MARGIN)
    return found[0] / wider, found[1], found[2] * wider


def _sizes(family: Mapping[str, Any]) -> Iterator[float]:
    for name in SIZES:
        values = family.get(name, ())
        for value in values if isinstance(values, list | tuple) else [values]:
            yield math.log2(1 + (OPEN_SIDE if value is None else value))
