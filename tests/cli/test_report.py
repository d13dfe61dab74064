"""The command `report`: what it compares, what it writes, and what it says where it cannot."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from attn_dispatch.cli.report import page as page_module
from attn_dispatch.cli.report.series import all_series
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.store.decision import TIMED, Decision
from tests.support import made_up as planted
from tests.support import stored_profiles as made_up
from tests.support.commands import command, plain
from tests.support.stored_profiles import FLEX, HILBERT, MASK, NATIVE, SDPA

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>&amp;'


class Texts(HTMLParser):
    """The elements of a page by name, and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.text, self._inside = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self._inside = tag
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += f" {data}"


@pytest.fixture
def _library() -> None:
    pytest.importorskip("vl_convert", reason="the extra `report` is not installed: pip install -e '.[report]'")


def written(folder: Path, *decisions: Decision) -> str:
    made_up.store(folder, decisions)
    page = folder.parent / "report.html"
    done = plain(command(folder, "report", "-o", str(page), "--json"))
    content = page.read_text(encoding="utf-8")
    assert (done["path"], done["bytes"], done["folder"]) == (str(page), len(content.encode()), str(folder))
    return content


# --- comparisons ------------------------------------------------------------------------------------------------------


def decision(times: dict[planted.Name, float | None], **more: object) -> Decision:
    return made_up.whole(planted.problem_at(1024), times, **more)


def once(decision: Decision) -> Decision:
    """The decision with all candidates timed once."""
    rows = (replace(row, rounds=1) if row.status in TIMED else row for row in decision.candidates)
    return replace(decision, candidates=tuple(rows))


def test_a_series_has_all_lengths_and_the_crossing() -> None:
    (series,) = all_series(made_up.crossing())
    assert series.title.startswith(f"up to [1, {made_up.LENGTHS[-1]}, 4, 64] float32 Dense() forward, key ")
    assert list(series.by_length) == list(made_up.LENGTHS)
    assert series.notes == ["Fastest: sdpa to native between 2,048 and 4,096 tokens."]
    gains = {(point.row.id, point.tokens): point.gain for point in series.points}
    assert gains[NATIVE, 4096] == pytest.approx((4096 / 3000 * 0.99, 4096 / 3000, 4096 / 3000 * 1.01))
    assert gains[SDPA, 1024] == (1.0, 1.0, 1.0)
    assert series.numbers.head == ["tokens", "sdpa", "native", "flex"]
    assert series.numbers.rows[2][1:3] == ["5.59 ms (1.00x)", "4.1 ms (1.37x)"]


@pytest.mark.parametrize("lengths", [(1024,), (4096,), (1024, 4096)])
def test_no_headline_rests_on_single_samples(lengths: tuple[int, ...]) -> None:
    made = [once(each) if each.problem["q_len"] in lengths else each for each in made_up.crossing((1024, 4096))]
    (series,) = all_series(made)
    assert series.notes == []
    assert ", 1 sample" in str(series.numbers.rows)
    # At 1,024 tokens SDPA itself is the fastest.
    means = {(1024,): "1.37x", (4096,): "1.00x", (1024, 4096): "-"}
    shown = page_module._summary(made)
    assert (f"<dd>{means[lengths]}, geometric mean of 1" in shown) == (means[lengths] != "-")


def test_series_of_one_title_are_told_apart_and_others_are_not_mixed() -> None:
    one = made_up.crossing((1024, 2048))
    two = made_up.crossing((1024, 2048), strides=["hnd", "hnd", "hnd"])
    three = made_up.crossing((1024,), heads=8)
    found = all_series([*one, *two, *three])
    assert [list(each.by_length) for each in found] == [[1024, 2048], [1024, 2048], [1024]]
    assert len({each.title for each in found}) == 3
    (grids,) = all_series(made_up.orders())
    assert list(grids.by_length) == [1024, 4096, 16384]
    assert "window=(13, 13)" in grids.title


def test_densities_are_not_mixed() -> None:
    """A series is over lengths: times of a mask made of data at two densities are two."""

    def of(length: int, density: int) -> Decision:
        pattern = {"kind": "RangesForm", "intervals": 1, "by_row": False, "density": density, "imbalance": 0}
        return made_up.whole(planted.problem_at(length, pattern=pattern), {SDPA: 2.0, NATIVE: 1.0})

    found = all_series([of(length, density) for length in (512, 1024) for density in (-2, -8)])
    assert sorted(len(each.by_length) for each in found) == [2, 2]


def test_a_dilated_series_has_the_lengths_that_cut_its_segments() -> None:
    long = [dilated(length, (1024, 4096)) for length in (512, 1024, 2048, 4096, 8192)]
    even = [dilated(length, (1024, 1024)) for length in (2048, 8192)]
    other = [dilated(length, (1024, 4096), rates=(1, 4)) for length in (512, 2048)]
    found = [list(each.by_length) for each in all_series([*long, *even, *other])]
    assert found == [[512, 1024, 2048, 4096, 8192], [512, 1024, 2048, 8192], [512, 2048]]


