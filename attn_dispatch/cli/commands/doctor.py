"""Show this machine's devices, which backends can run on them and why others cannot, quarantines, strikes (deaths and
hangs that count if there is another), and where decisions are stored.
"""

from __future__ import annotations

import argparse
import sys

from attn_dispatch.cli import machine
from attn_dispatch.cli.tables import print_json
from attn_dispatch.text import printable

EXAMPLE = """examples:
  attn-dispatch doctor
  attn-dispatch doctor --lift flash
      trials include this backend again"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lift", metavar="NAME", help="lift the quarantines and strikes of this backend, or of 'all'")


def run(args: argparse.Namespace) -> int:
    if args.lift is not None:
        return _lift(args.lift, as_json=args.json)
    report = machine.examined()
    if args.json:
        print_json(report)
    else:
        print("\n".join(map(printable, _lines(report))))
    return 0


def _lift(name: str, *, as_json: bool) -> int:
    backend = None if name == "all" else name
    lifted = [entry for each in machine.excluded() for entry in each.lift(backend)]
    left = [entry for each in machine.excluded() for entry in each.entries()]
    if as_json:
        print_json({"lifted": lifted, "quarantines": left})  # which takes structs
    else:
        for each in lifted:
            print(f"lifted    {each.backend} {each.version or '-'} on {each.silicon}: {each.reason}")
        if not lifted and not left:
            print("nothing is in quarantine")
    if not any(backend in (None, entry.backend) for entry in left) and (lifted or backend is None):
        return 0
    names = ", ".join(dict.fromkeys(entry.backend for entry in left)) or "nothing"
    what = "not all was lifted" if lifted else "nothing was lifted"
    print(f"attn-dispatch doctor: {what} for {name!r}; in quarantine: {names}", file=sys.stderr)
    return 1


def _lines(report: machine.Report) -> list[str]:
    excluded = [line for each in machine.exclusions(report) for line in each.lines()]
    hint = [machine.LIFT_HINT] if report["quarantines"] or report["strikes"] else []
    tables = [table.lines() for table in (machine.devices(report), machine.backends(report))]
    state = [f"{name:9} {value}" for name, value in machine.state(report)]
    return [*(line for part in (machine.lines(report), *tables, excluded + hint) for line in [*part, ""]), *state]
