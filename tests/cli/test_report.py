"""The command `report`: what it compares, what it writes, and what it says where it cannot."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from attn_dispatch.cli.report import page as page_module
from attn_dispatch.cli.report import plots
from attn_dispatch.cli.report.comparisons import Gain, default_of, gain_of, known_factors, outcomes
from attn_dispatch.cli.report.sections import Machine
from attn_dispatch.cli.report.series import all_series
from attn_dispatch.store.decision import TIMED, Decision
from attn_dispatch.store.quarantine import Entry, Quarantine
from tests.support import made_up as planted
from tests.support import stored_profiles as made_up
from tests.support.commands import command, plain
from tests.support.stored_profiles import FLEX, MASK, NATIVE, SDPA

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


def written(folder: Path) -> str:
    page = folder.parent / "report.html"
    done = plain(command(folder, "report", "-o", str(page), "--json"))
    content = page.read_text(encoding="utf-8")
    assert (done["path"], done["bytes"], done["folder"]) == (str(page), len(content.encode()), str(folder))
    return content


# --- comparisons ------------------------------------------------------------------------------------------------------


def decision(times: dict[planted.Name, float | None], **more: object) -> Decision:
    return made_up.whole(planted.problem_at(1024), times, **more)


def test_the_default_is_the_first_by_preference_that_can_run() -> None:
    found = default_of(decision({FLEX: 1.0, ("native", "hilbert"): 1.0, MASK: 9.0, SDPA: 5.0}))
    assert found is not None
    assert found.id == SDPA
    refused = decision({FLEX: 1.0, MASK: 9.0, SDPA: None}, status={SDPA: "over_memory"})
    assert getattr(default_of(refused), "id", None) == MASK


@pytest.mark.parametrize(
    ("times", "verdict", "interval"),
    [
        ({SDPA: 3.0, NATIVE: 1.0}, "3.00x faster", "2.97 - 3.03"),
        ({SDPA: 1.005, NATIVE: 1.0}, "1.00x undecided", "0.99 - 1.02"),
        ({SDPA: 1.0, NATIVE: 2.0}, "is the default", ""),
        ({SDPA: None, NATIVE: 1.0}, "no time of sdpa", ""),
    ],
)
def test_the_gain_over_the_default(times: dict[planted.Name, float | None], verdict: str, interval: str) -> None:
    gain = gain_of(decision(times))
    assert (gain.verdict, gain.interval, gain.is_changed) == (verdict, interval, "default" not in verdict)


def test_a_choice_that_takes_twice_as_long_is_twice_as_slow() -> None:
    gain = Gain(SDPA, False, (0.4, 0.5, 0.625))
    assert (gain.verdict, gain.interval) == ("2.00x slower", "1.60 - 2.50")


def test_a_choice_that_is_the_default_gains_1() -> None:
    four, one, unknown = (
        gain_of(decision({SDPA: sdpa, NATIVE: native})) for sdpa, native in ((4.0, 1.0), (1.0, 2.0), (None, 1.0))
    )
    assert known_factors([four, one, unknown]) == pytest.approx([4.0, 1.0])


def test_outcomes_count_verdicts_and_reasons_that_differ_in_numbers_only() -> None:
    decisions = [made_up.whole(each, {SDPA: 2.0, NATIVE: 1.0, FLEX: None}) for each in made_up.problems((1024, 2048))]
    found = {each.name: each for each in outcomes(decisions)}
    assert list(found) == ["sdpa", "flash", "native", "flex"]
    assert found["sdpa"].statuses == {"slower": 2}
    assert found["sdpa"].ratios == pytest.approx((2.0, 2.0))
    assert found["flex"].reasons == (("not_measured", "needs 1.0 s, with 0 s of the budget left", 2),)
    assert found["flash"].reasons == (("not_installed", made_up.REFUSED.reason, 2),)


def test_a_series_has_all_lengths_and_the_crossing() -> None:
    (series,) = all_series(made_up.crossing())
    assert series.title == "[1, N, 4, 64] float32 Dense() forward"
    assert series.lengths == list(made_up.LENGTHS)
    assert series.defaults == ("sdpa",)
    (crossing,) = series.crossings
    assert (crossing.before, crossing.after, crossing.between) == (SDPA, NATIVE, (2048, 4096))
    assert crossing.tokens == pytest.approx(3000)
    assert crossing.ms == pytest.approx(3.0)
    assert str(crossing) == "sdpa to native at about 3,000 tokens (measured at 2,048 and 4,096)"
    gains = {(point.candidate, point.tokens): point.gain for point in series.points}
    assert gains[NATIVE, 4096] == pytest.approx((4096 / 3000 * 0.99, 4096 / 3000, 4096 / 3000 * 1.01))
    assert gains[SDPA, 1024] == (1.0, 1.0, 1.0)


def test_a_crossing_within_noise_and_one_that_is_not_known() -> None:
    near = [
        made_up.whole(each, {SDPA: a, NATIVE: b})
        for each, (a, b) in zip(made_up.problems((1024, 2048)), ((1.0, 1.01), (4, 2)))
    ]
    (crossing,) = all_series(near)[0].crossings
    assert str(crossing).endswith("(measured at 1,024 and 2,048; within noise at one of them)")
    times: tuple[dict[planted.Name, float | None], ...] = ({SDPA: 1.0, NATIVE: None}, {SDPA: 4.0, NATIVE: 2.0})
    apart = [made_up.whole(each, one) for each, one in zip(made_up.problems((1024, 2048)), times)]
    (unknown,) = all_series(apart)[0].crossings
    assert (unknown.tokens, unknown.ms) == (None, None)
    assert "unknown, since one was not timed at both" in str(unknown)


@pytest.mark.parametrize(("lengths", "at"), [((1024,), "1,024"), ((4096,), "4,096"), ((1024, 4096), "1,024, 4,096")])
def test_no_headline_rests_on_single_samples(lengths: tuple[int, ...], at: str) -> None:
    made = [once(each) if each.problem["q_len"] in lengths else each for each in made_up.crossing((1024, 4096))]
    (series,) = all_series(made)
    assert series.crossings == []
    assert series.notes == [f"Which candidate is the fastest is not known at {at} tokens: it was timed once there."]
    gains = list(map(gain_of, made))
    assert len(known_factors(gains)) == sum(gain.is_chosen or 4096 not in lengths for gain in gains)
    (crossing,) = all_series([once(each, "slower") for each in made_up.crossing((1024, 4096))])[0].crossings
    assert crossing.tokens is None  # nor where the two cross


def once(decision: Decision, *statuses: str) -> Decision:
    """The decision with candidates, or those of these statuses, timed once."""
    rows = (replace(row, rounds=1) if row.status in (statuses or TIMED) else row for row in decision.candidates)
    return replace(decision, candidates=tuple(rows))


def test_series_of_one_title_are_told_apart_and_others_are_not_mixed() -> None:
    one = made_up.crossing((1024, 2048))
    two = made_up.crossing((1024, 2048), strides=["hnd", "hnd", "hnd"])
    three = made_up.crossing((1024,), heads=8)
    series = all_series([*one, *two, *three])
    assert len(series) == 3
    assert {each.title for each in series} == {
        '[1, N, 4, 64] float32 Dense() forward (strides ["nhd", "nhd", "nhd"])',
        '[1, N, 4, 64] float32 Dense() forward (strides ["hnd", "hnd", "hnd"])',
        "[1, N, 8, 64] float32 Dense() forward",
    }


def test_grids_of_one_window_are_one_series() -> None:
    (series,) = all_series(made_up.orders())
    assert series.lengths == [1024, 4096, 16384]
    assert "grid, window=(13, 13)" in series.title


def test_a_dilated_series_has_the_lengths_that_cut_its_segments() -> None:
    long = [dilated(length, (1024, 4096)) for length in (512, 1024, 2048, 4096, 8192)]
    even = [dilated(length, (1024, 1024)) for length in (2048, 8192)]
    other = [dilated(length, (1024, 4096), rates=(1, 4)) for length in (512, 2048)]
    series = all_series([*long, *even, *other])
    assert [each.lengths for each in series] == [[512, 1024, 2048, 4096, 8192], [512, 1024, 2048, 8192], [512, 2048]]
    assert {point.tokens for each in series for point in each.points if point.decision < len(long)} == {
        512, 1024, 2048, 4096, 8192
    }  # fmt: skip


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


def test_wrong_usage(tmp_path: Path) -> None:
    done = command(tmp_path, "report")
    assert done.returncode == 2
    assert "-o" in done.stderr


@pytest.mark.usefixtures("_library")
def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    done = command(tmp_path / "store", "report", "-o", str(tmp_path / "none" / "report.html" / ""))
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("_library")
def test_an_empty_store_says_what_to_run(folder: Path) -> None:
    page = written(folder)
    text = Texts(page).text
    assert f"No decision is stored in {folder} yet" in text
    assert "attn-dispatch profile --quick" in text
    assert "University of Washington" not in text
    assert len(page) < 60_000


@pytest.mark.usefixtures("_library")
def test_a_page_loads_nothing_and_holds_every_decision(folder: Path) -> None:
    decisions = [*made_up.crossing(), *made_up.orders()]
    made_up.store(folder, decisions)
    page = written(folder)
    found = Texts(page)
    assert all(each.startswith("#") or each == "data:," for each in found.addresses)
    assert "default-src &#x27;none&#x27;" in page
    for each in decisions:
        assert each.key[:10] in found.text
        assert " ".join(each.title.split()) in found.text


@pytest.mark.usefixtures("_library")
def test_texts_of_the_store_become_no_markup(folder: Path) -> None:
    """Names of plug-ins, reasons, titles, and what a quarantine says."""
    made_up.store(folder, made_up.crossing())
    harmless = Texts(written(folder)).names
    times = {SDPA: 2.0, (EVIL, "natural"): 1.0, NATIVE: None}
    bad = made_up.whole(planted.problem_at(512), times, provenance={"name": EVIL, "torch": EVIL})
    made_up.store(folder, [bad])
    entry = Entry(backend=EVIL, version=EVIL, silicon=planted.SILICON, kind="incorrect", reason=EVIL, title=EVIL)
    Quarantine(folder, planted.SILICON).add(entry)
    page = written(folder)
    found = Texts(page)
    assert found.text.count(EVIL) >= 5
    assert found.names.count("script") == harmless.count("script")
    assert "img" not in found.names
    (data,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', page, re.DOTALL)
    assert any(EVIL in text for text in json.loads(gzip.decompress(base64.b64decode(data)))["strings"])


def odd(times: dict[planted.Name, float | None], **more: Any) -> Decision:
    """One whose parts are consistent, but that no measurement gives."""
    return msgspec.structs.replace(decision(times), **more)


def far(tokens: int, times: dict[planted.Name, float]) -> Decision:
    """One with times whose ratios are no numbers of 64 bits."""
    return planted.decision(planted.problem_at(tokens), times)


HILBERT = ("native", "hilbert")
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
    made_up.store(folder, decisions)
    found = Texts(written(folder)).text
    assert all(each.key[:10] in found for each in decisions)
    assert "Left out" not in found
    assert command(folder, "inspect", "--thresholds").returncode == 0


@pytest.mark.usefixtures("_library")
def test_a_decision_that_cannot_be_shown_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, *others = made_up.crossing()

    def failing(each: Decision) -> Gain:
        if each.key == bad.key:
            raise TypeError("no number")
        return gain_of(each)

    monkeypatch.setattr(page_module, "gain_of", failing)
    made_up.store(folder, [bad, *others])
    done = command(folder, "report", "-o", str(folder.parent / "report.html"))
    assert done.returncode == 0
    assert f"key {bad.key}" in done.stderr
    assert "TypeError: no number" in done.stderr
    assert f"{len(others)} decisions in" in done.stdout
    found = Texts((folder.parent / "report.html").read_text(encoding="utf-8")).text
    assert "Left out, since they cannot be shown (1)" in found
    assert f"key {bad.key}" in found
    assert all(each.key[:10] in found for each in others)


@pytest.mark.usefixtures("_library")
def test_500_decisions_fit(folder: Path) -> None:
    decisions = made_up.many()
    assert len(decisions) == 500
    made_up.store(folder, decisions)
    page = written(folder)
    assert len(page.encode()) < 1_500_000
    assert Texts(page).names.count("tr") > 500


@pytest.mark.usefixtures("_library")
def test_3000_decisions_fit() -> None:
    """Six times as many keys."""
    decisions = [
        msgspec.structs.replace(each, key=f"{copy:02d}{each.key[2:]}") for copy in range(6) for each in made_up.many()
    ]
    text, left_out = page_module.page(decisions, Machine([], [], [], [], ""), folder="", made="", version="")
    assert (len(decisions), left_out) == (3000, [])
    assert len(text.encode()) < 1_500_000


@pytest.mark.usefixtures("_library")
def test_the_plots_compile_without_a_warning() -> None:
    compiled = plots.compiled()
    assert set(compiled) == {"time", "gain", "memory"}
    for spec in compiled.values():
        scales = {scale["name"]: scale["type"] for scale in spec["scales"]}
        assert (scales["x"], scales["y"]) == ("log", "log")
        assert {"points", "marks"} <= {each["name"] for each in spec["data"]}
        assert {"lengths", "ticks", "span", "ink"} <= {each["name"] for each in spec["signals"]}
