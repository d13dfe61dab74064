"""Compiles attention.cpp once for this processor, or finds a library that the wheel carries, and loads it.

The name of what is compiled holds digests of the source and of the processor; it is kept as code_folder.py says.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attn_dispatch import process_state
from attn_dispatch.errors import BackendFailed, NotDecided
from attn_dispatch.kernels.device_cache import refuse_compiling
from attn_dispatch.kernels.native.variants import NATIVE, SOURCE, VARIANTS, build, digest
from attn_dispatch.log import logger, say_once
from attn_dispatch.machine import code_folder
from attn_dispatch.machine.compiler import compiler
from attn_dispatch.machine.hardware import cpuinfo
from attn_dispatch.machine.openmp import openmp
from attn_dispatch.settings import mode

OPTIONS = (NATIVE,)
FOLDER = SOURCE.parent  #: where a wheel has its compiled libraries
#: Of /proc/cpuinfo, all that `OPTIONS` may depend on.
CPU_FIELDS = ("model name", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
NAME = "native"  #: of the folders with what is compiled
#: What attention.cpp needs: headers, and a function of PyTorch's OpenMP library.
FEW_LINES = """#include <cmath>
#include <cstring>
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" void call(void (*work)(void*)) { GOMP_parallel(work, nullptr, 1, 0); }
"""

_failed: dict[tuple[str, ...], str] = {}  # compilers that failed in this process, and why
_unloadable: dict[Path, str] = {}  # libraries, and why
_building = process_state.lock()
process_state.register(process_state.FACTS, _failed.clear, _unloadable.clear)


class View(ctypes.Structure):
    """A [batch, len, heads, head_dim] tensor: address and strides in elements; rows are dense."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "row", "head")))


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
        *((name, ctypes.c_int64) for name in ("more_keys", "dropped", "first_row", "seed", "invariant")),
    )


def cpu_flags() -> frozenset[str]:
    """The processor's flags in /proc/cpuinfo, which the system supports too; empty on macOS, which has no such file."""
    fields = cpuinfo()
    return frozenset(fields.get("flags", fields.get("Features", "")).split())


class Prebuilt(NamedTuple):
    """A library that the wheel carries, and the name of its variant."""

    name: str
    path: Path


@cache
def prebuilt() -> Prebuilt:
    """The fastest library in the package that this processor can run.

    Raises:
        ImportError: there is none; the message says why.
    """
    files = {variant: FOLDER / variant.file for variant in VARIANTS}
    there = [variant for variant, path in files.items() if path.exists() and path not in _unloadable]
    flags = cpu_flags()
    for variant in there:
        if variant.needs <= flags:
            return Prebuilt(variant.name, files[variant])
    if there:
        missing = ", ".join(sorted(there[-1].needs - flags))
        raise ImportError(f"the package's compiled libraries need a processor with {missing}")
    raise ImportError("this installation has no compiled library; wheels for Linux and macOS (arm64) have some")


def used_prebuilt() -> Prebuilt | None:
    """The library of the package if it is used: where nothing is compiled here, nor can be. None: what is compiled is.

    Raises:
        ImportError: there is neither; the message says what would help.
    """
    if sys.platform == "win32":
        raise ImportError("native is built for Linux and macOS")
    try:
        _working_compiler()
    except ImportError as error:
        if _found() is not None:
            return None
        try:
            return prebuilt()
        except ImportError as why:
            raise ImportError("; ".join((f"needs a C++ compiler: {error}", str(why), *_unloadable.values()))) from error
    return None


def _working_compiler() -> tuple[str, ...]:
    """Raises ImportError: there is none, or it failed before in this process."""
    found = compiler()
    if found in _failed:
        raise ImportError(_failed[found])
    return found


def version() -> str:
    """The processor's level, and a digest of the source: decisions hold for whatever compiler built it.

    Raises:
        ImportError: it cannot run here.
    """
    found = used_prebuilt()
    return f"{_level() if found is None else found.name} {_source_digest()}"


@cache
def _source_digest() -> str:
    return digest()


def _level() -> str:
    """The variant for this processor, of which what is compiled here has the code paths."""
    flags = cpu_flags()
    return next((variant.name for variant in VARIANTS if variant.needs <= flags), platform.machine())


def is_compiled() -> bool:
    """Whether `load` compiles nothing. Raises ImportError: there is no compiler, and no library."""
    return used_prebuilt() is not None or _found() is not None or _loaded.cache_info().currsize > 0


