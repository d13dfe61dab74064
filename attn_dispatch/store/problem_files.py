"""Files of problems, one JSON object per line: those that could not be measured when first called, and recorded ones.

`attn-dispatch profile --from` measures them.
"""

from __future__ import annotations

import json
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from attn_dispatch import process_state
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import files

MISSED = "missed.jsonl"
MOST = 1 << 20  #: bytes of the file; past this its older half is removed
MAX_NOTED = 4096  #: problems of a process that are known to be in the file; past this some may enter it twice


def note_missed(folder: Path, problem: dict[str, Any]) -> None:
    """Append a problem to the folder's file of missed problems, as a rule once in a process."""
    _append(folder, msgspec.json.encode(problem) + b"\n")


@lru_cache(MAX_NOTED)
def _append(folder: Path, line: bytes) -> None:
    try:
        files.append_bounded(folder, folder / MISSED, line, MOST)
    except OSError as error:
        files.say_unwritten("misses are not recorded", folder, error)


process_state.register(process_state.READ, _append.cache_clear)


class Use(NamedTuple):
    """How often a recorded problem was called, and the seconds that its calls took; 0 where a file has no counts."""

    calls: int = 0
    seconds: float = 0.0


def read_record(path: str | os.PathLike[str], device: torch.device | str | None = None) -> dict[Problem, Use]:
    """Read the distinct problems of a file that `record` wrote, in order, with the sum of their uses.

    Args:
        device: where to measure them; by default the kind of device they were recorded on.

    Raises:
        InvalidInput: a line is not a problem; the message names it.
    """
    return parse_record(Path(path).read_text(encoding="utf-8"), path, device)


def parse_record(
    text: str, path: str | os.PathLike[str], device: torch.device | str | None = None
) -> dict[Problem, Use]:
    """Parse the text of a recorded file; `path` is for messages. See `read_record`."""
    found: dict[Problem, Use] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            plain = json.loads(line)
            calls, seconds = _taken(plain, "calls", int), _taken(plain, "seconds", float)
            problem = Problem.from_dict(plain, device)
        except json.JSONDecodeError as error:
            why = f"not JSON ({error}); if a run was cut off there, delete the line"
            raise InvalidInput(f"{path}, line {number}: {why}") from error
        except (RecursionError, InvalidInput) as error:
            raise InvalidInput(f"{path}, line {number}: {error}") from error
        before = found.get(problem, Use())
        found[problem] = Use(before.calls + int(calls), before.seconds + seconds)
    return found


def _taken(plain: Any, name: str, kind: type[int] | type[float]) -> float:
    """Take a number >= 0 out of a line, 0 where it has none. Raises InvalidInput for another value."""
    value = plain.pop(name, 0) if isinstance(plain, dict) else 0
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 <= value < math.inf:
        raise InvalidInput(f"{name} must be a number >= 0, got {value!r}")
    return float(value)
