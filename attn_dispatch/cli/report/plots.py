"""The plots of the page: written in Vega-Lite, compiled here by vl-convert, drawn by Vega in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import cycle
from typing import Any, NamedTuple

from attn_dispatch.errors import AttnDispatchError
from attn_dispatch.spec.orders import EXCHANGES, NATURAL, ORDERS

SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
SOFT, LINE = "var(--soft)", "var(--line)"  #: colours of page.css: plots follow the theme without being drawn anew
DASHED = ([7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [12, 3], [5, 2, 1, 2], [1, 4], [9, 2, 2, 2, 2, 2], [3, 6])
#: Solid in natural order, another one in each other order.
DASHES = {NATURAL: [1, 0], **dict(zip((each for each in (*ORDERS, *EXCHANGES) if each != NATURAL), cycle(DASHED)))}
TOKENS = "datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"
MS = "format(datum.value / 1000, '.3~s') + 's'"
BYTES = (
    "datum.value < 1073741824 ? format(datum.value / 1048576, '.3~r') + ' MiB' : "
    "format(datum.value / 1073741824, '.3~r') + ' GiB'"
)
TIMES = "format(datum.value, '.3~g') + 'x'"
X = {
    "field": "tokens",
    "type": "quantitative",
    "scale": {"type": "log", "base": 2, "nice": False, "padding": 12},
    "axis": {"labelExpr": TOKENS, "title": "tokens", "grid": False, "labelOverlap": "greedy"},
}


class Panel(NamedTuple):
    """One of the plots above each other: points have `field`, and with an interval `field`_low and `field`_high."""

    title: str
    field: str
    labels: str
    base: int = 10
    has_interval: bool = True
    reference: float | None = None


PANELS = (
    Panel("Time of one call", "ms", MS),
    Panel("SDPA's time / this time: above 1 is faster", "gain", TIMES, reference=1.0),
    Panel("Peak memory of one call", "bytes", BYTES, base=2, has_interval=False),
)


class Look(NamedTuple):
    """How a candidate is drawn."""

    name: str
    colour: str
    shape: str
    dash: Sequence[int]


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


def compiled(looks: Sequence[Look]) -> dict[str, Any]:
    """The panels above each other as Vega, on logarithmic axes, with one legend; a click there fades the others.

    The page fills in the data `points` (name, tokens, the panels' fields, a text) and the signal `names`, theirs.
    """
    found: dict[str, Any] = library().vegalite_to_vega({
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "background": None,
        "params": [{"name": "names", "value": []}],
        "data": {"name": "points"},
        "vconcat": [_panel(each, looks, is_first=each is PANELS[0]) for each in PANELS],
        "config": {
            "view": {"stroke": None},
            "axis": {"labelColor": SOFT, "titleColor": SOFT, "tickColor": LINE, "domainColor": LINE, "gridColor": LINE},
            "title": {"color": SOFT, "anchor": "start", "fontWeight": "normal"},
            "legend": {"labelColor": "var(--ink)", "labelLimit": 300, "symbolSize": 110},
        },
    })  # fmt: skip
    return found


def _panel(panel: Panel, looks: Sequence[Look], *, is_first: bool) -> dict[str, Any]:
    def by_name(part: str, **more: Any) -> dict[str, Any]:
        scale = {"domain": [each.name for each in looks], "range": [getattr(each, part) for each in looks]}
        return {"field": "name", "type": "nominal", "scale": scale, "title": None, **more}

    legend = {"orient": "bottom", "values": {"expr": "names"}, "columns": {"expr": "max(1, floor(width / 150))"}}
    colour, shape, dash = (by_name(part, legend=legend) for part in ("colour", "shape", "dash"))
    value = _y(panel, panel.field)
    span = {"y": _y(panel, f"{panel.field}_low"), "y2": {"field": f"{panel.field}_high"}, "color": colour}
    spans: list[dict[str, Any]] = [
        {"mark": {"type": "area", "fillOpacity": 0.18}, "encoding": span},
        {"mark": "rule", "encoding": span},
    ]
    layers: list[dict[str, Any]] = [
        *(spans if panel.has_interval else []),
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": value, "color": colour, "strokeDash": dash}},
        {
            "mark": {"type": "point", "filled": True, "size": 70},
            "encoding": {"y": value, "color": colour, "shape": shape, "tooltip": {"field": "text", "type": "nominal"}},
        },
    ]
    for layer in layers:
        fade = {"condition": {"param": "picked", "value": 1}, "value": 0.08}
        layer["encoding"] = {"x": X, "opacity": fade, **layer["encoding"]}
        layer["transform"] = [{"filter": f"isValid(datum.{panel.field})"}]
    if panel.reference is not None:
        rule = {"type": "rule", "strokeDash": [4, 4], "color": SOFT}
        layers.append({"data": {"values": [{}]}, "mark": rule, "encoding": {"y": _y(panel, datum=panel.reference)}})
    if is_first:
        layers[0]["params"] = [{"name": "picked", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"}]
    return {"title": panel.title, "width": 600, "height": 240, "layer": layers}


def _y(panel: Panel, field: str | None = None, datum: float | None = None) -> dict[str, Any]:
    labels = f"datum.label ? ({panel.labels}) : ''"  # of many ticks, Vega labels some
    axis = {"labelExpr": labels, "title": None, "labelOverlap": "greedy", "minExtent": 55, "tickCount": 6}
    scale = {"type": "log", "base": panel.base, "nice": False, "zero": False, "padding": 8}
    return {"type": "quantitative", "axis": axis, "scale": scale, **({"field": field} if field else {"datum": datum})}
