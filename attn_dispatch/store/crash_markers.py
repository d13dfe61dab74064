"""Crash markers: a file that exists while a backend is tried, so that a later process learns of a crash.

    <cache folder>/quarantine/<silicon>/<digest>-<token>.mark

The process holds an exclusive lock on its marker (flock): a marker that is not locked and was not removed is abandoned,
its process has died. The lock ends with its process, in containers and across them, and over NFS where locks are
forwarded. Where a file system has no such locks, a marker is abandoned when its process is gone or, if that ran on
another machine or in another container, after an hour.

What a process notes of the signal that ends it is in `signal_notes`, whose token begins that of its markers. Its time
is compared with that of the marker's last change: both are the file system's. Forked children release the lock, except
those that C code forks without Python's fork handlers.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import msgspec

from attn_dispatch import settings
from attn_dispatch.log import say_once
from attn_dispatch.store import files
from attn_dispatch.store.address import SILICON
from attn_dispatch.store.signal_notes import Noted, SignalNotes, read_notes, remove_orphans

FOLDER = "quarantine"
MARKER_NAME = re.compile(r"[0-9a-f]{20}-[0-9a-f]{12}\.mark")
FOREIGN_EXPIRY_S = 3600.0  #: age in seconds at which an unlocked marker of an unknown process counts as abandoned
PROC = Path("/proc")
MACHINE_ID = Path("/etc/machine-id")
_FINISHED = b"over\n"
_PATIENCE, _CALL = b"patience ", b"call "

_own_markers: dict[Path, int] = {}  # this process's markers -> descriptors that hold their locks
_notes: dict[Path, SignalNotes] = {}  # the folder of this process's notes -> the notes; one entry, or none
_tables_lock = threading.Lock()  # guards these two
_finalized: set[int] = set()  # this process's pid, once `_end` is registered with multiprocessing


class Process(msgspec.Struct, frozen=True):
    """Identifies a process: its pid, start (clock ticks), pid namespace and the machine's boot.

    `host` identifies the machine across boots; empty where it is unknown.
    """

    pid: int
    start: str
    namespace: str
    boot: str
    host: str = ""


class MarkerContent(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a marker: the backend, the problem (`title`) and the process.

    `began` is in seconds since 1970; `scope`, `patience_s` and `crashes_only` are those of `crash_marker`; `locked` is
    whether the process could lock the marker.
    """

    backend: str
    version: str | None
    silicon: str
    title: str
    scope: str
    process: Process
    locked: bool
    began: float
    patience_s: float | None = None
    crashes_only: bool = False


class Abandoned(msgspec.Struct, frozen=True, kw_only=True):
    """A marker whose process is gone.

    `noted` is what it noted of its end; `rebooted` whether the machine may have rebooted since, which ends every
    process; `progress` identifies the call of the trial that was running. `overdue_s` is how many seconds that call had
    run when the process received a stop signal, None if no longer than its patience.
    """

    path: Path
    marker: MarkerContent
    noted: Noted
    rebooted: bool
    progress: str
    overdue_s: float | None


@dataclass
class CrashMarker:
    """A crash marker on disk. Between `pause` and `resume` the trial is paused: a crash is not the backend's fault."""

    path: Path
    size: int = 0
    calls: int = 0  #: since the first pause

    def pause(self) -> None:
        """Mark the trial as finished until `resume`."""
        handle = _own_markers.get(self.path)
        if handle is not None:
            with suppress(OSError):
                self.size = self.size or os.fstat(handle).st_size
                os.write(handle, _FINISHED)

    def resume(self) -> None:
        """Mark the trial as running again: a call begins."""
        handle = _own_markers.get(self.path)
        if handle is not None and self.size:
            with suppress(OSError):
                os.ftruncate(handle, self.size)
                self.calls += 1
                os.write(handle, b"%s%d\n" % (_CALL, self.calls))

    def begin(self, patience_s: float) -> None:
        """Mark the beginning of a call; a stop signal after `patience_s` seconds of it counts as a hang."""
        handle = _own_markers.get(self.path)
        if handle is not None:
            with suppress(OSError):
                os.write(handle, b"%s%g\n" % (_PATIENCE, patience_s))


