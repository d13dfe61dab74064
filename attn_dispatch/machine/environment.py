"""A fingerprint of the installed software, by which a stored decision is used without loading backends for versions.

It covers the modification times of the folders that packages are installed into, of this package's own backends and of
the compiler. Where it is equal, no version has changed; where it differs, the backends' versions are compared.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache

from attn_dispatch.machine.compiler import parsed

VARIABLES = ("TRITON_INTERPRET", "CXX", "CUDA_HOME")  #: variables that backends' versions and refusals depend on
PLACES = ("site-packages", "dist-packages")  #: names of the folders that packages are installed into


def environment(registered: Mapping[str, str | None]) -> str:
    """Compute the fingerprint: 16 hexadecimal digits.

    Args:
        registered: versions by name of the backends registered in this process, which no folder shows.
    """
    variables = [os.environ.get(name) for name in VARIABLES]
    text = repr((_installed(os.environ.get("CXX"), tuple(sys.path)), variables, sorted(registered.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _installed(compiler: str | None, search: tuple[str, ...]) -> tuple[object, ...]:
    own = os.path.dirname(os.path.dirname(__file__))
    # Not all of sys.path: it includes the script's own folder, which changes for any reason.
    folders = [folder for folder in search if os.path.basename(os.path.normpath(folder)) in PLACES]
    try:
        found = parsed(compiler).program
    except ImportError:
        found = ""
    return sys.version, tuple(map(_stamp, folders)), tuple(_own_files(own)), _stamp(os.path.realpath(found))


def _own_files(own: str) -> Iterator[object]:
    """The names of the backends' files, and the state of the files that native's version depends on.

    An editable installation changes those in place, which no folder's time shows.
    """
    yield from sorted(os.listdir(os.path.join(own, "backends")))
    native = os.path.join(own, "kernels", "native")
    for folder in (native, os.path.join(native, "attention")):
        for name in sorted(os.listdir(folder)):
            if name.endswith((".cpp", ".h", ".so")) or name == "variants.py":
                yield _stamp(os.path.join(folder, name))


def _stamp(path: str) -> object:
    try:
        about = os.stat(path)
    except OSError:
        return path, None
    return path, about.st_mtime_ns, about.st_size
