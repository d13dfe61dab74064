"""The C++ compiler for kernels: $CXX, split as a shell would split it, else g++."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from functools import lru_cache


def compiler() -> tuple[str, ...]:
    """The command of this process's C++ compiler, one word each, such as `ccache g++ -m64`; it is not run.

    Its programs, the words before the first option or variable, are paths found on the PATH.

    Raises:
        ImportError: there is no such program; the message names the missing program or the fault in $CXX.
    """
    return _found(os.environ.get("CXX"), tuple(os.get_exec_path()))


@lru_cache(maxsize=16)
def _found(setting: str | None, _folders: tuple[str, ...]) -> tuple[str, ...]:  # kept: every new problem asks
    try:
        words = shlex.split(setting or "") or ["g++"]
    except ValueError as error:
        raise ImportError(f"$CXX is {setting!r}, which is no command: {error}") from error
    count = next((i for i, word in enumerate(words) if re.match(r"-|[A-Za-z_]\w*=", word)), len(words))
    if not count:
        raise ImportError(f"$CXX is {setting!r}, which starts with no program")
    for at, name in enumerate(words[:count]):
        path = shutil.which(name)
        if path is None:
            raise ImportError(f"{name} is not on the PATH, and $CXX is {repr(setting) if setting else 'not set'}")
        words[at] = path
    return tuple(words)
