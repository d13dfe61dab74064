"""The problems that could not be measured when they were met, one JSON object per line; `profile --from` takes them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from attn_dispatch import process_state
from attn_dispatch.errors import InvalidInput
from attn_dispatch.log import say_once
from attn_dispatch.settings import NOWHERE
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import files

MISSED = "missed.jsonl"
MOST = 1 << 20  #: bytes; past this the older half goes

_noted: set[tuple[Path, bytes]] = set()
process_state.register(process_state.READ, _noted.clear)


def note_missed(folder: Path, problem: dict[str, Any]) -> None:
    """Append a problem to the folder's file, once in a process."""
    line = msgspec.json.encode(problem) + b"\n"
    mark = folder, hashlib.sha256(line).digest()
    if mark in _noted or folder == NOWHERE:
        return
    path = folder / MISSED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.locked(folder):
            if files.append(path, line) > MOST:
                files.write(path, _newer_half(path))
    except OSError as error:
        say_once(f"misses are not noted: {folder} cannot be written ({error.strerror or error})")
        return
    _noted.add(mark)


def _newer_half(path: Path) -> bytes:
    """The last lines that together hold no more than half of the bound."""
    return files.tail(path, MOST // 2).partition(b"\n")[2]


def read_record(path: str | os.PathLike[str], device: torch.device | str | None = None) -> list[Problem]:
    """The distinct problems of a file that `record` wrote, in order.

    Args:
        device: where to measure them; by default the kind of device they were met on.

    Raises:
        InvalidInput: a line is not a problem; the message names it.
    """
    return parse_record(Path(path).read_text(encoding="utf-8"), path, device)


def parse_record(text: str, path: str | os.PathLike[str], device: torch.device | str | None = None) -> list[Problem]:
    """`read_record` of what a file holds."""
    found: dict[Problem, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found[Problem.from_dict(json.loads(line), device)] = None
        except (json.JSONDecodeError, RecursionError, InvalidInput) as error:
            raise InvalidInput(f"{path}, line {number}: {error}") from error
    return list(found)
