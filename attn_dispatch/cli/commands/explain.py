"""Show which backend would run a problem, why, and why not the others. Measures and runs nothing."""

from __future__ import annotations

import argparse

from attn_dispatch.cli import options
from attn_dispatch.cli.tables import print_json

EXAMPLE = """examples:
  attn-dispatch explain --shape 1,8k,16,128 --causal --dtype bf16
  attn-dispatch explain --grid 64,64 --window 7 --backward --backend sdpa_mask"""


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_options(parser)
    parser.add_argument("--backend", metavar="NAME", help="explain the problem with this backend forced")
    parser.add_argument("--order", metavar="NAME", help="explain the problem with this order forced")


def run(args: argparse.Namespace) -> int:
    problems = options.problems_of(args)
    from attn_dispatch.decisions.decide import explain_problem  # here, so that usage errors do not wait for torch

    found = [explain_problem(problem, args.backend, args.order) for problem in problems]
    if args.json:
        print_json({"decisions": [explanation.to_dict() for explanation in found]})
    else:
        print(*found, sep="\n\n")
    return 1 if any(explanation.choice is None for explanation in found) else 0
