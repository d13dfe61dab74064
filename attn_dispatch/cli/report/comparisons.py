"""What a decision gains over the default: the backend that would run if nothing had been measured."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.registry import BUILT_IN, LAST_RESORT
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import Bounds, time_ratio
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row
from attn_dispatch.text import titled

_DIGITS = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?")


class Gain(NamedTuple):
    """The default and time of the default / time of the chosen candidate, with bounds; None where one has no time.

    `is_single`: one of the two times is a single sample, on which no summary rests.
    """

    default: CandidateId | None
    is_chosen: bool
    bounds: Bounds | None
    is_single: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether another candidate than the default was chosen."""
        return self.default is not None and not self.is_chosen

    @property
    def verdict(self) -> str:
        """`2.10x faster`, `2.10x slower`; or why there is no such number."""
        if self.default is None:
            return "no default"
        if self.is_chosen:
            return "is the default"
        if self.bounds is None:
            return f"no time of {titled(*self.default)}"
        low, middle, high = self.bounds
        if high < 1:
            return f"{1 / middle:.2f}x slower"
        return f"{middle:.2f}x {'faster' if low > 1 else 'undecided'}"

    @property
    def interval(self) -> str:
        """`2.01 - 2.20`, of the number in `verdict`; empty for the default itself, or without times."""
        if not self.bounds or not self.is_changed:
            return ""
        low, _, high = self.bounds
        low, high = (1 / high, 1 / low) if high < 1 else (low, high)
        return f"{low:.2f} - {high:.2f}"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """How often a candidate ended in each status, its reasons with their counts, and its times over the chosen one's.

    Reasons that differ in numbers only are counted together; the first stands for all.
    """

    name: str
    statuses: Counter[str]
    reasons: tuple[tuple[str, str, int], ...]
    ratios: tuple[float, ...]


def preference(backend: str, order: Sequence[str] = BUILT_IN) -> int:
    """The place of a backend in an order of preference; plug-ins come before the last resort."""
    if backend == LAST_RESORT:
        return len(order) + 1
    return order.index(backend) if backend in order else len(order)


def by_preference(name: CandidateId) -> tuple[int, str, bool, str]:
    """Sorts candidates by preference, natural order first."""
    return preference(name[0]), name[0], name[1] != NATURAL, name[1]


def default_of(decision: Decision) -> Row | None:
    """The static choice: the first backend by preference that can run, in natural order if possible."""
    able = [row for row in decision.candidates if row.status in (*TIMED, "not_measured")]
    order = registry.preference(decision.silicon, decision.problem)
    return min(able, key=lambda row: (row.order != NATURAL, preference(row.backend, order)), default=None)


def gain_over(default: Row | None, row: Row) -> Bounds | None:
    """Low, middle and high of the default's time / the row's; None where one of them has no time."""
    if default is None or not is_timed(default) or not is_timed(row):
        return None
    return (1.0, 1.0, 1.0) if default.id == row.id else _ratio(default, row)


def _ratio(one: Row, other: Row) -> Bounds | None:
    """`time_ratio`; None where a time of 0 or without a limit leaves no ratio."""
    try:
        low, middle, high = time_ratio(one, other)
    except ArithmeticError:
        return None
    return (low, middle, high) if 0 < low <= middle <= high < math.inf else None


def gain_of(decision: Decision) -> Gain:
    """The gain of a decision's choice."""
    default = default_of(decision)
    chosen = next((row for row in decision.candidates if row.id == decision.chosen), None)
    if default is None or chosen is None:
        return Gain(None, False, None)
    single = default.id != chosen.id and 1 in (default.rounds, chosen.rounds)
    return Gain(default.id, default.id == chosen.id, gain_over(default, chosen), single)


def known_factors(gains: Iterable[Gain]) -> list[float]:
    """The gains whose times were both sampled more than once."""
    return [gain.bounds[1] for gain in gains if gain.bounds is not None and not gain.is_single]


def outcomes(decisions: Sequence[Decision]) -> list[Outcomes]:
    """One for each candidate, by preference."""
    statuses: defaultdict[CandidateId, Counter[str]] = defaultdict(Counter)
    reasons: defaultdict[CandidateId, dict[tuple[str, str], list[str]]] = defaultdict(dict)
    ratios: defaultdict[CandidateId, list[float]] = defaultdict(list)
    for decision in decisions:
        chosen = next((row for row in decision.candidates if row.id == decision.chosen), None)
        for row in decision.candidates:
            statuses[row.id][row.status] += 1
            if chosen is not None and row is not chosen and is_timed(row) and is_timed(chosen):
                ratio = _ratio(row, chosen)
                ratios[row.id] += [] if ratio is None else [ratio[1]]
            if row.status != "chosen" and row.reason:
                alike = row.status, _DIGITS.sub("#", row.reason)
                reasons[row.id].setdefault(alike, []).append(row.reason)
    return [
        Outcomes(titled(*name), statuses[name], _most_common(reasons[name]), tuple(sorted(ratios[name])))
        for name in sorted(statuses, key=by_preference)
    ]


def _most_common(reasons: dict[tuple[str, str], list[str]]) -> tuple[tuple[str, str, int], ...]:
    found = sorted(reasons.items(), key=lambda each: -len(each[1]))
    return tuple((status, texts[0], len(texts)) for (status, _), texts in found)
