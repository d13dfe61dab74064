"""The page as one HTML file that loads nothing: its sections, its data, its style and its scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from attn_dispatch.cli import thresholds
from attn_dispatch.cli.report import plots, sections
from attn_dispatch.cli.report.comparisons import Gain, by_preference, gain_of, outcomes, preference
from attn_dispatch.cli.report.markup import Html, element, join, packed_json
from attn_dispatch.cli.report.sections import Machine
from attn_dispatch.cli.report.series import Series, all_series
from attn_dispatch.decisions.explanation import HEAD, LEFT, Explanation
from attn_dispatch.kernels.registry import is_built_in
from attn_dispatch.learning import speedups
from attn_dispatch.learning.predict import PROBLEM_ERRORS, is_timed
from attn_dispatch.learning.speedups import SpeedupSeries
from attn_dispatch.learning.thresholds import Threshold, by_length, threshold_of
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import one_line, printable, titled

COLOURS = 14  #: in page.css
LICENCE = (
    "Plots: Vega, copyright 2015-2023 University of Washington Interactive Data Lab, under the BSD 3-Clause licence."
)

Section = tuple[str, str, Html]  #: its id, title and content


def page(
    decisions: Sequence[Decision], machine: Machine, *, folder: str, made: str, version: str
) -> tuple[str, list[str]]:
    """The whole page, and what it leaves out: the decisions that cannot be shown, with reasons.

    Args:
        decisions: in the order in which they are listed.
        made: the time, for people.

    Raises:
        AttnDispatchError: vl-convert is not installed.
    """
    hardware = ("machine", "Machine", sections.hardware(machine))
    quarantine = ("quarantine", "Strikes and quarantines", sections.quarantine(machine))
    if not decisions:
        start = ("decisions", "Decisions", sections.no_decisions(folder))
        return _document([start, hardware, quarantine], None, [_text("page.js")], made=made, version=version), []
    left_out: list[str] = []
    try:
        content, data = _content(decisions, machine)
    except PROBLEM_ERRORS:
        decisions, left_out = _showable(decisions, machine)
        content, data = _content(decisions, machine)
    shown = [
        ("summary", "Summary", content["summary"]),
        hardware,
        ("decisions", "Decisions", join([sections.left_out(left_out), content["decisions"]])),
        ("lengths", "Time and memory against length", content["lengths"]),
        ("orders", "Token orders: Hilbert and others", content["orders"]),
        ("losers", "Why the others lost", content["losers"]),
        quarantine,
        ("drift", "Drift", content["drift"]),
    ]
    data |= {"plots": plots.compiled(), "dashes": plots.DASHES}
    scripts = [plots.runtime(), _text("page.js")]
    return _document(shown, data, scripts, made=made, version=version), left_out


def _showable(decisions: Sequence[Decision], machine: Machine) -> tuple[list[Decision], list[str]]:
    """The decisions that can be shown; the others by name, with what they raise."""
    found, left_out = [], []
    for each in decisions:
        try:
            _content([each], machine)
        except PROBLEM_ERRORS as error:
            left_out.append(printable(f"key {each.key} of {each.silicon} ({each.title}): {one_line(error)}"))
        else:
            found.append(each)
    return found, left_out


def _content(decisions: Sequence[Decision], machine: Machine) -> tuple[dict[str, Html], dict[str, Any]]:
    """The sections about decisions, and the data of the page's script.

    Raises:
        Some of PROBLEM_ERRORS: a decision holds what no measurement of this version gives.
    """
    found = list(map(Explanation.of, decisions))
    gains = list(map(gain_of, decisions))
    series = all_series(decisions)
    orders = [(each, threshold_of(each)) for each in sorted(speedups.all_series(decisions), key=thresholds.sort_key)]
    content = {
        "summary": sections.summary(decisions, gains, machine),
        "decisions": sections.decided(decisions, found, gains),
        "lengths": sections.lengths(series),
        "orders": sections.orders(orders),
        "losers": sections.losers(outcomes(decisions)),
        "drift": sections.drift(decisions),
    }
    strings, candidates = Strings(), _candidates(decisions)
    names = [title for _, title, _, _ in candidates]
    data = {
        "decisions": [_details(*pair, strings) for pair in zip(decisions, found)],
        "more": [_plain_row(*each, strings) for each in list(zip(decisions, found, gains))[sections.ROWS :]],
        "series": [_plain_series(each, names) for each in series],
        "orders": [_plain_order(*pair, decisions) for pair in orders],
        "candidates": candidates,
        "head": [[name, at not in LEFT] for at, name in enumerate(HEAD)],
        "strings": strings.texts,
    }
    json.dumps(data, allow_nan=False)  # raises ValueError where the page could not hold it
    return content, data


# --- data -------------------------------------------------------------------------------------------------------------


class Strings:
    """Texts that occur often, each held once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """The place of a text in `texts`."""
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _details(decision: Decision, explanation: Explanation, strings: Strings) -> dict[str, Any]:
    """What the page shows of a decision on request, as places of texts: pairs of name and text, and candidates."""
    lines = str(explanation).split("\n\n")[0].splitlines()
    pairs = [[*line.split(maxsplit=1), "-"][:2] for line in lines]  # a title may be blank
    pairs.append(["silicon", decision.silicon])
    pairs.append(["measured", f"{decision.created[:16].replace('T', ' ')} UTC"])
    place = strings.place
    return {
        "about": [[place(name.rstrip(":")), place(text)] for name, text in pairs],
        "rows": [[place(printable(cell)) for cell in row] for row in explanation.rows()],
    }


