"""A marker on disk for as long as a backend is tried, so that a process that dies of it is not forgotten.

    <cache folder>/quarantine/<silicon>/<digest>-<token>.mark

The process holds an exclusive lock on its marker (flock): a marker that nobody holds and that was not taken away
belongs to a process that died. The lock ends with its process, in containers and across them, and over NFS where locks
are passed on. Where a file system has no such locks, a marker is dead when its process is gone, or, if that ran on
another machine or in another container, after an hour.

A process that is merely told to stop in the meantime (schedulers, `timeout`, a closed terminal) says so in its marker.
Forked children let go of the lock; those that C code forks without telling Python keep it.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import os
import re
import secrets
import signal
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
from attn_dispatch.store import files as sealed
from attn_dispatch.store.address import SILICON

FOLDER = "quarantine"
MARK = re.compile(r"[0-9a-f]{20}-[0-9a-f]{12}\.mark")
FOREIGN_S = 3600.0  #: seconds after which an unlocked marker of a process that cannot be looked up is dead
PROC = Path("/proc")
MACHINE_ID = Path("/etc/machine-id")
#: What schedulers, resource limits and people end processes with. A crash of the process's own is none of these.
TELLING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU", "SIGQUIT")
)
_OVER = b"over\n"

_held: dict[Path, int] = {}  # markers of this process, with the descriptors that hold their locks
_noted: set[int] = set()  # signals whose arrival is being written into a marker
_changing = threading.Lock()  # of these two
_finalized: set[int] = set()  # this process, once multiprocessing is to call `_end`


class Process(msgspec.Struct, frozen=True):
    """Which process: a pid means nothing without its start (in clock ticks), its namespace and the machine's boot.

    `host` is the same from boot to boot; empty where there is no telling.
    """

    pid: int
    start: str
    namespace: str
    boot: str
    host: str = ""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried, by whom. `began` is in seconds since 1970; `patience_s` as in `contact`."""

    backend: str
    version: str | None
    silicon: str
    title: str
    scope: str
    process: Process
    locked: bool
    began: float
    patience_s: float | None = None


class Dead(msgspec.Struct, frozen=True, kw_only=True):
    """A marker whose process is gone: `told_to_stop` where that was by a signal, `after_s` seconds into the trial.

    `rebooted` where the machine may have been started anew since, which ends every process.
    """

    path: Path
    marker: Marker
    told_to_stop: bool
    rebooted: bool
    after_s: float


@dataclass
class Contact:
    """A marker that is kept. While its trial rests, a process that dies does not die of it."""

    path: Path
    size: int = 0

    def rest(self) -> None:
        """Until `resume`, the trial is over."""
        handle = _held.get(self.path)
        if handle is not None:
            with suppress(OSError):
                self.size = os.fstat(handle).st_size
                os.write(handle, _OVER)

    def resume(self) -> None:
        """The trial goes on."""
        handle = _held.get(self.path)
        if handle is not None and self.size:
            with suppress(OSError):
                os.ftruncate(handle, self.size)


@contextmanager
def contact(
    folder: Path,
    silicon: str,
    backend: str,
    version: str | None,
    title: str,
    scope: str = "",
    *,
    patience_s: float | None = None,
) -> Iterator[Contact]:
    """Keep a marker on disk while a backend is tried on a problem.

    Args:
        folder: the cache folder. Where it cannot be written, that is said once and the trial goes on unmarked.
        scope: what is kept out if the process dies: "" for the whole version, or a group's digits.
        patience_s: a process told to stop later than this into the trial (seconds) is taken to have hung in it.
            None: it never is.

    Raises:
        ValueError: not a fingerprint.
    """
    place = place_of(folder, silicon)
    path = place / f"{digest(backend, version, scope)}-{secrets.token_hex(6)}.mark"
    try:
        try:
            _mark(path, backend, version, silicon, title, scope, patience_s)
        except OSError as error:
            if folder != settings.NOWHERE:
                say_once(f"a crash could not be remembered: {place} cannot be written ({error.strerror or error})")
        yield Contact(path)
    finally:
        _unmark(path)


def place_of(folder: Path, silicon: str) -> Path:
    """Where one silicon's quarantines are kept. Raises ValueError: paths cannot escape the folder."""
    if not SILICON.fullmatch(silicon):
        raise ValueError(f"not a fingerprint: {silicon!r}")
    return folder / FOLDER / silicon


def refuse_links(place: Path) -> None:
    """Raise OSError where a folder below the cache folder is a symbolic link."""
    base = next((each.parent for each in (place, *place.parents) if each.name == FOLDER), place.parent)
    files.refuse_links(base, place)


def digest(*parts: str | None) -> str:
    """20 hex digits for what a file is about: any text is safe in its name so."""
    return sha256(msgspec.json.encode(parts)).hexdigest()[:20]


