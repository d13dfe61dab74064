"""Compiles attention.cpp once for this processor, or finds a library that the wheel carries, and loads it.

A compiled library is in the user's cache folder; its name holds a digest of everything that it is built from. A file
that another user could have written is not loaded.
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
from pathlib import Path
from typing import NamedTuple

import platformdirs

from attn_dispatch.errors import BackendFailed
from attn_dispatch.kernels.native.variants import FLAGS, LINK_FLAGS, SOURCE, VARIANTS, build, source_text
from attn_dispatch.log import logger
from attn_dispatch.machine.compiler import compiler

OPTIONS = ("-march=native",)
FOLDER = SOURCE.parent  #: where a wheel has its compiled libraries
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
        ("sums", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("lse", "grad_lse", "tiles", "runs", "first_tile", "head_class")),
        *((name, ctypes.c_void_p) for name in ("seen", "seq_lens", "order", "listed", "lanes", "run_lanes")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "group", "q_len", "k_len", "head_dim", "dtype")),
        *((name, ctypes.c_int64) for name in ("threads", "parts", "part_stride", "first_key", "last_key")),
        *((name, ctypes.c_int64) for name in ("packed_heads", "together", "splits")),
        ("states", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ("slopes", "bias", "dbias")),
        *((name, ctypes.c_int64) for name in ("slopes_batch", "bias_batch", "bias_head", "bias_row", "bias_key")),
    )


@cache
def build_digest() -> str:
    """Digest of source, flags, compiler and processor. Raises ImportError without a compiler."""
    cxx = compiler()
    made = Path(cxx.program).resolve()
    about = made.stat()
    program = (str(made), str(about.st_size), str(about.st_mtime_ns))
    parts = (source_text().decode(), *FLAGS, *LINK_FLAGS, *OPTIONS, *cxx.command, *program, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _processor() -> str:
    """Text with everything that -march=native may depend on."""
    return "\n".join(_cpu_lines()) or platform.machine()


def _cpu_lines() -> list[str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return [line for line in lines if line.split(":")[0].strip() in CPU_FIELDS]
    return []


def cpu_flags() -> frozenset[str]:
    """The processor's flags in /proc/cpuinfo, which the system supports too; empty where it is not an x86 processor."""
    return frozenset(
        word for line in _cpu_lines() if line.startswith("flags") for word in line.partition(":")[2].split()
    )


class Prebuilt(NamedTuple):
    """A library that the wheel carries, and the name of its variant."""

    name: str
    path: Path

    @property
    def version(self) -> str:
        return f"{self.name} {_digest_of(self.path)}"


@cache
def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


@cache
def prebuilt() -> Prebuilt:
    """The fastest library in the package that this processor can run.

    Raises:
        ImportError: there is none; the message says why.
    """
    there = [variant for variant in VARIANTS if (FOLDER / variant.file).exists()]
    flags = cpu_flags()
    for variant in there:
        if variant.needs <= flags:
            return Prebuilt(variant.name, FOLDER / variant.file)
    if there:
        missing = ", ".join(sorted(there[-1].needs - flags))
        raise ImportError(f"the package's compiled libraries need a processor with {missing}")
    raise ImportError("this installation has no compiled library; a wheel built for Linux on x86-64 has some")


def used_prebuilt() -> Prebuilt | None:
    """The library of the package if it is used: where there is no compiler. None: the kernel is compiled here.

    Raises:
        ImportError: there is neither; the message says what would help.
    """
    try:
        compiler()
    except ImportError as error:
        try:
            return prebuilt()
        except ImportError as why:
            raise ImportError(f"needs a C++ compiler: {error}; {why}") from error
    return None


def version() -> str:
    """The compiler's name, or that of the library in the package, and a digest of what it was built from.

    Raises:
        ImportError: there is neither.
    """
    found = used_prebuilt()
    return f"{Path(compiler().program).name} {build_digest()}" if found is None else found.version


def is_compiled() -> bool:
    """Whether `load` compiles nothing. Raises ImportError: there is no compiler, and no library in the package."""
    return used_prebuilt() is not None or _trusted(_path())


def in_use() -> str:
    """Say which code runs, and what a compiler would gain; tools/bench/prebuilt.py measures that."""
    try:
        found = used_prebuilt()
    except ImportError:
        return "neither a C++ compiler nor a compiled library for this processor"
    if found is None:
        return f"compiled for this processor by {compiler().program}"
    gain = "not measured for this level" if found.name == VARIANTS[-1].name else "4 % or less, where that was measured"
    return f"the package's library for {found.name}; what a C++ compiler on the PATH would gain: {gain}"


def load() -> ctypes.CDLL:
    """The library, compiled first if necessary.

    Raises:
        BackendFailed: it cannot be compiled or loaded; the message ends with the compiler's errors.
        ImportError: there is no compiler, and no library in the package.
    """
    return _loaded()


@cache
def _loaded() -> ctypes.CDLL:
    found = used_prebuilt()
    path = _compiled() if found is None else found.path
    try:
        # It resolves to the OpenMP library of PyTorch: two thread pools would compete for the cores.
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendFailed(f"native: cannot load {path}: {error}") from error


def _compiled() -> Path:
    path = _path()
    if not _trusted(path):
        logger.info("compiling %s with %s, once on this machine", path.name, " ".join(compiler().command))
        path = _build(path)
    return path


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
    library = folder / "attention.so"
    try:
        build(cxx, OPTIONS, library)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()[-1:]
        raise BackendFailed(f"native: {cxx[0]} failed: {' '.join(lines)[:500]}") from error
    library.chmod(0o700)
    return library
