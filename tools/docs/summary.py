"""The README's excerpt of an explanation."""

from __future__ import annotations

from tools.docs.results import load
from tools.lib.tables import Table

SHOWN = ("sdpa", "sdpa_mask", "native", "flex")  #: backends of the excerpt


def explained() -> str:
    """The first lines of `explain`, and the rows of a few backends without long reasons."""
    lines = load("explain")["lines"]
    table_at = next(number for number, line in enumerate(lines) if line.startswith("backend "))
    rows = [line for line in lines[table_at + 1 :] if line.split()[0] in SHOWN or "need CUDA" in line]
    return Table(lines=(*lines[: table_at + 1], *rows)).markdown()
