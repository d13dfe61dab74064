"""The C++ compiler that kernels are built with: $CXX as a shell would split it, else g++."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import NamedTuple

DEFAULT = "g++"


class Compiler(NamedTuple):
    """A command in parts, such as `ccache g++ -m64`. Paths are those that the PATH leads to.

    `launchers` are programs that start the compiler, such as ccache; `program` is the compiler itself.
    """

    launchers: tuple[str, ...]
    program: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The words to run."""
        return [*self.launchers, self.program, *self.arguments]


def compiler() -> Compiler:
    """The C++ compiler of this process's environment; nothing is run.

    Raises:
        ImportError: there is none that can be run; the message names the program that is missing, or what is wrong
            with $CXX.
    """
    return parsed(os.environ.get("CXX"))


def parsed(setting: str | None) -> Compiler:
    """The compiler that a value of $CXX names; None or a blank one is g++. Raises as `compiler`."""
    try:
        words = shlex.split(setting or "") or [DEFAULT]
    except ValueError as error:
        raise ImportError(f"$CXX is {setting!r}, which is no command: {error}") from error
    # Programs stand before the first option or variable: a compiler alone, or behind launchers.
    count = next((i for i, word in enumerate(words) if word.startswith("-") or "=" in word), len(words))
    programs = []
    for name in words[:count]:
        path = shutil.which(name)
        if path is None:
            raise ImportError(f"{name} is not on the PATH, and $CXX is {repr(setting) if setting else 'not set'}")
        programs.append(path)
    if not programs:
        raise ImportError(f"$CXX is {setting!r}, which starts with no program")
    return Compiler(tuple(programs[:-1]), programs[-1], tuple(words[count:]))
