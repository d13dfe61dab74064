"""Signal notes: a file in which a dying process leaves the signal that ended it, while crash markers are open.

    <cache folder>/quarantine/<silicon>/<token>.notes

A process has one such file, made and registered before its first marker is written, and removed after its last.
Python's faulthandler writes into it at once, also in C code that holds the interpreter's lock:

- a crash (SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE), as "Fatal Python error: ...". `faulthandler.enable` is used only
  where nobody else handles these signals, and given back only where nobody called it meanwhile;
- a signal that asks a process to stop, if the program has no handler of its own;
- SIGCONT, which follows a suspension: it overwrites the first line, since times mean nothing after it. With several
  busy threads the process may end before that is written.

SIGKILL, the out-of-memory killer and a loss of power leave no note.

The first line holds the offset between the wall clock and the monotonic one, which stands still while the machine
sleeps. If it is another one when the file is read, the clock was set or the machine slept, and times mean nothing.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import secrets
import signal
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from attn_dispatch.store import files

NOTES_NAME = re.compile(r"[0-9a-f]{8}\.notes")
PROC = Path("/proc")
#: Signals by which schedulers, resource limits and users end processes; a crash raises none of them.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU", "SIGQUIT")
)
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
CRASHED = re.compile(rb"Fatal Python error: ([^\n]{1,80})")
STEP_S = 2.0  #: seconds by which two readings of the offset of the clocks may differ


class Clocks(msgspec.Struct, frozen=True):
    """The boot, and the wall clock's offset to the monotonic clock in seconds."""

    boot: str
    offset_s: float

    def agree(self, other: Clocks) -> bool:
        """Whether the clocks ran on between two readings."""
        return self.boot == other.boot and abs(self.offset_s - other.offset_s) < STEP_S


class Noted(msgspec.Struct, frozen=True):
    """What a process noted: the crash ("" for none), whether it was stopped or resumed by a signal, and the time.

    `at` is in seconds since 1970; None where clocks were set, or the process or the machine was suspended.
    """

    crash: str = ""
    stopped: bool = False
    at: float | None = None


class _File:
    """What faulthandler writes crashes to. It alone holds a reference: one that is gone was replaced by other code."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def fileno(self) -> int:
        return self.handle

    def flush(self) -> None:
        """Nothing is buffered."""


class SignalNotes:
    """The notes of this process, open until `close`; one at a time. Not safe in several threads.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, place: Path, boot: str) -> None:
        self.token = secrets.token_hex(4)
        self.path = place / f"{self.token}.notes"
        self._registered: set[int] = set()
        self._crashes: weakref.ref[_File] | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._handle = os.open(self.path, flags, 0o666)
        self._first_line = -1
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            line = files.encode_checked(_clocks(boot))
            if os.write(self._handle, line) < len(line):
                raise OSError(0, "no room")
            self._first_line = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            self._register()
        except BaseException:
            self.close()
            raise

    def close(self, *, remove: bool = True) -> None:
        """Give the signals back, and remove the file."""
        self._unregister()
        if remove:
            with suppress(OSError):
                os.unlink(self.path)
        for handle in (self._handle, self._first_line):
            with suppress(OSError):
                os.close(handle)

    def _register(self) -> None:
        caught = _caught()
        for number in (*STOP_SIGNALS, signal.SIGCONT):
            if not caught >> (number - 1) & 1:
                faulthandler.unregister(number)  # a handler set and reset meanwhile has left it half registered
                resumed = number == signal.SIGCONT
                file = self._first_line if resumed else self._handle
                faulthandler.register(number, file=file, all_threads=False, chain=not resumed)
                self._registered.add(number)
        if not any(caught >> (number - 1) & 1 for number in CRASH_SIGNALS):
            file_object = _File(self._handle)
            faulthandler.enable(file=file_object, all_threads=False)
            self._crashes = weakref.ref(file_object)

    def _unregister(self) -> None:
        for number in self._registered:
            if signal.getsignal(number) is signal.SIG_DFL:  # a handler set meanwhile must not be removed
                faulthandler.unregister(number)
        self._registered.clear()
        if self._crashes is not None and self._crashes() is not None:
            faulthandler.disable()
        self._crashes = None


def read_notes(place: Path, token: str, boot: str) -> Noted:
    """The notes of a dead process; empty where there are none."""
    try:
        handle = files.open_regular(place / f"{token}.notes")
    except OSError:
        return Noted()
    try:
        content, at = files.content_of(handle), os.fstat(handle).st_mtime
    except files.UNREADABLE:
        return Noted()
    finally:
        os.close(handle)
    crash = CRASHED.search(content)
    line, _, rest = content.partition(b"\n")
    try:
        ran_on = files.decode_checked(line, Clocks).agree(_clocks(boot))
    except files.UNREADABLE:  # overwritten after a suspension
        return Noted(crash[1].decode(errors="replace") if crash else "", stopped=True)
    return Noted(crash[1].decode(errors="replace") if crash else "", bool(rest), at if ran_on else None)


def remove_orphans(paths: Sequence[Path], expiry_s: float) -> None:
    """Remove, of a folder's markers and notes, the notes of dead processes without a marker."""
    marked = {path.name.partition("-")[2][:8] for path in paths if path.suffix == ".mark"}
    for path in paths:
        if NOTES_NAME.fullmatch(path.name) and path.stem not in marked:
            with suppress(OSError):
                handle = files.open_regular(path)
                try:
                    if _is_orphan(handle, expiry_s):
                        os.unlink(path)
                finally:
                    os.close(handle)


def _is_orphan(handle: int, expiry_s: float) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return abs(time.time() - os.fstat(handle).st_mtime) > expiry_s
    return True


def _clocks(boot: str) -> Clocks:
    return Clocks(boot, time.time() - time.monotonic())


def _caught() -> int:
    """The signals with a handler or ignored, as bits; Python itself does not know of handlers set by C code."""
    found = 0
    try:
        status = (PROC / "self" / "status").read_text()
    except OSError:
        return -1
    for line in status.splitlines():
        if line.startswith(("SigCgt:", "SigIgn:")):
            found |= int(line.split()[1], 16)
    return found
