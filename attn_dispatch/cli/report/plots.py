"""The plots of the page: written in Vega-Lite, compiled here by vl-convert, drawn by Vega in the browser."""

from __future__ import annotations

from importlib import import_module
from itertools import cycle
from typing import Any

from attn_dispatch.errors import AttnDispatchError
from attn_dispatch.spec.orders import EXCHANGES, NATURAL, ORDERS

HEIGHT = 300  #: pixels
TOKENS = (
    "datum.value % 1048576 == 0 ? datum.value / 1048576 + 'M' : "
    "datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"
)
MS = (
    "datum.value >= 1000 ? format(datum.value / 1000, '.3~g') + ' s' : "
    "datum.value >= 1 ? format(datum.value, '.3~g') + ' ms' : format(datum.value * 1000, '.3~g') + ' us'"
)
BYTES = (
    "datum.value >= 1073741824 ? format(datum.value / 1073741824, '.3~g') + ' GiB' : "
    "datum.value >= 1048576 ? format(datum.value / 1048576, '.3~g') + ' MiB' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '.3~g') + ' KiB' : datum.value + ' B'"
)
TIMES = "format(datum.value, '.3~g') + 'x'"
DASHED = (
    [7, 4],
    [2, 3],
    [9, 3, 2, 3],
    [4, 2],
    [12, 3],
    [5, 2, 1, 2],
    [1, 4],
    [9, 2, 2, 2, 2, 2],
    [3, 6],
)
#: Solid in natural order, another one in each other order.
DASHES = {
    NATURAL: [1, 0],
    **dict(zip((each for each in (*ORDERS, *EXCHANGES) if each != NATURAL), cycle(DASHED))),
}
#: Labels and base of the vertical axis, and whether 1 is the reference.
KINDS = {"time": (MS, 10, False), "gain": (TIMES, 10, True), "memory": (BYTES, 2, False)}


def library() -> Any:
    """vl-convert, which is loaded for this command only.

    Raises:
        AttnDispatchError: it is not installed.
    """
    try:
        return import_module("vl_convert")
    except ImportError as error:
        raise AttnDispatchError(
            f'the plots need vl-convert-python: pip install "attn-dispatch[report]" ({error})'
        ) from error


def runtime() -> str:
    """What the page needs of Vega, as one script that loads nothing, and sets `window.vega`."""
    # By the address of vl-convert's own copy, which is not fetched: its names for whole libraries include Vega-Lite.
    where = f"https://cdn.jsdelivr.net/npm/vega@{library().get_vega_version()}/+esm"
    code = f"import {{View, parse, Error as error}} from '{where}'; window.vega = {{View, parse, error}};"
    found: str = library().javascript_bundle(code)
    return found


def compiled() -> dict[str, Any]:
    """The plots as Vega, by kind. The page fills in the data sources `points` and `marks`, and the signals."""
    found: dict[str, Any] = {kind: library().vegalite_to_vega(_plot(*options)) for kind, options in KINDS.items()}
    return found


def _plot(labels: str, base: int, has_reference: bool) -> dict[str, Any]:
    """Points of candidates against tokens, joined by lines, with their intervals as bands, on logarithmic axes.

    Each point has tokens, value, low and high, the candidate's name, colour, shape and order, and a text. `marks` are
    lengths with a text, drawn as vertical rules.
    """
    colour = {"field": "colour", "type": "nominal", "scale": None}
    detail = {"field": "name", "type": "nominal"}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "area", "opacity": 0.18},
            "encoding": {"y": _y("low", labels, base), "y2": {"field": "high"}, "color": colour, "detail": detail},
        },
        {
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"y": _y("value", labels, base), "color": colour, "detail": detail, "strokeDash": _dash()},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 1.5},
            "encoding": {"y": _y("low", labels, base), "y2": {"field": "high"}, "color": colour},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {
                "y": _y("value", labels, base),
                "color": colour,
                "shape": {"field": "shape", "type": "nominal", "scale": None},
                "tooltip": {"field": "text", "type": "nominal"},
            },
        },
    ]
    if has_reference:
        reference = {"type": "rule", "strokeDash": [4, 4], "color": {"expr": "ink"}}
        layers.insert(
            0, {"data": {"values": [{"value": 1}]}, "mark": reference, "encoding": {"y": _y("value", labels, base)}}
        )
        layers[0]["encoding"]["x"] = None
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": 600,
        "height": HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "params": [
            {"name": "lengths", "value": []},
            {"name": "ticks", "value": []},
            {"name": "span", "value": [1, 2]},
            {"name": "ink", "value": "black"},
        ],
        "data": {"name": "points"},
        "encoding": {"x": _x()},
        "layer": [*layers, *_marks()],
    }


def _x() -> dict[str, Any]:
    ends = {"domainMin": {"expr": "span[0]"}, "domainMax": {"expr": "span[1]"}}
    return {
        "field": "tokens",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "nice": False, **ends},
        "axis": {
            "values": {"expr": "lengths"},
            "labelExpr": TOKENS,
            "title": "tokens",
            "grid": False,
            "labelOverlap": "greedy",
        },
    }


def _y(field: str, labels: str, base: int) -> dict[str, Any]:
    axis = {"labelExpr": labels, "title": None, "values": {"expr": "ticks"}, "labelOverlap": "greedy"}
    scale = {"type": "log", "base": base, "nice": False, "zero": False, "padding": 8}
    return {"field": field, "type": "quantitative", "axis": axis, "scale": scale}


def _dash() -> dict[str, Any]:
    scale = {"domain": list(DASHES), "range": list(DASHES.values())}
    return {"field": "order", "type": "nominal", "scale": scale, "legend": None}


def _marks() -> list[dict[str, Any]]:
    rule = {"type": "rule", "strokeDash": [2, 3], "color": {"expr": "ink"}}
    text = {"type": "text", "baseline": "bottom", "dy": -3, "color": {"expr": "ink"}, "fontSize": 11}
    top = {"value": 0}
    return [
        {"data": {"name": "marks"}, "mark": rule, "encoding": {"x": _x()}},
        {"data": {"name": "marks"}, "mark": text, "encoding": {"x": _x(), "y": top, "text": {"field": "text"}}},
    ]
