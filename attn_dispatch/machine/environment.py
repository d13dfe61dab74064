"""A fingerprint of the installed software, by which a stored decision is used without loading backends for versions.

It covers the installed versions of the libraries that built-in backends run, which no folder's time need show, the
code that this package compiles, and the modification times of the folders that packages are installed into and of the
compiler. Where it is equal, no version has changed; where it differs, the backends' versions are compared.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache

from attn_dispatch.machine.compiler import compiler
from attn_dispatch.settings import FLASH_KERNEL

VARIABLES = ("TRITON_INTERPRET", "CXX", "CUDA_HOME", FLASH_KERNEL)  #: that versions and refusals depend on
PLACES = ("site-packages", "dist-packages")  #: names of the folders that packages are installed into
#: What built-in backends run, besides PyTorch; its version is known without a look at the disk.
FLASH = ("flash-attn", "flash_attn_3", "flash-attn-4")
LIBRARIES = ("triton", *FLASH, "xformers", "mslk", "mslk-cuda", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def environment(versions: Mapping[str, str | None]) -> str:
    """Compute the fingerprint: 16 hexadecimal digits.

    Args:
        versions: by name, of what is in this process alone: PyTorch, and backends that were registered in it.
    """
    variables = [os.environ.get(name) for name in VARIABLES]
    text = repr((_installed(os.environ.get("CXX"), tuple(sys.path)), variables, sorted(versions.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def installed(distribution: str) -> str | None:
    """The installed version, with the commit if it was built from a repository; None: it is not installed."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    return f"{found.version} @ {commit[:12]}" if commit else found.version


@cache
def _installed(_cxx: str | None, search: tuple[str, ...]) -> tuple[object, ...]:
    own = os.path.dirname(os.path.dirname(__file__))
    # Not in `own` where git has made no link of it, as on Windows.
    backends = importlib.import_module("attn_dispatch.backends").__path__[0]
    # Not all of sys.path: it includes the script's own folder, which changes for any reason.
    folders = [folder for folder in search if os.path.basename(os.path.normpath(folder)) in PLACES]
    with suppress(ImportError):  # there is no compiler
        folders += map(os.path.realpath, compiler())
    libraries = tuple(map(installed, LIBRARIES))
    return sys.version, libraries, tuple(map(_stamp, folders)), tuple(_own_files(own, backends))


def _own_files(own: str, backends: str) -> Iterator[object]:
    """The names of the backends' files and of compiled libraries, and the code that versions hold a digest of.

    An editable installation changes it in place, and a copy may keep its times.
    """
    yield from sorted(os.listdir(backends))
    native = [("native", (".cpp", "variants.py")), ("native/attention", (".h",)), ("native/attention/arm", (".h",))]
    for folder, ends in (("triton", (".py",)), *native):
        path = os.path.join(own, "kernels", folder)
        for name in sorted(os.listdir(path)):
            if name.endswith(ends):
                with open(os.path.join(path, name), "rb") as file:
                    yield name, hashlib.sha256(file.read()).hexdigest()
            elif name.endswith(".so"):
                yield name


def _stamp(path: str) -> object:
    try:
        about = os.stat(path)
    except OSError:
        return path, None
    return path, about.st_mtime_ns, about.st_size
