"""`python -m tools.ROOM`: lists the programs of a room of tools, or runs one. No torch is loaded for the list."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attn_dispatch.text import align

TOOLS = Path(__file__).parents[1]
HEAD = ("name", "takes about", "writes to tools/results/", "what it does")


class Program(NamedTuple):
    """Fields from the source of a program; "-" where it has none."""

    name: str
    takes: str
    writes: str
    summary: str


def programs(room: str) -> list[Program]:
    """The programs of `tools/ROOM/`, by name."""
    paths = sorted((TOOLS / room).glob("*.py"))
    return [_read(path) for path in paths if not path.stem.startswith("__")]


def _read(path: Path) -> Program:
    """The first sentence of its docstring, `TAKES`, and the default results file that it gives to `parser`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    takes = writes = "-"
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name("TAKES")], value=ast.Constant(str(text))):
                takes = text
            case ast.Call(func=ast.Name("parser"), args=[_, ast.Constant(str(text))]):
                writes = text
    summary = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return Program(path.stem, takes, writes, summary.split(". ")[0].rstrip("."))


def main(room: str, arguments: Sequence[str] | None = None, *, more: str | None = None) -> None:
    """List the programs, or import the named one and call its `main()` with the other arguments in `sys.argv`.

    `--help` ends with `more`.
    """
    found = programs(room)
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{room}",
        description=f"Run NAME of tools/{room}/; without it, list the programs.",
        epilog=more,
    )
    parser.add_argument("name", nargs="?", choices=[each.name for each in found], metavar="NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of NAME; --help shows them")
    given = parser.parse_args(arguments)
    if given.name is None:
        print(*align([HEAD, *found], {0, 1, 2, 3}), sep="\n")
        return
    sys.argv[:] = [f"python -m tools.{room} {given.name}", *given.arguments]
    importlib.import_module(f"tools.{room}.{given.name}").main()
