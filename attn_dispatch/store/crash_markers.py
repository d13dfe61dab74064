"""Crash markers: a locked file that says which backend is tried, so that a later process learns of a death.

    <cache folder>/quarantine/v2/<silicon>/<token>.mark

The process holds an exclusive lock on its marker (flock): a marker that is free was abandoned, its process is gone. The
lock ends with its process, in containers and across them, and over NFS where locks are forwarded. Where a file system
has no such locks, a marker that has not changed for an hour is abandoned. An empty marker blames nobody: its trial has
not begun, pauses or is over. Forked children release the lock, except those that C code forks without Python's
handlers.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attn_dispatch.log import say_once
from attn_dispatch.store import files
from attn_dispatch.store.address import fingerprint

FOLDER = "quarantine/v2"
EXPIRY_S = 3600.0  #: age in seconds at which a marker counts as abandoned where files cannot be locked

_own_markers: dict[Path, int] = {}  # this process's markers -> descriptors that hold their locks


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a marker: the backend, the problem (`title`), and when its trial began, in seconds since 1970."""

    backend: str
    version: str | None
    title: str
    began: float


@dataclass
class CrashMarker:
    """A crash marker on disk. Between `pause` and `resume` a death is not the backend's fault."""

    path: Path
    content: bytes

    def pause(self) -> None:
        """Mark the trial as not running until `resume`."""
        self._write(b"")

    def resume(self) -> None:
        """Mark the trial as running again."""
        self._write(self.content)

    def _write(self, content: bytes) -> None:
        handle = _own_markers.get(self.path)  # None: never made, or the parent's
        if handle is not None:
            with suppress(OSError):
                os.ftruncate(handle, 0)
                os.pwrite(handle, content, 0)


@contextmanager
def crash_marker(folder: Path, silicon: str, backend: str, version: str | None, title: str) -> Iterator[CrashMarker]:
    """Keep a crash marker on disk while a backend is tried on a problem.

    Args:
        folder: the cache folder. Where it cannot be written, a warning is logged once and the trial runs unmarked.
        silicon: the fingerprint of the device.
        title: the problem, for messages.

    Raises:
        ValueError: `silicon` is not a fingerprint.
    """
    path = place_of(folder, silicon) / f"{secrets.token_hex(8)}.mark"
    trial = Trial(backend=backend, version=version, title=title[:4000], began=time.time())
    marker = CrashMarker(path, files.encode_checked(trial))
    try:
        try:
            _create(folder, marker)
        except OSError as error:
            files.say_unwritten("a crash would not be recorded", path.parent, error)
        yield marker
    finally:
        _remove(marker.path)


def place_of(folder: Path, silicon: str) -> Path:
    """The folder of one silicon's quarantine. Raises ValueError for no fingerprint: paths cannot leave the folder."""
    return folder / FOLDER / fingerprint(silicon)


def abandoned(folder: Path, silicon: str) -> Iterator[tuple[Path, Trial]]:
    """Find the markers of dead processes, each locked until the next; several processes may iterate at once."""
    for path in files.listed(folder, place_of(folder, silicon), ".mark"):
        try:
            with files.opened(path) as file:
                if (found := _abandoned_trial(path, file.fileno())) is not None:
                    yield path, found
        except FileNotFoundError:
            continue  # removed by its process, or by another that recorded the death
        except files.UNREADABLE as error:
            say_once(f"ignored {path}: {error}")


def _abandoned_trial(path: Path, handle: int) -> Trial | None:
    """The trial whose process is gone; None for others, and for an empty marker, which is removed once it is old."""
    seen = os.fstat(handle)
    is_old = abs(time.time() - seen.st_mtime) > EXPIRY_S
    if not seen.st_size and not is_old:  # its process may be about to lock it
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:  # a file system without locks
        if not is_old:
            return None
    content = os.pread(handle, files.MAX_CHECKED_BYTES, 0)  # now that no process writes it
    if not content:
        path.unlink()
        return None
    return files.decode_checked(content, Trial)


def _create(folder: Path, marker: CrashMarker) -> None:
    files.refuse_links(folder, marker.path.parent)
    marker.path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(marker.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    _own_markers[marker.path] = handle
    with suppress(OSError):  # a file system without locks
        fcntl.flock(
            handle, fcntl.LOCK_EX | fcntl.LOCK_NB
        )  # before writing: other processes leave an empty marker alone
    os.pwrite(handle, marker.content, 0)


def _remove(path: Path) -> None:
    handle = _own_markers.pop(path, None)
    if handle is not None:
        with suppress(OSError):
            os.ftruncate(handle, 0)  # for a process that reads it now, or if it cannot be removed
        with suppress(OSError):
            os.unlink(path)
        os.close(handle)


def _forget_parents_markers() -> None:
    """Close the parent's markers in a forked child: its copies of the descriptors would keep them locked."""
    while _own_markers:
        os.close(_own_markers.popitem()[1])


def _end() -> None:
    """Remove the markers at a regular exit: a trial still running in a thread did not end the process."""
    for path in list(_own_markers):
        _remove(path)


atexit.register(_end)
os.register_at_fork(after_in_child=_forget_parents_markers)
