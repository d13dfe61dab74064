"""Output of the commands: JSON, and tables of texts for a terminal or a page."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import Bounds, time_ratio
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.text import align, milliseconds, printable, titled

HEAD = ("problem", "winner", "time", "vs SDPA", "")
PLAIN = ("sdpa", "sdpa_mask")  #: PyTorch's own attention, without a mask and with one
KEY_DIGITS = 10  #: digits shown in tables; `inspect --key` takes any number


class Table(NamedTuple):
    """Texts under a head, for a terminal or a page; the columns `left` hold words, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int]
    caption: str = ""
    nothing: str = ""  #: text where there are no rows

    def lines(self) -> list[str]:
        """The table as lines."""
        return align([list(self.head), *self.rows], self.left) if self.rows else [self.nothing]


def print_json(value: Mapping[str, Any]) -> None:
    """Print strict JSON in ASCII: bytes of a path may be no text. Numbers that are not finite become null."""
    plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=lambda _: None)
    print(json.dumps(plain, indent=1))


def decided(decisions: Iterable[Decision]) -> Table:
    """One row for each stored decision: its key, what a row of `profile` has, and when it was measured."""
    rows = [[each.key[:KEY_DIGITS], *cells(Explanation.of(each)), when(each)] for each in decisions]
    return Table(("key", *HEAD, "measured (UTC)"), rows, {0, 1, 2, 5, 6}, "Newest first")


def when(decision: Decision) -> str:
    """The time at which it was made, in UTC."""
    return decision.created[:16].replace("T", " ")


def cells(explanation: Explanation) -> list[str]:
    """The cells of a decision under `HEAD`."""
    held = [name for name in ("provisional", "unchecked") if getattr(explanation, name)]
    problem, source = compact(explanation.problem), ", ".join([explanation.source, *held])
    if explanation.choice is None:
        return [problem, "none", "-", "-", "no backend can run it"]
    name, chosen = titled(explanation.choice, explanation.order or NATURAL), chosen_of(explanation.candidates)
    if chosen is None or chosen.median_ms is None:
        return [problem, name, "-", "-", f"{source}, not measured"]
    plain = plain_of(explanation.candidates)
    gain = gain_over(plain, chosen)
    once = 1 in (chosen.rounds, plain.rounds if plain else None)
    ratio = f"{gain[1]:.2f}x" if gain else "-"
    return [problem, name, milliseconds(chosen.median_ms), ratio, f"{source}, 1 sample" if once else source]


def chosen_of(rows: Iterable[Row]) -> Row | None:
    """The chosen row."""
    return next((row for row in rows if row.status == "chosen"), None)


def plain_of(rows: Iterable[Row]) -> Row | None:
    """The faster row of PyTorch's own attention; None where neither was timed."""
    timed = (row for row in rows if row.backend in PLAIN and row.order == NATURAL and is_timed(row))
    return min(timed, key=lambda row: row.median_ms or math.inf, default=None)


def gain_over(plain: Row | None, row: Row) -> Bounds | None:
    """Low, middle and high of PyTorch's time / the row's; None where a time of 0 or infinity leaves no ratio."""
    if plain is None or not is_timed(row):
        return None
    if plain.id == row.id:
        return 1.0, 1.0, 1.0
    try:
        low, middle, high = time_ratio(plain, row)
    except ArithmeticError:
        return None
    return (low, middle, high) if 0 < low <= middle <= high < math.inf else None


def compact(problem: str) -> str:
    """A problem's title with single blanks."""
    return printable(" ".join(problem.split()))
