"""Show this machine's devices, which backends can run on them and why others cannot, quarantines, strikes (deaths and
hangs that count if there is another), and where decisions are stored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attn_dispatch.cli import machine
from attn_dispatch.cli.tables import print_json
from attn_dispatch.settings import NO_HOME, NOWHERE
from attn_dispatch.store.quarantine import shown_time
from attn_dispatch.text import align, gib, printable

DEVICES = ("device", "free", "dtype", "why", "silicon")
BACKENDS = ("backend", "version", "usable")
ENTRY_HEAD = ("version", "kind", "scope", "since (UTC)", "until (UTC)", "silicon", "problem", "reason")
LIFT_HINT = "'attn-dispatch doctor --lift NAME' lifts the quarantines and strikes of a backend"

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


def _lines(report: Mapping[str, Any]) -> list[str]:
    """The processors and the software, tables of devices, backends and what is excluded, then the state."""
    from attn_dispatch.machine.hardware import hardware

    found, devices, backends = hardware(), list[Sequence[str]]([DEVICES]), list[Sequence[str]]([BACKENDS])
    about = [*str(found).splitlines(), f"torch {found.torch}, {found.toolkit}"]
    for each in report["devices"]:
        about += [f"{each['device']} cannot be used: {each['unusable']}"] if each["unusable"] else []
        free = "unknown" if each["free_bytes"] is None else gib(each["free_bytes"])
        devices.append((each["device"], free, each["dtype"], each["dtype_reason"], each["silicon"]))
    for each in report["backends"]:
        usable = f"no: {each['reason']}" if each["reason"] else "yes"
        backends.append((each["name"], each["version"] or "-", usable))
    excluded = [*_excluded("quarantine", report["quarantines"]), *_excluded("strikes", report["strikes"])]
    excluded += [LIFT_HINT] if report["quarantines"] or report["strikes"] else []
    parts = about, align(devices, {0, 2, 3, 4}), align(backends, {0, 1, 2}), excluded
    return [*(line for part in parts for line in [*part, ""]), *_state(report)]


def _excluded(name: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of entries, or that there are none."""
    rows: list[Sequence[str]] = [(name, *ENTRY_HEAD)]
    for each in entries:
        what = each["backend"], each["version"] or "-", each["kind"], each["scope"] or "all"
        end = "lifted" if each["until"] is None else shown_time(each["until"])
        title = " ".join(each["title"].split())
        rows.append((*what, shown_time(each["created"]), end, each["silicon"], title, each["reason"]))
    return align(rows, range(9)) if entries else [f"{name:10} none"]


def _state(report: Mapping[str, Any]) -> list[str]:
    """The native kernel, the stored decisions, the settings, what is yet unmeasured."""
    missed, unwritable = report["missed"], "" if report["writable"] else ", which cannot be written"
    stored = f"{report['decisions']} in {report['folder']}{unwritable}"
    stored += f"; {report['unreadable']}" if report["unreadable"] else ""
    unmeasured = f"{missed['count']}; measure them with: {missed['command']}" if missed["count"] else "none"
    found = {
        "native": report["native"],
        "decisions": f"none: {NO_HOME}" if report["folder"] == str(NOWHERE) else stored,
        "shared": report["shared"],
        "mode": f"{report['mode']}   ($ATTN_DISPATCH_MODE)",
        "budget": f"{report['budget_ms']:g} ms for a new problem   ($ATTN_DISPATCH_BUDGET_MS)",
        "missed": missed["reason"] or unmeasured,
        "remove": f"delete these after uninstalling, or to start anew: {', '.join(report['leaves']) or 'nothing'}",
    }
    return [f"{name:9} {value}" for name, value in found.items() if value]
