"""Speed-ups of token orders over the natural order at measured lengths, by family of problems; and of skipping what a
mask made of data hides, at measured densities, by shape. No torch here.

A family is the problems of a group whose patterns share every size but the grid; length, heads and batch may differ.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from attn_dispatch.learning.predict import NOISE, Evidence, EvidencePoint, is_timed
from attn_dispatch.spec.groups import OF_DATA, SIZES, USUAL, group_of
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.tuning.intervals import LAST_LOOK, MARGIN, ONE_LOOK, fewest

MASKING = ("sdpa_mask", "manual")  #: backends that compute all pairs of queries and keys, whatever is seen
SKIPPING = "skipping"  #: in place of an order: any other backend
PER_DENSITY = 1000  #: a density is at `PER_DENSITY / density` in place of tokens: the sparser, the farther
OPEN_SIDE_TOKENS = 2**20  #: size of a window's open side when families are compared

Bounds = tuple[float, float, float]  #: low, middle, high


class Speedup(NamedTuple):
    """Time of the fastest candidate in natural order / time of the fastest in another order, at one length.

    `low` and `high` bound the factor: the paired 99 % interval where one of the two candidates was chosen, else the
    extreme ratios of both 95 % intervals. `key` names the decision with the measurements.
    """

    tokens: int
    factor: float
    low: float
    high: float
    key: str = ""


@dataclass(frozen=True, slots=True)
class SpeedupSeries:
    """The speedups of one order in one family on one silicon; `problem` is any problem of the family."""

    silicon: str
    group: str
    problem: Mapping[str, Any]
    order: str
    speedups: tuple[Speedup, ...]

    @property
    def family(self) -> dict[str, Any]:
        return family_of(self.problem)


def family_of(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The pattern without its grid, in plain values. Raises KeyError or TypeError for an invalid problem."""
    plain = json.loads(json.dumps(problem["pattern"]))
    return {name: value for name, value in plain.items() if name not in ("grid", *OF_DATA)}


def family_title(family: Mapping[str, Any]) -> str:
    """The family as readable text: `Neighborhood(window=13,13 causal)`."""
    words = []
    for name, value in family.items():
        value = family_title(value) if isinstance(value, Mapping) else value
        values = value if isinstance(value, list | tuple) else [value]
        usual = name in ("kind", "is_causal") or (name, value) in USUAL.items() or {name, *values} == {"dilation", 1}
        usual = usual or value is False
        words += [] if usual else [f"{name}={','.join('open' if each is None else str(each) for each in values)}"]
    causal = family.get("is_causal", False)
    axes = causal if isinstance(causal, list | tuple) else [causal]
    if any(axes):
        words.append("causal" if all(axes) else "causal=" + ",".join("1" if axis else "0" for axis in axes))
    return f"{family.get('kind', '?').removesuffix('Form')}({' '.join(words)})"


