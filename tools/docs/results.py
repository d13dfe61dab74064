"""The files in tools/results/: what a page shows of each, and the list of all."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from typing import Any

from tools.lib.common import RESULTS
from tools.lib.tables import Table, markdown

#: Shown by an excerpt elsewhere, or with the machines in its rows.
APART = ("arm", "explain", "platforms")
EXCERPT = ("sdpa", "sdpa_mask", "native", "flex")  #: backends of the excerpt


def load(name: str) -> Any:
    """A file by its name, in which `gpu-` stands for the folder of GPU results."""
    return json.loads((RESULTS / f"{name.replace('-', '/')}.json").read_text())


def names() -> list[str]:
    """Of every file that a page of docs/results/ shows."""
    paths = (path.relative_to(RESULTS).with_suffix("") for path in sorted(RESULTS.rglob("*.json")))
    return [name for path in paths if (name := "-".join(path.parts)) not in APART]


def machine(found: Any) -> str:
    """The device, a CPU's threads, and the version of torch."""
    about = found["provenance"]
    threads = found["hardware"]["cpu"]["threads"] if "hardware" in found else 0
    of_threads = f", {threads} thread{'s' * (threads != 1)}" if threads else ""
    return f"{about['name']}{of_threads}, torch {about['torch']}"


def program(name: str) -> str:
    """The module that makes a file, or made it."""
    return f"tools.checks.{name.replace('-', '.')}" if name.startswith("gpu-") else f"tools.bench.{name}"


def command(name: str, found: Any) -> str:
    """What makes the file; of a frozen one the commit at which it did."""
    if "tables" in found:
        return f"`{found.get('command', program(name))}` at commit `{found['commit']}`"
    return "`python -m tools.checks.gpu_check`" if name.startswith("gpu-") else f"`python -m {program(name)}`"


def shown(name: str) -> str:
    """The tables of a file: its own, if nobody is to measure it again, else those that its program makes of it."""
    found = load(name)
    kept = found.get("tables")
    tables: Iterable[Table]
    tables = importlib.import_module(program(name)).tables(found) if kept is None else (Table(**each) for each in kept)
    usual = machine(found) == machine(load("longnet"))
    about = f"By {command(name, found)}, {found['measured'][:10]}{'' if usual else f'; {machine(found)}'}."
    return "\n\n".join((about, *(table.markdown() for table in tables)))


def index(pages: dict[str, list[str]]) -> str:
    """The usual machine, and a row for each file, by page."""
    rows = []
    for page, shows in pages.items():
        for name in shows:
            found = load(name)
            rows.append((f"[{page}]({page}.md)", f"`{name.replace('-', '/')}.json`", command(name, found)))
    about = f"Measured on {machine(load('longnet'))}, unless the page says otherwise."
    return f"{about}\n\n{markdown(('page', 'file', 'made by'), rows)}"


def explained() -> str:
    """The first lines of `explain`, and the rows of a few backends without long reasons."""
    lines = load("explain")["lines"]
    table_at = next(number for number, line in enumerate(lines) if line.startswith("backend "))
    rows = [line for line in lines[table_at + 1 :] if line.split()[0] in EXCERPT or "need CUDA" in line]
    return Table(lines=(*lines[: table_at + 1], *rows)).markdown()
