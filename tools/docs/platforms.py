"""The table of the environments that the tests were run in."""

from __future__ import annotations

from typing import Any

from tools.checks.matrix import ROOMS
from tools.docs.results import load
from tools.lib.tables import table

HEAD = (
    "Python",
    "torch",
    "NumPy",
    "Triton",
    "without",
    "system",
    "folders of tests/",
    "passed",
    "skipped",
    "failed",
    "date",
)


def platforms() -> str:
    """A row for each environment, and the names of the tests that failed."""
    rows = load("platforms")["environments"]
    lines = [table([HEAD, ("---",) * len(HEAD), *map(_row, rows)])]
    lines += [f"Failed in {row['name']}: `{name}`." for row in rows for name in row["failed"]]
    return "\n\n".join(lines)


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    rooms = "all" if set(found["rooms"]) == set(ROOMS) else ", ".join(found["rooms"])
    versions = (found[name] or "-" for name in ("python", "torch", "numpy", "triton"))
    counts = (f"{found['passed']:,}", f"{found['skipped']:,}", str(len(found["failed"])))
    return (*versions, found["without"] or "-", found["system"], rooms, *counts, found["measured"][:10])
