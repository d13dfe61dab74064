"""Show this machine's devices, which backends can run on them and why others cannot, quarantines, strikes (deaths and
hangs that exclude nothing now, but count if there is another), and where decisions are stored.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attn_dispatch import settings
from attn_dispatch.cli.stored import why_unreadable
from attn_dispatch.cli.tables import print_json
from attn_dispatch.errors import AttnDispatchError, InvalidInput
from attn_dispatch.settings import NO_HOME, cache_folder
from attn_dispatch.store import files
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Entry, Quarantine, shown_time, silicons
from attn_dispatch.text import align, gib, printable

if TYPE_CHECKING:
    from attn_dispatch.kernels.contract import Backend
    from attn_dispatch.machine.hardware import Hardware

EXAMPLE = """examples:
  attn-dispatch doctor
  attn-dispatch doctor --json | jq '.backends[] | select(.usable | not)'
  attn-dispatch doctor --lift flash
      lift the quarantines of a backend and forget its strikes, so that trials include it; shows nothing else"""
DEVICE_HEAD = ("device", "free", "dtype", "why", "silicon")
BACKEND_HEAD = ("backend", "version", "usable")
QUARANTINE_HEAD = ("version", "kind", "scope", "since (UTC)", "until (UTC)", "silicon", "problem", "reason")
LIFT_HINT = "'attn-dispatch doctor --lift NAME' lifts the quarantines and strikes of a backend"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lift", metavar="NAME", help="lift the quarantines and strikes of this backend, or of 'all'")


def run(args: argparse.Namespace) -> int:
    if args.lift is not None:
        return _lift(args.lift, as_json=args.json)
    found, report = examined()
    if args.json:
        print_json(report)
    else:
        print("\n".join(map(printable, _lines(found, report))))
    return 0


def examined() -> tuple[Hardware, dict[str, Any]]:
    """This machine, and the plain values that `doctor --json` prints."""
    from attn_dispatch.kernels.native import library
    from attn_dispatch.machine.hardware import hardware

    found = hardware()
    library.check_compiler()
    return found, {
        "hardware": found.to_dict(),
        "devices": [_device(device) for device in ("cpu", *(f"cuda:{gpu.index}" for gpu in found.gpus))],
        "backends": _backends(),
        "native": library.in_use(),
        "quarantines": [_to_dict(entry) for entry in _quarantined(cache_folder())],
        "strikes": [_to_dict(entry) for entry in _struck(cache_folder())],
        **_settings(),
    }


def _lift(name: str, *, as_json: bool) -> int:
    folder = cache_folder()
    backend = None if name == "all" else name
    lifted = [entry for silicon in silicons(folder) for entry in Quarantine(folder, silicon).lift(backend)]
    left = _quarantined(folder)
    if as_json:
        print_json({"lifted": list(map(_to_dict, lifted)), "quarantines": list(map(_to_dict, left))})
    for entry in () if as_json else lifted:
        print(f"lifted    {_named(entry)} on {entry.silicon}: {entry.reason}")
    remaining = [entry for entry in left if backend in (None, entry.backend)]
    if not remaining and (lifted or backend is None):
        if not lifted and not as_json:
            print("nothing is in quarantine")
        return 0
    names = ", ".join(dict.fromkeys(entry.backend for entry in left)) or "nothing"
    what = "not all was lifted" if lifted else "nothing was lifted"
    print(f"attn-dispatch doctor: {what} for {name!r}; in quarantine: {names}", file=sys.stderr)
    return 1


def _quarantined(folder: Path) -> list[Entry]:
    return [entry for silicon in silicons(folder) for entry in Quarantine(folder, silicon).entries()]


def _struck(folder: Path) -> list[Entry]:
    return [entry for silicon in silicons(folder) for entry in Quarantine(folder, silicon).strikes()]


def _to_dict(entry: Entry) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(entry)
    return plain


def _named(entry: Entry) -> str:
    return f"{entry.backend} {entry.version}" if entry.version else entry.backend


def _device(device: str) -> dict[str, Any]:
    from attn_dispatch.machine.devices import missing_code, resolve
    from attn_dispatch.machine.hardware import dtype_advice, silicon
    from attn_dispatch.machine.memory import available_bytes

    try:
        free = available_bytes(device)
    except RuntimeError:
        free = None  # this device does not report it
    advice = dtype_advice(device)
    return {
        "device": device,
        "silicon": silicon(device),
        "free_bytes": free,
        "dtype": advice.dtype,
        "dtype_reason": advice.reason,
        "unusable": missing_code(resolve(device)),
    }


def _backends() -> list[dict[str, Any]]:
    from attn_dispatch.kernels import registry
    from attn_dispatch.settings import timeout_s
    from attn_dispatch.tuning import candidates as candidates  # guards the imports of plug-ins
    from attn_dispatch.tuning import guard

    found = []
    for name in registry.names():
        version, reason = None, ""
        try:
            backend = registry.load(name)
            version = guard.run_guarded(partial(registry.version_of, backend), timeout_s())
            reason = guard.run_guarded(partial(_unusable, backend), timeout_s())
        except InvalidInput as error:
            reason = str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may fail in any way; the others are still listed
            reason = f"raised {type(error).__name__}: {error}"
        found.append({"name": name, "version": version, "usable": not reason, "reason": reason})
    return found


def _unusable(backend: Backend) -> str:
    """The reasons that name a missing package or device for a small dense problem; empty if there are none."""
    import torch

    from attn_dispatch.kernels.contract import refusals_of
    from attn_dispatch.spec.pattern import Dense
    from attn_dispatch.spec.shapes import problem_of
    from attn_dispatch.spec.tensors import default_device

    device = default_device()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    refusals = refusals_of(backend, problem_of((1, 128, 8, 64), Dense(), dtype, device))
    return "; ".join(str(refusal) for refusal in refusals if refusal.code in {"not_installed", "device"})


def _settings() -> dict[str, Any]:
    from attn_dispatch.settings import budget_ms, mode

    folder, leaves = cache_folder(), [str(cache_folder())]
    with suppress(RuntimeError):  # no home folder
        leaves.append(str(settings.user_folder() or folder))
    return {
        "folder": str(folder),
        "writable": _writable(folder),
        "shared": Store(folder).shared(),
        "decisions": sum(1 for _ in Store(folder).all()),
        "leaves": [each for each in dict.fromkeys(leaves) if each != str(settings.NOWHERE)],
        "unreadable": "" if folder == settings.NOWHERE else why_unreadable(folder),
        "mode": mode(),
        "budget_ms": budget_ms(),
        "missed": _missed(folder),
    }


def _writable(folder: Path) -> bool:
    """Whether decisions can be written to the folder, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _missed(folder: Path) -> dict[str, Any]:
    """Count and file of the recorded problems that calls could not measure and that have no decision yet."""
    from attn_dispatch.decisions.look_up import read_stored
    from attn_dispatch.store.problem_files import MISSED, MOST, parse_record
    from attn_dispatch.tuning.candidates import Request

    path, count, reason = folder / MISSED, 0, ""
    try:
        # More than MOST, since several processes may append before one truncates. Does not block where it is a pipe.
        text = files.read(path, 4 * MOST).decode()
        count = sum(read_stored(Request.of(problem)) is None for problem in parse_record(text, path))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, UnicodeDecodeError, AttnDispatchError) as error:
        reason = f"cannot be read: {error}"
    command = f"attn-dispatch profile --from {path}" if count else None
    return {"count": count, "path": str(path), "command": command, "reason": reason}


