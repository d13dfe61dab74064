"""Times against length: decisions that differ in length only, and where the fastest candidate changes."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from attn_dispatch.cli.report.comparisons import default_of, gain_over
from attn_dispatch.cli.tables import compact
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import Bounds, family_of
from attn_dispatch.store.decision import CandidateId, Decision
from attn_dispatch.text import titled

LENGTHS = ("q_len", "k_len", "pattern")  #: fields of a problem that a series does not share, or only in part
_SHAPE = re.compile(r"^\[(\d+), \d+, ")
_KEYS = re.compile(r"k, v \[\d+, ")
_GRID = re.compile(r"grid=\([\d, ]*\)")


class Point(NamedTuple):
    """A candidate at one length; times in ms. `gain` is the default's time / this one's, with bounds.

    `decision` and `row` are the places of the decision among all, and of the candidate in it. `is_single`: its time is
    a single sample.
    """

    candidate: CandidateId
    tokens: int
    median_ms: float
    low_ms: float
    high_ms: float
    peak_bytes: int | None
    gain: Bounds | None
    decision: int
    row: int
    is_single: bool = False


class Crossing(NamedTuple):
    """Where the fastest candidate changes between two neighbouring lengths at which it was sampled more than once.

    `tokens` and `ms` are interpolated linearly in log-log; None where one of the two has no such time at both lengths.
    """

    before: CandidateId
    after: CandidateId
    between: tuple[int, int]
    tokens: float | None
    ms: float | None
    sure: bool

    def __str__(self) -> str:
        change = f"{titled(*self.before)} to {titled(*self.after)}"
        between = f"measured at {self.between[0]:,} and {self.between[1]:,}"
        doubt = "" if self.sure else "; within noise at one of them"
        if self.tokens is None:
            return f"{change}: {between}{doubt}; where they cross is unknown, since one was not timed at both, or once"
        return f"{change} at about {float(f'{self.tokens:.2g}'):,.0f} tokens ({between}{doubt})"


@dataclass(frozen=True, slots=True)
class Series:
    """The points of problems that share all but the length, on one silicon."""

    title: str
    silicon: str
    points: tuple[Point, ...]
    defaults: tuple[str, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({point.tokens for point in self.points})

    @property
    def crossings(self) -> list[Crossing]:
        """Sorted by length."""
        known = [points for points in self._by_length() if not _fastest(points).is_single]
        return [found for one, two in pairwise(known) if (found := _crossing(one, two)) is not None]

    @property
    def notes(self) -> list[str]:
        """Where the fastest candidate is not known, since it was sampled once; or that it is the same everywhere."""
        fastest = [_fastest(points) for points in self._by_length()]
        once = ", ".join(f"{each.tokens:,}" for each in fastest if each.is_single)
        if once:
            return [f"Which candidate is the fastest is not known at {once} tokens: it was timed once there."]
        return [] if self.crossings else ["The same candidate is the fastest at all measured lengths."]

    def _by_length(self) -> list[dict[CandidateId, Point]]:
        found: defaultdict[int, dict[CandidateId, Point]] = defaultdict(dict)
        for point in self.points:
            known = found[point.tokens].get(point.candidate)
            if known is None or point.median_ms < known.median_ms:
                found[point.tokens][point.candidate] = point
        return [found[tokens] for tokens in sorted(found)]


def all_series(decisions: Sequence[Decision]) -> list[Series]:
    """The series with a timed candidate; those with the most lengths and candidates first."""
    members: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index, decision in enumerate(decisions):
        if _tokens(decision.problem) is not None and any(map(is_timed, decision.candidates)):
            members[decision.silicon, _shared(decision.problem)].append(index)
    groups = _with_cut(decisions, members)
    named: defaultdict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for key, places in groups.items():
        named[key[0], _title(decisions[places[0]])].append(key)
    found = [
        _series(decisions, groups[key], title + _differing(key[1], [other for _, other in keys]))
        for (_, title), keys in named.items()
        for key in keys
    ]
    return sorted(found, key=lambda each: (-len(each.lengths), -len(each.points), each.silicon, each.title))


def _with_cut(
    decisions: Sequence[Decision], members: Mapping[tuple[str, str], list[int]]
) -> dict[tuple[str, str], list[int]]:
    """The groups, those of dilated patterns with the problems that are shorter than a segment, which is stored cut.

    A group is left out if all its problems are in others now.
    """
    #: By silicon and all but the segments: by the length that cuts these, and by what they are cut to.
    cut: defaultdict[tuple[str, str], dict[int, dict[tuple[int, ...], list[int]]]] = defaultdict(dict)
    groups = {key: _without_segments(key) for key in members}
    for key, (rest, segments) in groups.items():
        for place in members[key]:
            tokens = _tokens(decisions[place].problem)
            if tokens is not None and tokens in segments:
                cut[rest].setdefault(tokens, {}).setdefault(segments, []).append(place)
    found, added = {}, set()
    for key, (rest, segments) in groups.items():
        more = [
            place
            for tokens, by_segments in sorted(cut[rest].items())
            if tokens < max(segments, default=0)
            for place in by_segments.get(tuple(min(each, tokens) for each in segments), ())
        ]
        found[key] = members[key] + more
        added.update(more)
    return {key: places for key, places in found.items() if not added.issuperset(members[key])}


def _without_segments(key: tuple[str, str]) -> tuple[tuple[str, str], tuple[int, ...]]:
    """A group's key without its segment lengths, and these; none where the pattern has none."""
    problem = json.loads(key[1])
    segments = problem["pattern"].get("segment_lengths")
    if not isinstance(segments, list) or any(type(each) is not int for each in segments):
        return key, ()
    del problem["pattern"]["segment_lengths"]
    return (key[0], json.dumps(problem, sort_keys=True)), tuple(segments)


