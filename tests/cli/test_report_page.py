"""The page of `report` in a real browser without a network: what it shows, by keyboard and to a screen reader too.

$REPORT_PICTURES names a folder for pictures of it, to be looked at.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.cli.report import plots, sections
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.learning.predict import is_timed
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.quarantine import Entry, Quarantine
from attn_dispatch.text import milliseconds, printable, titled
from tests.support import browser
from tests.support import made_up as planted
from tests.support import stored_profiles as made_up
from tests.support.browser import Page
from tests.support.commands import command
from tests.support.stored_profiles import NATIVE, SDPA

EVIL = "<script>document.title = 'taken'</script>"
ROWS = "[...document.querySelectorAll('#decided > tbody > tr')].filter((row) => row.dataset.n)"
TITLES = f"{ROWS}.map((row) => row.cells[0].textContent)"
SHOWN = "document.querySelector('#count').textContent"

pytestmark = [
    pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium: apt-get install chromium"),
]
pytest.importorskip("vl_convert", reason="the extra `report` is not installed: pip install -e '.[report]'")


def written(folder: Path, page: Path, *decisions: Decision) -> Path:
    made_up.store(folder, decisions)
    done = command(folder, "report", "-o", str(page))
    assert done.returncode == 0, done.stderr
    return page


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser.opened(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """A tab in which nothing may go wrong, and which may ask for nothing but the file."""
    tab.problems.clear()
    tab.requests.clear()
    tab.show(1280)
    yield tab
    assert tab.problems == []
    assert {address.partition(":")[0] for address in tab.requests} == {"file"}


@pytest.fixture(scope="module")
def stored() -> list[Decision]:
    first, second, *others = made_up.crossing()
    return [made_up.drifted(first), made_up.provisional(second), *others, *made_up.orders()]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, stored: list[Decision]) -> Path:
    place = tmp_path_factory.mktemp("report")
    text = "[1, 1024, 4, 64] float32 Dense() forward"
    crash = f"the process crashed while flash 2.8 ran {text} for the first time (SIGSEGV)"
    for backend, kind, reason in (("flash", "died", crash), ("xformers", "incorrect", "dq is wrong by 0.31")):
        entry: dict[str, Any] = {"backend": backend, "version": "2.8", "kind": kind, "reason": reason, "title": text}
        Quarantine(place / "store", planted.SILICON).add(Entry(silicon=planted.SILICON, **entry))
    return written(place / "store", place / "report.html", *stored)


def test_numbers_are_those_of_the_store(page: Page, file: Path, stored: list[Decision]) -> None:
    page.open(file)
    cells = page.ask(f"{ROWS}.map((row) => [...row.cells].map((cell) => [cell.innerText, cell.dataset.v]))")
    by_key = {row[-1][0]: row for row in cells}
    assert len(by_key) == len(stored)
    for decision in stored:
        row = by_key[decision.key[:10]]
        (chosen,) = (each for each in decision.candidates if each.status == "chosen")
        assert chosen.median_ms is not None
        assert row[0][0] == " ".join(decision.title.split())
        assert row[1][0] == titled(*decision.chosen)
        assert (row[2][0], float(row[2][1])) == (milliseconds(chosen.median_ms), chosen.median_ms)


def test_a_row_opens_to_all_candidates(page: Page, file: Path, stored: list[Decision]) -> None:
    page.open(file)
    page.ask(f"{ROWS}.forEach((row) => row.cells[0].firstChild.click())")
    tables = page.ask(
        "[...document.querySelectorAll('.detail')].map((detail) => [detail.querySelector('dl').textContent, "
        "[...detail.querySelector('table').rows].map((row) => [...row.cells].map((cell) => cell.textContent))])"
    )
    assert len(tables) == len(stored)
    for decision in stored:
        (found,) = (rows for about, (_, *rows) in tables if decision.key in about)
        assert found == [[printable(cell) for cell in row] for row in Explanation.of(decision).rows()]
    page.ask(f"{ROWS}.forEach((row) => row.cells[0].firstChild.click())")
    assert page.ask("document.querySelectorAll('.detail').length") == 0


def test_search_filters_and_sorting(page: Page, file: Path, stored: list[Decision]) -> None:
    page.open(file)
    assert page.ask(SHOWN) == f"{len(stored)} of {len(stored)} decisions"

    def chosen(control: str, value: str) -> list[str]:
        page.ask(f"Object.assign(document.getElementById('{control}'), {value}).dispatchEvent(new Event('input'))")
        found: list[str] = page.ask(TITLES)
        return found

    assert len(chosen("search", "{value: 'neighborhood 128'}")) == 1
    assert chosen("search", "{value: 'no such thing'}") == []
    assert len(chosen("search", "{value: ''}")) == len(stored)
    assert chosen("provisional", "{checked: true}") == [" ".join(stored[1].title.split())]
    assert len(chosen("provisional", "{checked: false}")) == len(stored)
    # sdpa, the default, stays the choice at two lengths of `crossing`.
    assert len(chosen("changed", "{checked: true}")) == len(stored) - 2
    chosen("changed", "{checked: false}")
    for direction in ("ascending", "descending"):
        page.ask("document.querySelectorAll('#decided thead button')[2].click()")
        medians = page.ask(f"{ROWS}.map((row) => Number(row.cells[2].dataset.v))")
        assert medians == sorted(medians, reverse=direction == "descending")
        sorts = page.ask("[...document.querySelectorAll('#decided thead th')].map((head) => head.ariaSort)")
        assert sorts == [None, None, direction, None, None, None, None, None]


def marks(page: Page, plot: str) -> list[tuple[float, float]]:
    found = page.ask(
        f"[...document.querySelectorAll('#plot-{plot} .mark-symbol path')]"
        ".map((mark) => mark.getAttribute('transform').match(/[-\\d.]+/g).map(Number))"
    )
    return [(x, y) for x, y in found]


def test_marks_stand_where_logarithmic_axes_put_them(page: Page, file: Path) -> None:
    """Every time of the first series has a mark; distances are those of logarithms; the crossing is marked."""
    page.open(file)
    rows = [(decision, row) for decision in made_up.crossing() for row in decision.candidates if is_timed(row)]
    expected = sorted((math.log(each.problem["q_len"]), -math.log(row.median_ms or 0)) for each, row in rows)
    found = sorted(marks(page, "time"))
    assert len(found) == len(expected)
    for axis in (0, 1):
        values, pixels = ([each[axis] for each in points] for points in (expected, found))
        at, end = values.index(min(values)), values.index(max(values))
        scale = (pixels[end] - pixels[at]) / (values[end] - values[at])
        assert pixels == pytest.approx([pixels[at] + scale * (value - values[at]) for value in values], abs=0.01)
    assert len(marks(page, "gain")) == len(marks(page, "memory")) == len(expected)
    assert "~3,000" in page.ask("document.querySelector('#plot-time svg').textContent")
    assert "sdpa to native at about 3,000 tokens" in page.ask("document.querySelector('#crossings').textContent")
    page.ask("document.querySelector('#legend input').click()")
    page.wait_for("document.querySelectorAll('#plot-time .mark-symbol path').length === 10")
    assert "sdpa," not in page.ask("document.querySelector('#numbers').innerText")


def test_orders_show_the_threshold_and_its_evidence(page: Page, file: Path) -> None:
    page.open(file)
    assert page.ask("document.querySelector('#threshold').textContent") == "Pays: above 3,000 tokens (1,024 - 4,096)."
    assert len(marks(page, "order")) == 3
    page.ask("document.querySelector('#evidence').parentElement.open = true")
    table = page.ask("document.querySelector('#evidence tbody').innerText")
    assert [line.split("\t")[0] for line in table.splitlines()] == ["1,024", "4,096", "16,384"]


def test_losers_quarantines_and_drift(page: Page, file: Path, stored: list[Decision]) -> None:
    page.open(file)
    verdicts = page.ask("document.querySelector('#losers tbody').innerText").splitlines()
    (flash,) = (line.split() for line in verdicts if line.startswith("flash"))
    assert str(len(stored)) in flash
    reasons = page.ask("document.querySelector('#losers details').textContent")
    assert made_up.REFUSED.reason in reasons
    quarantine = page.ask("document.querySelector('#quarantine').innerText")
    assert "SIGSEGV" in quarantine
    assert "dq is wrong by 0.31" in quarantine
    assert "9 ms" in page.ask("document.querySelector('#drift tbody').innerText")


def test_themes(page: Page, file: Path) -> None:
    """The system's, until the button chooses; plots follow."""

    both = (
        "[getComputedStyle(document.body).backgroundColor, "
        "document.querySelector('#plot-time .mark-symbol path')?.getAttribute('fill')]"
    )

    def colours() -> list[str]:
        found: list[str] = page.ask(both)
        return found

    page.open(file)
    light = colours()
    page.show(1280, "dark")
    page.wait_for(f"{both}.every((colour, at) => colour && colour !== {light}[at])")
    assert page.ask("document.querySelector('#theme').textContent") == "Light theme"
    page.ask("document.querySelector('#theme').click()")
    page.wait_for(f"{both}.every((colour, at) => colour === {light}[at])")
    page.open(file)
    assert colours() == light  # it is kept
    page.ask("localStorage.clear()")


