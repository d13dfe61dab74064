"""The C++ compiler for kernels: $CXX, split as a shell would split it, else g++."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from functools import lru_cache
from typing import NamedTuple

DEFAULT = "g++"


class Compiler(NamedTuple):
    """A compiler command in parts, such as `ccache g++ -m64`; programs are paths found on the PATH.

    `launchers` are programs that start the compiler, such as ccache; `program` is the compiler itself.
    """

    launchers: tuple[str, ...]
    program: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command line, one word each."""
        return [*self.launchers, self.program, *self.arguments]


def compiler() -> Compiler:
    """Find the C++ compiler of this process's environment, without running it.

    Raises:
        ImportError: there is no such program; the message names the missing program or the fault in $CXX.
    """
    return _found(os.environ.get("CXX"), tuple(os.get_exec_path()))


@lru_cache(maxsize=16)
def _found(setting: str | None, _folders: tuple[str, ...]) -> Compiler:  # kept: every new problem asks
    return parsed(setting)


def parsed(setting: str | None) -> Compiler:
    """Find the compiler for a value of $CXX; None or blank means g++. Raises as `compiler` does."""
    try:
        words = shlex.split(setting or "") or [DEFAULT]
    except ValueError as error:
        raise ImportError(f"$CXX is {setting!r}, which is no command: {error}") from error
    # Programs stand before the first option or variable: a compiler alone, or behind launchers.
    count = next((i for i, word in enumerate(words) if re.match(r"-|[A-Za-z_]\w*=", word)), len(words))
    programs = []
    for name in words[:count]:
        path = shutil.which(name)
        if path is None:
            raise ImportError(f"{name} is not on the PATH, and $CXX is {repr(setting) if setting else 'not set'}")
        programs.append(path)
    if not programs:
        raise ImportError(f"$CXX is {setting!r}, which starts with no program")
    return Compiler(tuple(programs[:-1]), programs[-1], tuple(words[count:]))
