"""Tables of results: text in columns and rows, as Markdown in the documentation and as a table on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_dispatch.text import align


@dataclass(frozen=True)
class Table:
    """Columns and rows of text, below a title and a sentence or two.

    Without columns it is that text alone, or `lines` as a program printed them.
    """

    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    about: str = ""
    title: str = ""
    lines: Sequence[str] = ()

    def markdown(self) -> str:
        parts = [f"### {self.title}"] if self.title else []
        parts += [self.about] if self.about else []
        if self.lines:
            parts.append("\n".join(("```text", *self.lines, "```")))
        if self.columns:
            parts.append(markdown(self.columns, self.rows))
        return "\n\n".join(parts)

    def show(self) -> None:
        """Print it, unless its columns have no rows."""
        if self.rows or not self.columns:
            table = align([self.columns, *self.rows], range(len(self.columns))) if self.rows else []
            print(*filter(None, [self.title]), *table, *filter(None, [self.about]), *self.lines, "", sep="\n")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. No cell may hold a `|`."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


# --- cells ------------------------------------------------------------------------------------------------------------


def direction(row: Mapping[str, Any]) -> str:
    return "forward + backward" if row.get("backward") else "forward"


def ms(timing: Mapping[str, Any], digits: int = 0) -> str:
    return f"{timing['median_ms']:,.{digits}f} ms"


def interval(ratio: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A median with both ends of its interval; "-" for None."""
    if ratio is None:
        return "-"
    return "{median:.{0}f} ({low:.{0}f} to {high:.{0}f})".format(digits, **ratio)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
