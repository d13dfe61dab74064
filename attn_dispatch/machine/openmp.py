"""The OpenMP library that PyTorch has loaded. Others use it too: two pools of threads would compete for the cores."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

NEEDED = "omp_get_max_threads"
LOADED = getattr(os, "RTLD_NOLOAD", 0)  #: a library that is not loaded yet is left alone
#: Where PyTorch brings none of its own, as in Conda's and Debian's builds.
SHARED = ("libgomp.so.1", "libomp.so", "libomp.so.5", "libiomp5.so", "libomp.dylib")


@cache
def openmp() -> ctypes.CDLL | None:
    """The library, with its names visible to all that is loaded after this call; None where PyTorch has none.

    x86-64 builds of PyTorch load it for everyone, aarch64 ones for themselves alone.
    """
    for name in _names():
        with suppress(OSError, TypeError):  # Windows has no global scope
            found = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL | LOADED)
            if hasattr(found, NEEDED):
                return found
    return None


def _names() -> Iterator[str | None]:
    """None stands for what everyone sees."""
    import torch

    yield None
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.with_name("torch.libs")):
        yield from (str(path) for path in sorted(folder.glob("lib*omp*")))
    yield from SHARED
