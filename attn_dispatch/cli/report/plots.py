"""The plots of the page: written in Vega-Lite, compiled here by vl-convert, drawn by Vega in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from attn_dispatch.errors import AttnDispatchError

SOFT, LINE = "var(--soft)", "var(--line)"  #: colours of page.css: plots follow the theme without being drawn anew
TOKENS = "datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"
BYTES = (
    "datum.value < 1073741824 ? format(datum.value / 1048576, '.3~r') + ' MiB' : "
    "format(datum.value / 1073741824, '.3~r') + ' GiB'"
)
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
    Panel("Time of one call", "ms", "format(datum.value / 1000, '.3~s') + 's'"),
    Panel("SDPA's time / this time, above 1 faster", "gain", "format(datum.value, '.3~g') + 'x'", reference=1.0),
    Panel("Peak memory of one call", "bytes", BYTES, base=2, has_interval=False),
)


def library() -> Any:
    """vl-convert, which is loaded for this command only.

    Raises:
        AttnDispatchError: it is not installed.
    """
    try:
        return import_module("vl_convert")
    except ImportError as error:
        install = 'pip install "attn-dispatch[report]"'
        raise AttnDispatchError(f"the plots need vl-convert-python: {install} ({error})") from error


def runtime() -> str:
    """What the page needs of Vega, as one script that loads nothing, and sets `window.vega`."""
    # By the address of vl-convert's own copy, which is not fetched: its names for whole libraries include Vega-Lite.
    where = f"https://cdn.jsdelivr.net/npm/vega@{library().get_vega_version()}/+esm"
    code = f"import {{View, parse, Error as error}} from '{where}'; window.vega = {{View, parse, error}};"
    found: str = library().javascript_bundle(code)
    return found


def compiled(backends: Sequence[str], orders: Sequence[str]) -> dict[str, Any]:
    """The panels above each other as Vega, on logarithmic axes, with legends; a click there fades other backends.

    The page fills in the data `points`: name, backend, order, tokens, the panels' fields, and a text.

    Args:
        backends, orders: of all points, the natural order first: each has a colour and a shape, or a dash.
    """
    scales = {"color": backends, "shape": backends, "strokeDash": orders}
    names = {"color": "backend", "shape": "backend", "strokeDash": "order"}
    looks = {
        channel: {"field": names[channel], "type": "nominal", "title": None, "scale": {"domain": list(domain)}}
        for channel, domain in scales.items()
    }
    config = {
        "view": {"stroke": None},
        "axis": dict.fromkeys(("labelColor", "titleColor"), SOFT)
        | dict.fromkeys(("tickColor", "domainColor", "gridColor"), LINE),
        "title": {"color": SOFT, "anchor": "start", "fontWeight": "normal"},
        "legend": {"labelColor": "var(--ink)", "symbolSize": 110, "orient": "bottom", "columns": 6},
        "range": {"category": [f"oklch(from var(--mark) l c {137.5 * number})" for number in range(14)]},
    }
    found: dict[str, Any] = library().vegalite_to_vega(
        {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "background": None,
            "data": {"name": "points"},
            "vconcat": [_panel(each, looks, is_first=each is PANELS[0]) for each in PANELS],
            "config": config,
        }
    )
    return found


def _panel(panel: Panel, looks: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
    value, colour = _y(panel, panel.field), {"color": looks["color"]}
    span = {"y": _y(panel, f"{panel.field}_low"), "y2": {"field": f"{panel.field}_high"}, **colour}
    line = {"y": value, **colour, "strokeDash": looks["strokeDash"]}
    point = {"y": value, **colour, "shape": looks["shape"], "tooltip": {"field": "text", "type": "nominal"}}
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "area", "fillOpacity": 0.18}, "encoding": {**span, "detail": {"field": "order"}}},
        {"mark": "rule", "encoding": span},
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": line},
        {"mark": {"type": "point", "filled": True, "size": 70}, "encoding": point},
    ]
    layers = layers if panel.has_interval else layers[2:]
    for layer in layers:
        fade = {"condition": {"param": "picked", "value": 1}, "value": 0.08}
        layer["encoding"] = {"x": X, "opacity": fade, **layer["encoding"]}
        layer["transform"] = [{"filter": f"isValid(datum.{panel.field})"}]
    if panel.reference is not None:
        rule = {"type": "rule", "strokeDash": [4, 4], "color": SOFT}
        layers.append({"data": {"values": [{}]}, "mark": rule, "encoding": {"y": _y(panel, datum=panel.reference)}})
    if is_first:
        select = {"type": "point", "fields": ["backend"]}
        layers[0]["params"] = [{"name": "picked", "select": select, "bind": "legend"}]
    return {"title": panel.title, "width": 600, "height": 240, "layer": layers}


def _y(panel: Panel, field: str | None = None, datum: float | None = None) -> dict[str, Any]:
    labels = f"datum.label ? ({panel.labels}) : ''"  # of many ticks, Vega labels some
    axis = {"labelExpr": labels, "title": None, "labelOverlap": "greedy", "minExtent": 55, "tickCount": 6}
    scale = {"type": "log", "base": panel.base, "nice": False, "zero": False, "padding": 8}
    return {"type": "quantitative", "axis": axis, "scale": scale, **({"field": field} if field else {"datum": datum})}
