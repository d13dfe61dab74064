"""Output of the commands: JSON, and tables of many decisions."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.explanation import table as full
from attn_dispatch.store.decision import Row
from attn_dispatch.text import align, folded, milliseconds, printable, titled

HEAD = ("key", "problem", "backend", "source", "median", "vs next", "next best")
LEFT = {0, 1, 2, 3, 6, 7}
KEY_DIGITS = 10  #: digits shown in tables; `inspect --key` takes any number
NOT_COMPARED = {"failed", "incorrect", "quarantined"}
REFUSED = {"not_installed", "unsupported"}
_NOT_ASCII = re.compile(r"[^ -~\n]")


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


def table(explanations: Sequence[Explanation], times: Sequence[str] = ()) -> list[str]:
    """One line for each decision: the chosen backend, and the next best time over its time.

    Args:
        times: when each was measured; shown as a last column.
    """
    rows = [list(HEAD), *(cells(explanation) for explanation in explanations)]
    if times:
        rows = [[*row, time] for row, time in zip(rows, ["measured (UTC)", *times])]
    return align(rows, LEFT)


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


def full_table(explanations: Sequence[Explanation], but: Collection[str] = ()) -> list[str]:
    """The candidates of every problem, under one head, without those in `but`."""
    explanations = [
        replace(each, candidates=tuple(c for c in each.candidates if titled(c.backend, c.order) not in but))
        for each in explanations
    ]
    groups = [explanation.rows() for explanation in explanations]
    lines = iter(full([row for group in groups for row in group]))
    found = [next(lines)]
    for explanation, group in zip(explanations, groups):
        how = _source(explanation) if explanation.choice else "no backend can run it"
        found += ["", folded(f"{compact(explanation.problem)}   ({how}, key {explanation.key[:KEY_DIGITS]})")]
        found += [next(lines) for _ in group]
    return found


def no_backend(explanation: Explanation) -> list[str]:
    """Why no backend runs a problem, one line for each backend."""
    rows = [f"  {titled(c.backend, c.order)}: {c.reason or c.status.replace('_', ' ')}" for c in explanation.candidates]
    return [f"no backend can run {compact(explanation.problem)}:", *(folded(printable(row)) for row in rows)]


def cells(explanation: Explanation) -> list[str]:
    """The cells of a decision under `HEAD`."""
    start = [explanation.key[:KEY_DIGITS], compact(explanation.problem)]
    if explanation.choice is None:
        return [*start, "none", "-", "-", "-", "no backend can run it"]
    name = titled(explanation.choice, explanation.order or "natural")
    chosen = next((c for c in explanation.candidates if c.status == "chosen"), None)
    others = [c for c in explanation.candidates if c is not chosen]
    source = _source(explanation)
    if chosen is None or chosen.median_ms is None:
        return [*start, name, source, "-", "-", "not measured"]
    return [*start, name, source, milliseconds(chosen.median_ms), *_rival(chosen.median_ms, others)]


def _source(explanation: Explanation) -> str:
    source = explanation.source + ", provisional" * bool(explanation.provisional)
    return source + ", unchecked" * explanation.unchecked + ", drifted" * (explanation.drift is not None)


def _rival(median_ms: float, others: Sequence[Row]) -> tuple[str, str]:
    timed = [(c.median_ms, c) for c in others if c.median_ms is not None and c.status not in NOT_COMPARED]
    if not timed:
        return "-", _absences(others)
    rival_ms, rival = min(timed, key=lambda pair: pair[0])
    noise = ", within noise" if rival.status == "tie" else ""
    ratio = f"{rival_ms / median_ms:.2f}x" if median_ms > 0 else "-"  # a coarse clock
    return ratio, f"{titled(rival.backend, rival.order)} {milliseconds(rival_ms)}{noise}"


def _absences(others: Sequence[Row]) -> str:
    """Why no other candidate has a time: `sdpa unsupported; sdpa_mask, manual not measured`."""
    by_status: dict[str, list[str]] = {}
    for candidate in others:
        by_status.setdefault(candidate.status.replace("_", " "), []).append(titled(candidate.backend, candidate.order))
    return "; ".join(f"{', '.join(names)} {status}" for status, names in by_status.items()) or "no other backend"


def compact(problem: str) -> str:
    """A problem's title with single blanks."""
    return printable(" ".join(problem.split()))
