"""Output of the commands: JSON, and tables of texts for a terminal or a page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.explanation import table as full
from attn_dispatch.store.decision import Row
from attn_dispatch.text import align, folded, milliseconds, printable, titled

HEAD = ("problem", "winner", "time", "vs SDPA", "")
PLAIN = ("sdpa", "sdpa_mask")  #: PyTorch's own attention, without a mask and with one
KEY_DIGITS = 10  #: digits shown in tables; `inspect --key` takes any number
REFUSED = {"not_installed", "unsupported"}
_NOT_ASCII = re.compile(r"[^ -~\n]")


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


class Gain(NamedTuple):
    """Time of PyTorch's own attention / time of the choice, with its 99 % interval if there is one.

    `is_single`: one of the two times is a single sample, on which no summary rests.
    """

    factor: float
    low: float | None
    high: float | None
    is_single: bool


def print_json(value: Mapping[str, Any]) -> None:
    """Print strict JSON: numbers that are not finite become null, characters that are not printable are escaped."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:  # bytes of a path that are no text
        plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=lambda _: None)
        encoded = json.dumps(plain, ensure_ascii=False).encode(errors="surrogatepass")
    text = msgspec.json.format(encoded, indent=1).decode(errors="surrogatepass")
    print(_NOT_ASCII.sub(lambda found: _escaped(found[0]), text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def winners(explanations: Sequence[Explanation]) -> Table:
    """One row for each problem: the winner, its time, PyTorch's over it, and what is to be known about them."""
    return Table(HEAD, list(map(cells, explanations)), {0, 1, 4})


def cells(explanation: Explanation) -> list[str]:
    """The cells of a decision under `HEAD`."""
    problem, chosen = compact(explanation.problem), _chosen(explanation)
    if explanation.choice is None:
        return [problem, "none", "-", "-", "no backend can run it"]
    name = titled(explanation.choice, explanation.order or "natural")
    if chosen is None or chosen.median_ms is None:
        return [problem, name, "-", "-", f"{source_of(explanation)}, not measured"]
    gain, source = gain_of(explanation), source_of(explanation)
    remarks = f"{source}, 1 sample" if chosen.rounds == 1 or (gain and gain.is_single) else source
    return [problem, name, milliseconds(chosen.median_ms), f"{gain.factor:.2f}x" if gain else "-", remarks]


def gain_of(explanation: Explanation) -> Gain | None:
    """How much faster the choice is than PyTorch's own attention; None where one of them has no time."""
    chosen = _chosen(explanation)
    timed = [c for c in explanation.candidates if c.backend in PLAIN and c.order == "natural" and c.median_ms]
    plain = min((c for c in timed if c.status in ("chosen", "slower", "tie")), key=_median, default=None)
    if chosen is None or plain is None or not chosen.median_ms:
        return None
    if plain is chosen:
        return Gain(1.0, None, None, is_single=False)
    factor = plain.ratio or _median(plain) / chosen.median_ms
    return Gain(factor, plain.ratio_low, plain.ratio_high, 1 in (plain.rounds, chosen.rounds))


def _chosen(explanation: Explanation) -> Row | None:
    return next((each for each in explanation.candidates if each.status == "chosen"), None)


def _median(candidate: Row) -> float:
    return candidate.median_ms or 0.0


def source_of(explanation: Explanation) -> str:
    """Where a choice comes from, and what else holds of it: `measured, provisional`."""
    remarks = {"provisional": bool(explanation.provisional), "unchecked": explanation.unchecked}
    return ", ".join([explanation.source, *(name for name, holds in remarks.items() if holds)])


def full_table(explanations: Sequence[Explanation]) -> list[str]:
    """The candidates of every problem, under one head."""
    groups = [explanation.rows() for explanation in explanations]
    lines = iter(full([row for group in groups for row in group]))
    found = [next(lines)]
    for explanation, group in zip(explanations, groups):
        how = source_of(explanation) if explanation.choice else "no backend can run it"
        found += ["", folded(f"{compact(explanation.problem)}   ({how}, key {explanation.key[:KEY_DIGITS]})")]
        found += [next(lines) for _ in group]
    return found


def refused_by_all(explanations: Sequence[Explanation]) -> dict[str, str]:
    """The candidates that can run none of the problems, with the reasons common to all their refusals."""
    reasons: dict[str, list[list[str]]] = {}
    for candidate in (each for explanation in explanations for each in explanation.candidates):
        parts = candidate.reason.split("; ") if candidate.status in REFUSED else []
        reasons.setdefault(titled(candidate.backend, candidate.order), []).append(parts)
    shared = {
        name: [part for part in found[0] if part and all(part in other for other in found)]
        for name, found in reasons.items()
        if len(found) == len(explanations)
    }
    return {name: "; ".join(parts) for name, parts in shared.items() if parts}


def left_for_full(explanations: Sequence[Explanation]) -> dict[str, int]:
    """The candidates that the budget did not suffice for, with the number of problems that need more of it."""
    found = (
        titled(each.backend, each.order)
        for explanation in explanations
        for each in explanation.candidates
        if each.status == "not_measured" and "budget" in each.reason
    )
    return dict(Counter(found).most_common())


def no_backend(explanation: Explanation) -> list[str]:
    """Why no backend runs a problem, one line for each backend."""
    rows = [f"  {titled(c.backend, c.order)}: {c.reason or c.status.replace('_', ' ')}" for c in explanation.candidates]
    return [f"no backend can run {compact(explanation.problem)}:", *(folded(printable(row)) for row in rows)]


def compact(problem: str) -> str:
    """A problem's title with single blanks."""
    return printable(" ".join(problem.split()))
