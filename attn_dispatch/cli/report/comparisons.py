"""What a decision gains over the default: the backend that would run if nothing had been measured."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attn_dispatch.cli.tables import Table
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.registry import BUILT_IN, LAST_RESORT
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import Bounds, time_ratio
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import TIMED, CandidateId, Decision, Row
from attn_dispatch.text import titled

STATUSES = (
    *("chosen", "tie", "slower", "not_measured", "over_memory", "unsupported", "not_installed", "failed"),
    *("incorrect", "quarantined"),
)
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


def ratio_of(one: Row | None, other: Row) -> Bounds | None:
    """`time_ratio`; None where one has no time, or a time of 0 or without a limit leaves no ratio."""
    if one is None or not is_timed(one) or not is_timed(other):
        return None
    if one.id == other.id:
        return 1.0, 1.0, 1.0
    try:
        low, middle, high = time_ratio(one, other)
    except ArithmeticError:
        return None
    return (low, middle, high) if 0 < low <= middle <= high < math.inf else None


def chosen_row(decision: Decision) -> Row | None:
    """The row of the choice."""
    return next((row for row in decision.candidates if row.id == decision.chosen), None)


def gain_of(decision: Decision) -> Gain:
    """The gain of a decision's choice."""
    default, chosen = default_of(decision), chosen_row(decision)
    if default is None or chosen is None:
        return Gain(None, False, None)
    single = default.id != chosen.id and 1 in (default.rounds, chosen.rounds)
    return Gain(default.id, default.id == chosen.id, ratio_of(default, chosen), single)


def known_factors(gains: Iterable[Gain]) -> list[float]:
    """The gains whose times were both sampled more than once."""
    return [gain.bounds[1] for gain in gains if gain.bounds is not None and not gain.is_single]


def verdicts(decisions: Sequence[Decision]) -> Table:
    """How often each candidate ended in each status, and its times over the chosen one's, by preference."""
    statuses: defaultdict[CandidateId, Counter[str]] = defaultdict(Counter)
    ratios: defaultdict[CandidateId, list[float]] = defaultdict(list)
    for decision in decisions:
        chosen = chosen_row(decision)
        for row in decision.candidates:
            statuses[row.id][row.status] += 1
            if chosen is not None and row is not chosen and (found := ratio_of(row, chosen)):
                ratios[row.id].append(found[1])
    shown = [status for status in STATUSES if any(each[status] for each in statuses.values())]
    head = ("candidate", *(status.replace("_", " ") for status in shown), "time / the chosen one's: median (range)")
    rows = [
        [titled(*name), *(str(statuses[name][status] or "-") for status in shown), _spread(ratios[name])]
        for name in sorted(statuses, key=by_preference)
    ]
    return Table(head, rows, {0}, "Verdicts of each candidate")


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} - {max(ratios):.2f})"


def reasons(decisions: Sequence[Decision]) -> Table:
    """Why candidates were not chosen, with the number of decisions."""
    found: defaultdict[tuple[CandidateId, str, str], list[str]] = defaultdict(list)
    for row in (row for decision in decisions for row in decision.candidates):
        if row.status != "chosen" and row.reason:
            found[row.id, row.status, _DIGITS.sub("#", row.reason)].append(row.reason)
    ordered = sorted(found.items(), key=lambda each: (by_preference(each[0][0]), -len(each[1])))
    rows = [
        [titled(*name), status.replace("_", " "), str(len(texts)), texts[0]] for (name, status, _), texts in ordered
    ]
    caption = "Reasons; of those that differ in numbers only, one"
    return Table(("candidate", "verdict", "decisions", "reason"), rows, {0, 1, 3}, caption)
