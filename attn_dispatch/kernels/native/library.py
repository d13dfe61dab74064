"""Compiles attention.cpp once for this processor, and loads it.

The library is in the user's cache folder; its name holds a digest of everything that it is built from. A file that
another user could have written is not loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path

import platformdirs

from attn_dispatch.errors import BackendFailed
from attn_dispatch.log import logger
from attn_dispatch.machine.compiler import compiler

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

CPU_FIELDS = ("model name", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
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
    """The struct `Args` of attention.cpp, field by field."""

    _fields_ = (
        *((name, View) for name in ("q", "k", "v", "out", "grad", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("lse", "grad_lse", "tiles", "runs", "first_tile", "head_class")),
        *((name, ctypes.c_void_p) for name in ("seen", "seq_lens", "order", "listed", "lanes")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "group", "q_len", "k_len", "head_dim", "dtype")),
        *((name, ctypes.c_int64) for name in ("threads", "parts", "part_stride")),
        ("scale", ctypes.c_double),
    )


@cache
def build_digest() -> str:
    """Digest of source, flags, compiler and processor. Raises ImportError without a compiler."""
    cxx = compiler()
    made = Path(cxx.program).resolve()
    about = made.stat()
    parts = (source(), *FLAGS, *cxx.command, str(made), str(about.st_size), str(about.st_mtime_ns), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _processor() -> str:
    """Text with everything that -march=native may depend on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.split(":")[0].strip() in CPU_FIELDS)
    return platform.machine()


def source() -> str:
    return (files("attn_dispatch.kernels.native") / "attention.cpp").read_text(encoding="utf-8")


def load() -> ctypes.CDLL:
    """The library, compiled first if necessary.

    Raises:
        BackendFailed: it cannot be compiled or loaded; the message ends with the compiler's errors.
    """
    return _loaded()


@cache
def _loaded() -> ctypes.CDLL:
    path = _path()
    if not _trusted(path):
        logger.info("compiling %s with %s, once on this machine", path.name, " ".join(compiler().command))
        path = _build(path)
    try:
        # It resolves to the OpenMP library of PyTorch: two thread pools would compete for the cores.
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendFailed(f"native: cannot load {path}: {error}") from error


def _path() -> Path:
    try:
        folder = platformdirs.user_cache_path("attn-dispatch", appauthor=False)
    except RuntimeError:  # no home folder
        folder = _own_folder()
    return folder / "native" / f"attention-{build_digest()}.so"


@cache
def _own_folder() -> Path:
    """A folder of this process, removed at exit."""
    folder = tempfile.mkdtemp(prefix="attn-dispatch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _trusted(path: Path) -> bool:
    """Whether only this user can have written the file."""
    return _ours(path) and _ours(path.parent)


def _ours(place: Path) -> bool:
    try:
        about = os.lstat(place)
    except OSError:
        return False
    return about.st_uid == os.geteuid() and not about.st_mode & OTHERS_WRITE


def _build(path: Path) -> Path:
    """Compile to `path`, or to a folder of this process if `path` is not writable, or writable by others."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _ours(path.parent):
            raise PermissionError(f"{path.parent} is open to others")
        folder = tempfile.mkdtemp(dir=path.parent, prefix="building-")
    except OSError:
        path = _own_folder() / path.name
        folder = tempfile.mkdtemp(dir=path.parent)
    try:
        os.replace(_compile(Path(folder)), path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _compile(folder: Path) -> Path:
    cxx = compiler().command
    code, compiled, library = folder / "attention.cpp", folder / "attention.o", folder / "attention.so"
    code.write_text(source(), encoding="utf-8")
    _call(*cxx, *FLAGS, "-c", str(code), "-o", str(compiled))
    # No -fopenmp here: the symbols resolve to the OpenMP library that PyTorch has loaded.
    _call(*cxx, "-shared", str(compiled), "-o", str(library))
    library.chmod(0o700)
    return library


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise BackendFailed(f"native: {command[0]} failed: {' '.join(lines)[:500]}")
