"""The commands as `--help` describes them, in Markdown."""

from __future__ import annotations

import io
import os
import re
import textwrap
from contextlib import redirect_stdout, suppress
from unittest import mock

from attn_dispatch.cli import COMMANDS, main

WIDTH = 120  #: characters of a line
UNWRAPPED = "100000"  #: argparse's wrapping differs between Python versions; lines are wrapped here instead
#: Options of every command, as `--help` describes them.
COMMON = ("-h, --help show this help message and exit", "--json print JSON instead of tables")


def page() -> str:
    """What `--help` says of each command; options that several share stand first, once."""
    texts = {name: help_of(name) for name in COMMANDS}
    head, shared = _problems(texts["explain"])
    parts = ["## Options of problems", _block("\n".join([head, *shared]))]
    for name, text in texts.items():
        own = [block for block in text.split("\n\n")[1:] if not block.startswith(("problems:", "  --shape"))]
        own = [_without(block, {*shared, *COMMON}) for block in own]
        parts += [f"## attn-dispatch {name}", _block("\n\n".join(filter(None, own)))]
    return "\n\n".join(parts)


def _problems(text: str) -> tuple[str, list[str]]:
    """What is said of the options that describe problems, and these."""
    blocks = text.split("\n\n")
    at = next(at for at, block in enumerate(blocks) if block.startswith("problems:"))
    return blocks[at].removeprefix("problems:\n").strip(), _entries(blocks[at + 1])


def _entries(block: str) -> list[str]:
    """Each option with the lines of its text."""
    return re.split(r"\n(?=  \S)", block)


def _without(block: str, shared: set[str]) -> str:
    """A block of options without shared ones, as their texts differ in blanks only; empty where no other is left."""
    known = {" ".join(entry.split()) for entry in shared}
    left = [entry for entry in _entries(block) if " ".join(entry.split()) not in known]
    return "" if left == ["options:"] else "\n".join(left)


def help_of(*command: str) -> str:
    """`--help` text that depends neither on the Python version nor on the terminal's width."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=UNWRAPPED, NO_COLOR="1"), redirect_stdout(printed), suppress(SystemExit):
        main([*command, "--help"])
    return "\n".join(map(_wrapped, printed.getvalue().rstrip().splitlines()))


def _wrapped(line: str) -> str:
    """Wrap a usage line between options, and an option's text below its start."""
    indent = " " * len(re.match(r" *(?:-\S.*?  +|\S+  +|)", line)[0])  # type: ignore[index]
    if line.startswith("usage: "):
        indent = " " * len("usage: ")
        line = re.sub(r"\[(?:[^][]|\[[^][]*\])*\]", lambda option: option[0].replace(" ", "\xa0"), line)
    wrapped = textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False, drop_whitespace=True
    )
    return "\n".join(wrapped).replace("\xa0", " ")


def _block(text: str) -> str:
    return f"```text\n{text}\n```"
