"""Files shared by many processes: atomic writes, one writer at a time where locks work, bounded sizes."""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from attn_dispatch import system
from attn_dispatch.log import say_once
from attn_dispatch.settings import NOWHERE

MAX_CHECKED_BYTES = 1 << 16  #: bytes of one checked file
UNREADABLE = (OSError, ValueError, msgspec.MsgspecError, RecursionError)  #: errors of reading a checked file
#: What stands in a folder's place, if anything, is a file or a link; writing warns of it.
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
LOCK = ".lock"
LOCK_S = 2.0  #: seconds to wait for another writer at most
TMP = ".tmp"
STALE_S = 3600.0  #: age in seconds at which a temporary file counts as abandoned
FILL_AFTER_TIDY = 0.9  #: share of the bound that remains after `tidy` removed files
LINK = "is a symbolic link, which is not followed"
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | system.BINARY  #: flags of os.open for a file that is made
_SAFE = system.NOFOLLOW | system.NONBLOCK | system.BINARY

T = TypeVar("T")


@contextmanager
def opened(path: str | Path, *, follow: bool = False) -> Iterator[BinaryIO]:
    """Open a plain file for reading, without blocking.

    Args:
        follow: whether the file may be a symbolic link; for paths that the user names, not for the cache folder's.

    Raises:
        OSError: the file cannot be read or is not a plain file.
    """
    if not follow and os.path.islink(path):
        raise OSError(errno.EINVAL, LINK)
    handle = os.open(path, _SAFE & ~system.NOFOLLOW if follow else _SAFE)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file")
    with os.fdopen(handle, "rb") as file:
        yield file


def read(path: str | Path, most: float, *, follow: bool = False) -> bytes:
    """Read a plain file. Raises OSError as `opened` does, and where it holds more than `most` bytes."""
    try:
        return system.when_free(lambda: _read(path, most, follow))
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return _read(path, most, follow)  # on NFS another host replaced the file between look-up and opening


