"""The page as one HTML file that loads nothing: its sections, the data of its plots, its style and its scripts."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from attn_dispatch.cli import machine, thresholds
from attn_dispatch.cli.report import plots
from attn_dispatch.cli.report.comparisons import (
    Gain,
    by_preference,
    chosen_row,
    gain_of,
    known_factors,
    preference,
    reasons,
    verdicts,
)
from attn_dispatch.cli.report.markup import Html, element, join, table
from attn_dispatch.cli.report.plots import Look
from attn_dispatch.cli.report.series import Point, Series, all_series
from attn_dispatch.cli.tables import Table, cells, compact
from attn_dispatch.decisions.explanation import HEAD, LEFT, Explanation
from attn_dispatch.kernels.registry import is_built_in
from attn_dispatch.learning import speedups
from attn_dispatch.learning.predict import PROBLEM_ERRORS, is_timed
from attn_dispatch.learning.speedups import SpeedupSeries
from attn_dispatch.learning.thresholds import Threshold, by_length, threshold_of
from attn_dispatch.settings import NO_HOME, NOWHERE
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import gib, milliseconds, one_line, printable, titled

COLOURS = 14  #: in page.css
DETAILED = 500  #: decisions, the newest ones, whose candidates the page holds
DECISION_HEAD = ("problem", "backend", "median", "vs default")
DRIFT_HEAD = (
    *("problem", "backend", "stored median", "stored interval", "live median", "live interval", "live / stored"),
    "seen (UTC)",
)
NO_DRIFT = "No decision is marked. $ATTN_DISPATCH_SENTINEL sets the share of live calls that are timed."
DEFAULT = "The default is what runs where nothing was measured: the first backend by preference that can run."
AXES = (
    "Bands and bars are 95 % intervals of the median; of ratios to the default, the paired 99 % interval where one of "
    "the two was chosen, else the extreme ratios. Orders other than the natural one are dashed. Dotted: the fastest "
    "candidate changes. Both axes are logarithmic; 1k is 1,024. A click on a name fades the others."
)
LICENCE = (
    "Plots: Vega, copyright 2015-2023 University of Washington Interactive Data Lab, under the BSD 3-Clause licence."
)

Section = tuple[str, str, Html]  #: its id, title and content


def page(
    decisions: Sequence[Decision], report: machine.Report, *, made: str, version: str
) -> tuple[str, list[str]]:
    """The whole page, and what it leaves out: the decisions that cannot be shown, with reasons.

    Args:
        decisions: in the order in which they are listed.
        report: of `machine.examined`.
        made: the time, for people.

    Raises:
        AttnDispatchError: vl-convert is not installed.
    """
    hardware, excluded = ("machine", "Machine", _machine(report)), ("quarantine", "Strikes and quarantines", _excluded(report))
    if not decisions:
        start = ("decisions", "Decisions", _no_decisions(report["folder"]))
        return _document([start, hardware, excluded], {}, made=made, version=version), []
    left_out: list[str] = []
    try:
        found, data = _content(decisions, report)
    except PROBLEM_ERRORS:
        decisions, left_out = _showable(decisions, report)
        found, data = _content(decisions, report)
    shown = [
        ("summary", "Summary", found["summary"]),
        hardware,
        ("decisions", "Decisions", join([_left_out(left_out), found["decisions"]])),
        ("lengths", "Time and memory against length", found["lengths"]),
        ("orders", "Token orders: Hilbert and others", found["orders"]),
        ("losers", "Why the others lost", found["losers"]),
        excluded,
        ("drift", "Drift", found["drift"]),
    ]
    return _document(shown, data, made=made, version=version), left_out


def _showable(decisions: Sequence[Decision], report: machine.Report) -> tuple[list[Decision], list[str]]:
    """The decisions that can be shown; the others by name, with what they raise."""
    found, left_out = [], []
    for each in decisions:
        try:
            _content([each], report)
        except PROBLEM_ERRORS as error:
            left_out.append(printable(f"key {each.key} of {each.silicon} ({each.title}): {one_line(error)}"))
        else:
            found.append(each)
    return found, left_out


def _content(decisions: Sequence[Decision], report: machine.Report) -> tuple[dict[str, Html], dict[str, Any]]:
    """The sections about decisions, and the data of their plots.

    Raises:
        Some of PROBLEM_ERRORS: a decision holds what no measurement of this version gives.
    """
    series, gains = all_series(decisions), list(map(gain_of, decisions))
    orders = [(each, threshold_of(each)) for each in sorted(speedups.all_series(decisions), key=thresholds.sort_key)]
    data: dict[str, Any] = {}
    if series:
        panels = (plots.TIME, plots.GAIN, plots.MEMORY)
        data["series"] = {"all": list(map(_series_data, series)), "spec": plots.compiled(panels, _looks(decisions))}
    if orders:
        looks = [Look(name, "var(--c7)", "circle", (1, 0)) for name in dict.fromkeys(each.order for each, _ in orders)]
        data["order"] = {"all": [_order_data(*pair) for pair in orders], "spec": plots.compiled([plots.ORDER], looks)}
    json.dumps(data, allow_nan=False)  # raises ValueError where the page could not hold it
    return {
        "summary": _summary(decisions, gains, report),
        "decisions": _decided(decisions, gains),
        "lengths": _lengths(series),
        "orders": _orders(orders),
        "losers": _losers(decisions),
        "drift": _drift(decisions),
    }, data


# --- sections ---------------------------------------------------------------------------------------------------------


def _summary(decisions: Sequence[Decision], gains: Sequence[Gain], report: machine.Report) -> Html:
    """Counts, and the gains over the default."""
    known = known_factors(gains)
    mean, most = (f"{statistics.geometric_mean(known):.2f}x", f"{max(known):.2f}x") if known else ("-", "-")
    facts = [
        (f"{len(decisions):,}", "decisions"),
        (f"{sum(gain.is_changed for gain in gains):,}", "choose another candidate than the default"),
        (mean, f"the default's speed: geometric mean of the {len(known):,} with several samples of both"),
        (most, "the default's speed at best"),
        (f"{sum(bool(each.provisional) for each in decisions):,}", "provisional: a later process measures them again"),
        (f"{sum(each.drift is not None for each in decisions):,}", "drifted: live calls take another time"),
        (f"{len(report['quarantines']) + len(report['strikes']):,}", "quarantines and strikes"),
    ]
    cards = [element("div", element("dt", name), element("dd", value)) for value, name in facts]
    return join([element("dl", *cards, class_="cards"), _note(DEFAULT)])


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


def _decided(decisions: Sequence[Decision], gains: Sequence[Gain]) -> Html:
    """All decisions: a row each, and what it was chosen from. The page's script searches and sorts them."""
    search = element("input", type="search", id="search", autocomplete="off", placeholder="e.g. dilated provisional")
    head = [element("th", element("button", name, type="button"), scope="col") for name in DECISION_HEAD]
    several = len({decision.silicon for decision in decisions}) > 1
    bodies = [_row(*pair, several, at < DETAILED) for at, pair in enumerate(zip(decisions, gains))]
    caption = "Newest first. Below each: the next best, when it was measured, its key, and all candidates on request."
    if len(decisions) > DETAILED:
        caption += f" Of those after the first {DETAILED}, 'attn-dispatch inspect --key KEY' lists the candidates."
    inner = element("table", element("caption", caption), element("thead", element("tr", *head)), *bodies, id="decided")
    return join([
        element("label", "Search", search, class_="chooser"),
        element("p", f"{len(decisions):,} decisions", id="count", role="status"),
        element("div", inner, class_="scroll long", role="region", aria_label="Decisions", tabindex=0),
    ])  # fmt: skip


