"""Made-up entries of a quarantine, its files, and processes that try something. They load no torch."""

from __future__ import annotations

import secrets
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from attn_dispatch.store import files
from attn_dispatch.store.quarantine import Entry, Quarantine, Trial, place_of
from tests.support.fakes import SILICON

GROUP = "0123456789ab"
STARTED = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from attn_dispatch.store.quarantine import Quarantine, crash_marker

folder, silicon = Path(sys.argv[1]), sys.argv[2]
"""
TRIED = (
    STARTED
    + """
with crash_marker(folder, silicon, "made_up", "1", "dense 1 x 64"):
    {}
"""
)


def entry(**changes: Any) -> Entry:
    values: dict[str, Any] = {
        "backend": "made_up",
        "version": "1",
        "silicon": SILICON,
        "kind": "incorrect",
        "reason": "dq is wrong by 0.31",
        "title": "dense Ω",
    }
    return Entry(**(values | changes))


def path_of(folder: Path) -> Path:
    (path,) = place_of(folder, SILICON).glob("*.json")
    return path


def path_of_new(folder: Path, suffix: str) -> Path:
    return place_of(folder, SILICON) / f"{files.digest(*entry().key)}{suffix}"


def abandon(folder: Path, at: datetime, where: str = SILICON, **changes: Any) -> Path:
    """Leave the marker of a process that died in a trial begun at `at`."""
    values: dict[str, Any] = {"backend": "made_up", "version": "1", "title": "x", **changes}
    trial = Trial(began=at.timestamp(), **values)
    path = place_of(folder, where) / f"{secrets.token_hex(8)}.mark"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(files.encode_checked(trial))
    return path


def blamed(quarantined: Quarantine) -> list[str]:
    """The backends with a quarantine or a strike."""
    return [each.backend for each in (*quarantined.entries(), *quarantined.strikes())]


def markers(folder: Path) -> list[Path]:
    return sorted(place_of(folder, SILICON).glob("*.mark"))


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(folder), SILICON]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, code: str) -> tuple[int, str, str]:
    with start(folder, code) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err