def dilated(length: int, segments: tuple[int, ...], rates: tuple[int, ...] = (1, 2)) -> Decision:
    """As `Problem` normalizes it: no segment is longer than the sequence."""
    cut = [min(each, length) for each in segments]
    pattern = {"kind": "Dilated", "segment_lengths": cut, "dilation_rates": list(rates), "is_causal": True}
    return made_up.whole(planted.problem_at(length, pattern=pattern), {SDPA: 2.0, NATIVE: 1.0})


# --- the command ------------------------------------------------------------------------------------------------------


def test_without_the_extra_it_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = command(tmp_path / "store", "report", "-o", str(tmp_path / "report.html"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert 'pip install "attn-dispatch[report]"' in done.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    ("arguments", "code", "said"), [((), 2, "-o"), (("-o", "/none/report.html"), 1, "cannot be written")]
)
def test_wrong_outputs(arguments: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = command(tmp_path / "store", "report", *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("_library")
def test_an_empty_store_says_what_to_run(folder: Path) -> None:
    page = written(folder)
    text = Texts(page).text
    assert f"No decision is stored in {folder} yet" in text
    assert "attn-dispatch profile --quick" in text
    assert len(page) < 60_000


@pytest.mark.usefixtures("_library")
def test_a_page_loads_nothing_and_holds_every_decision(folder: Path) -> None:
    decisions = [*made_up.crossing(), *made_up.orders()]
    page = written(folder, *decisions)
    found = Texts(page)
    assert all(each.startswith("#") or each == "data:," for each in found.addresses)
    assert "default-src &#x27;none&#x27;" in page
    for each in decisions:
        assert each.key[:10] in found.text
        assert " ".join(each.title.split()) in found.text
        assert all(text in found.text for row in Explanation.of(each).rows() for text in row)


@pytest.mark.usefixtures("_library")
def test_texts_of_the_store_become_no_markup(folder: Path) -> None:
    """Names of plug-ins, reasons and titles."""
    harmless = Texts(written(folder, *made_up.crossing())).names
    times = {SDPA: 2.0, (EVIL, "natural"): 1.0, NATIVE: None}
    bad = made_up.whole(planted.problem_at(512), times, provenance={"name": EVIL, "torch": EVIL})
    found = Texts(written(folder, bad))
    assert found.text.count(EVIL) >= 5
    assert found.names.count("script") == harmless.count("script")
    assert "img" not in found.names


def odd(times: dict[planted.Name, float | None], **more: Any) -> Decision:
    """One whose parts are consistent, but that no measurement gives."""
    return msgspec.structs.replace(decision(times), **more)


def far(tokens: int, times: dict[planted.Name, float]) -> Decision:
    """One with times whose ratios are no numbers of 64 bits."""
    return planted.decision(planted.problem_at(tokens), times)


IN_TWO_ORDERS: dict[planted.Name, float | None] = {NATIVE: 2.0, HILBERT: 1.0}


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    "decisions",
    [
        [odd({SDPA: 1.0}, title=" ")],
        [far(1024, {SDPA: 1e300, NATIVE: 1e-300}), far(2048, {SDPA: 1e-300, NATIVE: 1e300})],
        [far(1024, {MASK: 1e-300, FLEX: 1e300}), far(2048, {MASK: 1e300, FLEX: 1.0})],
        [odd(IN_TWO_ORDERS, problem=planted.problem_at(512, dropout_p="0.5", ranks="two"))],
        [far(1024, {NATIVE: 1e300, HILBERT: 1e-300}), far(2048, {NATIVE: 1e-300, HILBERT: 1e300})],
    ],
    ids=["blank title", "infinite ratio", "ratio of 0", "texts for numbers", "infinite gain of an order"],
)
def test_odd_decisions_are_shown(decisions: list[Decision], folder: Path) -> None:
    found = Texts(written(folder, *decisions)).text
    assert all(each.key[:10] in found for each in decisions)
    assert "Left out" not in found
    assert command(folder, "inspect", "--thresholds").returncode == 0


@pytest.mark.usefixtures("_library")
def test_a_decision_that_cannot_be_shown_is_counted(folder: Path) -> None:
    bad = odd({SDPA: 1.0, NATIVE: 2.0})
    bad = msgspec.structs.replace(bad, problem={**bad.problem, "pattern": {"segment_lengths": 3}})
    others = made_up.crossing((2048, 4096))
    made_up.store(folder, [bad, *others])
    done = command(folder, "report", "-o", str(folder.parent / "report.html"))
    assert done.returncode == 0
    assert "1 decisions cannot be shown" in done.stderr
    assert f"{len(others)} decisions in" in done.stdout
    found = Texts((folder.parent / "report.html").read_text(encoding="utf-8")).text
    assert all(each.key[:10] in found for each in others)