def _row(decision: Decision, gain: Gain, several: bool, detailed: bool) -> Html:
    explanation, row = Explanation.of(decision), chosen_row(decision)
    key, problem, backend, source, median, ratio, rival = cells(explanation)
    when = f"{decision.created[:16].replace('T', ' ')} UTC"
    more = [f"next {ratio} {rival}", source, when, *([decision.silicon] if several else []), f"key {key}"]
    summary, detail = " · ".join(more), element("p", " · ".join(more), class_="note")
    if detailed:
        detail = element("details", element("summary", summary), _detail(decision, explanation))
    factor = None if gain.bounds is None else gain.bounds[1]
    first = element("tr",
        element("th", problem, scope="row"),
        element("td", backend),
        element("td", median, class_="n", data_v=None if row is None else row.median_ms),
        element("td", gain.verdict, element("small", gain.interval), class_="n", data_v=factor),
    )  # fmt: skip
    return element("tbody", first, element("tr", element("td", detail, colspan=len(DECISION_HEAD))))


def _detail(decision: Decision, explanation: Explanation) -> Html:
    """What the explanation says, and all candidates."""
    lines = [*str(explanation).split("\n\n")[0].splitlines(), f"silicon   {decision.silicon}"]
    rows = explanation.rows()
    chosen = next((at for at, row in enumerate(rows) if row[-1].partition(":")[0] == "chosen"), None)
    candidates = Table(HEAD, [list(map(printable, row)) for row in rows], LEFT, "Candidates of this decision")
    return join([element("p", "\n".join(lines), class_="lines"), table(candidates, chosen)])