def _read(path: str | Path, most: float, follow: bool) -> bytes:
    with opened(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, over {most:.0f}")
        return file.read()


def read_or_none(path: Path, read: Callable[[Path], T]) -> T | None:
    """What ``read`` makes of a file; None where there is none and, with one warning, where that raises UNREADABLE."""
    try:
        return read(path)
    except UNREADABLE as error:
        if getattr(error, "errno", None) not in MISSING:
            say_once(f"ignored {path}: {error}")
        return None


def say_unwritten(what: str, folder: Path, error: OSError) -> None:
    """Log once what is not kept, as a folder cannot be written; nothing more where there is no home folder."""
    if NOWHERE not in (folder, *folder.parents):
        say_once(f"{what}: {folder} cannot be written ({error.strerror or error})")


def listed(base: Path, folder: Path, suffix: str) -> list[Path]:
    """The files with a suffix, sorted by name; empty where there is no folder, or a link below `base`."""
    try:
        refuse_links(base, folder)
        with os.scandir(folder) as found:
            return sorted(Path(item.path) for item in found if item.name.endswith(suffix))
    except OSError as error:
        if error.errno not in MISSING:
            say_once(f"{folder} cannot be read ({error.strerror or error})")
        return []


def refuse_links(base: Path, folder: Path) -> None:
    """Raise OSError where `folder` or a parent below `base` is a symbolic link; `base` itself may be one."""
    for each in (folder, *folder.parents):
        if each == base:
            return
        if each.is_symlink():
            raise OSError(errno.ELOOP, LINK, str(each))


def open_to_others(folder: Path) -> str:
    """Say that other users than this one and root can write to a folder, and why; empty if they cannot."""
    if sys.platform == "win32":
        return ""  # a file's mode does not show its access lists
    try:
        about = os.stat(folder)
    except OSError:
        return ""
    if about.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to user {about.st_uid}"
    if about.st_mode & stat.S_IWOTH:
        return f"{folder} can be written by everyone"
    # The group that this user's files get is private on most systems whose umask lets it write.
    if about.st_mode & stat.S_IWGRP and about.st_gid not in (0, os.getegid()):
        return f"{folder} can be written by group {about.st_gid}"
    return ""


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old or the new content, whenever the writer dies. A link is replaced.

    Raises:
        OSError: the file could not be written; the old one is unchanged.
    """
    name = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{TMP}")
    try:
        handle = os.open(name, NEW, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        system.when_free(lambda: os.replace(name, path))
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def append_bounded(base: Path, path: Path, line: bytes, most: int) -> None:
    """Append a line to a file of lines below `base`; past `most` bytes its older half is removed.

    Raises:
        OSError: the file cannot be written, or is behind a link.
    """
    with locked(base, path.parent):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _SAFE, 0o666)
        with os.fdopen(handle, "wb", buffering=0) as file:
            file.write(line)
            size = file.tell()
        if size > most:
            write(path, read(path, float("inf"))[-most // 2 :].partition(b"\n")[2])


@contextmanager
def locked(base: Path, folder: Path) -> Iterator[None]:
    """Make a folder below `base`, and lock it against other writers; after `LOCK_S` seconds, or without lock support,
    go on unlocked. Raises OSError: it cannot be made, or is behind a link.
    """
    refuse_links(base, folder)
    folder.mkdir(parents=True, exist_ok=True)
    handle = None
    with suppress(OSError):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | _SAFE, 0o666)
    try:
        if handle is not None:
            _wait_for_lock(handle)
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                system.unlock(handle)  # a child that was forked meanwhile has a copy of the descriptor
            os.close(handle)


def _wait_for_lock(handle: int) -> None:
    end = time.monotonic() + LOCK_S
    with suppress(OSError):  # a file system without locks
        while not system.lock(handle) and time.monotonic() < end:
            time.sleep(random.uniform(0.0005, 0.003))  # random, so that waiters do not retry in step


def tidy(root: Path, own: re.Pattern[str], most: float, keep: Path) -> None:
    """Remove abandoned temporary files and, past `most` bytes, the least recently used files.

    Other processes may do the same at the same time; a file that is written meanwhile stays, and so does `keep`. Files
    with other names, and those behind a link, are not the store's: they are not removed.

    Args:
        own: matches the path below `root` of every file that the store writes there, temporary ones included.
        most: bytes of all files together; removal goes down to `FILL_AFTER_TIDY` of it.
    """
    now, total = time.time(), 0
    found: list[tuple[int, Path, os.stat_result]] = []
    for path, seen in _walk(root, own):
        if path.suffix != TMP:
            total += seen.st_size
            found.append((seen.st_mtime_ns, path, seen))
        elif now - seen.st_mtime > STALE_S:  # a time in the future counts as new
            _remove(path, seen)
    excess = total - FILL_AFTER_TIDY * most if total > most else 0
    for _, path, seen in sorted(found, key=lambda each: each[:2]):
        if excess > 0 and path != keep:
            with locked(root, path.parent):
                _remove(path, seen)
            excess -= seen.st_size


def _walk(root: Path, own: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """The plain files below a folder whose paths match. Links are not followed, vanished files are skipped."""
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                seen = os.lstat(path)
                if own.fullmatch(path.relative_to(root).as_posix()) and stat.S_ISREG(seen.st_mode):
                    yield path, seen


def _remove(path: Path, seen: os.stat_result) -> None:
    with suppress(OSError):
        now = os.lstat(path)
        if (now.st_ino, now.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns):
            os.unlink(path)


class _Checked(msgspec.Struct):
    sha256: str
    content: msgspec.Raw


def digest(*parts: str | None) -> str:
    """Hash any text to 20 hex digits, safe in a file name."""
    return sha256(msgspec.json.encode(parts)).hexdigest()[:20]


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
