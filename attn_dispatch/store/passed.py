"""Files of lines: checks that this machine passed, so that none is repeated, and problems that were not measured.

    <cache folder>/passed/<silicon>.txt    a digest of all that a check depends on, such as versions
    <cache folder>/missed.jsonl            a problem as JSON; `attn-dispatch profile --from` measures them

Lines are appended; past `MOST` bytes the older half goes. A damaged or missing line costs a repeated check, or one
problem, nothing else.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from attn_dispatch import process_state
from attn_dispatch.store import files
from attn_dispatch.store.address import fingerprint
from attn_dispatch.store.decision import Decision

MOST = 1 << 20  #: bytes of one file
MISSED = "missed.jsonl"
MAX_NOTED = 4096  #: problems of a process that are known to be in the file; past this some may enter it twice


def has_passed(folder: Path, silicon: str, check: str) -> bool:
    """Whether the check with these digits was passed on this machine. The file is read once in a process."""
    return check in _known(_path(folder, silicon))


def note_passed(folder: Path, silicon: str, check: str) -> None:
    """Remember a passed check; in this process only, logged once, where the folder cannot be written."""
    path = _path(folder, silicon)
    if check not in _known(path):
        _known(path).add(check)
        try:
            files.append_bounded(folder, path, check.encode() + b"\n", MOST)
        except OSError as error:
            files.say_unwritten("passed checks are not remembered", path.parent, error)


def is_confirmed(folder: Path, decision: Decision, *version: str | None) -> bool:
    """Whether another machine's choice was checked here: in this version of its backend, if one is given."""
    return has_passed(folder, decision.silicon, _digest(decision, *version))


def note_confirmed(folder: Path, decision: Decision, version: str | None) -> None:
    """Remember that another machine's choice was checked here, as `note_passed` does."""
    for found in (_digest(decision), _digest(decision, version)):
        note_passed(folder, decision.silicon, found)


def _digest(decision: Decision, *version: str | None) -> str:
    """Twenty digits for a choice: its problem, its candidate, when it was made, and the version that was checked."""
    return files.digest(decision.key, *decision.chosen, *version, decision.created)


def _path(folder: Path, silicon: str) -> Path:
    return folder / "passed" / f"{fingerprint(silicon)}.txt"


@cache
def _known(path: Path) -> set[str]:
    try:
        # Longer than MOST, since several processes may append before one shortens it.
        return set(files.read(path, 4 * MOST).decode(errors="replace").split())
    except OSError:
        return set()


def note_missed(folder: Path, problem: dict[str, Any]) -> None:
    """Append a problem to the folder's file of missed problems, as a rule once in a process."""
    _append(folder, msgspec.json.encode(problem) + b"\n")


@lru_cache(MAX_NOTED)
def _append(folder: Path, line: bytes) -> None:
    try:
        files.append_bounded(folder, folder / MISSED, line, MOST)
    except OSError as error:
        files.say_unwritten("misses are not recorded", folder, error)


process_state.register(process_state.READ, _known.cache_clear, _append.cache_clear)
