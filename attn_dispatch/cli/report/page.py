"""The page as one HTML file that loads nothing and runs nothing: its sections, its plots and its style."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

from attn_dispatch.cli import thresholds
from attn_dispatch.cli.report import plots
from attn_dispatch.cli.report.markup import Html, element, join, table
from attn_dispatch.cli.report.series import Point, all_series, by_preference
from attn_dispatch.cli.tables import KEY_DIGITS, PLAIN, Table, chosen_of, compact, decided, gain_over, plain_of
from attn_dispatch.decisions.explanation import HEAD, LEFT, Explanation
from attn_dispatch.learning import speedups
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.store.address import PROBLEM_ERRORS
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import printable

DRAWN = 50  #: series that have plots, those with the most lengths; the others have their numbers alone
DETAILED = 500  #: decisions, the newest ones, whose candidates the page holds
SDPA = "SDPA is PyTorch's scaled_dot_product_attention, with a dense mask where the pattern needs one: the faster one."
AXES = (
    "Bands and bars are 95 % intervals of the median; of ratios to SDPA, the paired 99 % interval where one of the two "
    "was chosen, else the extreme ratios. Other orders than the natural one are dashed; axes are logarithmic."
)
EMPTY = (
    "No decision is stored in {folder} yet. This measures some, in under a minute; then make the report again: "
    "attn-dispatch profile --quick"
)


def page(decisions: Sequence[Decision], folder: str, *, made: str, version: str) -> str:
    """The whole page.

    Args:
        decisions: those that can be shown, in the order in which they are listed.
        folder: where they are stored, for people.
        made: the time, for people.

    Raises:
        AttnDispatchError: vl-convert is not installed.
    """
    listed = decided(decisions)._replace(nothing=EMPTY.format(folder=folder))
    orders = thresholds.table(thresholds.paired(speedups.all_series(decisions)))
    sections = {
        "Summary": _summary(decisions),
        "Decisions": join([table(listed), *map(_detail, decisions[:DETAILED])]),
        "Time and memory against length": join([_note(AXES), *_plots(decisions)]),
        "Token orders": join([*map(_note, thresholds.EXPLAINED), table(orders)]),
    }
    return _document(sections, f"{made} UTC, attn-dispatch {version}")


def can_be_shown(decision: Decision) -> bool:
    """Whether a page can hold a decision: the problem of one from elsewhere may be anything."""
    with suppress(*PROBLEM_ERRORS):
        _detail(decision)
        json.dumps([_point(each) for series in all_series([decision]) for each in series.points], allow_nan=False)
        return True
    return False


# --- sections ---------------------------------------------------------------------------------------------------------


def _summary(decisions: Sequence[Decision]) -> Html:
    """Counts, and the gains over PyTorch's own attention: of times that were sampled more than once."""
    gains = []
    for rows in (each.candidates for each in decisions):
        plain, chosen = plain_of(rows), chosen_of(rows)
        if plain is not None and chosen is not None and 1 not in (plain.rounds, chosen.rounds):
            gains += [gain[1] for gain in [gain_over(plain, chosen)] if gain is not None]
    facts = [
        ("decisions", f"{len(decisions):,}"),
        ("another backend than SDPA", str(sum(each.choice not in PLAIN for each in decisions))),
        ("provisional", f"{sum(bool(each.provisional) for each in decisions)}, measured again by a later process"),
    ]
    if gains:
        mean = f"{statistics.geometric_mean(gains):.2f}x, geometric mean of {len(gains):,} with several samples"
        facts.append(("SDPA's time / the choice's", f"{mean}; {max(gains):.2f}x at best"))
    return join([_pairs(facts), _note(SDPA)])


def _pairs(facts: Iterable[tuple[str, str]]) -> Html:
    found = (join([element("dt", name), element("dd", value)]) for name, value in facts)
    return element("dl", *found, class_="pairs")


def _note(text: str) -> Html:
    return element("p", text, class_="note")


def _detail(decision: Decision) -> Html:
    """What the explanation of a decision says, and all candidates."""
    explanation = Explanation.of(decision)
    lines = [*str(explanation).split("\n\n")[0].splitlines(), f"silicon   {decision.silicon}"]
    rows = [list(map(printable, row)) for row in explanation.rows()]
    candidates = table(Table(HEAD, rows, LEFT, "Candidates of this decision"))
    summary = element("summary", f"{decision.key[:KEY_DIGITS]}: {compact(decision.title)}")
    return element("details", summary, element("p", "\n".join(lines), class_="lines"), candidates)


def _plots(decisions: Sequence[Decision]) -> list[Html]:
    """Each series: times, gains and memory against length, and where the fastest candidate changes."""
    rows = (row for each in decisions for row in each.candidates)
    names = sorted({row.id for row in rows if is_timed(row)}, key=by_preference)
    looks = [list(dict.fromkeys(each)) for each in zip(*names)]  # of the backends, and of the orders
    parts = []
    for number, series in enumerate(all_series(decisions)):
        title = element("summary", f"{series.title}, {series.silicon}")
        plot = Html(plots.drawn(list(map(_point, series.points)), *looks)) if number < DRAWN else ""
        notes = (element("p", note) for note in series.notes)
        parts.append(element("details", title, plot, *notes, table(series.numbers), class_="plot", open=number == 0))
    return parts


def _point(point: Point) -> dict[str, Any]:
    row = point.row
    found = {"backend": row.backend, "order": row.order, "tokens": point.tokens}
    found |= _bounds("ms", (row.low_ms or point.ms, point.ms, row.high_ms or point.ms))
    found |= {} if point.gain is None else _bounds("gain", point.gain)
    return found | ({"bytes": row.peak_bytes} if row.peak_bytes else {})


def _bounds(field: str, bounds: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((f"{field}_low", field, f"{field}_high"), bounds))


# --- document ---------------------------------------------------------------------------------------------------------


def _document(sections: Mapping[str, Html], about: str) -> str:
    """The sections by title, under links to each."""
    names = {title: title.split()[0].lower() for title in sections}
    links = [element("li", element("a", title, href=f"#{name}")) for title, name in names.items()]
    body = [
        element("section", element("h2", title), sections[title], id=name, aria_label=title)
        for title, name in names.items()
    ]
    style = files("attn_dispatch.cli.report").joinpath("page.css").read_text(encoding="utf-8")
    # No script runs, and nothing is loaded, whatever a name in the store holds.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"attn-dispatch report, {about}"),
        element("link", rel="icon", href="data:,"),
        element("style", Html(style)),
    ]
    parts = [
        element("header", element("h1", "attn-dispatch report"), element("p", about)),
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *body),
    ]
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', *parts), lang='en')}\n"
