"""A curve as text: ratios with their intervals over lengths, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH = 66  #: columns between the first length and the last
HEIGHT = 11  #: lines
LABEL = 7  #: columns of a ratio's label
BEYOND = 1.5  #: factor past all ratios at which an interval is cut; a cut interval ends in an arrow

Point = tuple[int, float, float, float]  #: tokens, low, ratio, high


def curve(points: Sequence[Point], mark: int | None = None) -> list[str]:
    """Lines with a bar for each length, 'o' at its ratio, a line at 1, and '^' under the length `mark`.

    Args:
        points: at least one, the shortest first; all numbers above 0 and finite.
    """
    plot = _Plot(points)
    rows = [[" "] * (WIDTH + 1) for _ in range(HEIGHT)]
    rows[plot.row(1.0)] = ["-"] * (WIDTH + 1)
    for tokens, low, ratio, high in points:
        column = plot.column(tokens)
        for row in range(plot.row(high), plot.row(low) + 1):
            rows[row][column] = "|"
        if high > plot.top:
            rows[0][column] = "A"
        if low < plot.bottom:
            rows[-1][column] = "v"
        rows[plot.row(ratio)][column] = "o"
    labels = {plot.row(value): f"{value:.2f}x" for value in (plot.top, plot.bottom, 1.0)}
    found = [f"{labels.get(row, '').rjust(LABEL)} | {''.join(cells)}".rstrip() for row, cells in enumerate(rows)]
    return [*found, *plot.axis(points, mark)]


class _Plot:
    def __init__(self, points: Sequence[Point]) -> None:
        self.first, self.last = points[0][0], points[-1][0]
        ratios = [1.0, *(ratio for _, _, ratio, _ in points)]
        self.top = min(max([1.0, *(high for *_, high in points)]), max(ratios) * BEYOND)
        self.bottom = max(min([1.0, *(low for _, low, _, _ in points)]), min(ratios) / BEYOND)

    def column(self, tokens: int) -> int:
        if self.last == self.first:
            return 0
        share = math.log(tokens / self.first) / math.log(self.last / self.first)
        return round(min(max(share, 0.0), 1.0) * WIDTH)

    def row(self, ratio: float) -> int:
        if self.top == self.bottom:
            return 0
        share = math.log(self.top / ratio) / math.log(self.top / self.bottom)
        return round(min(max(share, 0.0), 1.0) * (HEIGHT - 1))

    def axis(self, points: Sequence[Point], mark: int | None) -> list[str]:
        ticks, labels = ["-"] * (WIDTH + 1), ""
        for tokens, *_ in points:
            ticks[self.column(tokens)] = "+"
            text = f"{tokens:,}"
            start = max(self.column(tokens) - len(text) // 2, 0)
            if not labels or start > len(labels) + 1:
                labels = labels.ljust(start) + text
        if mark is not None:
            ticks[self.column(mark)] = "^"
        return [f"{' ' * LABEL} +-{''.join(ticks)}", f"{' ' * LABEL}   {labels} tokens"]
