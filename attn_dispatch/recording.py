"""The problems that a real run meets, one JSON object per line: what `profile` can then settle beforehand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from attn_dispatch.decisions.observers import observing
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
