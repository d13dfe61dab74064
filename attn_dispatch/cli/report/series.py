"""Times against length: decisions that differ in length only, and where the fastest candidate changes."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

from attn_dispatch.cli.report.comparisons import by_preference, gain_over, plain_of
from attn_dispatch.cli.tables import Table, compact
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import Bounds, family_of
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.text import milliseconds, titled

LENGTHS = ("q_len", "k_len", "pattern")  #: fields of a problem that a series does not share, or only in part
_SHAPE = re.compile(r"^\[(\d+), \d+, ")
_KEYS = re.compile(r"k, v \[\d+, ")
_GRID = re.compile(r"grid=\([\d, ]*\)")


class Point(NamedTuple):
    """A timed candidate at one length. `gain` is PyTorch's time / this one's, with bounds."""

    tokens: int
    row: Row
    gain: Bounds | None

    @property
    def ms(self) -> float:
        """The median time."""
        return self.row.median_ms or math.inf

    @property
    def is_single(self) -> bool:
        """Whether the time is a single sample."""
        return self.row.rounds == 1


class Crossing(NamedTuple):
    """Where the fastest candidate changes between two neighbouring lengths at which it was sampled more than once.

    `tokens` is interpolated linearly in log-log; None where one of the two has no such time at both lengths.
    """

    tokens: float | None
    text: str


@dataclass(frozen=True)
class Series:
    """The points of problems that share all but the length, on one silicon."""

    title: str
    silicon: str
    points: Sequence[Point]

    @cached_property
    def by_length(self) -> dict[int, dict[CandidateId, Point]]:
        """The fastest point of each candidate, the shortest length first."""
        found: defaultdict[int, dict[CandidateId, Point]] = defaultdict(dict)
        for point in sorted(self.points, key=lambda point: (point.tokens, point.ms)):
            found[point.tokens].setdefault(point.row.id, point)
        return dict(found)

    @property
    def crossings(self) -> list[Crossing]:
        """Sorted by length."""
        known = [points for points in self.by_length.values() if not _fastest(points).is_single]
        return [found for one, two in pairwise(known) if (found := _crossing(one, two)) is not None]

    @property
    def notes(self) -> list[str]:
        """Where the fastest candidate changes; or that it is not known, since it was sampled once."""
        fastest = map(_fastest, self.by_length.values())
        once = ", ".join(f"{each.tokens:,}" for each in fastest if each.is_single)
        found = [f"Fastest: {each.text}." for each in self.crossings]
        if once:
            found.append(f"Which candidate is the fastest is not known at {once} tokens: it was timed once there.")
        elif not found:
            found.append("The same candidate is the fastest at all measured lengths.")
        return found

    @property
    def numbers(self) -> Table:
        """A row for each length and a column for each candidate: its time, and how much faster than PyTorch's it is."""
        names = sorted({point.row.id for point in self.points}, key=by_preference)
        rows = [
            [f"{tokens:,}", *(_cell(points[name]) if name in points else "-" for name in names)]
            for tokens, points in self.by_length.items()
        ]
        caption = "Median time (times SDPA's speed)"
        return Table(["tokens", *(titled(*name) for name in names)], rows, {0}, caption)


def _cell(point: Point) -> str:
    gain = "" if point.gain is None else f" ({point.gain[1]:.2f}x)"
    return milliseconds(point.ms) + gain + (", 1 sample" if point.is_single else "")


def all_series(decisions: Sequence[Decision]) -> list[Series]:
    """The series with a timed candidate; those with the most lengths and candidates first."""
    groups: defaultdict[tuple[str, str], list[Decision]] = defaultdict(list)
    for decision in decisions:
        if _tokens(decision.problem) and any(map(is_timed, decision.candidates)):
            groups[decision.silicon, _shared(decision.problem)].append(decision)
    named: defaultdict[tuple[str, str], list[tuple[str, list[Decision]]]] = defaultdict(list)
    for (silicon, shared), members in groups.items():
        for each in _by_segments(members):
            longest = max(each, key=lambda decision: _tokens(decision.problem))
            named[silicon, _title(longest)].append((shared, each))
    found = [
        Series(title + _differing(shared, [other for other, _ in alike]), silicon, [*chain(*map(_points, members))])
        for (silicon, title), alike in named.items()
        for shared, members in alike
    ]
    return sorted(found, key=lambda each: (-len(each.by_length), -len(each.points), each.silicon, each.title))


def _by_segments(members: Sequence[Decision]) -> list[list[Decision]]:
    """Members whose segments are alike. A segment is stored cut to a shorter sequence, which may belong to several."""
    cut = [tuple(each.problem["pattern"].get("segment_lengths", ())) for each in members]
    lengths = [_tokens(each.problem) for each in members]
    places = [
        {at for at, tokens in enumerate(lengths) if cut[at] == tuple(min(each, tokens) for each in whole)}
        for whole in dict.fromkeys(cut)
    ]
    return [[members[at] for at in sorted(own)] for own in places if not any(own < other for other in places)]


def _points(decision: Decision) -> list[Point]:
    plain, tokens = plain_of(decision), _tokens(decision.problem)
    return [Point(tokens, row, gain_over(plain, row)) for row in decision.candidates if is_timed(row)]


def _tokens(problem: Mapping[str, Any]) -> int:
    """The number of keys, against which times are drawn; 0 for what is no problem of this version."""
    tokens = problem.get("k_len")
    return tokens if type(tokens) is int and tokens > 0 and isinstance(problem.get("pattern"), Mapping) else 0


def _shared(problem: Mapping[str, Any]) -> str:
    """What the problems of a series share, as text. Where there are fewer queries than keys, their number too."""
    kept = {name: value for name, value in problem.items() if name not in LENGTHS}
    kept["pattern"] = {name: value for name, value in family_of(problem).items() if name != "segment_lengths"}
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
    mine, plain = json.loads(shared), list(map(json.loads, others))
    differing = [name for name in mine if any(other.get(name) != mine[name] for other in plain)]
    return f" ({', '.join(f'{name} {json.dumps(mine[name])}' for name in differing)})" if differing else ""


def _fastest(points: Mapping[CandidateId, Point]) -> Point:
    return min(points.values(), key=lambda point: point.ms)


def _crossing(one: Mapping[CandidateId, Point], two: Mapping[CandidateId, Point]) -> Crossing | None:
    first, last = _fastest(one), _fastest(two)
    if first.row.id == last.row.id:
        return None
    change = f"{titled(*first.row.id)} to {titled(*last.row.id)}"
    between = f"measured at {first.tokens:,} and {last.tokens:,}"
    rival, former = one.get(last.row.id), two.get(first.row.id)
    if rival is None or former is None or rival.is_single or former.is_single:
        why = "where they cross is unknown, since one was not timed at both, or once"
        return Crossing(None, f"{change}: {between}; {why}")
    ahead = math.log(rival.ms) - math.log(first.ms)
    behind = math.log(former.ms) - math.log(last.ms)
    share = ahead / (ahead + behind) if ahead + behind else 0.5
    tokens = first.tokens * math.pow(last.tokens / first.tokens, share)
    sure = all((a.row.high_ms or a.ms) < (b.row.low_ms or b.ms) for a, b in ((first, rival), (last, former)))
    doubt = "" if sure else "; within noise at one of them"
    return Crossing(tokens, f"{change} at about {float(f'{tokens:.2g}'):,.0f} tokens ({between}{doubt})")
