"""Numbers as a person reads them, and lines of a table. No torch here: `inspect` must start at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def gib(count: int) -> str:
    """Bytes as a person reads them, in binary units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def titled(backend: str, order: str) -> str:
    """A candidate's name: `tiles@hilbert`, or `tiles`, since the natural order goes without saying."""
    return backend if order == "natural" else f"{backend}@{order}"


def milliseconds(value: float) -> str:
    """Three figures, in the unit that reads best."""
    value = float(f"{value:.3g}")  # before the unit is chosen: 999.9 ms is 1 s, not 1e+03 ms
    if value >= 1000:
        return f"{value / 1000:g} s"
    return f"{value:g} ms" if value >= 1 else f"{value * 1000:g} us"


def one_line(error: BaseException) -> str:
    """The kind and the text of an error on one line, whatever it holds."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an error of somebody else's may fail to tell of itself
        text = type(error).__name__
    return printable(" ".join(text.split()))[:500]


def printable(text: str) -> str:
    """On one line, without what no file can hold and no terminal should be told."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def align(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Printable lines with columns of equal width; the named columns to the left, numbers to the right."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("   ".join(cells).rstrip())
    return lines
