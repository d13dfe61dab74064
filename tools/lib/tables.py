"""Rows as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Join rows; the second row is the separator below the head."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
