"""The page as one HTML file that loads nothing: its sections, the data of its plots, its style and its scripts."""

from __future__ import annotations

import base64
import gzip
import json
import math
import secrets
import statistics
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from attn_dispatch.cli import machine, thresholds
from attn_dispatch.cli.report import plots
from attn_dispatch.cli.report.comparisons import by_preference, verdicts
from attn_dispatch.cli.report.markup import Html, element, join, table
from attn_dispatch.cli.report.plots import Look
from attn_dispatch.cli.report.series import Point, Series, all_series
from attn_dispatch.cli.tables import KEY_DIGITS, PLAIN, Table, cells, gain_of
from attn_dispatch.decisions.explanation import HEAD, LEFT, Explanation
from attn_dispatch.learning import speedups
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.learning.speedups import SpeedupSeries
from attn_dispatch.learning.thresholds import Threshold, by_length, threshold_of
from attn_dispatch.settings import NO_HOME, NOWHERE
from attn_dispatch.store.address import PROBLEM_ERRORS
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import gib, milliseconds, one_line, printable, titled

PANELS = {"series": (plots.TIME, plots.GAIN, plots.MEMORY), "order": (plots.ORDER,)}
COLOURS = 14  #: in page.css
DETAILED = 500  #: decisions, the newest ones, whose candidates the page holds
DECISION_HEAD = ("problem", "winner", "time", "vs SDPA")
SDPA = "SDPA is PyTorch's scaled_dot_product_attention, with a dense mask where the pattern needs one: the faster one."
AXES = (
    "Bands and bars are 95 % intervals of the median; of ratios to SDPA, the paired 99 % interval where one of the two "
    "was chosen, else the extreme ratios. Orders other than the natural one are dashed. Dotted: the fastest "
    "candidate changes. Both axes are logarithmic; 1k is 1,024. A click on a name fades the others."
)
LICENCE = (
    "Plots: Vega, copyright 2015-2023 University of Washington Interactive Data Lab, under the BSD 3-Clause licence."
)


class Drawn(NamedTuple):
    """What plots show at a time: points and marks as `plots.compiled` has them, and the notes beside them."""

    silicon: str
    title: str
    points: list[dict[str, Any]]
    marks: list[dict[str, Any]]
    notes: Html


def page(decisions: Sequence[Decision], report: machine.Report, *, made: str, version: str) -> tuple[str, list[str]]:
    """The whole page, and what it leaves out: the decisions that cannot be shown, with reasons.

    Args:
        decisions: in the order in which they are listed.
        report: of `machine.examined`.
        made: the time, for people.

    Raises:
        AttnDispatchError: vl-convert is not installed.
    """
    about = f"{made} UTC, attn-dispatch {version}"
    sections = {"Machine": _machine(report), "Strikes and quarantines": _excluded(report)}
    if not decisions:
        return _document({"Decisions": _no_decisions(report["folder"]), **sections}, None, about), []
    shown, left_out = _showable(decisions)
    orders = _thresholds(shown)
    drawn = {"series": list(map(_series, all_series(shown))), "order": [_order(*pair) for pair in orders]}
    looks = {
        "series": _looks(shown),
        "order": [
            Look(name, "var(--c7)", "circle", (1, 0)) for name in dict.fromkeys(each.order for each, _ in orders)
        ],
    }
    data = {
        name: {"spec": plots.compiled(PANELS[name], looks[name]), "all": [[each.points, each.marks] for each in found]}
        for name, found in drawn.items()
        if found
    }
    excluded = len(report["quarantines"]) + len(report["strikes"])
    sections = {
        "Summary": _summary(list(map(Explanation.of, shown)), excluded),
        "Machine": sections["Machine"],
        "Decisions": join([_left_out(left_out), _decided(shown)]),
        "Time and memory against length": join([_note(AXES), *_plot("series", "Problems", drawn["series"])]),
        "Token orders": join([*_learned(orders), *_plot("order", "Evidence", drawn["order"])]),
        "Why the others lost": table(verdicts(shown)),
        **sections,
    }
    return _document(sections, data, about), left_out


def _thresholds(decisions: Sequence[Decision]) -> list[tuple[SpeedupSeries, Threshold | None]]:
    return [(each, threshold_of(each)) for each in sorted(speedups.all_series(decisions), key=thresholds.sort_key)]


