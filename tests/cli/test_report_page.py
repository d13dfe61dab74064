"""The page of `report` in a real browser without a network: what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_dispatch.learning.predict import is_timed
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import milliseconds, titled
from tests.support import browser
from tests.support import made_up as planted
from tests.support import stored_profiles as made_up
from tests.support.browser import Page
from tests.support.commands import command
from tests.support.stored_profiles import NATIVE, SDPA

OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"

pytestmark = [pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium: apt-get install chromium")]
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
    return [first, made_up.provisional(second), *others, *made_up.orders()]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, stored: list[Decision]) -> Path:
    place = tmp_path_factory.mktemp("report")
    return written(place / "store", place / "report.html", *stored)


def test_numbers_are_those_of_the_store(page: Page, file: Path, stored: list[Decision]) -> None:
    page.open(file)
    rows = page.ask("[...document.querySelectorAll('#decisions > .scroll tbody tr')].map((row) => "
                    "[...row.cells].map((cell) => cell.textContent))")  # fmt: skip
    by_key = {row[0]: row for row in rows}
    assert len(by_key) == len(stored)
    for decision in stored:
        (chosen,) = (each for each in decision.candidates if each.status == "chosen")
        title, time = " ".join(decision.title.split()), milliseconds(chosen.median_ms or 0)
        assert by_key[decision.key[:10]][1:4] == [title, titled(*decision.chosen), time]


def marks(page: Page, panel: int = 0) -> list[tuple[float, float]]:
    found = page.ask(
        f"[...document.querySelectorAll('#plot .concat_{panel}_group .mark-symbol path')]"
        ".map((mark) => mark.getAttribute('transform').match(/[-\\d.]+/g).map(Number))"
    )
    return [(x, y) for x, y in found]


def test_marks_stand_where_logarithmic_axes_put_them(page: Page, file: Path) -> None:
    """Every time of the first series has a mark; distances are those of logarithms; the crossing is marked."""
    page.open(file)
    rows = [(decision, row) for decision in made_up.crossing() for row in decision.candidates if is_timed(row)]
    expected = sorted((math.log(each.problem["q_len"]), -math.log(row.median_ms or 0)) for each, row in rows)
    found = sorted(marks(page))
    assert len(found) == len(expected)
    for axis in (0, 1):
        values, pixels = ([each[axis] for each in points] for points in (expected, found))
        at, end = values.index(min(values)), values.index(max(values))
        scale = (pixels[end] - pixels[at]) / (values[end] - values[at])
        assert pixels == pytest.approx([pixels[at] + scale * (value - values[at]) for value in values], abs=0.1)
    assert [len(marks(page, panel)) for panel in (1, 2)] == [len(expected)] * 2
    assert "sdpa to native between 2,048 and 4,096 tokens" in page.ask("document.querySelector('#time').innerText")


def test_the_legend_fades_the_others(page: Page, file: Path) -> None:
    page.open(file)
    page.ask("document.querySelector('#plot .role-legend-label text').dispatchEvent("
             "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
    faded = "document.querySelectorAll('#plot .mark-symbol.role-mark path[opacity=\"0.08\"]')"
    page.wait_for(f"{faded}.length > 0")


def test_another_series_is_drawn_on_request(page: Page, file: Path) -> None:
    page.open(file)
    page.ask("Object.assign(document.querySelector('#series'), {value: 1}).dispatchEvent(new Event('input'))")
    page.wait_for("document.querySelectorAll('#plot .concat_0_group .mark-symbol.role-mark path').length === 9")
    assert "native@hilbert" in page.ask("document.querySelector('#time').innerText")


def test_thresholds_and_losers(page: Page, file: Path) -> None:
    page.open(file)
    assert "above 3,000 tokens (1,024 - 4,096)" in page.ask("document.querySelector('#token').innerText")
    page.ask(OPEN_ALL)
    decisions = page.ask("document.querySelector('#decisions').innerText")
    assert made_up.REFUSED.reason in decisions


def test_themes(page: Page, file: Path) -> None:
    """The system's; plots follow."""

    def colours() -> list[str]:
        found: list[str] = page.ask(
            "[getComputedStyle(document.body).backgroundColor, "
            "getComputedStyle(document.querySelector('#plot .mark-symbol.role-mark path')).fill]"
        )
        return found

    page.open(file)
    light = colours()
    page.show(1280, "dark")
    assert all(one != other for one, other in zip(light, colours()))


@pytest.mark.parametrize("width", [360, 1280])
def test_no_width_scrolls_sideways(width: int, page: Page, file: Path) -> None:
    page.show(width)
    page.open(file)
    page.ask(OPEN_ALL)
    assert page.ask("document.documentElement.scrollWidth") <= width
    boxes = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth + 1)"
    assert page.ask(f"{boxes}.map((box) => box.ariaLabel)") == []


@pytest.mark.parametrize("times", [{SDPA: 1.97}, {SDPA: 0.31, NATIVE: 0.45}])
def test_narrow_plots_have_labels(times: dict[tuple[str, str], float], page: Page, tmp_path: Path) -> None:
    """With one length, no power of 2 and no round number lies between the least and the largest."""
    decision = made_up.whole(planted.problem_at(1100), times)
    page.open(written(tmp_path / "store", tmp_path / "report.html", decision))
    for panel in range(3):
        axes = page.ask(
            f"[...document.querySelectorAll('#plot .concat_{panel}_group .role-axis-label')].map((axis) => "
            "[...axis.querySelectorAll('text')].map((text) => text.textContent).filter(Boolean))"
        )
        assert len(axes) == 2
        assert all(axes), axes
        assert all(len(set(each)) == len(each) for each in axes)
