"""Write one HTML page about the stored decisions: tables, plots against length, and why each candidate lost. It loads
nothing from the network; needs: pip install "attn-dispatch[report]".
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from importlib.metadata import version

from attn_dispatch.cli import machine, stored, urls
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
    from attn_dispatch.cli.report.page import page  # here, with torch

    folder = cache_folder()
    decisions = sorted(
        (decision for _, decision in stored.decisions(folder)), key=lambda each: each.created, reverse=True
    )
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    text, left_out = page(decisions, machine.examined(), made=made, version=version("attn-dispatch"))
    content = text.encode(errors="backslashreplace")
    for reason in left_out:
        print(f"attn-dispatch report: left out, since it cannot be shown: {reason}", file=sys.stderr)
    shown = len(decisions) - len(left_out)
    urls.write(args.output, content)
    with urls.beside(args.output):
        if args.json:
            print_json({"path": args.output, "bytes": len(content), "decisions": shown, "folder": str(folder)})
        else:
            print(f"{shown} decisions in {args.output} ({len(content) / 1e6:.2f} MB)")
    return 0