def _lengths(series: Sequence[Series]) -> Html:
    """Plots of one series at a time, and its numbers."""
    if not series:
        return element("p", "No decision holds a measured time.")
    titles = [(each.silicon, each.title) for each in series]
    told = [join([*(element("p", note) for note in each.notes), table(each.numbers)]) for each in series]
    return join([_note(AXES), *_plot("series", "Problems", titles, told)])


def _orders(found: Sequence[tuple[SpeedupSeries, Threshold | None]]) -> Html:
    """The threshold of every token order, and a plot of the evidence of one at a time."""
    if not found:
        return element("p", thresholds.NOTHING)
    made, titles, told = thresholds.table(found), [], []
    for (series, threshold), (pattern, dtype, head_dim, direction, order, *_) in zip(found, made.rows):
        titles.append((series.silicon, f"{order}: {pattern}, {dtype}, head_dim {head_dim}, {direction}"))
        rows = [
            [f"{tokens:,}", f"{factor:.2f}x", f"{low:.2f} - {high:.2f}", key[:10]]
            for tokens, factor, low, high, key in sorted(series.speedups)
            if all(map(math.isfinite, (factor, low, high)))
        ]
        numbers = Table(("tokens", "gain", "interval", "key"), rows, {0, 3}, "Its evidence")
        told.append(join([element("p", f"Pays: {thresholds.threshold_text(threshold)}."), table(numbers)]))
    notes = map(_note, thresholds.EXPLAINED)
    return join([*notes, table(made), *_plot("order", "Evidence", titles, told)])


def _plot(name: str, label: str, titles: Sequence[tuple[str, str]], told: Sequence[Html]) -> list[Html]:
    """A list to choose from, by silicon if there are several, a place for the plots, and what is told of each."""
    options: dict[str, list[Html]] = {}
    for at, (silicon, title) in enumerate(titles):
        options.setdefault(silicon, []).append(element("option", title, value=at))
    groups = [element("optgroup", *found, label=silicon) for silicon, found in options.items()]
    select = element("select", *(groups if len(groups) > 1 else next(iter(options.values()))), id=name)
    return [
        element("label", f"{label} ({len(titles)})", select, class_="chooser"),
        element("div", id=f"plot-{name}", class_="plot", aria_hidden="true"),
        *(element("div", each, data_of=name, hidden=at > 0) for at, each in enumerate(told)),
    ]


def _losers(decisions: Sequence[Decision]) -> Html:
    """How often each candidate lost, and why."""
    found = reasons(decisions)
    more = [element("details", element("summary", f"Reasons ({len(found.rows)})"), table(found))] if found.rows else []
    note = _note("How often each candidate got which verdict. Each decision has its own reasons.")
    return join([note, table(verdicts(decisions)), *more])


def _drift(decisions: Sequence[Decision]) -> Html:
    """The decisions that live calls contradict."""
    rows = []
    for decision in decisions:
        live, row = decision.drift, chosen_row(decision)
        if live is not None and row is not None and row.median_ms:
            stored, now = (
                [milliseconds(each.median_ms or 0), _interval(each.low_ms, each.high_ms)] for each in (row, live)
            )
            ratio, seen = f"{live.median_ms / row.median_ms:.2f}x", live.seen[:16].replace("T", " ")
            rows.append([compact(decision.title), titled(*row.id), *stored, *now, ratio, seen])
    caption = "Decisions whose live calls take another time than was measured; 'attn-dispatch profile' measures again"
    return table(Table(DRIFT_HEAD, rows, {0, 1, 7}, caption, NO_DRIFT))


def _interval(low_ms: float | None, high_ms: float | None) -> str:
    return "-" if low_ms is None or high_ms is None else f"{milliseconds(low_ms)} - {milliseconds(high_ms)}"


# --- data of plots ----------------------------------------------------------------------------------------------------


