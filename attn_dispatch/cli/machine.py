"""What `doctor` says of this machine: its devices, backends, settings, and what is excluded."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attn_dispatch import settings
from attn_dispatch.cli.stored import why_unreadable
from attn_dispatch.errors import AttnDispatchError, InvalidInput
from attn_dispatch.settings import cache_folder
from attn_dispatch.store import files
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Quarantine, silicons

if TYPE_CHECKING:
    from attn_dispatch.kernels.contract import Backend


def examined() -> dict[str, Any]:
    """The plain values that `doctor --json` prints."""
    from attn_dispatch.kernels.native import library
    from attn_dispatch.machine.hardware import hardware

    found, folder = hardware(), cache_folder()
    library.check()
    leaves = [str(folder)]
    with suppress(RuntimeError):  # no home folder
        leaves.append(str(settings.user_folder() or folder))
    return {
        "hardware": found.to_dict(),
        "devices": [_device(device) for device in found.devices],
        "backends": _backends(),
        "native": library.in_use(),
        "quarantines": msgspec.to_builtins([entry for each in excluded() for entry in each.entries()]),
        "strikes": msgspec.to_builtins([entry for each in excluded() for entry in each.strikes()]),
        "folder": str(folder),
        "writable": is_writable(folder),
        "shared": Store(folder).shared(),
        "decisions": sum(1 for _ in Store(folder).all()),
        "leaves": [each for each in dict.fromkeys(leaves) if each != str(settings.NOWHERE)],
        "unreadable": "" if folder == settings.NOWHERE else why_unreadable(folder),
        "mode": settings.mode(),
        "budget_ms": settings.budget_ms(),
        "missed": missed(folder),
    }


def excluded() -> list[Quarantine]:
    """The quarantine of each silicon in the cache folder."""
    return [Quarantine(cache_folder(), silicon) for silicon in silicons(cache_folder())]


def _device(device: str) -> dict[str, Any]:
    from attn_dispatch.machine.devices import missing_code, resolve
    from attn_dispatch.machine.hardware import dtype_advice, silicon
    from attn_dispatch.machine.memory import UNKNOWN, available_bytes

    free = None
    with suppress(RuntimeError):  # this device does not report it
        free = available_bytes(device)
    advice = dtype_advice(device)
    return {
        "device": device,
        "silicon": silicon(device),
        "free_bytes": None if free == UNKNOWN else free,
        "dtype": advice.dtype,
        "dtype_reason": advice.reason,
        "unusable": missing_code(resolve(device)),
    }


def _backends() -> list[dict[str, Any]]:
    from attn_dispatch.kernels import registry
    from attn_dispatch.tuning import candidates as candidates  # guards the imports of plug-ins
    from attn_dispatch.tuning import guard

    found = []
    for name in registry.names():
        version, reason = None, ""
        try:
            backend = registry.load(name)
            version = guard.run_guarded(partial(registry.version_of, backend), settings.timeout_s())
            reason = guard.run_guarded(partial(_unusable, backend), settings.timeout_s())
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


def is_writable(folder: Path) -> bool:
    """Whether decisions can be written to the folder, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def missed(folder: Path) -> dict[str, Any]:
    """Count and file of the recorded problems that calls could not measure and that have no decision yet."""
    from attn_dispatch.decisions.look_up import read_stored
    from attn_dispatch.recording import read_record
    from attn_dispatch.store.passed import MISSED, MOST
    from attn_dispatch.tuning.candidates import Request

    path, count, reason = folder / MISSED, 0, ""
    try:
        # More than MOST, since several processes may append before one truncates. Does not block where it is a pipe.
        text = files.read(path, 4 * MOST).decode()
        count = sum(read_stored(Request.of(problem)) is None for problem in read_record(path, text=text))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, UnicodeDecodeError, AttnDispatchError) as error:
        reason = f"cannot be read: {error}"
    command = f"attn-dispatch profile --from {path}" if count else None
    return {"count": count, "path": str(path), "command": command, "reason": reason}