def _lines(found: Hardware, report: Mapping[str, Any]) -> list[str]:
    return [
        *machine_lines(found),
        "",
        *align([list(DEVICE_HEAD), *map(device_cells, report["devices"])], {0, 2, 3, 4}),
        *[
            f"{device['device']} cannot be used: {device['unusable']}"
            for device in report["devices"]
            if device["unusable"]
        ],
        "",
        *align([list(BACKEND_HEAD), *map(backend_cells, report["backends"])], {0, 1, 2}),
        "",
        *_quarantine_lines(report["quarantines"], report["strikes"]),
        "",
        *(f"{name:9} {value}" for name, value in state(report)),
    ]


def machine_lines(found: Hardware) -> list[str]:
    """A line for each processor, and one for the software."""
    return [*str(found).splitlines(), f"torch {found.torch}, CUDA {found.cuda or 'none'}"]


def state(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values: the native kernel, the stored decisions, the settings, what is yet unmeasured."""
    missed = report["missed"]
    unwritable = "" if report["writable"] else ", which cannot be written"
    stored = f"{report['decisions']} in {report['folder']}{unwritable}"
    stored += f"; {report['unreadable']}" if report["unreadable"] else ""
    if report["folder"] == str(settings.NOWHERE):
        stored = f"none: {NO_HOME}"
    unmeasured = missed["reason"] or (
        f"{missed['count']}; measure them with: {missed['command']}" if missed["count"] else "none"
    )
    return [
        ("native", report["native"]),
        ("decisions", stored),
        *([("shared", report["shared"])] if report["shared"] else []),
        ("mode", f"{report['mode']}   ($ATTN_DISPATCH_MODE)"),
        ("budget", f"{report['budget_ms']:g} ms for a new problem   ($ATTN_DISPATCH_BUDGET_MS)"),
        ("missed", unmeasured),
        ("remove", f"delete these after uninstalling, or to start anew: {', '.join(report['leaves']) or 'nothing'}"),
    ]


def device_cells(item: Mapping[str, Any]) -> list[str]:
    """The cells of a device under `DEVICE_HEAD`."""
    free = "unknown" if item["free_bytes"] is None else gib(item["free_bytes"])
    return [item["device"], free, item["dtype"], item["dtype_reason"], item["silicon"]]


def backend_cells(item: Mapping[str, Any]) -> list[str]:
    """The cells of a backend under `BACKEND_HEAD`."""
    return [item["name"], item["version"] or "-", "yes" if item["usable"] else f"no: {item['reason']}"]


def _quarantine_lines(items: Sequence[Mapping[str, Any]], struck: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, found in (("quarantine", items), ("strikes", struck)):
        head = [name, *QUARANTINE_HEAD]
        rows = align([head, *map(quarantine_cells, found)], set(range(len(head))))
        lines += rows if found else [f"{name:10} none"]
    return [*lines, LIFT_HINT] if items or struck else lines


def quarantine_cells(item: Mapping[str, Any]) -> list[str]:
    """The backend of a quarantine or strike, and its cells under `QUARANTINE_HEAD`."""
    scope = item["scope"] or "all"
    since = shown_time(item["created"])
    end = "lifted" if item["until"] is None else shown_time(item["until"])
    title = " ".join(item["title"].split())
    where = [since, end, item["silicon"], title]
    return [item["backend"], item["version"] or "-", item["kind"], scope, *where, item["reason"]]