def _showable(decisions: Sequence[Decision]) -> tuple[list[Decision], list[str]]:
    """The decisions that can be shown; the others by name, with what they raise."""
    found, left_out = [], []
    for each in decisions:
        try:
            _row(each, several=False, detailed=True)
            drawn = [*map(_series, all_series([each])), *(_order(*pair) for pair in _thresholds([each]))]
            json.dumps(drawn, allow_nan=False)
        except PROBLEM_ERRORS as error:
            left_out.append(printable(f"key {each.key} of {each.silicon} ({each.title}): {one_line(error)}"))
        else:
            found.append(each)
    return found, left_out


# --- sections ---------------------------------------------------------------------------------------------------------


def _summary(found: Sequence[Explanation], excluded: int) -> Html:
    """Counts, and the gains over PyTorch's own attention: of times that were sampled more than once."""
    gains = [gain.factor for each in found if (gain := gain_of(each)) and not gain.is_single]
    known = [gain for gain in gains if 0 < gain < math.inf]
    mean, most = (f"{statistics.geometric_mean(known):.2f}x", f"{max(known):.2f}x") if known else ("-", "-")
    facts = [
        (len(found), "decisions"),
        (sum(each.choice not in PLAIN for each in found), "choose another backend than SDPA"),
        (mean, f"SDPA's time / the choice's: geometric mean of the {len(known):,} with several samples of both"),
        (most, "SDPA's time / the choice's at best"),
        (sum(bool(each.provisional) for each in found), "provisional: a later process measures them again"),
        (excluded, "quarantines and strikes"),
    ]
    cards = [element("div", element("dt", name), element("dd", str(value))) for value, name in facts]
    return join([element("dl", *cards, class_="cards"), _note(SDPA)])


def _note(text: str) -> Html:
    return element("p", text, class_="note")


def _machine(report: machine.Report) -> Html:
    """Processors, devices, backends, settings."""
    state = [join([element("dt", name), element("dd", value)]) for name, value in machine.state(report)]
    return join([
        element("p", "\n".join(machine.lines(report)), class_="lines"),
        table(machine.devices(report)),
        table(machine.backends(report)),
        element("dl", *state, class_="pairs"),
    ])  # fmt: skip


def _excluded(report: machine.Report) -> Html:
    """Which versions of backends are excluded, or will be after another crash."""
    found = machine.exclusions(report)
    return join([*map(table, found), *([_note(machine.LIFT_HINT)] if any(each.rows for each in found) else [])])


def _no_decisions(folder: str) -> Html:
    """What to run."""
    if folder == str(NOWHERE):
        return element("p", f"No decisions are stored: {NO_HOME}")
    text = f"No decision is stored in {folder} yet. This measures some, in under a minute; then make the report again:"
    return join([element("p", text), element("pre", "attn-dispatch profile --quick")])


def _left_out(reasons: Sequence[str]) -> Html:
    """The decisions that cannot be shown; nothing where all can."""
    items = [element("li", reason) for reason in reasons]
    text = f"Left out, since they cannot be shown ({len(items)}):"
    return join([element("p", text), element("ul", *items)] if items else [])


def _decided(decisions: Sequence[Decision]) -> Html:
    """All decisions: a row each, and what it was chosen from. The page's script searches and sorts them."""
    search = element("input", type="search", id="search", autocomplete="off", placeholder="e.g. dilated provisional")
    head = [element("th", element("button", name, type="button"), scope="col") for name in DECISION_HEAD]
    several = len({decision.silicon for decision in decisions}) > 1
    bodies = [_row(each, several=several, detailed=at < DETAILED) for at, each in enumerate(decisions)]
    caption = "Newest first. Below each: where it comes from, its key, and all candidates on request."
    if len(decisions) > DETAILED:
        caption += f" Of those after the first {DETAILED}, 'attn-dispatch inspect --key KEY' lists the candidates."
    inner = element("table", element("caption", caption), element("thead", element("tr", *head)), *bodies, id="decided")
    return join([
        element("label", "Search", search, class_="chooser"),
        element("p", f"{len(decisions):,} decisions", id="count", role="status"),
        element("div", inner, class_="scroll long", role="region", aria_label="Decisions", tabindex=0),
    ])  # fmt: skip


