"""The sections of the page, as markup."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attn_dispatch.cli.report.comparisons import Gain, Outcomes, known_factors
from attn_dispatch.cli.report.markup import Html, element, join, table
from attn_dispatch.cli.report.series import Series
from attn_dispatch.cli.tables import cells, compact
from attn_dispatch.cli.thresholds import EXPLAINED, NOTHING
from attn_dispatch.cli.thresholds import HEAD as ORDER_HEAD
from attn_dispatch.cli.thresholds import cells as order_cells
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.learning.speedups import SpeedupSeries
from attn_dispatch.learning.thresholds import Threshold
from attn_dispatch.settings import NO_HOME, NOWHERE
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import milliseconds, titled

DECISION_HEAD = ("problem", "backend", "median", "vs default", "next best", "source", "measured (UTC)", "key")
WIDE = ("next best", "source", "measured (UTC)", "key")  #: left out on narrow screens; a decision's details have them
ROWS = 500  #: decisions listed in the markup, the newest ones; the page's script makes the rows of the others
STATUSES = (
    "chosen",
    "tie",
    "slower",
    "not_measured",
    "over_memory",
    "unsupported",
    "not_installed",
    "failed",
    "incorrect",
    "quarantined",
)
NO_SCRIPT = f"Search, plots, the candidates of a decision, and decisions after the first {ROWS}, need JavaScript."
DRIFT_HEAD = (
    "problem",
    "backend",
    "stored median",
    "stored interval",
    "live median",
    "live interval",
    "live / stored",
    "seen (UTC)",
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts, or what is said where it has no rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    nothing: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What `doctor` says: lines about the hardware, named values, tables; the quarantine, and how to lift it."""

    lines: Sequence[str]
    state: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    quarantine: Sequence[Table]
    hint: str


def summary(decisions: Sequence[Decision], gains: Sequence[Gain], machine: Machine) -> Html:
    """Counts, and the gains over the default."""
    known = known_factors(gains)
    facts = [
        (f"{len(decisions):,}", "decisions"),
        (f"{sum(gain.is_changed for gain in gains):,}", "choose another candidate than the default"),
        (
            f"{statistics.geometric_mean(known):.2f}x" if known else "-",
            f"the default's speed: geometric mean of the {len(known):,} with several samples of both",
        ),
        (f"{max(known):.2f}x" if known else "-", "the default's speed at best"),
        (f"{sum(bool(each.provisional) for each in decisions):,}", "provisional: a later process measures them again"),
        (f"{sum(each.drift is not None for each in decisions):,}", "drifted: live calls take another time"),
        (f"{sum(len(each.rows) for each in machine.quarantine):,}", "quarantines and strikes"),
    ]
    cards = [element("div", element("dt", name), element("dd", value)) for value, name in facts]
    note = (
        "The default is what runs where nothing was measured: the first backend by preference that can run, in natural "
        "order."
    )
    return join([element("dl", *cards, class_="cards"), element("p", note, class_="note")])


def hardware(machine: Machine) -> Html:
    """Processors, devices, backends, settings."""
    lines = [element("li", line) for line in machine.lines]
    state = [join([element("dt", name), element("dd", value)]) for name, value in machine.state]
    return join([
        element("ul", *lines, class_="plain"),
        *map(_table, machine.tables),
        element("dl", *state, class_="pairs"),
    ])  # fmt: skip


def no_decisions(folder: str) -> Html:
    """What to run."""
    if folder == str(NOWHERE):
        return element("p", f"No decisions are stored: {NO_HOME}")
    text = f"No decision is stored in {folder} yet. This measures some, in under a minute; then make the report again:"
    return join([element("p", text), element("pre", element("code", "attn-dispatch profile --quick"))])


def left_out(reasons: Sequence[str]) -> Html:
    """The decisions that cannot be shown; nothing where all can."""
    if not reasons:
        return Html("")
    items = [element("li", reason) for reason in reasons]
    return join([element("p", f"Left out, since they cannot be shown ({len(items)}):"), element("ul", *items)])


