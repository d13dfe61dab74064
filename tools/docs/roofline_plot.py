"""The rates in tools/results/native.json below the processor's limits, as an SVG, by `python -m tools.docs.build`.

Source: Williams, Waterman and Patterson 2009, Roofline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tools.docs.hilbert_plot import Panel, document, line, text

WIDTH, HEIGHT = 860, 460
COLOURS = {"float32": "#0072b2", "bfloat16": "#d55e00", "float16": "#009e73"}
#: The lines of the limits, by the name of a limit.
DASHES = {"multiply_add": "", "dot_product": 'stroke-dasharray="6 4"'}
TITLES = {"multiply_add": "multiply-adds", "dot_product": "bfloat16 dot products"}
OPEN = "#ffffff"  #: the inside of a mark of a backward pass


def svg(found: Any) -> str:
    """Rates against operations per byte, with as many threads as were measured, and the limits above them."""
    machine = max(found["machine"], key=lambda one: one["threads"])
    rows = [one for one in found["rows"] if one["threads"] == machine["threads"]]
    panel = _panel(rows, machine)
    threads = machine["threads"]
    title = f"native: rates below the processor's limits, {threads} thread{'s' * (threads != 1)}"
    parts = (*_legend(panel.left), *_frame(panel), *_limits(panel, machine), *(_mark(panel, one) for one in rows))
    return document(WIDTH, HEIGHT, panel.left, title, parts)


def _mark(panel: Panel, one: Any) -> str:
    x, y, colour = panel.across(_per_byte(one)), panel.up(one["gflops"]), COLOURS[one["dtype"]]
    about = f"<title>{one['pattern']}, {one['tokens']:,} tokens, {one['dtype']}</title>"
    inside = OPEN if one["backward"] else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{inside}" stroke="{colour}">{about}</circle>'


def _per_byte(one: Any) -> float:
    return float(one["operations"] / one["bytes"])


def _peaks(machine: Any) -> dict[str, float]:
    """GFLOP/s of the limits of products that the processor has."""
    return {name: machine[f"{name}_gflops"] for name in DASHES if f"{name}_gflops" in machine}


def _panel(rows: Any, machine: Any) -> Panel:
    """Axes from powers of 2 and of 10 to others, around every rate, every limit and where a limit bends."""
    peaks = _peaks(machine).values()
    across = [_per_byte(one) for one in rows] + [peak / machine["read_gb_per_s"] for peak in peaks]
    up = [one["gflops"] for one in rows] + list(peaks)
    x = 2.0 ** math.floor(math.log2(min(across)) - 1), 2.0 ** math.ceil(math.log2(max(across)))
    y = 10.0 ** math.floor(math.log10(min(up))), 10.0 ** math.ceil(math.log10(max(up)))
    return Panel(76, x, y, top=88, width=WIDTH - 120, height=HEIGHT - 152)


def _frame(panel: Panel) -> Iterator[str]:
    right, bottom = panel.left + panel.width, panel.top + panel.height
    low, high = (round(math.log10(end)) for end in panel.y)
    for tick in (factor * 10.0**n for n in range(low, high + 1) for factor in (1, 2, 5)):
        if tick <= panel.y[1]:
            yield line((panel.left, panel.up(tick)), (right, panel.up(tick)), 'stroke="#dddddd"')
            yield text(panel.left - 7, panel.up(tick) + 4, f"{tick:,g}", "end")
    yield f'<path d="M{panel.left} {panel.top}V{bottom}H{right}" fill="none" stroke="#444444"/>'
    low, high = (round(math.log2(end)) for end in panel.x)
    for tick in (2.0**n for n in range(low, high + 1)):
        yield line((panel.across(tick), bottom), (panel.across(tick), bottom + 4), 'stroke="#444444"')
        yield text(panel.across(tick), bottom + 19, f"{tick:,g}", "middle")
    yield text(panel.left + panel.width / 2, bottom + 42, "operations per byte of inputs and results", "middle")
    yield text(panel.left, panel.top - 10, "GFLOP/s", "start")


def _limits(panel: Panel, machine: Any) -> Iterator[str]:
    read = machine["read_gb_per_s"]
    foot = max(panel.x[0], panel.y[0] / read)
    for name, peak in _peaks(machine).items():
        ends = [(foot, foot * read), (peak / read, peak), (panel.x[1], peak)]
        path = " ".join(f"{panel.across(x):.1f},{panel.up(y):.1f}" for x, y in ends)
        yield f'<polyline points="{path}" fill="none" stroke="#444444" stroke-width="1.6" {DASHES[name]}/>'
        yield text(panel.left + panel.width, panel.up(peak) - 6, f"{TITLES[name]}, {peak:,.0f} GFLOP/s", "end")
    yield text(panel.across(foot) + 24, panel.up(foot * read) - 2, f"reading memory, {read:,.0f} GB/s", "start")


def _legend(left: int) -> Iterator[str]:
    at = float(left)
    for name, colour in COLOURS.items():
        yield f'<circle cx="{at + 5:.1f}" cy="44" r="4" fill="{colour}" stroke="{colour}"/>'
        yield text(at + 15, 48, name, "start")
        at += 40 + 7 * len(name)
    for words, inside in (("forward", "#444444"), ("backward", OPEN)):
        yield f'<circle cx="{at + 5:.1f}" cy="44" r="4" fill="{inside}" stroke="#444444"/>'
        yield text(at + 15, 48, words, "start")
        at += 40 + 7 * len(words)