@contextmanager
def crash_marker(
    folder: Path,
    silicon: str,
    backend: str,
    version: str | None,
    title: str,
    scope: str = "",
    *,
    patience_s: float | None = None,
    crashes_only: bool = False,
) -> Iterator[CrashMarker]:
    """Keep a crash marker on disk while a backend is tried on a problem.

    Args:
        folder: the cache folder. Where it cannot be written, a warning is logged once and the trial runs unmarked.
        silicon: the fingerprint of the device.
        title: the problem, for messages.
        scope: the problems to quarantine after a crash: "" for all, else a group's digits.
        patience_s: seconds into a call after which a stop signal counts as a hang; None: it never does.
        crashes_only: whether only a noted crash counts, as where another program does the work.

    Raises:
        ValueError: `silicon` is not a fingerprint.
    """
    place = place_of(folder, silicon)
    path = place
    try:
        try:
            path = _create(place, digest(backend, version, scope))
            marker = MarkerContent(
                backend=backend,
                version=version,
                silicon=silicon,
                title=title[:4000],
                scope=scope,
                process=_this_process(),
                locked=_lock(_own_markers[path]),  # before writing: other processes ignore an empty marker
                began=time.time(),
                patience_s=patience_s,
                crashes_only=crashes_only,
            )
            _write(_own_markers[path], files.encode_checked(marker))
        except OSError as error:
            if folder != settings.NOWHERE:
                say_once(f"a crash would not be recorded: {place} cannot be written ({error.strerror or error})")
        yield CrashMarker(path)
    finally:
        _unmark(path)


def place_of(folder: Path, silicon: str) -> Path:
    """The folder of one silicon's quarantine. Raises ValueError for no fingerprint: paths cannot leave the folder."""
    if not SILICON.fullmatch(silicon):
        raise ValueError(f"not a fingerprint: {silicon!r}")
    return folder / FOLDER / silicon


def refuse_links(place: Path) -> None:
    """Raise OSError where a folder below the cache folder is a symbolic link."""
    base = next((each.parent for each in (place, *place.parents) if each.name == FOLDER), place.parent)
    files.refuse_links(base, place)


def digest(*parts: str | None) -> str:
    """Hash any text to 20 hex digits, safe in a file name."""
    return sha256(msgspec.json.encode(parts)).hexdigest()[:20]


