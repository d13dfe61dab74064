"""Files shared by many processes: atomic writes, one writer at a time where locks work, bounded sizes."""

from __future__ import annotations

import errno
import os
import random
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

MAX_CHECKED_BYTES = 1 << 16  #: bytes of one checked file
UNREADABLE = (OSError, ValueError, msgspec.MsgspecError, RecursionError)  #: errors of reading a checked file
# Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

T = TypeVar("T")

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
LOCK_S = 2.0  #: seconds to wait for another writer at most
TMP = ".tmp"
STALE_S = 3600.0  #: age in seconds at which a temporary file counts as abandoned
FILL_AFTER_TIDY = 0.9  #: share of the bound that remains after `tidy` removed files
#: The end of a temporary file's name: mkstemp's random part and the suffix.
MKSTEMP_PART = r"[a-z0-9_]{8}" + re.escape(TMP)


def read(path: str | Path, most: int, *, follow: bool = False) -> bytes:
    """Read a plain file.

    Args:
        follow: whether the file may be a symbolic link; for paths that the user names, not for the cache folder's.

    Raises:
        OSError: the file cannot be read, is not a plain file, or holds more than `most` bytes.
    """
    try:
        return _read(path, most, follow)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return _read(path, most, follow)  # on NFS another host replaced the file between look-up and opening


def tail(path: str | Path, most: int) -> bytes:
    """Read the last `most` bytes of a plain file. Raises OSError."""
    with _opened(path) as (file, size):
        file.seek(max(0, size - most))
        return file.read(most)


def _read(path: str | Path, most: int, follow: bool) -> bytes:
    with _opened(path, follow) as (file, size):
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, over {most}")
        return file.read()


@contextmanager
def _opened(path: str | Path, follow: bool = False) -> Iterator[tuple[BinaryIO, int]]:
    """Open a plain file; the file and its size in bytes. Raises OSError."""
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        yield file, os.fstat(file.fileno()).st_size


def refuse_links(base: Path, folder: Path) -> None:
    """Raise OSError where `folder` or a parent below `base` is a symbolic link; `base` itself may be one."""
    for each in (folder, *folder.parents):
        if each == base:
            return
        if each.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(each))


def open_to_others(folder: Path) -> str:
    """Say that other users than this one and root can write to a folder, and why; empty if they cannot."""
    try:
        about = os.stat(folder)
    except OSError:
        return ""
    if about.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to user {about.st_uid}"
    if about.st_mode & stat.S_IWOTH:
        return f"{folder} can be written by everyone"
    if about.st_mode & stat.S_IWGRP and not _is_private(about.st_gid):
        return f"{folder} can be written by group {about.st_gid}"
    return ""


def _is_private(group: int) -> bool:
    """Whether a group is root's, or this user's alone, as most systems make one for each user."""
    import grp  # here, as few folders need them
    import pwd

    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return group == 0
    return group == 0 or (found.gr_name == name and set(found.gr_mem) <= {name})


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old or the new content, whenever the writer dies. A link is replaced.

    Raises:
        OSError: the file could not be written; the old one is unchanged.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=TMP)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are private; a cache may be shared
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def append(path: Path, line: bytes) -> int:
    """Append to a file, creating it if needed; its size afterwards in bytes. Raises OSError, for a link too."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o666)
    with os.fdopen(handle, "wb", buffering=0) as file:
        file.write(line)
        return file.tell()


def append_bounded(path: Path, line: bytes, most: int) -> None:
    """Append a line to a file of lines; past `most` bytes its older half is removed. Raises OSError."""
    with locked(path.parent):
        if append(path, line) > most:
            write(path, tail(path, most // 2).partition(b"\n")[2])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers; after `LOCK_S` seconds, or without lock support, go on unlocked."""
    handle = _lock(folder)
    try:
        yield
    finally:
        if handle is not None and fcntl is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy of the descriptor
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
        time.sleep(random.uniform(0.0005, 0.003))  # random, so that waiters do not retry in step


