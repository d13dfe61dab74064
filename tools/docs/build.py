"""Write the generated blocks of README.md and docs/, between `<!-- NAME: ... -->` and `<!-- /NAME -->`, and the plots.

python -m tools.docs.build            write
python -m tools.docs.build --check    fail where a file would change
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.bench.projections import markdown as projections
from tools.docs import (
    choices,
    commands,
    compiled_tables,
    examples,
    figures,
    gpu,
    models,
    peer_tables,
    platforms,
    summary,
    support,
)
from tools.docs.gains import gains
from tools.docs.hilbert_plot import svg
from tools.docs.hilbert_tables import hilbert
from tools.docs.report_tables import markdown as reports
from tools.docs.results import index, load, machine
from tools.docs.ring_tables import markdown as ring
from tools.docs.roofline_plot import svg as roofline
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


def planned() -> str:
    found = load("plan")
    return "\n".join(("```text", f"$ {found['command']}", *found["lines"], "```"))


def ranks() -> str:
    found = load("ring")
    return f"{machine(found)}. {ring(found, load('ring_reports'))}"


BLOCKS: dict[str, Callable[[], str]] = {
    "gains": gains,
    "explain": summary.explained,
    "help": commands.page,
    "variables": variables,
    "platforms": platforms.platforms,
    "support": lambda: "\n".join(support.table()),
    "rooms": rooms,
    "results": index,
    "figures": figures.figures,
    "choices": choices.choices,
    "examples": examples.examples,
    "gpu": gpu.gpu,
    "peers": peer_tables.peers,
    "models": models.models,
    "compiled": compiled_tables.compiled,
    "hilbert": lambda: hilbert(load("hilbert"), load("cache_misses"), load("hilbert_curve")),
    "ring": ranks,
    "plan": planned,
    "projections": lambda: projections(load("projections")),
    "reports": lambda: reports(load("reports"), load("cache_misses")),
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
    plots = {
        RESULTS / "hilbert.svg": svg(load("hilbert")),
        RESULTS / "native.svg": roofline(load("native")),
        RESULTS / "end_to_end.svg": models.svg(load("end_to_end")),
    }
    return {**filled_pages, **plots}


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
