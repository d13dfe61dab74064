"""Show the decisions stored on this machine, for every device they were measured on, newest first."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from attn_dispatch import settings
from attn_dispatch.cli import regrets, stored, thresholds
from attn_dispatch.cli.tables import decided, print_json, when
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.settings import NO_HOME, cache_folder
from attn_dispatch.store.decision import Decision
from attn_dispatch.text import printable

EXAMPLE = """examples:
  attn-dispatch inspect
  attn-dispatch inspect --key 3f9a
      one decision in full
  attn-dispatch inspect --thresholds
      lengths above which a token order such as hilbert is faster; 'profile --thresholds' measures"""


def configure(parser: argparse.ArgumentParser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--key", metavar="PREFIX", default="", help="only decisions whose key starts with PREFIX")
    regret = "how much slower learned choices are than the best, by group"
    one.add_argument("--regret", action="store_true", help=regret)
    paying = "lengths above which a token order is faster; densities of masks below which skipping what is hidden is"
    one.add_argument("--thresholds", action="store_true", help=paying)


def run(args: argparse.Namespace) -> int:
    folder = cache_folder()
    if args.regret:
        return regrets.run(folder, args.json)
    if args.thresholds:
        return thresholds.run(folder, args.json)
    prefix = args.key.strip().lower()
    found = stored.decisions(folder, key=prefix)
    found.sort(key=lambda pair: pair[1].created, reverse=True)
    if args.json:
        print_json({"folder": str(folder), "decisions": [_to_dict(*pair) for pair in found]})
    elif prefix and len(found) == 1:
        _print_one(*found[0])
    elif found:
        _print_groups(found)
    elif folder == settings.NOWHERE:
        print(f"no decisions are stored: {NO_HOME}")
    elif not prefix:
        print(f"no decision is stored in {folder} yet; 'attn-dispatch profile --quick' measures some")
    if prefix and not found:
        print(f"attn-dispatch inspect: no key in {folder} starts with {args.key!r}", file=sys.stderr)
        return 1
    return 0


def _to_dict(path: Path, decision: Decision) -> dict[str, Any]:
    where = {"silicon": decision.silicon, "created": decision.created, "path": str(path)}
    return {**Explanation.of(decision).to_dict(), **where}


def _print_one(path: Path, decision: Decision) -> None:
    elsewhere = f" on another machine ({decision.origin})" if decision.origin else ""
    made = f"measured  {when(decision)} UTC{elsewhere}"
    print(Explanation.of(decision), "", made, f"silicon   {decision.silicon}", sep="\n")
    print(f"stored in {path}")


def _print_groups(found: list[tuple[Path, Decision]]) -> None:
    by_silicon = sorted(found, key=lambda pair: pair[1].silicon)  # stable: the newest stay first
    for silicon, group in groupby(by_silicon, key=lambda pair: pair[1].silicon):
        paths, decisions = zip(*group)
        for device in dict.fromkeys(Explanation.of(decision).device for decision in decisions):
            print(printable(f"device    {device}"))
        table = "\n".join(decided(decisions).lines())
        print(f"silicon   {silicon}", table, f"stored in {paths[0].parents[1]}", sep="\n\n", end="\n\n")
    print(f"{len(found)} decisions; 'attn-dispatch inspect --key KEY' shows one in full")
