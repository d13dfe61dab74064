"""The plot of what Hilbert order is worth: well formed, readable on any page, every figure where its axes say."""

from __future__ import annotations

import json
import math
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.docs import hilbert_plot
from tools.lib.common import RESULTS

FOUND = json.loads((RESULTS / "hilbert.json").read_text())
SVG = "{http://www.w3.org/2000/svg}"


def drawn(found: Any) -> ElementTree.Element:
    return ElementTree.fromstring(hilbert_plot.svg(found))


def test_every_figure_is_there_and_inside() -> None:
    page = drawn(FOUND)
    background = page.find(f"{SVG}rect")
    assert background is not None
    assert background.attrib == {"width": page.get("width"), "height": page.get("height"), "fill": "#ffffff"}
    times = sum(name.split()[0] in hilbert_plot.COLOURS for one in FOUND["plane"] for name in one["times"])
    gains = sum(len(one["gain"]) for one in FOUND["plane"])
    marks = page.findall(f"{SVG}circle")
    assert len(marks) == times + gains
    for mark in marks:
        assert 0 < float(mark.attrib["cx"]) < hilbert_plot.WIDTH
        assert 0 < float(mark.attrib["cy"]) < hilbert_plot.HEIGHT


def test_a_mark_stands_where_its_axes_say() -> None:
    """Ten times as long is one line of the grid higher; four times as many tokens, one tick to the right."""

    def one(tokens: int, ms: float, gain: float) -> dict[str, Any]:
        exact = {"median_ms": ms, "low_ms": ms, "high_ms": ms}
        ratio = {"median": gain, "low": gain / 2, "high": gain * 2}
        return {"pattern": "Neighborhood(grid=(8, 8), window=(3, 3))", "tokens": tokens,
                "times": {"native natural": exact}, "gain": {"native": ratio}}  # fmt: skip

    page = drawn({"plane": [one(64, 1.0, 1.0), one(256, 10.0, 1.2), one(1024, 100.0, 1.4)]})
    marks = [(float(mark.attrib["cx"]), float(mark.attrib["cy"])) for mark in page.iter(f"{SVG}circle")]
    times, gains = marks[:3], marks[3:]
    assert times[1][0] - times[0][0] == pytest.approx(times[2][0] - times[1][0])
    assert times[0][1] - times[1][1] == pytest.approx(times[1][1] - times[2][1])
    # Bars from half to twice a ratio are four times high.
    lines = (each for each in page.iter(f"{SVG}line") if each.get("stroke") == "#d55e00")
    bars = [each for each in lines if each.get("x1") == each.get("x2")]
    tall = float(bars[0].attrib["y1"]) - float(bars[0].attrib["y2"])
    unit = (gains[0][1] - gains[1][1]) / math.log(1.2)
    assert tall == pytest.approx(unit * math.log(4), rel=0.02)