def _plain_row(decision: Decision, explanation: Explanation, gain: Gain, strings: Strings) -> list[Any]:
    """A row of the list of decisions: its cells as places of texts and a number, silicon, changed, provisional."""
    found = sections.row_cells(decision, explanation, gain)
    cells = [[list(map(strings.place, texts)), value] for texts, value in found]
    return [cells, decision.silicon, gain.is_changed, bool(decision.provisional)]


def _candidates(decisions: Sequence[Decision]) -> list[list[Any]]:
    """Order, title, and the numbers of colour and shape of every candidate, by preference.

    A backend of this package has the colour of its place by preference; others share those that no timed one has.
    """
    rows = [row for decision in decisions for row in decision.candidates]
    ordered = sorted({row.id for row in rows}, key=by_preference)
    timed = {row.backend for row in rows if is_timed(row)}
    backends = sorted(dict.fromkeys(backend for backend, _ in ordered), key=lambda name: name not in timed)
    colours = {name: preference(name) for name in backends if is_built_in(name)}
    free = [at for at in range(COLOURS) if at not in {colours.get(name) for name in timed}] or list(range(COLOURS))
    others = [name for name in backends if name not in colours]
    colours |= {name: free[at % len(free)] for at, name in enumerate(others)}
    return [[name[1], titled(*name), colours[name[0]], backends.index(name[0])] for name in ordered]


def _plain_series(series: Series, names: Sequence[str]) -> dict[str, Any]:
    """Points with the place of their candidate in `names`; what is drawn only is rounded, for the page's size."""
    return {
        "defaults": series.defaults,
        "points": [
            [
                names.index(titled(*point.candidate)),
                point.tokens,
                point.median_ms,
                *map(_rounded, (point.low_ms, point.high_ms)),
                point.peak_bytes,
                point.gain and list(map(_rounded, point.gain)),
                point.decision,
                point.row,
            ]
            for point in series.points
        ],
        "crossings": [[each.tokens and _rounded(each.tokens), str(each)] for each in series.crossings],
        "notes": series.notes,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _plain_order(series: SpeedupSeries, threshold: Threshold | None, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The evidence of a token order: all speed-ups by length, and each with the place of its decision."""
    places = {decision.key: at for at, decision in enumerate(decisions) if decision.silicon == series.silicon}
    return {
        "tokens": None if threshold is None else threshold.tokens,
        "text": thresholds.threshold_text(threshold),
        "points": [[each.tokens, each.factor, each.low, each.high] for each in by_length(series.speedups)],
        "measured": [
            [*each[:-1], places[each.key]] for each in sorted(series.speedups) if all(map(math.isfinite, each[1:4]))
        ],
    }


# --- document ---------------------------------------------------------------------------------------------------------


def _document(shown: Sequence[Section], data: Any, scripts: Sequence[str], *, made: str, version: str) -> str:
    links = [element("li", element("a", title, href=f"#{name}")) for name, title, _ in shown]
    toggle = element("button", "Theme", type="button", id="theme", hidden=True)
    title = element("div", element("h1", "attn-dispatch report"), element("p", f"{made} UTC, attn-dispatch {version}"))
    body = [
        element("section", element("h2", title, id=f"{name}-title"), content, id=name, aria_labelledby=f"{name}-title")
        for name, title, content in shown
    ]
    # Only these scripts run, and nothing is loaded, whatever a name in the store holds. Vega compiles its expressions.
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed} 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"attn-dispatch report, {made} UTC"),
        element("link", rel="icon", href="data:,"),
        element("style", Html(_text("page.css"))),
    ]
    parts = [
        element("a", "Skip to the content", href="#content", class_="skip"),
        element("header", title, toggle),
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *body, id="content"),
        element("footer", element("p", "Made by 'attn-dispatch report'."), *[element("p", LICENCE)] * bool(data)),
        element("script", packed_json(data), type="text/plain", id="data"),
        *(element("script", Html(script)) for script in scripts),
    ]
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', *parts), lang='en')}\n"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _text(name: str) -> str:
    return files("attn_dispatch.cli.report").joinpath(name).read_text(encoding="utf-8")
