"""Write one HTML page about the stored decisions: tables, plots against length, and why each candidate lost. It loads
nothing from the network; needs: pip install "attn-dispatch[report]".
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from importlib.metadata import version

from attn_dispatch.cli import stored, urls
from attn_dispatch.cli.tables import print_json
from attn_dispatch.settings import cache_folder

EXAMPLE = """examples:
  attn-dispatch report -o report.html
  ATTN_DISPATCH_CACHE_DIR=/shared/decisions attn-dispatch report -o decisions.html"""


def configure(parser: argparse.ArgumentParser) -> None:
    text = "the page to write; an older one is replaced"
    parser.add_argument("-o", "--output", metavar="FILE", type=urls.target, required=True, help=text)


def run(args: argparse.Namespace) -> int:
    from attn_dispatch.cli.report import plots

    plots.library()  # at once: the rest takes seconds
    from attn_dispatch.cli.report.page import can_be_shown, page  # here, with torch

    folder = cache_folder()
    every = [decision for _, decision in stored.decisions(folder)]
    shown = sorted(filter(can_be_shown, every), key=lambda each: each.created, reverse=True)
    if len(shown) < len(every):
        print(f"attn-dispatch report: {len(every) - len(shown)} decisions cannot be shown", file=sys.stderr)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    text = page(shown, str(folder), made=made, version=version("attn-dispatch"))
    content = text.encode(errors="backslashreplace")
    urls.write(args.output, content)
    with urls.beside(args.output):
        if args.json:
            print_json({"path": args.output, "folder": str(folder), "bytes": len(content), "decisions": len(shown)})
        else:
            print(f"{len(shown)} decisions in {args.output} ({len(content) / 1e6:.2f} MB)")
    return 0
