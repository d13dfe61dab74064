"""The page as one HTML file that loads nothing: its sections, the data of its plots, its style and its scripts."""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, NamedTuple

from attn_dispatch.cli import thresholds
from attn_dispatch.cli.report import plots
from attn_dispatch.cli.report.markup import Html, element, join, table
from attn_dispatch.cli.report.series import Point, Series, all_series, by_preference
from attn_dispatch.cli.tables import KEY_DIGITS, PLAIN, Table, chosen_of, compact, decided, gain_over, plain_of
from attn_dispatch.cli.thresholds import ratio_text
from attn_dispatch.decisions.explanation import HEAD, LEFT, Explanation
from attn_dispatch.learning import speedups
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.store.address import PROBLEM_ERRORS
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import gib, milliseconds, printable, titled

DETAILED = 500  #: decisions, the newest ones, whose candidates the page holds
SDPA = "SDPA is PyTorch's scaled_dot_product_attention, with a dense mask where the pattern needs one: the faster one."
AXES = (
    "Bands and bars are 95 % intervals of the median; of ratios to SDPA, the paired 99 % interval where one of the two "
    "was chosen, else the extreme ratios. Other orders than the natural one are dashed; axes are logarithmic. A "
    "click on a name fades the others."
)
EMPTY = (
    "No decision is stored in {folder} yet. This measures some, in under a minute; then make the report again: "
    "attn-dispatch profile --quick"
)
LICENCE = (
    "Plots: Vega, copyright 2015-2023 University of Washington Interactive Data Lab, under the BSD 3-Clause licence."
)


class Drawn(NamedTuple):
    """What plots show at a time: points as `plots.compiled` has them, and the notes beside them."""

    title: str
    points: list[dict[str, Any]]
    notes: Html


def page(decisions: Sequence[Decision], folder: str, *, made: str, version: str) -> str:
    """The whole page.

    Args:
        decisions: those that can be shown, in the order in which they are listed.
        folder: where they are stored, for people.
        made: the time, for people.

    Raises:
        AttnDispatchError: vl-convert is not installed.
    """
    drawn = list(map(_series, all_series(decisions)))
    data: dict[str, Any] | None = None
    if drawn:
        rows = (row for each in decisions for row in each.candidates)
        names = sorted({row.id for row in rows if is_timed(row)}, key=by_preference)
        backends, orders_of = (list(dict.fromkeys(each)) for each in zip(*names))
        data = {"spec": plots.compiled(backends, orders_of), "all": [each.points for each in drawn]}
    listed = decided(decisions)._replace(nothing=EMPTY.format(folder=folder))
    orders = thresholds.table(thresholds.paired(speedups.all_series(decisions)))
    sections = {
        "Summary": _summary(decisions),
        "Decisions": join([table(listed), *map(_detail, decisions[:DETAILED])]),
        "Time and memory against length": join([_note(AXES), *_plot(drawn)]),
        "Token orders": join([*map(_note, thresholds.EXPLAINED), table(orders)]),
    }
    return _document(sections, data, f"{made} UTC, attn-dispatch {version}")


def can_be_shown(decision: Decision) -> bool:
    """Whether a page can hold a decision: the problem of one from elsewhere may be anything."""
    with suppress(*PROBLEM_ERRORS):
        _detail(decision)
        json.dumps([_series(series) for series in all_series([decision])], allow_nan=False)
        return True
    return False


# --- sections -------------------------------------------------------------------------------------------------


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


def _plot(drawn: Sequence[Drawn]) -> list[Html]:
    """A list to choose from, a place for the plots, and the notes of each; nothing for none."""
    if not drawn:
        return []
    options = [element("option", each.title, value=at) for at, each in enumerate(drawn)]
    return [
        element("label", f"Problems ({len(drawn)})", element("select", *options, id="series"), class_="chooser"),
        element("div", id="plot", class_="plot", aria_hidden="true"),
        *(element("div", each.notes, class_="notes", hidden=at > 0) for at, each in enumerate(drawn)),
    ]


def _series(series: Series) -> Drawn:
    """Times, gains and memory against length, and where the fastest candidate changes."""
    notes = join([*(element("p", note) for note in series.notes), table(series.numbers)])
    return Drawn(f"{series.title}, {series.silicon}", list(map(_point, series.points)), notes)


def _point(point: Point) -> dict[str, Any]:
    row, name = point.row, titled(*point.row.id)
    low, high = row.low_ms or point.ms, row.high_ms or point.ms
    interval = point.remark or f" ({milliseconds(low)} - {milliseconds(high)})"
    text = f"{name}, {point.tokens:,} tokens\n{milliseconds(point.ms)}{interval}"
    where = {"name": name, "backend": row.backend, "order": row.order, "tokens": point.tokens}
    found = {**where, **_bounds("ms", (low, point.ms, high))}
    if point.gain is not None:
        found |= _bounds("gain", point.gain)
        text += f"\nvs SDPA {ratio_text(*point.gain)}"
    if row.peak_bytes:
        found["bytes"] = row.peak_bytes
        text += f"\nmemory {gib(row.peak_bytes)}"
    return {**found, "text": text}


def _bounds(field: str, bounds: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((f"{field}_low", field, f"{field}_high"), bounds))


# --- document -------------------------------------------------------------------------------------------------


def _document(sections: Mapping[str, Html], data: Mapping[str, Any] | None, about: str) -> str:
    """The sections by title, under links to each; scripts and the plots' data where there are any."""
    names = {title: title.split()[0].lower() for title in sections}
    links = [element("li", element("a", title, href=f"#{name}")) for title, name in names.items()]
    body = [
        element("section", element("h2", title), sections[title], id=name, aria_label=title)
        for title, name in names.items()
    ]
    # Only scripts with the nonce run, and nothing is loaded, whatever a name in the store holds. Vega compiles its
    # expressions.
    nonce = secrets.token_urlsafe(16)
    policy = f"script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=f"default-src 'none'; {policy}"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"attn-dispatch report, {about}"),
        element("link", rel="icon", href="data:,"),
        element("style", Html(_text("page.css"))),
    ]
    parts = [
        element("header", element("h1", "attn-dispatch report"), element("p", about)),
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *body),
    ]
    if data is not None:
        parts += [element("footer", element("p", LICENCE))]
        parts += [element("script", _packed(data), type="text/plain", id="data")]
        parts += [element("script", Html(script), nonce=nonce) for script in (plots.runtime(), _text("page.js"))]
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', *parts), lang='en')}\n"


def _packed(data: Mapping[str, Any]) -> Html:
    """JSON as gzip in base64, which ends no script element; browsers unpack it by themselves."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Html(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())


def _text(name: str) -> str:
    return files("attn_dispatch.cli.report").joinpath(name).read_text(encoding="utf-8")