def _row(decision: Decision, *, several: bool, detailed: bool) -> Html:
    explanation = Explanation.of(decision)
    problem, winner, time, ratio, remarks = cells(explanation)
    gain, chosen = gain_of(explanation), next((row for row in decision.candidates if row.status == "chosen"), None)
    interval = f"{gain.low:.2f} - {gain.high:.2f}" if gain and gain.low and gain.high else ""
    when = f"{decision.created[:16].replace('T', ' ')} UTC"
    summary = " · ".join([remarks, when, *([decision.silicon] if several else []), f"key {decision.key[:KEY_DIGITS]}"])
    below = element("p", summary, class_="note")
    if detailed:
        below = element("details", element("summary", summary), _detail(decision, explanation))
    first = element("tr",
        element("th", problem, scope="row"),
        element("td", winner),
        element("td", time, data_v=None if chosen is None else chosen.median_ms),
        element("td", ratio, element("small", interval), data_v=None if gain is None else gain.factor),
    )  # fmt: skip
    return element("tbody", first, element("tr", element("td", below, colspan=len(DECISION_HEAD))))


def _detail(decision: Decision, explanation: Explanation) -> Html:
    """What the explanation says, and all candidates."""
    lines = [*str(explanation).split("\n\n")[0].splitlines(), f"silicon   {decision.silicon}"]
    rows = explanation.rows()
    chosen = next((at for at, row in enumerate(rows) if row[-1].partition(":")[0] == "chosen"), None)
    candidates = Table(HEAD, [list(map(printable, row)) for row in rows], LEFT, "Candidates of this decision")
    return join([element("p", "\n".join(lines), class_="lines"), table(candidates, chosen)])


def _learned(found: Sequence[tuple[SpeedupSeries, Threshold | None]]) -> list[Html]:
    """The threshold of every token order."""
    return [*map(_note, thresholds.EXPLAINED if found else ()), table(thresholds.table(found))]


def _plot(name: str, label: str, drawn: Sequence[Drawn]) -> list[Html]:
    """A list to choose from, by silicon, a place for the plots, and the notes of each; nothing for none."""
    options: dict[str, list[Html]] = {}
    for at, each in enumerate(drawn):
        options.setdefault(each.silicon, []).append(element("option", each.title, value=at))
    groups = [element("optgroup", *found, label=silicon) for silicon, found in options.items()]
    return (
        [
            element("label", f"{label} ({len(drawn)})", element("select", *groups, id=name), class_="chooser"),
            element("div", id=f"plot-{name}", class_="plot", aria_hidden="true"),
            *(element("div", each.notes, data_of=name, hidden=at > 0) for at, each in enumerate(drawn)),
        ]
        if drawn
        else []
    )


def _looks(decisions: Sequence[Decision]) -> list[Look]:
    """The look of every timed candidate: a colour and a shape for each backend, a dash for each order."""
    names = sorted({row.id for each in decisions for row in each.candidates if is_timed(row)}, key=by_preference)
    backends = list(dict.fromkeys(backend for backend, _ in names))
    at = {name: place for place, name in enumerate(backends)}
    return [
        Look(
            titled(backend, order),
            f"var(--c{at[backend] % COLOURS})",
            plots.SHAPES[at[backend] % len(plots.SHAPES)],
            plots.DASHES.get(order, plots.DASHED[0]),
        )
        for backend, order in names
    ]


def _series(series: Series) -> Drawn:
    """Times, gains and memory against length, and where the fastest candidate changes."""
    lengths = [each.tokens for each in series.crossings if each.tokens is not None]
    marks = [{"tokens": tokens, "text": f"~{float(f'{tokens:.2g}'):,.0f}"} for tokens in lengths]
    notes = join([*(element("p", note) for note in series.notes), table(series.numbers)])
    return Drawn(series.silicon, series.title, list(map(_point, series.points)), marks, notes)


