"""Run each problem once, by its stored decision, so that later processes find what this compiles: in the folders that
are printed. Set $TORCHINDUCTOR_CACHE_DIR and $TRITON_CACHE_DIR to folders that stay."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from attn_dispatch.cli.tables import Table, compact, print_json
from attn_dispatch.errors import AttnDispatchError, BackendFailed, NotDecided
from attn_dispatch.settings import cache_folder
from attn_dispatch.text import milliseconds, printable, titled

if TYPE_CHECKING:
    from attn_dispatch.warming import Warmed

EXAMPLE = """examples:
  attn-dispatch warm
      all decisions of this machine, for as many threads as this process has
  attn-dispatch warm problems.jsonl
      those that record("problems.jsonl") wrote in a run, once 'profile --from' has measured them
      exit code 1 if one has no decision, or fails"""


def configure(parser: argparse.ArgumentParser) -> None:
    file = "a file that record() or 'attn-dispatch export' wrote, for its problems alone; by default all decisions here"
    parser.add_argument("file", metavar="FILE", nargs="?", help=file)


def run(args: argparse.Namespace) -> int:
    from attn_dispatch.warming import folders, problems_in, stored_problems, warm  # loads torch

    problems, left = stored_problems() if args.file is None else problems_in(args.file)
    found: list[Warmed] = []
    if problems:
        with suppress(NotDecided, BackendFailed):  # the rows have the reasons
            warm(problems, report=found.append)
    elif not args.json:
        source = args.file or cache_folder()
        raise AttnDispatchError("; ".join([f"no problem of this machine is in {source}", *_left_out(left)]))
    cold = sum(bool(each.reason) for each in found)
    if args.json:
        print_json({"warmed": [asdict(each) for each in found], "left_out": left, "folders": folders()})
    else:
        rows = [[compact(each.problem), *_cells(each)] for each in found]
        print(*Table(("problem", "runs by", "took", ""), rows, {0, 1, 3}).lines(), "", sep="\n")
        print(*_left_out(left), *(f"keep  {folder}  (${name})" for name, folder in folders().items()), sep="\n")
        print(f"{len(found) - cold} of {len(found)} problems are warm")
    return 1 if cold or not found else 0


def _cells(each: Warmed) -> list[str]:
    took = milliseconds(each.seconds * 1e3) if each.backend else "-"
    return [titled(each.backend, each.order) if each.backend else "-", took, printable(each.reason)]


def _left_out(left: dict[str, int]) -> list[str]:
    return [printable(f"left out  {count} {why}") for why, count in left.items()]