def in_use() -> str:
    """Say which code runs, and what a compiler would gain (docs/results/studies.md)."""
    try:
        found = used_prebuilt()
    except ImportError as error:
        return f"no library for this processor: {error}"
    if found is None and (there := _found()) is not None:
        return f"compiled for this processor: {there}"
    if found is None:
        return f"to be compiled for this processor by {' '.join(compiler())}, in up to a minute"
    measured = found.name in ("x86-64-v4", "x86-64-v4+avx512bf16")
    gain = "4 % or less, where that was measured" if measured else "not measured for this level"
    return f"the package's library for {found.name}; what a C++ compiler would gain: {gain}"


def load() -> ctypes.CDLL:
    """The library, compiled first if necessary.

    Raises:
        BackendFailed: it cannot be compiled or loaded; the message ends with the compiler's errors.
        ImportError: it cannot run here.
    """
    return _loaded()


@cache
def _loaded() -> ctypes.CDLL:
    with _building:  # another thread that compiles is waited for
        while True:
            path = _library()
            try:
                return _opened(path)
            except OSError as error:
                _unloadable[path] = f"cannot load {path}: {error}"
                if path.parent == FOLDER:
                    prebuilt.cache_clear()
                    say_once(f"native: {_unloadable[path]}")
                # Else it was built for another system: it is built again, if it can be.


def _opened(path: Path) -> ctypes.CDLL:
    openmp()  # whose functions the library calls
    return ctypes.CDLL(str(path))


def _library() -> Path:
    found = used_prebuilt()
    there = _found() if found is None else found.path
    if there is not None:
        return there
    try:
        return _build()
    except (BackendFailed, NotDecided) as error:
        with suppress(ImportError):
            path = prebuilt().path
            logger.warning("%s; the package's library runs instead", error)
            return path
        say_once(f"{error}; other backends run instead")
        raise


@cache
def _file() -> str:
    """The name of what is compiled here, which any compiler may have built."""
    known = "\n".join(f"{name}: {text}" for name, text in cpuinfo().items() if name in CPU_FIELDS)
    processor = hashlib.sha256((known or platform.machine()).encode()).hexdigest()[:8]
    return f"attention-{digest(OPTIONS)}-{processor}.so"


def _found() -> Path | None:
    """What was compiled for this processor, if no other user can have written it."""
    return next((folder / _file() for folder in code_folder.folders(NAME) if _is_in(folder)), None)


def _is_in(folder: Path) -> bool:
    path = folder / _file()
    return path not in _unloadable and code_folder.is_trusted(path) and code_folder.is_trusted(folder)


def keep() -> None:
    """Copy what was compiled beside the decisions, with which it can go to other machines, or from there."""
    found = _found()
    for folder in code_folder.folders(NAME):
        if found is not None and not _is_in(folder) and code_folder.is_writable(folder):
            with suppress(OSError), tempfile.TemporaryDirectory(dir=folder, prefix="copying-") as made:
                os.replace(shutil.copy(found, made), folder / _file())


def check() -> None:
    """Load the library, or what is compiled of a few lines where it is yet to be compiled: a failure is remembered."""
    with suppress(ImportError, BackendFailed, OSError), tempfile.TemporaryDirectory(prefix="attn-dispatch-") as folder:
        if is_compiled():
            load()
        else:
            source = Path(folder) / "few.cpp"
            source.write_text(FEW_LINES)
            _compile(Path(folder), source)


@cache
def _own_folder() -> Path:
    """A folder of this process, removed at exit."""
    folder = tempfile.mkdtemp(prefix="attn-dispatch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _build() -> Path:
    """Compile into the first folder that this user alone can write to, or into one of this process."""
    refuse_compiling(f"{_file()} of native")
    say = logger.warning if mode() == "locked" else logger.info  # a server's first request waits for it
    say("compiling %s with %s, once on this machine", _file(), " ".join(compiler()))
    folder = code_folder.writable(NAME) or _own_folder()
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as made:
        os.replace(_compile(Path(made)), folder / _file())
    return folder / _file()


def _compile(folder: Path, source: Path = SOURCE) -> Path:
    """A library that can be loaded."""
    cxx, library = compiler(), folder / "attention.so"
    try:
        build(cxx, OPTIONS, library, source)
        library.chmod(0o755)
        _opened(library)
    except (subprocess.CalledProcessError, OSError) as error:
        lines = str(getattr(error, "stderr", error)).splitlines() or [str(error)]
        errors = [line for line in lines if "error" in line] or lines[-1:]
        _failed[cxx] = f"{cxx[0]} failed: {' '.join(errors)[:500]}"
        raise BackendFailed(f"native: {_failed[cxx]}") from error
    return library