@pytest.mark.parametrize("width", [360, 1280])
def test_no_width_scrolls_sideways(width: int, page: Page, file: Path) -> None:
    page.show(width)
    page.open(file)
    page.ask(f"{ROWS}.forEach((row) => row.cells[0].firstChild.click())")
    page.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.ask("document.documentElement.scrollWidth") <= width
    if width == 360:  # tables need no scrolling either
        boxes = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth + 1)"
        assert page.ask(f"{boxes}.map((box) => box.ariaLabel)") == []


def test_by_keyboard(page: Page, file: Path) -> None:
    page.open(file)
    page.press("Tab")
    assert page.ask("document.activeElement.textContent") == "Skip to the content"
    page.ask("document.getElementById('search').focus()")
    page.write("neighborhood")
    assert page.ask(SHOWN).startswith("3 of ")
    for _ in range(30):
        page.press("Tab")
        if page.ask("document.activeElement.ariaExpanded") == "false":
            break
    page.press("Enter", "\r")
    assert page.ask("document.activeElement.ariaExpanded") == "true"
    assert page.ask("document.querySelectorAll('.detail').length") == 1
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.ask(outline) == "solid"


@pytest.mark.parametrize("width", [360, 1280])
def test_what_a_screen_reader_is_given(width: int, page: Page, file: Path) -> None:
    page.show(width)
    page.open(file)
    headings = page.names("heading")
    assert headings[0] == "attn-dispatch report"
    assert {"Machine", "Decisions", "Drift"} <= set(headings)
    assert {"main", "navigation", "search", "banner"} <= set(page.roles())
    pictures = page.names("image") + page.names("img")
    assert len(pictures) == 4
    assert any("sdpa to native at about 3,000 tokens" in name for name in pictures)
    for role in ("button", "searchbox", "checkbox", "combobox"):
        names = page.names(role)
        assert names
        assert all(names), role
    assert len(page.names("columnheader")) >= 4
    assert len(page.names("rowheader")) >= 8