def listed(place: Path, suffix: str) -> list[Path]:
    """The files with a suffix, sorted by name; empty where the folder does not exist or is a link."""
    try:
        refuse_links(place)
        with os.scandir(place) as found:
            return sorted(Path(item.path) for item in found if item.name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        say_once(f"{place} cannot be read ({error.strerror or error})")
        return []


def abandoned(place: Path) -> Iterator[Abandoned]:
    """Find the markers of dead processes, each locked until the next; several processes may iterate at once."""
    for path in listed(place, ".mark"):
        if not MARKER_NAME.fullmatch(path.name):
            continue  # not a marker
        try:
            handle = files.open_regular(path)
        except FileNotFoundError:
            continue  # removed by its process, or by another that recorded the crash
        except OSError as error:
            say_once(f"ignored {path}: {error.strerror or error}")
            continue
        try:
            if (found := _examined(path, handle)) is not None:
                yield found
        finally:
            os.close(handle)
    remove_orphans([*listed(place, ".mark"), *listed(place, ".notes")], FOREIGN_EXPIRY_S)


# --- this process's markers -------------------------------------------------------------------------------------------


def _create(place: Path, name: str) -> Path:
    """Create an empty marker, and this process's signal notes unless they are open in this folder."""
    refuse_links(place)
    place.mkdir(parents=True, exist_ok=True)
    with _tables_lock:
        if place not in _notes:
            _close_notes()
            _notes[place] = SignalNotes(place, _this_process().boot)
        path = place / f"{name}-{_notes[place].token}{secrets.token_hex(2)}.mark"
        _own_markers[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
    return path


def _write(handle: int, line: bytes) -> None:
    if os.write(handle, line) < len(line):
        raise OSError(0, "no room")
    os.fsync(handle)
    _end_with_multiprocessing()


def _unmark(path: Path) -> None:
    handle = _own_markers.get(path)
    if handle is not None:  # else never written, or the parent's
        with suppress(OSError):
            os.write(handle, _FINISHED)  # for a process that reads it now, or if it cannot be removed
        _remove(path)
    with _tables_lock:  # deleted last: if this is interrupted, `_end` repeats it at exit
        if _own_markers.pop(path, None) is not None and handle is not None:
            os.close(handle)
        if not _own_markers:
            _close_notes()


def _close_notes(*, remove: bool = True) -> None:
    while _notes:
        _notes.popitem()[1].close(remove=remove)


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _forget_parents_markers() -> None:
    """Forget the parent's markers in a forked child. Closing the copied descriptors does not unlock them."""
    global _tables_lock
    _tables_lock = threading.Lock()  # the old one may be held by a thread of the parent
    _close_notes(remove=False)
    for handle in _own_markers.values():
        with suppress(OSError):
            os.close(handle)
    _own_markers.clear()
    _finalized.clear()


def _end_with_multiprocessing() -> None:
    """Register `_end` with multiprocessing, whose children skip atexit and clear what their parent registered."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and os.getpid() not in _finalized:
        _finalized.add(os.getpid())
        util.Finalize(None, _end, exitpriority=-100)  # after the process has joined its own children


def _end() -> None:
    """Remove the markers at a regular exit: a trial still running in a thread did not crash the process."""
    for path in list(_own_markers):
        _unmark(path)


atexit.register(_end)
os.register_at_fork(after_in_child=_forget_parents_markers)


# --- other processes' markers -----------------------------------------------------------------------------------------


def _examined(path: Path, handle: int) -> Abandoned | None:
    try:
        line, finished, _ = files.content_of(handle).partition(b"\n")
        if not finished:
            if _is_expired(handle):  # its process was killed before the trial
                _remove(path)
            return None
        marker = files.decode_checked(line, MarkerContent)
        if not _is_abandoned(handle, marker):
            return None
        _, *rest = files.content_of(handle).splitlines(keepends=True)  # again, now that its process is gone
        waits = [float(each.removeprefix(_PATIENCE)) for each in rest if each.startswith(_PATIENCE)]
        changed = os.fstat(handle)
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None  # removed by its process, or by another that recorded the crash
    except files.UNREADABLE as error:
        say_once(f"ignored {path}: {error}")
        return None
    if there.st_ino != changed.st_ino:
        return None
    if rest and rest[-1] == _FINISHED:
        _remove(path)  # its process ended before it could
        return None
    noted = read_notes(path.parent, path.name.partition("-")[2][:8], _this_process().boot)
    patience_s = waits[-1] if waits else marker.patience_s
    ran_s = 0.0 if noted.at is None else noted.at - changed.st_mtime
    overdue_s = ran_s if noted.stopped and patience_s is not None and ran_s > patience_s else None
    calls = [each.strip().decode(errors="replace") for each in rest if each.startswith(_CALL)]
    return Abandoned(
        path=path,
        marker=marker,
        noted=noted,
        rebooted=_rebooted(marker.process),
        progress=" ".join([str(len(waits)), *calls[-1:]]),
        overdue_s=overdue_s,
    )


def _is_abandoned(handle: int, marker: MarkerContent) -> bool:
    if marker.locked:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        else:
            return True
    here, there = _this_process(), marker.process
    if here.boot and (here.boot, here.namespace) == (there.boot, there.namespace):
        return _start_of(there.pid) != there.start
    return _is_expired(handle)


def _rebooted(there: Process) -> bool:
    """Whether the process may have run on this machine before a reboot; False where a boot is unknown."""
    here = _this_process()
    another = here.boot and there.boot and here.boot != there.boot
    return bool(another) and (here.host == there.host or not here.host or not there.host)


def _is_expired(handle: int) -> bool:
    return abs(time.time() - os.fstat(handle).st_mtime) > FOREIGN_EXPIRY_S


def _this_process() -> Process:
    pid = os.getpid()
    return Process(pid, _start_of(pid), *_machine())


@cache
def _machine() -> tuple[str, str, str]:
    """This process's pid namespace, the machine's boot and the machine's identity; empty where unknown."""
    try:
        namespace = os.readlink(PROC / "self" / "ns" / "pid")
        return namespace, (PROC / "sys/kernel/random/boot_id").read_text().strip(), _host()
    except OSError:
        return "", "", ""


def _host() -> str:
    try:
        name = MACHINE_ID.read_text().strip()
    except (OSError, ValueError):
        return ""
    return digest("attn-dispatch", name) if name else ""  # hashed: the machine id itself is confidential


def _start_of(pid: int) -> str:
    """The start of a process in clock ticks; empty if it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start = fields[0], fields[19]
    return "" if state in "ZX" else start
