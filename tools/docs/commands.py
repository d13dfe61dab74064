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


def page() -> str:
    """`--help` of the command itself and of each of its commands."""
    parts = [_block(help_of())]
    for name in COMMANDS:
        parts += [f"## attn-dispatch {name}", _block(help_of(name))]
    return "\n\n".join(parts)


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
