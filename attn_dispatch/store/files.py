"""Files that many processes read and write: whole or not at all, one writer at a time if it can be had, bounded."""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

LIMIT = 1 << 16  #: bytes of one file
UNREADABLE = (OSError, ValueError, msgspec.MsgspecError, RecursionError)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

T = TypeVar("T")

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
LOCK_S = 2.0  #: longest wait for another writer
TMP = ".tmp"
STALE_S = 3600.0  #: after which a temporary file has lost its writer
FILLED = 0.9  #: of the bound, after a clean-up
#: mkstemp's part between what `write` puts before and after it.
UNFINISHED = r"[a-z0-9_]{8}" + re.escape(TMP)


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


def refuse_links(base: Path, folder: Path) -> None:
    """Raise OSError where a folder below `base` is a symbolic link, and so not what was made there; `base` may be."""
    for each in (folder, *folder.parents):
        if each == base:
            return
        if each.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(each))


def write(path: Path, content: bytes) -> None:
    """All of it or nothing: readers see the old file or the new one, whenever the writer dies. A link is replaced.

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
    """Write at the end of a file, made where there is none; its size afterwards. Raises OSError, for a link too."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o666)
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
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        handle = os.open(folder / LOCK, flags, 0o666)
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


def tidy(root: Path, levels: Sequence[re.Pattern[str]], most: float, keep: Path) -> None:
    """Remove what killed writers left and, past `most` bytes, the files that have not been used for longest.

    Other processes may remove the same ones; a file that is written meanwhile stays, and so does `keep`. What has
    another form of name, and what lies behind a link, is somebody else's: it is neither removed nor counted.

    Args:
        levels: the names of the folders below `root`, from the outermost, and then of the files without `.json`.
    """
    *folders, stem = levels
    own, left = re.compile(stem.pattern + r"\.json"), re.compile(rf"\.{stem.pattern}-{UNFINISHED}")
    now, total = time.time(), 0
    found: list[tuple[float, str, os.stat_result]] = []
    for path, seen in _walk(root, folders):
        name = os.path.basename(path)
        if left.fullmatch(name) and now - seen.st_mtime > STALE_S:  # a time to come is no age: the clock was set
            _remove(path, seen)
        elif own.fullmatch(name):
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
        now = os.stat(path, follow_symlinks=False)
        if (now.st_ino, now.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns):
            os.unlink(path)


def _walk(folder: str | Path, below: Sequence[re.Pattern[str]]) -> Iterator[tuple[str, os.stat_result]]:
    """The plain files in the folders of these names, links not followed; what cannot be read or has gone is no file."""
    if os.path.islink(folder):
        return
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if below and below[0].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        yield from _walk(entry.path, below[1:])
                    elif not below and entry.is_file(follow_symlinks=False):
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


class _Checked(msgspec.Struct):
    sha256: str
    content: msgspec.Raw


def encode_checked(value: msgspec.Struct) -> bytes:
    """The line for a value."""
    content = msgspec.json.encode(value)
    return msgspec.json.encode(_Checked(sha256(content).hexdigest(), msgspec.Raw(content))) + b"\n"


def decode_checked(line: bytes, kind: type[T]) -> T:
    """The value of a line. Raises one of UNREADABLE for anything but what `seal` made of such a value."""
    found = msgspec.json.decode(line, type=_Checked)
    if sha256(found.content).hexdigest() != found.sha256:
        raise ValueError("its content is not what its digest says")
    return msgspec.json.decode(found.content, type=kind)


def open_regular(path: Path) -> int:
    """A descriptor to read a plain file by. Raises OSError, for links and pipes too; never waits."""
    handle = os.open(path, _READ)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a plain file")
    return handle


def content_of(handle: int) -> bytes:
    """All of a file from its start. Raises ValueError past LIMIT."""
    content = b""
    while part := os.pread(handle, LIMIT + 1 - len(content), len(content)):
        content += part
    if len(content) > LIMIT:
        raise ValueError(f"larger than {LIMIT} bytes")
    return content


def read_checked(path: Path, kind: type[T]) -> T:
    """The value of a file. Raises one of UNREADABLE."""
    handle = open_regular(path)
    try:
        return decode_checked(content_of(handle), kind)
    finally:
        os.close(handle)


def write_checked(path: Path, value: msgspec.Struct) -> None:
    """All of it or nothing, whenever the writer dies. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.stem}-{secrets.token_hex(6)}.tmp")
    try:
        with unfinished.open("xb") as file:
            file.write(encode_checked(value))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make a file's name last through a crash of the machine, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