def listed(place: Path, suffix: str) -> list[Path]:
    """The files of one kind, by name; none where there is no such folder, or a link in its place."""
    try:
        refuse_links(place)
        with os.scandir(place) as found:
            return sorted(Path(item.path) for item in found if item.name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        say_once(f"{place} cannot be read ({error.strerror or error})")
        return []


def dead(place: Path) -> Iterator[Dead]:
    """The markers that dead processes left. Each is locked, shared, until the next is asked for: many may look."""
    for path in listed(place, ".mark"):
        if not MARK.fullmatch(path.name):
            continue  # somebody else's
        try:
            handle = sealed.open_regular(path)
        except FileNotFoundError:
            continue  # its process has finished, or another one took note of it
        except OSError as error:
            say_once(f"ignored {path}: {error.strerror or error}")
            continue
        try:
            if (found := _examined(path, handle)) is not None:
                yield found
        finally:
            os.close(handle)


# --- a marker of this process -----------------------------------------------------------------------------------------


def _mark(
    path: Path, backend: str, version: str | None, silicon: str, title: str, scope: str, patience_s: float | None
) -> None:
    refuse_links(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    with _changing:
        _held[path] = handle
    marker = Marker(
        backend=backend,
        version=version,
        silicon=silicon,
        title=title[:4000],
        scope=scope,
        process=_this_process(),
        locked=_lock(handle),  # before there is a word in it: an empty marker means nothing to others
        began=time.time(),
        patience_s=patience_s,
    )
    line = sealed.encode_checked(marker)
    if os.write(handle, line) < len(line):
        raise OSError(0, "no room")
    os.fsync(handle)
    with _changing:
        _note_signals(handle)
    _end_with_multiprocessing()


def _unmark(path: Path) -> None:
    handle = _held.get(path)
    if handle is None:
        return  # never marked, or the parent's
    with suppress(OSError):
        os.write(handle, _OVER)  # for those who look at it at this moment, or if it cannot be taken away
    _remove(path)
    with _changing:  # known to the very end: if this is interrupted, the regular exit does it again
        if _held.pop(path, None) is None:
            return
        _note_signals(next(iter(_held.values()), None))
    os.close(handle)


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _note_signals(handle: int | None) -> None:
    """Have a marker tell of the signals that ask a process to end, where nobody else deals with them.

    Python runs its own handlers only when C code returns, so faulthandler's is the one that can be relied on.
    """
    caught = _caught()
    for number in TELLING:
        if signal.getsignal(number) is not signal.SIG_DFL:
            continue  # one that was set during the trial must not be taken away with ours
        if number in _noted and (handle is None or not caught >> (number - 1) & 1):
            faulthandler.unregister(number)
            _noted.discard(number)
        if handle is not None and (number in _noted or not caught >> (number - 1) & 1):
            faulthandler.register(number, file=handle, all_threads=False, chain=True)
            _noted.add(number)


def _caught() -> int:
    """The signals that have a handler, as bits: Python does not know of those that C code has set."""
    try:
        status = (PROC / "self" / "status").read_text()
    except OSError:
        return -1
    return int(next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"), 16)


def _let_go() -> None:
    """In a forked child: the parent's markers are the parent's. Closing a copy does not unlock them."""
    global _changing
    _changing = threading.Lock()  # another thread of the parent may have held it
    _note_signals(None)
    for handle in _held.values():
        with suppress(OSError):
            os.close(handle)
    _held.clear()
    _finalized.clear()


def _end_with_multiprocessing() -> None:
    """Its children leave without what `atexit` has been told. Late: a child forgets what its parent registered."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and os.getpid() not in _finalized:
        _finalized.add(os.getpid())
        util.Finalize(None, _end, exitpriority=-100)  # after its own children were waited for


def _end() -> None:
    """At a regular exit: a thread that was still trying something did not take the process down."""
    for path in list(_held):
        _unmark(path)


atexit.register(_end)
os.register_at_fork(after_in_child=_let_go)


# --- markers of others ------------------------------------------------------------------------------------------------


def _examined(path: Path, handle: int) -> Dead | None:
    try:
        line, finished, _ = sealed.content_of(handle).partition(b"\n")
        if not finished:
            if _is_old(handle):  # its process was killed before it tried anything
                _remove(path)
            return None
        marker = sealed.decode_checked(line, Marker)
        if not _abandoned(handle, marker):
            return None
        note = sealed.content_of(handle)[len(line) + 1 :]  # again: nobody writes any more
        changed = os.fstat(handle)
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None  # taken away by its process, or by another that took note of it
    except sealed.UNREADABLE as error:
        say_once(f"ignored {path}: {error}")
        return None
    if there.st_ino != changed.st_ino:
        return None
    if note.endswith(_OVER):
        _remove(path)  # its process had no time for that
        return None
    after_s = max(0.0, changed.st_mtime - marker.began)
    return Dead(path=path, marker=marker, told_to_stop=bool(note), rebooted=_rebooted(marker.process), after_s=after_s)


def _abandoned(handle: int, marker: Marker) -> bool:
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
    return _is_old(handle)


def _rebooted(there: Process) -> bool:
    """Whether this may be the same machine in a later boot; False where a boot is not known."""
    here = _this_process()
    another = here.boot and there.boot and here.boot != there.boot
    return bool(another) and (here.host == there.host or not here.host or not there.host)


def _is_old(handle: int) -> bool:
    return abs(time.time() - os.fstat(handle).st_mtime) > FOREIGN_S


def _this_process() -> Process:
    pid = os.getpid()
    return Process(pid, _start_of(pid), *_machine())


@cache
def _machine() -> tuple[str, str, str]:
    """The namespace of this process's pids, the machine's boot and the machine; empty where there is no telling."""
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
    return digest("attn-dispatch", name) if name else ""  # what it is itself is not for others to see


def _start_of(pid: int) -> str:
    """When a process started; empty for one that is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start = fields[0], fields[19]
    return "" if state in "ZX" else start
