"""The problems that a real run meets, one JSON object per line: what `profile` can then settle beforehand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from attn_dispatch.dispatch import observing
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import Problem


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Append every distinct problem that `attend` meets inside the block to a file, as it is met.

    Args:
        path: a JSON Lines file; made if it is not there. `profile` and `attn-dispatch profile --from` take it.
    """
    seen: set[Problem] = set()
    with open(path, "a", encoding="utf-8") as file:

        def note(problem: Problem) -> None:
            if problem not in seen:
                seen.add(problem)
                file.write(json.dumps(problem.to_dict()) + "\n")
                file.flush()  # a run that dies has still told what it met

        with observing(note):
            yield


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
