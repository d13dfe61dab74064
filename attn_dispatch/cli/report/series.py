"""Times against length: decisions that differ in length only, and where the fastest candidate changes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from attn_dispatch.cli.tables import KEY_DIGITS, Table, compact, gain_over, plain_of
from attn_dispatch.kernels.registry import BUILT_IN
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import Bounds, family_of
from attn_dispatch.spec.groups import OF_DATA
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.text import milliseconds, titled


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
    def remark(self) -> str:
        """Whether the time is a single sample."""
        return ", 1 sample" if self.row.rounds == 1 else ""


@dataclass(frozen=True)
class Series:
    """The points of problems that share all but the length, on one silicon."""

    title: str
    silicon: str
    points: Sequence[Point]

    @cached_property
    def by_length(self) -> dict[int, dict[CandidateId, Point]]:
        """The points of each length by candidate, the shortest length and the fastest point first."""
        found: defaultdict[int, dict[CandidateId, Point]] = defaultdict(dict)
        for point in sorted(self.points, key=lambda point: (point.tokens, point.ms)):
            found[point.tokens].setdefault(point.row.id, point)
        return dict(found)

    @property
    def notes(self) -> list[str]:
        """Where the fastest candidate changes: between neighbouring lengths that were sampled more than once."""
        fastest = (next(iter(points.values())) for points in self.by_length.values())
        known = [point for point in fastest if not point.remark]
        changes = ((one, two) for one, two in pairwise(known) if one.row.id != two.row.id)
        return [
            f"Fastest: {titled(*a.row.id)} to {titled(*b.row.id)} between {a.tokens:,} and {b.tokens:,} tokens."
            for a, b in changes
        ]

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
    return milliseconds(point.ms) + gain + point.remark


def by_preference(name: CandidateId) -> tuple[int, str, bool, str]:
    """Sorts candidates as the registry lists backends, natural order first; other packages' come last."""
    backend, order = name
    return BUILT_IN.index(backend) if backend in BUILT_IN else len(BUILT_IN), backend, order != NATURAL, order


def all_series(decisions: Sequence[Decision]) -> list[Series]:
    """The series with a timed candidate; those with the most lengths and candidates first."""
    groups: defaultdict[tuple[str, str], list[Decision]] = defaultdict(list)
    for decision in decisions:
        if _tokens(decision.problem) and any(map(is_timed, decision.candidates)):
            groups[decision.silicon, _shared(decision.problem)].append(decision)
    found = []
    for (silicon, _), members in groups.items():
        for alike in _by_segments(members):
            longest = max(alike, key=lambda decision: _tokens(decision.problem))
            title = f"up to {compact(longest.title)}, key {longest.key[:KEY_DIGITS]}"
            found.append(Series(title, silicon, [point for each in alike for point in _points(each)]))
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
    plain, tokens = plain_of(decision.candidates), _tokens(decision.problem)
    return [Point(tokens, row, gain_over(plain, row)) for row in decision.candidates if is_timed(row)]


def _tokens(problem: Mapping[str, Any]) -> int:
    """The number of keys, against which times are drawn; 0 for what is no problem of this version."""
    tokens = problem.get("k_len")
    return tokens if type(tokens) is int and tokens > 0 and isinstance(problem.get("pattern"), Mapping) else 0


def _shared(problem: Mapping[str, Any]) -> str:
    """What the problems of a series share, as text. Where there are fewer queries than keys, their number too."""
    kept = {name: value for name, value in problem.items() if name not in ("q_len", "k_len", "pattern")}
    pattern = family_of(problem) | {name: problem["pattern"].get(name) for name in OF_DATA}
    kept["pattern"] = {name: value for name, value in pattern.items() if name != "segment_lengths"}
    if problem.get("q_len") != problem["k_len"]:
        kept["q_len"] = problem.get("q_len")
    return json.dumps(kept, sort_keys=True)