def test_many_decisions_are_shown_in_parts(page: Page, tmp_path: Path) -> None:
    decisions = made_up.many()
    page.open(written(tmp_path / "store", tmp_path / "report.html", *decisions))
    assert page.ask(f"{ROWS}.length") == 25
    assert page.ask(SHOWN) == "25 of 500 matching decisions shown; 500 in all"
    page.ask("document.querySelector('#more').click()")
    assert page.ask(f"{ROWS}.length") == 500
    assert page.ask("document.querySelectorAll('#series option').length") == 100
    page.ask("Object.assign(document.querySelector('#series'), {value: 99}).dispatchEvent(new Event('input'))")
    page.drawn()
    assert len(marks(page, "time")) == 5 * 9


def test_rows_are_alike_wherever_they_are_made(
    page: Page, tmp_path: Path, stored: list[Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the markup, or by the page's script."""
    found = []
    for count in (500, 3):
        monkeypatch.setattr(sections, "ROWS", count)
        path = written(tmp_path / "store", tmp_path / f"{count}.html", *stored)
        assert path.read_text(encoding="utf-8").count("data-n=") == min(count, len(stored))
        page.open(path)
        numbers = """/data-v="(.*?)"/g, (_, value) => `data-v="${Number(value)}"`"""  # 1.0 and 1 are alike
        found.append(page.ask(f"{ROWS}.map((row) => row.outerHTML.replace({numbers}))"))
    assert found[0] == found[1]
    assert len(found[0]) == len(stored)
    page.ask(f"{ROWS}[4].cells[0].firstChild.click()")
    key = page.ask(f"{ROWS}[4].cells[7].textContent")
    assert key in page.ask("document.querySelector('.detail').textContent")


def test_an_empty_store(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path / "store", tmp_path / "report.html"))
    assert "attn-dispatch profile --quick" in page.ask("document.querySelector('main').innerText")


def test_names_from_elsewhere_run_nothing(page: Page, tmp_path: Path) -> None:
    times = {SDPA: 2.0, (EVIL, "natural"): 1.0, NATIVE: 1.5}
    decision = made_up.whole(planted.problem_at(512), times, provenance={"name": EVIL})
    page.open(written(tmp_path / "store", tmp_path / "report.html", decision))
    page.ask(f"{ROWS}[0].cells[0].firstChild.click()")
    assert page.ask("document.querySelector('.detail').textContent").count(EVIL) >= 2
    assert EVIL in page.ask("document.querySelector('#legend').textContent")
    colours = page.ask("[...document.querySelectorAll('#legend svg')].map((each) => each.lastChild.style.fill)")
    assert len(set(colours)) == 3
    assert page.ask("document.title").startswith("attn-dispatch report")


def labels(page: Page, plot: str) -> list[str]:
    """Those of the vertical axis."""
    axes = page.ask(
        f"[...document.querySelectorAll('#plot-{plot} .role-axis')].filter((each) => "
        "each.querySelector('.role-axis-label')).map((each) => [each.querySelector('.role-axis-title')?.textContent, "
        "[...each.querySelectorAll('.role-axis-label text')].map((text) => text.textContent)])"
    )
    return [text for title, texts in axes if title != "tokens" for text in texts]


@pytest.mark.parametrize("times", [{SDPA: 1.97}, {SDPA: 1.97, NATIVE: 1.99}, {SDPA: 0.31, NATIVE: 0.45}])
def test_narrow_plots_have_labels(times: dict[tuple[str, str], float], page: Page, tmp_path: Path) -> None:
    """Of one length: no power of 2 and no round number lies between the least and the largest."""
    decision = made_up.whole(planted.problem_at(1100), times)
    page.open(written(tmp_path / "store", tmp_path / "report.html", decision))
    page.drawn()
    for plot in ("time", "gain", "memory"):
        found = labels(page, plot)
        assert found, plot
        assert len(set(found)) == len(found)


def test_a_plot_without_points_is_no_picture(page: Page, file: Path) -> None:
    page.open(file)
    page.drawn()
    box = "document.querySelector('#plot-time')"
    assert page.ask(f"{box}.getAttribute('role')") == "img"
    page.ask("document.querySelectorAll('#legend input').forEach((each) => each.click())")
    assert page.ask(f"[{box}.textContent, {box}.role, {box}.ariaLabel]") == [
        "No candidate is chosen above.",
        None,
        None,
    ]
    page.ask("document.querySelectorAll('#legend input').forEach((each) => each.click())")
    page.drawn()
    assert page.ask(f"{box}.getAttribute('role')") == "img"


def test_the_legend_tells_orders_apart(page: Page, tmp_path: Path) -> None:
    names = [("native", order) for order in plots.DASHES]
    decisions = [
        made_up.whole(problem, {name: 1.0 + at for at, name in enumerate(names)})
        for problem in made_up.problems((1024, 2048))
    ]
    page.open(written(tmp_path / "store", tmp_path / "report.html", *decisions))
    page.drawn()
    legend = page.ask("[...document.querySelectorAll('#legend path[d=\"M1 7H33\"]')].map((line) => "
                      "line.getAttribute('stroke-dasharray'))")  # fmt: skip
    drawn = page.ask("[...document.querySelectorAll('#plot-time .mark-line path')].map((line) => "
                     "line.getAttribute('stroke-dasharray'))")  # fmt: skip
    assert len(set(legend)) == len(names)
    assert {each.replace(" ", ",") for each in legend} == {each.replace(" ", ",") for each in drawn}


def test_a_narrow_page_has_the_time_of_measuring(page: Page, file: Path, stored: list[Decision]) -> None:
    page.show(360)
    page.open(file)
    page.ask(f"{ROWS}[0].cells[0].firstChild.click()")
    newest = max(each.created for each in stored)
    assert f"{newest[:16].replace('T', ' ')} UTC" in page.ask("document.querySelector('.detail dl').innerText")


def test_the_focus_stays_where_rows_are_added(page: Page, tmp_path: Path) -> None:
    decisions = made_up.crossing(range(1024, 1024 + 30))
    page.open(written(tmp_path / "store", tmp_path / "report.html", *decisions))
    page.ask("document.querySelector('#more').focus()")
    page.press("Enter", "\r")
    assert page.ask(f"{ROWS}.length") == 30
    assert page.ask(f"document.activeElement === {ROWS}[25].cells[0].firstChild")


@pytest.mark.skipif("REPORT_PICTURES" not in os.environ, reason="$REPORT_PICTURES names no folder for pictures")
def test_pictures(page: Page, file: Path) -> None:
    place = Path(os.environ["REPORT_PICTURES"])
    place.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        for width in (360, 1280):
            page.show(width, scheme)
            page.open(file)
            page.picture(place / f"{scheme}-{width}.png")
            assert re.match(rb"\x89PNG", (place / f"{scheme}-{width}.png").read_bytes())