def _looks(decisions: Sequence[Decision]) -> list[Look]:
    """The look of every timed candidate, by preference.

    A backend of this package has the colour of its place by preference; others share those that no timed one has.
    """
    names = sorted({row.id for each in decisions for row in each.candidates if is_timed(row)}, key=by_preference)
    backends = list(dict.fromkeys(backend for backend, _ in names))
    colours = {name: preference(name) for name in backends if is_built_in(name)}
    free = [at for at in range(COLOURS) if at not in colours.values()] or list(range(COLOURS))
    others = [name for name in backends if name not in colours]
    colours |= {name: free[at % len(free)] for at, name in enumerate(others)}
    return [
        Look(
            titled(backend, order),
            f"var(--c{colours[backend]})",
            plots.SHAPES[backends.index(backend) % len(plots.SHAPES)],
            plots.DASHES.get(order, plots.DASHED[0]),
        )
        for backend, order in names
    ]


def _series_data(series: Series) -> dict[str, Any]:
    marks = [{"tokens": each.tokens, "text": f"~{float(f'{each.tokens:.2g}'):,.0f}"} for each in series.crossings if each.tokens]
    return {"points": list(map(_point, series.points)), "marks": marks}


def _point(point: Point) -> dict[str, Any]:
    row, name = point.row, titled(*point.row.id)
    interval = "1 sample" if point.is_single else _interval(row.low_ms, row.high_ms)
    text = f"{name}, {point.tokens:,} tokens\n{milliseconds(point.ms)} ({interval})"
    found = {"name": name, "tokens": point.tokens, **_bounds("ms", (row.low_ms or point.ms, point.ms, row.high_ms or point.ms))}
    if point.gain is not None:
        found |= _bounds("gain", point.gain)
        text += f"\ngain {_factor(*point.gain)}"
    if row.peak_bytes:
        found["bytes"] = row.peak_bytes
        text += f"\nmemory {gib(row.peak_bytes)}"
    return {**found, "text": text}


def _order_data(series: SpeedupSeries, threshold: Threshold | None) -> dict[str, Any]:
    """All speed-ups by length, and the threshold."""
    tokens = None if threshold is None else threshold.tokens
    points = [
        {
            "name": series.order,
            "tokens": each.tokens,
            **_bounds("gain", (each.low, each.factor, each.high)),
            "text": f"{each.tokens:,} tokens\n{_factor(each.low, each.factor, each.high)}",
        }
        for each in by_length(series.speedups)
    ]
    return {"points": points, "marks": [] if tokens is None else [{"tokens": tokens, "text": f"from {tokens:,}"}]}


def _bounds(field: str, bounds: tuple[float, float, float]) -> dict[str, float]:
    """Rounded, for the page's size."""
    return {
        name: float(f"{value:.5g}") for name, value in zip((f"{field}_low", field, f"{field}_high"), bounds)
    }


def _factor(low: float, middle: float, high: float) -> str:
    return f"{middle:.2f}x ({low:.2f} - {high:.2f})"


# --- document ---------------------------------------------------------------------------------------------------------


def _document(shown: Sequence[Section], data: Mapping[str, Any], *, made: str, version: str) -> str:
    links = [element("li", element("a", title, href=f"#{name}")) for name, title, _ in shown]
    themes = [element("option", name, value=name.partition(" ")[0]) for name in ("system theme", "light", "dark")]
    title = element("div", element("h1", "attn-dispatch report"), element("p", f"{made} UTC, attn-dispatch {version}"))
    body = [
        element("section", element("h2", title, id=f"{name}-title"), content, id=name, aria_labelledby=f"{name}-title")
        for name, title, content in shown
    ]
    scripts = [plots.runtime(), _text("page.js")] if data else []
    # Only these scripts run, and nothing is loaded, whatever a name in the store holds. Vega compiles its expressions.
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"script-src {allowed} 'unsafe-eval'; " if scripts else ""
    policy = f"default-src 'none'; {policy}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
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
        element("header", title, element("select", *themes, id="theme", aria_label="Theme")),
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *body, id="content"),
        element("footer", element("p", "Made by 'attn-dispatch report'."), *[element("p", LICENCE)] * bool(data)),
        element("script", _packed(data), type="text/plain", id="data"),
        *(element("script", Html(script)) for script in scripts),
    ]
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', *parts), lang='en')}\n"


def _packed(data: Mapping[str, Any]) -> Html:
    """JSON as gzip in base64, which ends no script element; browsers unpack it by themselves."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Html(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _text(name: str) -> str:
    return files("attn_dispatch.cli.report").joinpath(name).read_text(encoding="utf-8")
