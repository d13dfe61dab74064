"""Files that many processes read and write: whole or not at all, one writer at a time if it can be had, bounded."""

from __future__ import annotations

import errno
import os
import random
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
LOCK_S = 2.0  #: longest wait for another writer
TMP = ".tmp"
STALE_S = 3600.0  #: after which a temporary file has lost its writer
FILLED = 0.9  #: of the bound, after a clean-up


def read(path: str | Path, most: int) -> bytes:
    """The content of a plain file.

    Raises:
        OSError: it cannot be read, is no plain file, or holds more than `most` bytes.
    """
    try:
        return _read(path, most)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return _read(path, most)  # another host has replaced the file between look-up and opening


def tail(path: str | Path, most: int) -> bytes:
    """The last bytes of a plain file, `most` of them. Raises OSError."""
    with _opened(path) as (file, size):
        file.seek(max(0, size - most))
        return file.read(most)


def _read(path: str | Path, most: int) -> bytes:
    with _opened(path) as (file, size):
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, over {most}")
        return file.read()


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file and its size. Raises OSError."""
    # Without O_NONBLOCK a pipe in place of a file would wait for a writer for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            yield file, status.st_size
    finally:
        os.close(handle)


def write(path: Path, content: bytes) -> None:
    """All of it or nothing: readers see the old file or the new one, whenever the writer dies.

    Raises:
        OSError: it could not be written; what was there still is.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=TMP)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are its owner's alone; a cache may be shared
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def append(path: Path, line: bytes) -> int:
    """Write at the end of a file, made where there is none; its size afterwards. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb", buffering=0) as file:
        file.write(line)
        return file.tell()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder; after two seconds, or where locks are not to be had, go on without."""
    handle = _lock(folder)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                os.close(handle)


def _lock(folder: Path) -> int | None:
    if fcntl is None:
        return None
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError:
        return None
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR) or time.monotonic() > end:
                os.close(handle)
                return None
        except BaseException:
            os.close(handle)
            raise
        time.sleep(random.uniform(0.0005, 0.003))  # not all waiters at once


def tidy(root: Path, most: float, keep: Path) -> None:
    """Remove what killed writers left and, past `most` bytes, the files that have not been used for longest.

    Other processes may remove the same ones; a file that is written meanwhile stays, and so does `keep`.
    """
    now, total = time.time(), 0
    found: list[tuple[float, str, os.stat_result]] = []
    for path, seen in _walk(root):
        if path.endswith(TMP) and now - seen.st_mtime > STALE_S:  # a time to come is no age: the clock was set
            _remove(path, seen)
        elif path.endswith(".json"):
            total += seen.st_size
            found.append((seen.st_mtime, path, seen))
    if total > most:
        _shrink([(path, seen) for _, path, seen in sorted(found) if path != str(keep)], total - FILLED * most)


def _shrink(oldest: list[tuple[str, os.stat_result]], excess: float) -> None:
    for path, seen in oldest:
        if excess <= 0:
            return
        with locked(Path(path).parent):
            _remove(path, seen)
        excess -= seen.st_size


def _remove(path: str, seen: os.stat_result) -> None:
    with suppress(OSError):
        if os.stat(path).st_mtime_ns == seen.st_mtime_ns:
            os.unlink(path)


def _walk(root: str | Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every plain file under a folder, links not followed; what cannot be read or has just gone is passed over."""
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        yield from _walk(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        yield entry.path, entry.stat(follow_symlinks=False)
    except OSError:
        return


def _umask() -> int:
    """The process's mask, which elsewhere than on Linux can only be read by setting it, for all threads."""
    with suppress(OSError, ValueError), open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
