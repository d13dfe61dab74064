"""The rooms of attn_dispatch/, from their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

import attn_dispatch
from tools.lib.tables import markdown

ROOT = Path(attn_dispatch.__file__).parent


def rooms() -> str:
    """A row for each: its purpose, what it imports, and the public names that come from it."""
    rows: list[tuple[str, ...]] = []
    for path in sorted(ROOT.glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.parent.name == "cli":  # where the command itself stands
            rows.append(("`cli/`", text.splitlines()[0], "the functions that users call, and what they import", "-"))
            continue
        purpose, _, imports, public = text.splitlines()
        cells = (purpose, imports.removeprefix("Imports "), public.removeprefix("Public: "))
        rows.append((f"`{path.parent.name}/`", *cells))
    return markdown(("room", "purpose", "imports", "public names"), rows)
