"""A curve as text: ratios with their intervals over lengths, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 66, 11  #: columns between the first length and the last, and lines
LABEL = 7  #: columns of a ratio's label
BEYOND = 1.5  #: factor past all ratios at which an interval is cut

Point = tuple[int, float, float, float]  #: tokens, low, ratio, high; all above 0 and finite


def curve(points: Sequence[Point], mark: int | None = None) -> list[str]:
    """Lines with a bar for each length, the shortest first, 'o' at its ratio, a line at 1, and '^' at `mark` tokens."""
    lengths, ratios = [tokens for tokens, *_ in points], [1.0, *(ratio for _, _, ratio, _ in points)]
    top = min(max([1.0, *(high for *_, high in points)]), max(ratios) * BEYOND)
    bottom = max(min([1.0, *(low for _, low, _, _ in points)]), min(ratios) / BEYOND)

    def column(tokens: int) -> int:
        return _place(tokens, lengths[0], lengths[-1], WIDTH)

    def row(ratio: float) -> int:
        return _place(ratio, top, bottom, HEIGHT - 1)

    cells = [[" " for _ in range(WIDTH + 1)] for _ in range(HEIGHT)]
    cells[row(1.0)] = list("-" * (WIDTH + 1))
    ticks, below = list("-" * (WIDTH + 1)), ""
    for tokens, low, ratio, high in points:
        for line in range(row(high), row(low) + 1):
            cells[line][column(tokens)] = "|"
        cells[row(ratio)][column(tokens)] = "o"
        ticks[column(tokens)] = "+"
        start = max(column(tokens) - len(f"{tokens:,}") // 2, 0)
        below = below.ljust(start) + f"{tokens:,}" if not below or start > len(below) + 1 else below
    if mark is not None:
        ticks[column(mark)] = "^"
    labels = {row(value): f"{value:.2f}x" for value in (top, bottom, 1.0)}
    drawn = [f"{labels.get(line, ''):>{LABEL}} | {''.join(each)}".rstrip() for line, each in enumerate(cells)]
    return [*drawn, f"{'':{LABEL}} +-{''.join(ticks)}", f"{'':{LABEL}}   {below} tokens"]


def _place(value: float, first: float, last: float, most: int) -> int:
    """Where a value lies between the ends of a logarithmic axis of `most` steps."""
    share = math.log(value / first) / math.log(last / first) if first != last else 0.0
    return round(min(max(share, 0.0), 1.0) * most)
