"""Write the generated blocks of README.md and docs/, between `<!-- NAME: ... -->` and `<!-- /NAME -->`, and the plots.

python -m tools.docs.build            write
python -m tools.docs.build --check    fail where a file would change
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tools.checks import arm, matrix
from tools.docs import commands, results, support
from tools.docs.gains import gains
from tools.docs.hilbert_plot import svg
from tools.docs.results import load
from tools.docs.rooms import rooms
from tools.docs.variables import variables
from tools.lib.common import RESULTS

ROOT = RESULTS.parent.parent
README = ROOT / "README.md"
MADE_BY = "made by `python -m tools.docs.build`"
BLOCK = re.compile(r"<!-- ([\w-]+): [^\n]*-->\n(.*?)<!-- /\1 -->", flags=re.DOTALL)


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and everything under docs/."""
    return [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def index() -> str:
    """The list of results: what each page of docs/results/ shows."""
    shown = {page.stem: names(page.read_text(encoding="utf-8")) for page in pages() if page.parent.name == "results"}
    return results.index({page: blocks for page, blocks in shown.items() if page != "README"})


BLOCKS: dict[str, Callable[[], str]] = {
    "gains": gains,
    "explained": results.explained,
    "help": commands.page,
    "variables": variables,
    "arm": lambda: arm.table(load("arm")).markdown(),
    "platforms": lambda: matrix.tables(load("platforms")).markdown(),
    "support": lambda: support.table().markdown(),
    "rooms": rooms,
    "results": index,
    **{name: partial(results.shown, name) for name in results.names()},
}


def names(text: str) -> list[str]:
    """The names of a page's blocks."""
    return [match[1] for match in BLOCK.finditer(text)]


def filled(text: str, contents: Mapping[str, str]) -> str:
    """A page with its blocks replaced by `contents`."""
    return BLOCK.sub(lambda block: f"<!-- {block[1]}: {MADE_BY} -->\n{contents[block[1]]}\n<!-- /{block[1]} -->", text)


def made() -> dict[Path, str]:
    """Every file with a generated part, and its generated text.

    Raises:
        KeyError: a page has a block of an unknown name.
    """
    contents = {name: make() for name, make in BLOCKS.items()}
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    filled_pages = {page: filled(text, contents) for page, text in texts.items() if names(text)}
    return {**filled_pages, RESULTS / "hilbert.svg": svg(load("hilbert"))}


def stale(files: Mapping[Path, str]) -> list[str]:
    """The names of the files whose content differs."""
    return [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    check, files = options.parse_args().check, made()
    if check and stale(files):
        sys.exit(f"{', '.join(stale(files))}: not as generated; run `python -m tools.docs.build`")
    if not check:
        for path, text in files.items():
            path.write_text(text)


if __name__ == "__main__":
    main()