def _series(decisions: Sequence[Decision], places: Sequence[int], title: str) -> Series:
    points: list[Point] = []
    defaults: dict[str, None] = {}
    for place in places:
        decision, tokens = decisions[place], _tokens(decisions[place].problem)
        assert tokens is not None
        default = default_of(decision)
        for number, row in enumerate(decision.candidates):
            if not is_timed(row) or row.median_ms is None:
                continue
            low, high = row.low_ms or row.median_ms, row.high_ms or row.median_ms
            gain = gain_over(default, row)
            if default is not None and gain is not None:
                defaults[titled(*default.id)] = None
            points.append(
                Point(row.id, tokens, row.median_ms, low, high, row.peak_bytes, gain, place, number, row.rounds == 1)
            )
    points.sort(key=lambda point: (point.tokens, point.decision, point.row))
    return Series(title, decisions[places[0]].silicon, tuple(points), tuple(defaults))


def _tokens(problem: Mapping[str, Any]) -> int | None:
    """The number of keys, against which times are drawn; None for what is no problem of this version."""
    tokens = problem.get("k_len")
    known = type(tokens) is int and tokens > 0 and isinstance(problem.get("pattern"), Mapping)
    return tokens if known else None


def _shared(problem: Mapping[str, Any]) -> str:
    """What the problems of a series share, as text. Where there are fewer queries than keys, their number too."""
    kept = {name: value for name, value in problem.items() if name not in LENGTHS}
    kept["pattern"] = family_of(problem)
    if problem.get("q_len") != problem["k_len"]:
        kept["q_len"] = problem.get("q_len")
    return json.dumps(kept, sort_keys=True)


def _title(decision: Decision) -> str:
    """The decision's title with N for its length."""
    text = _GRID.sub("grid", compact(decision.title))
    if decision.problem.get("q_len") == decision.problem["k_len"]:
        text = _SHAPE.sub(r"[\1, N, ", text)
    return _KEYS.sub("k, v [N, ", text)


def _differing(shared: str, others: Sequence[str]) -> str:
    """The fields in which a series differs from others of its title."""
    mine, plain = json.loads(shared), [json.loads(other) for other in others]
    differing = [name for name in mine if any(other.get(name) != mine[name] for other in plain)]
    return f" ({', '.join(f'{name} {json.dumps(mine[name])}' for name in differing)})" if differing else ""


def _crossing(one: Mapping[CandidateId, Point], two: Mapping[CandidateId, Point]) -> Crossing | None:
    first, last = _fastest(one), _fastest(two)
    if first.candidate == last.candidate:
        return None
    between = first.tokens, last.tokens
    rival, former = one.get(last.candidate), two.get(first.candidate)
    if rival is None or former is None or rival.is_single or former.is_single:
        return Crossing(first.candidate, last.candidate, between, None, None, True)
    sure = first.high_ms < rival.low_ms and last.high_ms < former.low_ms
    ahead = math.log(rival.median_ms) - math.log(first.median_ms)
    behind = math.log(former.median_ms) - math.log(last.median_ms)
    share = ahead / (ahead + behind) if ahead + behind else 0.5
    tokens = between[0] * math.pow(between[1] / between[0], share)
    ms = math.pow(first.median_ms, 1 - share) * math.pow(former.median_ms, share)
    return Crossing(first.candidate, last.candidate, between, tokens, ms, sure)


def _fastest(points: Mapping[CandidateId, Point]) -> Point:
    return min(points.values(), key=lambda point: point.median_ms)
