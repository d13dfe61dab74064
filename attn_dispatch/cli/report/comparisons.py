"""Candidates beside each other: their times over PyTorch's own attention, and why they were not chosen."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from attn_dispatch.cli.tables import PLAIN, Table
from attn_dispatch.kernels.registry import BUILT_IN
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import Bounds, time_ratio
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.text import titled

_DIGITS = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?")


def by_preference(name: CandidateId) -> tuple[int, str, bool, str]:
    """Sorts candidates as the registry lists backends, natural order first; other packages' come last."""
    backend, order = name
    return BUILT_IN.index(backend) if backend in BUILT_IN else len(BUILT_IN), backend, order != NATURAL, order


def plain_of(decision: Decision) -> Row | None:
    """The faster row of PyTorch's own attention; None where neither was timed."""
    rows = (row for row in decision.candidates if row.backend in PLAIN and row.order == NATURAL and is_timed(row))
    return min(rows, key=lambda row: row.median_ms or math.inf, default=None)


def gain_over(plain: Row | None, row: Row) -> Bounds | None:
    """Low, middle and high of PyTorch's time / the row's; None where a time of 0 or without a limit leaves no ratio."""
    if plain is None:
        return None
    if plain.id == row.id:
        return 1.0, 1.0, 1.0
    try:
        low, middle, high = time_ratio(plain, row)
    except ArithmeticError:
        return None
    return (low, middle, high) if 0 < low <= middle <= high < math.inf else None


def verdicts(decisions: Sequence[Decision]) -> Table:
    """How often each candidate got which verdict for which reason; of reasons that differ in numbers only, one."""
    found: defaultdict[tuple[CandidateId, str, str], list[str]] = defaultdict(list)
    for row in (row for decision in decisions for row in decision.candidates):
        reason = "" if row.status == "chosen" else row.reason
        found[row.id, row.status, _DIGITS.sub("#", reason)].append(reason or "-")
    ordered = sorted(found.items(), key=lambda each: (by_preference(each[0][0]), -len(each[1])))
    rows = [
        [titled(*name), status.replace("_", " "), str(len(reasons)), reasons[0]]
        for (name, status, _), reasons in ordered
    ]
    caption = "Of reasons that differ in numbers only, one is shown; each decision has its own"
    return Table(("candidate", "verdict", "decisions", "reason"), rows, {0, 1, 3}, caption)
