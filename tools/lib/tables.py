"""Rows as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """The second row is the rule under the first."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
