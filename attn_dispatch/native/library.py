"""Compile attention.cpp for this processor, once, and load it.

The library lies in the user's own cache folder under a name that holds everything it was made from. It is code: one
that somebody else could have written is not loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path

import platformdirs

from attn_dispatch.errors import BackendFailed
from attn_dispatch.machine import silicon

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
)
logger = logging.getLogger("attn_dispatch")

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class View(ctypes.Structure):
    """A [batch, len, heads, head_dim] tensor: address and strides in elements; rows are dense."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )


class Args(ctypes.Structure):
    """What attention.cpp calls Args, field by field."""

    _fields_ = (
        *((name, View) for name in ("q", "k", "v", "out", "grad", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("lse", "grad_lse", "tiles", "runs", "first_tile", "head_class")),
        *((name, ctypes.c_void_p) for name in ("seen", "seq_lens")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "group", "q_len", "k_len", "head_dim", "dtype")),
        *((name, ctypes.c_int64) for name in ("threads", "parts", "part_stride")),
        ("scale", ctypes.c_double),
    )


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++; None where there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


@cache
def digest() -> str:
    """What the library is made from: source, flags, compiler and processor."""
    found = compiler()
    if found is None:
        raise ImportError("there is no C++ compiler")
    path = Path(found).resolve()
    made = path.stat()
    parts = (source(), *FLAGS, str(path), str(made.st_size), str(made.st_mtime_ns), silicon("cpu"), platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def source() -> str:
    return (files("attn_dispatch.native") / "attention.cpp").read_text(encoding="utf-8")


def is_built() -> bool:
    """Whether a library that `load` would take is there."""
    return _trusted(_path())


def load() -> ctypes.CDLL:
    """The library, compiled first if need be.

    Raises:
        BackendFailed: it cannot be compiled or loaded; the message ends with what the compiler said.
    """
    return _loaded()


@cache
def _loaded() -> ctypes.CDLL:
    path = _path()
    if not _trusted(path):
        logger.info("compiling %s with %s, once on this machine", path.name, compiler())
        path = _build(path)
    try:
        # Loaded with PyTorch's own OpenMP threads: a second set of them would fight for the cores.
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendFailed(f"native: cannot load {path}: {error}") from error


def _path() -> Path:
    return platformdirs.user_cache_path("attn-dispatch", appauthor=False) / "native" / f"attention-{digest()}.so"


def _trusted(path: Path) -> bool:
    """Whether only this user can have put the file there."""
    try:
        places = [os.lstat(path), os.lstat(path.parent)]
    except OSError:
        return False
    return all(place.st_uid == os.geteuid() and not place.st_mode & OTHERS_WRITE for place in places)


def _build(path: Path) -> Path:
    """Compile to `path`, or to a folder of this process where that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = tempfile.mkdtemp(dir=path.parent, prefix="building-")
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="attn-dispatch-")) / path.name
        folder = tempfile.mkdtemp(dir=path.parent)
    try:
        made = _compile(Path(folder))
        os.replace(made, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not _trusted(path):
        raise BackendFailed(f"native: {path} can be written by other users; a library there is not loaded")
    return path


def _compile(folder: Path) -> Path:
    cxx = compiler()
    assert cxx is not None  # digest() has found one
    code, compiled, library = folder / "attention.cpp", folder / "attention.o", folder / "attention.so"
    code.write_text(source(), encoding="utf-8")
    _call(cxx, *FLAGS, "-c", str(code), "-o", str(compiled))
    # No -fopenmp here: its functions are found in the OpenMP library that PyTorch has loaded.
    _call(cxx, "-shared", str(compiled), "-o", str(library))
    library.chmod(0o700)
    return library


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise BackendFailed(f"native: {' '.join(command[:1])} failed: {' '.join(lines)[:500]}")
