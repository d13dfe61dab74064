"""The speed-ups of Hilbert order in tools/results/hilbert.json as an SVG, by `python -m tools.docs.build`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from attn_dispatch.spec.orders import HILBERT, NATURAL

WIDTH, HEIGHT = 860, 420
COLOURS = {"tiles": "#0072b2", "native": "#d55e00", "flex": "#009e73", "sdpa_mask": "#777777"}
DASHED = 'stroke-dasharray="5 4"'
APART = 7  #: pixels between backends at the same length, so that their intervals do not overlap
ROOM = 1.06  #: factor between the outermost values and the panel's edges
RATIOS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  #: that are written

Point = tuple[float, float, float, float]  #: tokens, and a value with its interval


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes with logarithms on both; (left, top) in pixels, ranges in the data's units."""

    left: int
    x: tuple[float, float]
    y: tuple[float, float]
    top: int = 96
    width: int = 340
    height: int = 250

    def across(self, value: float) -> float:
        return self.left + 24 + (self.width - 48) * share(value, *self.x)

    def up(self, value: float) -> float:
        return self.top + self.height * (1 - share(value, *self.y))

    def frame(self, title: str, lengths: Sequence[int], ticks: Sequence[float], strong: float | None) -> Iterator[str]:
        right, bottom = self.left + self.width, self.top + self.height
        yield text(self.left, self.top - 14, title, "start", 'font-weight="bold"')
        for tick in ticks:
            colour, height = ("#444444" if tick == strong else "#dddddd"), self.up(tick)
            yield line((self.left, height), (right, height), f'stroke="{colour}"')
            yield text(self.left - 7, height + 4, f"{tick:,g}", "end")
        yield f'<path d="M{self.left} {self.top}V{bottom}H{right}" fill="none" stroke="#444444"/>'
        for length in lengths:
            yield line((self.across(length), bottom), (self.across(length), bottom + 4), 'stroke="#444444"')
            yield text(self.across(length), bottom + 19, f"{length:,}", "middle")
        yield text(self.left + self.width / 2, bottom + 40, "tokens", "middle")

    def curve(self, points: Sequence[Point], colour: str, style: str = "", aside: float = 0) -> Iterator[str]:
        """Marks joined by a line, with a bar for each interval."""
        if not points:
            return
        ends = [(self.across(tokens) + aside, self.up(value)) for tokens, value, _, _ in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" {style}/>'
        for (x, y), (_, _, low, high) in zip(ends, points):
            if low < high:
                yield line((x, self.up(low)), (x, self.up(high)), f'stroke="{colour}"')
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{"#ffffff" if style else colour}" stroke="{colour}"/>'


def share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {style}/>'


def text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{words}</text>'


def svg(found: Any) -> str:
    """Grids of two axes, forward: times in both orders, and their ratio."""
    rows = found["plane"]
    lengths = [one["tokens"] for one in rows]
    ends = (lengths[0], lengths[-1])
    times = {each: points(rows, "times", " ".join(each), "_ms") for each in product(COLOURS, (NATURAL, HILBERT))}
    gains = {name: points(rows, "gain", name) for name in COLOURS}
    low, high = bounds(times.values())
    decades = [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    low, high = bounds(gains.values())
    left = Panel(62, ends, (decades[0], decades[-1]))
    right = Panel(494, ends, (min(low, 1.0) / ROOM, max(high, 1.0) * ROOM))
    ticks = [tick for tick in RATIOS if right.y[0] <= tick <= right.y[1]]
    parts = [*legend(left.left), *left.frame("milliseconds", lengths, decades, None)]
    parts += right.frame("time in natural order / in Hilbert order", lengths, ticks, 1.0)
    for number, (name, colour) in enumerate(COLOURS.items()):
        parts += left.curve(times[name, NATURAL], colour, DASHED)
        parts += left.curve(times[name, HILBERT], colour)
        parts += right.curve(gains[name], colour, aside=(number - 1) * APART)
    window = rows[0]["pattern"].split("window=")[-1].strip("()").replace(", ", " x ")
    title = f"Neighbourhoods of {window} on square grids, forward, in natural and in Hilbert order"
    note = "Bars: 95 % intervals. Without one: timed once, or narrower than the mark."
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    about = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" font-size="12" fill="#222222"'
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {about}>',
        f"<title>{title}</title>",
        f'<rect {size} fill="#ffffff"/>',  # readable on a dark page
        text(left.left, 24, title, "start", 'font-size="14"'),
        *parts,
        text(left.left, HEIGHT - 12, note, "start"),
        "</svg>\n",
    ))  # fmt: skip


def points(rows: Any, kind: str, name: str, unit: str = "") -> list[Point]:
    """Of the lengths that have it."""
    found = ((one["tokens"], one[kind].get(name)) for one in rows)
    return [(n, one[f"median{unit}"], one[f"low{unit}"], one[f"high{unit}"]) for n, one in found if one is not None]


def bounds(curves: Iterable[Sequence[Point]]) -> tuple[float, float]:
    """The lowest and the highest end of all intervals."""
    values = [value for points in curves for point in points for value in point[2:]]
    return min(values), max(values)


def legend(left: int) -> Iterator[str]:
    at = float(left)
    for name, colour in COLOURS.items():
        yield line((at, 46), (at + 22, 46), f'stroke="{colour}" stroke-width="3"')
        yield text(at + 28, 50, name, "start")
        at += 56 + 7 * len(name)
    for name, style in (("natural order", DASHED), ("Hilbert order", "")):
        yield line((at, 46), (at + 22, 46), f'stroke="#222222" stroke-width="1.8" {style}')
        yield text(at + 28, 50, name, "start")
        at += 140
