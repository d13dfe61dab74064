"""The rates of the native kernel: their table, and the picture with the processor's limits."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from tools.docs import native_tables, roofline_plot

SVG = "{http://www.w3.org/2000/svg}"
READ = 20.0


def row(dtype: str, backward: bool, threads: int) -> dict[str, Any]:
    return {
        "pattern": "Dense()",
        "tokens": 4096,
        "dtype": dtype,
        "backward": backward,
        "threads": threads,
        "operations": 64_000,
        "bytes": 1000,
        "gflops": 40.0 * threads,
        "limit": "multiply_add",
        "share": {"median": 0.5, "low": 0.4, "high": 0.6},
    }


def found() -> dict[str, Any]:
    machine = [
        {"threads": n, "multiply_add_gflops": 100.0 * n, "dot_product_gflops": 200.0 * n, "read_gb_per_s": READ}
        for n in (1, 2)
    ]
    each = [(dtype, backward) for dtype in ("float32", "bfloat16") for backward in (False, True)]
    return {"head_dim": 64, "machine": machine, "rows": [row(*one, threads) for one in each for threads in (1, 2)]}


def drawn(given: Any) -> ElementTree.Element:
    return ElementTree.fromstring(roofline_plot.svg(given))


def marks(page: ElementTree.Element) -> list[ElementTree.Element]:
    return [mark for mark in page.findall(f"{SVG}circle") if mark.find(f"{SVG}title") is not None]


def test_every_rate_with_most_threads_is_there_and_inside() -> None:
    shown = marks(drawn(found()))
    assert len(shown) == 4
    for mark in shown:
        assert 0 < float(mark.attrib["cx"]) < roofline_plot.WIDTH
        assert 0 < float(mark.attrib["cy"]) < roofline_plot.HEIGHT
    assert [mark.attrib["fill"] for mark in shown].count(roofline_plot.OPEN) == 2


@pytest.mark.parametrize(("name", "peak"), [("multiply_add", 200.0), ("dot_product", 400.0)])
def test_a_limit_bends_where_reading_gives_its_rate(name: str, peak: float) -> None:
    """A mark at the limit's rate, with as many operations per byte as are done while one is read, lies there."""
    given = found()
    given["rows"][1] |= {"gflops": peak, "operations": peak / READ * 1000}
    page = drawn(given)
    mark = marks(page)[0].attrib
    bends = [path.attrib["points"].split()[1] for path in page.findall(f"{SVG}polyline")]
    assert f"{mark['cx']},{mark['cy']}" == bends[list(roofline_plot.DASHES).index(name)]


def test_a_processor_without_dot_products_has_one_limit() -> None:
    given = found()
    for one in given["machine"]:
        del one["dot_product_gflops"]
    assert len(drawn(given).findall(f"{SVG}polyline")) == 1
    assert "dot products" not in native_tables.ceilings(given)


def test_the_table_has_a_row_for_each_pattern_and_dtype() -> None:
    given = found()
    given["rows"][-1]["limit"] = "read"
    lines = native_tables.rates(given).splitlines()
    assert lines[0].count(" thread") == 4
    assert len(lines) == 4
    assert "40 GFLOP/s: 0.50 (0.40 to 0.60) | 80 GFLOP/s" in lines[2]
    assert "reading memory" not in lines[2]
    assert lines[3].endswith("80 GFLOP/s: 0.50 (0.40 to 0.60), limit: reading memory |")
