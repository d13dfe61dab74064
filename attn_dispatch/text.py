"""Formats numbers, errors and tables for people. No torch here: `inspect` must start at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from textwrap import fill

WIDTH = 120  #: characters of a line that is folded


def gib(count: int) -> str:
    """Format a number of bytes in binary units: `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def titled(backend: str, order: str) -> str:
    """Format a candidate's name: `tiles@hilbert`, or `tiles` for the natural order."""
    return backend if order == "natural" else f"{backend}@{order}"


def milliseconds(value: float) -> str:
    """Format milliseconds with three significant digits, in s, ms or us."""
    value = float(f"{value:.3g}")  # before the unit is chosen: 999.9 ms is 1 s, not 1e+03 ms
    if value >= 1000:
        return f"{value / 1000:g} s"
    return f"{value:g} ms" if value >= 1 else f"{value * 1000:g} us"


def where_true(options: Mapping[str, object]) -> list[str]:
    """The texts whose values are true."""
    return [text for text, value in options.items() if value]


def one_line(error: BaseException) -> str:
    """Format an exception's type and text on one printable line of at most 500 characters."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a foreign exception's __str__ may fail
        text = type(error).__name__
    return printable(" ".join(text.split()))[:500]


def printable(text: str) -> str:
    """Replace white space by blanks and other unprintable characters by question marks."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def folded(text: str) -> str:
    """Fold a printable text into lines of at most `WIDTH`, the later ones indented."""
    start = text[: len(text) - len(text.lstrip())]
    return fill(text, WIDTH, subsequent_indent=f"{start}    ", break_long_words=False, break_on_hyphens=False)


def align(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Lay out rows as printable lines with columns of equal width, left-aligned where in `left`, else right-aligned."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    places = [str.ljust if number in left else str.rjust for number in range(len(widths))]
    return ["   ".join(put(cell, w) for put, cell, w in zip(places, row, widths)).rstrip() for row in rows]