def tidy(
    root: Path,
    levels: Sequence[re.Pattern[str]],
    most: float,
    keep: Path,
    *,
    is_own: Callable[[str], bool],
    head: bytes,
) -> None:
    """Remove abandoned temporary files and, past `most` bytes, the least recently used files.

    Other processes may do the same at the same time; a file that is written meanwhile stays, and so does `keep`. Files
    with other names or content, and those behind a link, are not the store's: they are not removed.

    Args:
        levels: patterns of the names of the folders below `root`, outermost first, then of the files without `.json`.
        most: bytes of all files together; removal goes down to `FILL_AFTER_TIDY` of it.
        is_own: whether the content of the file at a path is the store's, so that it may be removed.
        head: the first bytes of every file that the store writes; temporary files with others stay.
    """
    *folders, stem = levels
    own, left = re.compile(stem.pattern + r"\.json"), re.compile(rf"\.{stem.pattern}-{MKSTEMP_PART}")
    now, total = time.time(), 0
    found: list[tuple[float, str, os.stat_result]] = []
    for path, seen in _walk(root, folders):
        name = os.path.basename(path)
        if left.fullmatch(name) and now - seen.st_mtime > STALE_S:  # a time in the future counts as new
            if _begins_with(path, head):
                _remove(path, seen)
        elif own.fullmatch(name):
            total += seen.st_size
            found.append((seen.st_mtime, path, seen))
    if total > most:
        oldest = [(path, seen) for _, path, seen in sorted(found) if path != str(keep)]
        _shrink(oldest, total - FILL_AFTER_TIDY * most, is_own)


def _shrink(oldest: list[tuple[str, os.stat_result]], excess: float, is_own: Callable[[str], bool]) -> None:
    for path, seen in oldest:
        if excess <= 0:
            return
        if is_own(path):
            with locked(Path(path).parent):
                _remove(path, seen)
        excess -= seen.st_size  # a file that is not the store's should not have been counted


def _remove(path: str, seen: os.stat_result) -> None:
    with suppress(OSError):
        now = os.stat(path, follow_symlinks=False)
        if (now.st_dev, now.st_ino, now.st_mtime_ns) == (seen.st_dev, seen.st_ino, seen.st_mtime_ns):
            os.unlink(path)


def _begins_with(path: str, head: bytes) -> bool:
    """Whether a file begins with `head`, or was cut off within it."""
    with suppress(OSError), _opened(path) as (file, size):
        return file.read(len(head)) == head[:size]
    return False


def _walk(folder: str | Path, below: Sequence[re.Pattern[str]]) -> Iterator[tuple[str, os.stat_result]]:
    """The plain files in folders of these names. Links are not followed; unreadable or vanished files are skipped."""
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
    """The process's umask; other systems than Linux can only read it by setting it, for all threads."""
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
    """Encode a value with its SHA-256 as one line of JSON."""
    content = msgspec.json.encode(value)
    return msgspec.json.encode(_Checked(sha256(content).hexdigest(), msgspec.Raw(content))) + b"\n"


def decode_checked(line: bytes, kind: type[T]) -> T:
    """Decode a line of `encode_checked`. Raises one of UNREADABLE for anything else."""
    found = msgspec.json.decode(line, type=_Checked)
    if sha256(found.content).hexdigest() != found.sha256:
        raise ValueError("its content does not match its checksum")
    return msgspec.json.decode(found.content, type=kind)


def open_regular(path: str | Path, *, follow: bool = False) -> int:
    """Open a plain file for reading; its descriptor; never blocks.

    Raises OSError for pipes and, unless `follow`, for links.
    """
    try:
        handle = os.open(path, _READ & ~os.O_NOFOLLOW if follow else _READ)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow and os.path.islink(path):
            raise OSError(errno.EINVAL, "is a symbolic link, which is not followed") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file")
    return handle


def content_of(handle: int) -> bytes:
    """Read a whole file by its descriptor. Raises ValueError past MAX_CHECKED_BYTES."""
    content = b""
    while part := os.pread(handle, MAX_CHECKED_BYTES + 1 - len(content), len(content)):
        content += part
    if len(content) > MAX_CHECKED_BYTES:
        raise ValueError(f"larger than {MAX_CHECKED_BYTES} bytes")
    return content


def read_checked(path: Path, kind: type[T]) -> T:
    """Read a checked file. Raises one of UNREADABLE."""
    handle = open_regular(path)
    try:
        return decode_checked(content_of(handle), kind)
    finally:
        os.close(handle)


def write_checked(path: Path, value: msgspec.Struct) -> None:
    """Write a checked file atomically, and sync it and its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, encode_checked(value))
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new file's name survives a crash of the machine, where the file system allows it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