def decided(decisions: Sequence[Decision], found: Sequence[Explanation], gains: Sequence[Gain]) -> Html:
    """All decisions, to be searched and sorted; the page's script adds the candidates of one on request."""
    search = element("input", type="search", id="search", autocomplete="off", placeholder="e.g. dilated bfloat16")
    controls = [
        element("label", "Search", search, class_="grow"),
        _checkbox("changed", "only changed from the default"),
        _checkbox("provisional", "only provisional"),
    ]
    silicons = sorted({decision.silicon for decision in decisions})
    if len(silicons) > 1:
        options = [element("option", "all", value=""), *(element("option", name, value=name) for name in silicons)]
        controls.append(element("label", "Silicon", element("select", *options, id="silicon")))
    head = [
        element("th", element("button", name, type="button"), scope="col", class_="wide" if name in WIDE else None)
        for name in DECISION_HEAD
    ]
    newest = list(zip(decisions, found, gains))[:ROWS]
    rows = [_row(at, *each) for at, each in enumerate(newest)]
    caption = element("caption", "Newest first. The button of a row shows all candidates, and why each lost.")
    inner = element("table", caption, element("thead", element("tr", *head)), element("tbody", *rows), id="decided")
    return join([
        element("form", *controls, role="search", aria_label="decisions", class_="controls"),
        element("p", f"{len(decisions):,} decisions", id="count", role="status"),
        element("div", inner, class_="scroll", role="region", aria_label="Decisions", tabindex=0),
        element("button", "Show all", type="button", id="more", hidden=True),
        element("noscript", element("p", NO_SCRIPT)),
    ])  # fmt: skip


def _checkbox(name: str, label: str) -> Html:
    return element("label", element("input", type="checkbox", id=name), label)


def _row(at: int, decision: Decision, explanation: Explanation, gain: Gain) -> Html:
    found = []
    for name, (texts, value) in zip(DECISION_HEAD, row_cells(decision, explanation, gain)):
        inside: list[str] = [texts[0], *(element("small", text) for text in texts[1:])]
        if name == "problem":
            found.append(element("th", element("button", *inside, type="button", aria_expanded="false"), scope="row"))
        else:
            inside = [element("code", *inside)] if name == "key" else inside
            found.append(element("td", *inside, data_v=value, class_="wide" if name in WIDE else None))
    flags = {"data_changed": gain.is_changed, "data_provisional": bool(decision.provisional)}
    return element("tr", *found, data_n=at, data_silicon=decision.silicon, **flags)


def row_cells(decision: Decision, explanation: Explanation, gain: Gain) -> list[tuple[list[str], float | None]]:
    """The cells of a decision under `DECISION_HEAD`: a text, and one in small; the number to sort by if it has one."""
    key, problem, backend, source, median, ratio, rival = cells(explanation)
    row = next((each for each in decision.candidates if each.id == decision.chosen), None)
    factor = None if gain.bounds is None else gain.bounds[1]
    found: dict[str, tuple[list[str], float | None]] = {
        "problem": ([problem], None),
        "backend": ([backend], None),
        "median": ([median], None if row is None else row.median_ms),
        "vs default": ([gain.verdict, gain.interval] if gain.interval else [gain.verdict], factor),
        "next best": ([rival] if ratio == "-" else [ratio, rival], _number(ratio)),
        "source": ([source], None),
        "measured (UTC)": ([decision.created[:16].replace("T", " ")], None),
        "key": ([key], None),
    }
    return [found[name] for name in DECISION_HEAD]


def _number(ratio: str) -> float | None:
    return float(ratio.removesuffix("x")) if ratio.endswith("x") else None


def lengths(series: Sequence[Series]) -> Html:
    """Plots of one series at a time, and their numbers."""
    if not series:
        return element("p", "No decision holds a measured time.")
    note = (
        "Bands and bars are 95 % intervals of the median; of ratios to the default, the paired 99 % interval where one "
        "of the two was chosen, else the extreme ratios. Orders other than the natural one are dashed. Dotted: the "
        "fastest candidate changes. Both axes are logarithmic; 1k is 1,024."
    )
    return join([
        element("p", note, class_="note"),
        _chooser("series", "Problems", [(each.silicon, each.title) for each in series]),
        element("fieldset", element("legend", "Candidates"), id="legend", class_="controls"),
        element("div", *(
            _figure("time", "Time of one call"),
            _figure("gain", "Time of the default / this time: above 1 is faster"),
            _figure("memory", "Peak memory of one call"),
        ), class_="figures"),
        element("ul", id="crossings"),
        element("details", element("summary", "The same numbers as a table"), element("div", id="numbers")),
    ])  # fmt: skip


