"""`record`: writes the problems of a real run to a file, one JSON object per line, for `profile` to measure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from attn_dispatch.decisions.call import observing
from attn_dispatch.spec.problem import Problem


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Append every distinct problem of `attend` calls inside the block to a file, as they occur.

    Args:
        path: a JSON Lines file, created if missing; `profile` and `attn-dispatch profile --from` read it.
    """
    written: set[Problem] = set()
    with open(path, "a", encoding="utf-8") as file:

        def note(problem: Problem) -> None:
            if problem not in written:
                written.add(problem)
                file.write(json.dumps(problem.to_dict()) + "\n")
                file.flush()  # so that a crashed run leaves its problems

        with observing(note):
            yield
