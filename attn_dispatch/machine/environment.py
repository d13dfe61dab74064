"""A fingerprint of what is installed, so that a decision made in the same surroundings is taken without asking every
backend for its version: that would load them all.

It is made of the modification times of the folders that packages are installed into, of this package's own backends,
and of the compiler. Where it is the same, no version has changed; where it differs, the versions are compared.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache

from attn_dispatch.machine.compiler import parsed

VARIABLES = ("TRITON_INTERPRET", "CXX", "CUDA_HOME")  #: that backends' versions and refusals ask for
PLACES = ("site-packages", "dist-packages")  #: names of the folders that packages are installed into


def environment(registered: Mapping[str, str | None]) -> str:
    """16 hexadecimal digits.

    Args:
        registered: versions of the backends that this process registered, which no folder shows.
    """
    variables = [os.environ.get(name) for name in VARIABLES]
    text = repr((_installed(os.environ.get("CXX"), tuple(sys.path)), variables, sorted(registered.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _installed(compiler: str | None, search: tuple[str, ...]) -> tuple[object, ...]:
    own = os.path.dirname(os.path.dirname(__file__))
    # A script's own folder, which is on the path too, changes for any reason.
    folders = [folder for folder in search if os.path.basename(os.path.normpath(folder)) in PLACES]
    try:
        found = parsed(compiler).program
    except ImportError:
        found = ""
    return sys.version, tuple(map(_stamp, folders)), tuple(_own_files(own)), _stamp(os.path.realpath(found))


def _own_files(own: str) -> Iterator[object]:
    """Which backends there are, and the one source that a version depends on: an editable installation changes it in
    place, which no folder's time shows.
    """
    yield from sorted(os.listdir(os.path.join(own, "backends")))
    yield _stamp(os.path.join(own, "kernels", "native", "attention.cpp"))


def _stamp(path: str) -> object:
    try:
        about = os.stat(path)
    except OSError:
        return path, None
    return path, about.st_mtime_ns, about.st_size