def family_distance(family: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The distance of two families of a group: root mean square over their sizes, in octaves."""
    one, two = list(_size_octaves(family)), list(_size_octaves(other))
    if len(one) != len(two):
        return math.inf
    return math.dist(one, two) / math.sqrt(max(len(one), 1))


def all_series(decisions: Iterable[Decision]) -> list[SpeedupSeries]:
    """The series of all decisions, sorted by silicon, group, family and order; invalid problems are skipped."""
    known: defaultdict[str, Evidence] = defaultdict(Evidence)
    for decision in decisions:
        known[decision.silicon].add(decision)
    groups = ((silicon, *each) for silicon in sorted(known) for each in sorted(known[silicon].groups.items()))
    return [each for silicon, group, points in groups for each in _series(silicon, group, points.values())]


def density_series(decisions: Iterable[Decision]) -> list[SpeedupSeries]:
    """For each problem with a mask made of data, whatever its `OF_DATA`: the time of the fastest backend that computes
    all pairs / that of the fastest that skips, by `PER_DENSITY / density`. Sorted by silicon and problem.
    """
    found: defaultdict[tuple[str, str], list[tuple[Decision, Speedup]]] = defaultdict(list)
    for decision in decisions:
        pattern = decision.problem.get("pattern")
        density = pattern.get("density") if isinstance(pattern, Mapping) else None
        rows = sorted(filter(is_timed, decision.candidates), key=_by_time)
        whole = next((row for row in rows if row.backend in MASKING), None)
        skipping = next((row for row in rows if row.backend not in MASKING), None)
        if type(density) is not int or whole is None or skipping is None:
            continue
        shape = {**decision.problem, "pattern": family_of(decision.problem)}
        low, middle, high = time_ratio(whole, skipping)
        point = Speedup(round(PER_DENSITY * 2 ** (-density / 2)), middle, low, high, decision.key)
        found[decision.silicon, json.dumps(shape, sort_keys=True)].append((decision, point))
    return [
        SpeedupSeries(name[0], each[0][0].group, each[0][0].problem, SKIPPING, tuple(point for _, point in each))
        for name, each in sorted(found.items())
    ]


def group_series(problem: Mapping[str, Any], evidence: Iterable[Decision] | Evidence) -> list[SpeedupSeries]:
    """The series of the problem's group. `evidence` must be of one silicon; the series leave `silicon` empty.

    Raises:
        KeyError, TypeError: `problem` is invalid.
    """
    ready, group = evidence if isinstance(evidence, Evidence) else Evidence(evidence), group_of(problem)
    return _series("", group, list(ready.groups.get(group, {}).values()))  # another thread may add to it


def _series(silicon: str, group: str, points: Iterable[EvidencePoint]) -> list[SpeedupSeries]:
    problems: dict[tuple[str, str], Mapping[str, Any]] = {}
    found: defaultdict[tuple[str, str], list[Speedup]] = defaultdict(list)
    for point in points:
        for order, speedup in speedups_of(point.problem, point.rows, point.key):
            name = (json.dumps(family_of(point.problem), sort_keys=True), order)
            problems.setdefault(name, point.problem)
            found[name].append(speedup)
    return [SpeedupSeries(silicon, group, problems[name], name[1], tuple(found[name])) for name in sorted(found)]


def speedups_of(problem: Mapping[str, Any], rows: Collection[Row], key: str = "") -> Iterator[tuple[str, Speedup]]:
    """Each token order of a decision with its speed-up over natural order.

    Yields nothing where q and k differ in length or natural order was not timed, and skips an order whose fastest
    backend has an untimed row in natural order.
    """
    tokens = problem.get("q_len")
    if type(tokens) is not int or tokens < 1 or problem.get("k_len") != tokens:
        return
    best: dict[str, Row] = {}
    for row in sorted(filter(is_timed, rows), key=_by_time):
        best.setdefault(row.order, row)
    natural = best.pop(NATURAL, None)
    if natural is None:
        return
    timed = {row.backend for row in rows if row.order == NATURAL and is_timed(row)}
    untimed = {row.backend for row in rows if row.order == NATURAL} - timed
    for order, row in sorted(best.items()):
        if row.backend in untimed:
            continue
        low, middle, high = time_ratio(natural, row)
        yield order, Speedup(tokens, middle, low, high, key)


def time_ratio(reference: Row, row: Row) -> Bounds:
    """Time of a timed row `reference` / time of another of the same decision, with its bounds.

    Paired, by the 99 % interval, where one of the two was chosen; else the extreme ratios of both 95 % intervals.
    Wider where one has few rounds.
    """
    return _widened(_paired(reference, row) or _unpaired(reference, row), reference, row)


def _by_time(row: Row) -> tuple[float, bool, str]:
    """The fastest first; of equal rows the chosen one, since ratios are relative to it."""
    return row.median_ms or math.inf, row.status != "chosen", row.backend


def _paired(natural: Row, row: Row) -> Bounds | None:
    """The ratio from the stored ratio to the chosen row; None where neither row was chosen."""
    if row.status == "chosen":
        return _ratio(natural)
    found = _ratio(row) if natural.status == "chosen" else None
    return None if found is None else (1 / found[2], 1 / found[1], 1 / found[0])


def _ratio(row: Row) -> Bounds | None:
    low, middle, high = row.ratio_low, row.ratio, row.ratio_high
    if low is None or middle is None or high is None or not 0 < low <= middle <= high < math.inf:
        return None
    return low, middle, high


def _unpaired(natural: Row, row: Row) -> Bounds:
    """The speed-up from the two medians and their separate intervals."""
    one, two = _times(natural), _times(row)
    return one[0] / two[2], one[1] / two[1], one[2] / two[0]


def _times(row: Row) -> Bounds:
    """Interval and median in milliseconds; without a valid interval, the median +- 2 standard deviations of `NOISE`."""
    low, middle, high = row.low_ms, row.median_ms or 0.0, row.high_ms
    if low is None or high is None or not 0 < low <= middle <= high < math.inf:
        return middle * math.exp(-2 * NOISE), middle, middle * math.exp(2 * NOISE)
    return low, middle, high


def _widened(bounds: Bounds, *rows: Row) -> Bounds:
    """Widen the bounds where a row has few rounds, with the margin that `intervals` demands of so early a choice."""
    rounds = min(fewest(LAST_LOOK) if row.rounds is None else max(row.rounds, 1) for row in rows)
    if rounds >= fewest(LAST_LOOK):
        return bounds
    wider = 1 + max(MARGIN * 2.0 ** (fewest(ONE_LOOK) - rounds), 2 * MARGIN)
    return bounds[0] / wider, bounds[1], bounds[2] * wider


def _size_octaves(family: Mapping[str, Any]) -> Iterator[float]:
    for name in SIZES:
        values = family.get(name, ())
        for value in values if isinstance(values, list | tuple) else [values]:
            yield math.log2(1 + (OPEN_SIDE_TOKENS if value is None else value))