def _point(point: Point) -> dict[str, Any]:
    row, name = point.row, titled(*point.row.id)
    bounds = [milliseconds(each) for each in (row.low_ms, row.high_ms) if each is not None]
    interval = "1 sample" if point.is_single else " - ".join(bounds)
    text = f"{name}, {point.tokens:,} tokens\n{milliseconds(point.ms)} ({interval})"
    times = row.low_ms or point.ms, point.ms, row.high_ms or point.ms
    found = {"name": name, "tokens": point.tokens, **_bounds("ms", times)}
    if point.gain is not None:
        found |= _bounds("gain", point.gain)
        text += f"\nvs SDPA {_factor(*point.gain)}"
    if row.peak_bytes:
        found["bytes"] = row.peak_bytes
        text += f"\nmemory {gib(row.peak_bytes)}"
    return {**found, "text": text}


def _order(series: SpeedupSeries, threshold: Threshold | None) -> Drawn:
    """The gain of an order against length, and its threshold."""
    pattern, dtype, head_dim, direction, order, _, _, pays = thresholds.table([(series, threshold)]).rows[0]
    points = [
        {
            "name": order,
            "tokens": each.tokens,
            **_bounds("gain", (each.low, each.factor, each.high)),
            "text": f"{each.tokens:,} tokens\n{_factor(each.low, each.factor, each.high)}",
        }
        for each in by_length(series.speedups)
    ]
    marks = (
        [{"tokens": threshold.tokens, "text": f"from {threshold.tokens:,}"}] if threshold and threshold.tokens else []
    )
    rows = [
        [f"{each.tokens:,}", _factor(each.low, each.factor, each.high), each.key[:KEY_DIGITS]]
        for each in sorted(series.speedups)
    ]
    numbers = Table(("tokens", "gain", "key"), rows, {0, 2}, "Its evidence")
    notes = join([element("p", f"Pays: {pays}."), table(numbers)])
    return Drawn(series.silicon, f"{order}: {pattern}, {dtype}, head_dim {head_dim}, {direction}", points, marks, notes)


def _bounds(field: str, bounds: tuple[float, float, float]) -> dict[str, float]:
    """Rounded, for the page's size."""
    return {name: float(f"{value:.5g}") for name, value in zip((f"{field}_low", field, f"{field}_high"), bounds)}


def _factor(low: float, middle: float, high: float) -> str:
    return f"{middle:.2f}x ({low:.2f} - {high:.2f})"


# --- document ---------------------------------------------------------------------------------------------------------


def _document(sections: Mapping[str, Html], data: Mapping[str, Any] | None, about: str) -> str:
    """The sections by title, under links to each; scripts and the plots' data where there are any."""
    links, body = list[Html](), list[Html]()
    for title, content in sections.items():
        name = title.split()[0].lower()
        links.append(element("li", element("a", title, href=f"#{name}")))
        body.append(
            element(
                "section", element("h2", title, id=f"{name}-title"), content, id=name, aria_labelledby=f"{name}-title"
            )
        )
    themes = [element("option", name, value=name.partition(" ")[0]) for name in ("system theme", "light", "dark")]
    # Only scripts with the nonce run, and nothing is loaded, whatever a name in the store holds. Vega compiles its
    # expressions.
    nonce = secrets.token_urlsafe(16)
    scripts = [] if data is None else [plots.runtime(), _text("page.js")]
    policy = f"script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    packed = [] if data is None else [element("script", _packed(data), type="text/plain", id="data")]
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=f"default-src 'none'; {policy}"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"attn-dispatch report, {about}"),
        element("link", rel="icon", href="data:,"),
        element("style", Html(_text("page.css"))),
    ]
    title = element("div", element("h1", "attn-dispatch report"), element("p", about))
    parts = [
        element("a", "Skip to the content", href="#content", class_="skip"),
        element("header", title, element("select", *themes, id="theme", aria_label="Theme")),
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *body, id="content"),
        element("footer", *([] if data is None else [element("p", LICENCE)])),
        *packed,
        *(element("script", Html(script), nonce=nonce) for script in scripts),
    ]
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', *parts), lang='en')}\n"


def _packed(data: Mapping[str, Any]) -> Html:
    """JSON as gzip in base64, which ends no script element; browsers unpack it by themselves."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Html(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())


def _text(name: str) -> str:
    return files("attn_dispatch.cli.report").joinpath(name).read_text(encoding="utf-8")
