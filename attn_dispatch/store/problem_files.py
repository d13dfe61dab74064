"""Files of problems, one JSON object per line: those that could not be measured when first called, and recorded ones.

`attn-dispatch profile --from` measures them.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from attn_dispatch import process_state
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import files
from attn_dispatch.store.decision import Amount, Count

MISSED = "missed.jsonl"
USES = ("calls", "seconds")  #: fields of a line beside the problem's
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


class Use(msgspec.Struct, frozen=True):
    """How often a recorded problem was called, and the seconds that its calls took; 0 where a file has no counts."""

    calls: Count = 0
    seconds: Amount = 0.0


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
            plain = msgspec.json.decode(line)
            use = msgspec.convert(plain, Use)
            problem = Problem.from_dict({name: plain[name] for name in plain if name not in USES}, device)
        except (msgspec.MsgspecError, RecursionError, InvalidInput) as error:
            cut = isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError)
            why = f"not JSON ({error}); if a run was cut off there, delete the line" if cut else str(error)
            raise InvalidInput(f"{path}, line {number}: {why}") from error
        before = found.get(problem, Use())
        found[problem] = Use(before.calls + use.calls, before.seconds + use.seconds)
    return found