def _chooser(name: str, label: str, titles: Sequence[tuple[str, str]], chosen: int = 0) -> Html:
    """A list to choose from, by silicon if there are several."""
    options: dict[str, list[Html]] = {}
    for at, (silicon, title) in enumerate(titles):
        options.setdefault(silicon, []).append(element("option", title, value=at, selected=at == chosen))
    groups = [join(found) for found in options.values()]
    if len(options) > 1:
        groups = [element("optgroup", *found, label=silicon) for silicon, found in options.items()]
    return element("label", f"{label} ({len(titles)})", element("select", *groups, id=name), class_="chooser")


def _figure(kind: str, caption: str) -> Html:
    plot = element("div", id=f"plot-{kind}", class_="plot")
    return element("figure", element("figcaption", caption), plot)


def orders(found: Sequence[tuple[SpeedupSeries, Threshold | None]]) -> Html:
    """The threshold of every token order, and a plot of the evidence of one at a time."""
    if not found:
        return element("p", NOTHING)
    rows = [order_cells(*pair) for pair in found]
    titles = [
        (series.silicon, f"{order}: {pattern}, {dtype}, head_dim {head_dim}, {direction}")
        for (series, _), (pattern, dtype, head_dim, direction, order, *_) in zip(found, rows)
    ]
    pays = (at for at, (_, threshold) in enumerate(found) if threshold is not None and threshold.tokens is not None)
    return join([
        *(element("p", line, class_="note") for line in EXPLAINED),
        table("Token orders, and the length from which each pays", ORDER_HEAD, rows),
        _chooser("order", "Evidence", titles, next(pays, 0)),
        _figure("order", "Time in natural order / time in this order: above 1 is faster"),
        element("p", id="threshold"),
        element("details", element("summary", "The same numbers as a table"), element("div", id="evidence")),
    ])  # fmt: skip


def losers(found: Sequence[Outcomes]) -> Html:
    """How often each candidate lost, and why."""
    shown = [status for status in STATUSES if any(each.statuses[status] for each in found)]
    head = ("candidate", *(status.replace("_", " ") for status in shown), "time / the chosen one's: median (range)")
    rows = [
        [each.name, *(str(each.statuses[status] or "-") for status in shown), _spread(each.ratios)] for each in found
    ]
    reasons = [
        [each.name, status.replace("_", " "), f"{count:,}", reason]
        for each in found
        for status, reason, count in each.reasons
    ]
    listed = table(
        "Reasons; of those that differ in numbers only, one",
        ("candidate", "verdict", "decisions", "reason"),
        reasons,
        [2],
    )
    return join([
        element("p", "How often each candidate got which verdict. Each decision has its own reasons.", class_="note"),
        table("Verdicts of each candidate", head, rows, range(1, len(head))),
        element("details", element("summary", f"Reasons ({len(reasons)})"), listed) if reasons else "",
    ])  # fmt: skip


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f}x" + (f" ({ratios[0]:.2f} - {ratios[-1]:.2f})" if len(ratios) > 1 else "")


def quarantine(machine: Machine) -> Html:
    """Which versions of backends are excluded, or will be after another crash."""
    hint = [element("p", machine.hint, class_="note")] if any(each.rows for each in machine.quarantine) else []
    return join([*map(_table, machine.quarantine), *hint])


def _table(made: Table) -> Html:
    return table(made.caption, made.head, made.rows) if made.rows else element("p", made.nothing)


def drift(decisions: Sequence[Decision]) -> Html:
    """The decisions that live calls contradict."""
    rows = []
    for decision in decisions:
        live, row = decision.drift, next((each for each in decision.candidates if each.id == decision.chosen), None)
        if live is None or row is None or not row.median_ms:
            continue
        times = [milliseconds(row.median_ms), _interval(row.low_ms, row.high_ms)]
        times += [
            milliseconds(live.median_ms),
            _interval(live.low_ms, live.high_ms),
            f"{live.median_ms / row.median_ms:.2f}x",
        ]
        rows.append([compact(decision.title), titled(*row.id), *times, live.seen[:16].replace("T", " ")])
    if not rows:
        return element(
            "p", "No decision is marked. $ATTN_DISPATCH_SENTINEL sets the share of live calls that are timed."
        )
    hint = element("p", "'attn-dispatch profile' measures these problems again.", class_="note")
    return join(
        [table("Decisions whose live calls take another time than was measured", DRIFT_HEAD, rows, range(2, 7)), hint]
    )


def _interval(low_ms: float | None, high_ms: float | None) -> str:
    return "-" if low_ms is None or high_ms is None else f"{milliseconds(low_ms)} - {milliseconds(high_ms)}"
