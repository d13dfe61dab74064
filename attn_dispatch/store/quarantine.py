"""The quarantine: backends that crashed, hung, gave wrong results or exceeded their declared memory on this machine.

    <cache folder>/quarantine/v2/<silicon>/<digest>.json    one small checked file per entry
    <cache folder>/quarantine/v2/<silicon>/<token>.mark     a crash marker: which backend a process is trying

An entry excludes one version of a backend, for all problems or for one group; other
versions are not affected. Damaged and foreign files are ignored with one warning. No torch here.

Wrong results and undeclared memory are proven: their entries (`incorrect`, `memory`) hold until they are lifted. A
trial whose process ended (`died`) or that did not return (`hung`) is a strike, whatever ended it: most processes die
for other reasons than their backend. A first death excludes nothing; a second one in a row excludes the version for
`FIRST_HOLD`, and each one after a hold for six times as long, up to `LONGEST_HOLD`. A hang that this process saw, or a
device that it lost, is certain and excludes at once. Processes that die together are one strike: a trial that
began before the last one was recorded, or ends within a hold, adds none. A trial that succeeds clears them.

The process holds an exclusive lock on its marker: one that is free was abandoned, its process is gone.
The lock ends with its process, in containers and across them, and over NFS where locks are forwarded. Where a file
system has no such locks, a marker that has not changed for an hour is abandoned. An empty one blames nobody: its
trial has not begun, pauses or is over.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from attn_dispatch import process_state, system
from attn_dispatch.log import say_once
from attn_dispatch.store import files
from attn_dispatch.store.address import SILICON, fingerprint
from attn_dispatch.text import printable

Kind = Literal["died", "hung", "incorrect", "memory"]
Key = tuple[str, str | None, str]
Time = Annotated[datetime, msgspec.Meta(tz=True)]
LAST_RESORT = "manual"  #: never quarantined for a crash, because nothing else could run. Same as in kernels.registry
STRIKES = ("died", "hung")  #: kinds of entries that expire
FIRST_HOLD = timedelta(minutes=10)
HOLD_FACTOR = 6  #: ratio of a hold to the last one
LONGEST_HOLD = timedelta(hours=12)
NO_HOLD = timedelta(0)
FOLDER = "quarantine/v2"
EXPIRY_S = 3600.0  #: age in seconds at which a marker counts as abandoned where files cannot be locked
CLOCK_ERROR = timedelta(minutes=1)  #: by which the clocks of machines that share the folder may differ


def clock() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The quarantine of one version of a backend.

    ``scope`` is "" for all problems, else the digits of a group of problems. ``reason`` is one line, ``title`` the
    problem that showed the fault. ``strikes`` counts deaths and hangs in a row, ``created`` is the time of the last and
    ``until`` the end of its hold, equal to ``created`` where it excludes nothing. Other entries have no end.
    """

    backend: str
    version: str | None
    silicon: str
    kind: Kind
    scope: str = ""
    reason: str
    title: str
    created: Time = msgspec.field(default_factory=lambda: clock())
    until: Time | None = None
    strikes: int = 0

    @property
    def hold(self) -> timedelta:
        """For how long its last strike excludes the version."""
        return NO_HOLD if self.until is None else self.until - self.created

    @property
    def holds(self) -> bool:
        """Whether the entry excludes its version now; none that a clock that was ahead has dated does."""
        return self.until is None or self.created - CLOCK_ERROR <= clock() < self.until

    @property
    def key(self) -> Key:
        return self.backend, self.version, self.scope

    def __post_init__(self) -> None:
        """Make texts one line, free of terminal control characters."""
        for name in ("reason", "title"):
            text = printable(" ".join(getattr(self, name).split()))[:4000]
            msgspec.structs.force_setattr(self, name, text)


Table = dict[Key, Entry]
_known: dict[Path, Table] = {}  # the entries of each folder as read and added in this process
_unsaved: defaultdict[Path, Table] = defaultdict(dict)  # those that could not be written
process_state.register(process_state.READ, _known.clear, _unsaved.clear)


class Quarantine:
    """The quarantine of one silicon. The folder is read once in a process, at the first look-up.

    Every `Quarantine` of the same folder and silicon shares the entries read and added in the process.
    """

    def __init__(self, folder: Path, silicon: str) -> None:
        """Raises ValueError where `silicon` is not a fingerprint."""
        self.folder, self.silicon = folder, silicon
        self._place = place_of(folder, silicon)

    def find(self, backend: str, version: str | None, scope: str = "") -> Entry | None:
        """The entry that excludes this version, for all problems or for those of ``scope``; None if it may run."""
        found = map(self._entries().get, ((backend, version, each) for each in ("", scope)))
        return next((entry for entry in found if entry is not None and entry.holds), None)

    def entries(self) -> list[Entry]:
        """The entries in force now, sorted by backend, version and scope."""
        return [entry for entry in self._all_entries() if entry.holds]

    def strikes(self) -> list[Entry]:
        """The entries that exclude nothing now, but count if there is another strike, in the same order."""
        return [entry for entry in self._all_entries() if not entry.holds]

    def _all_entries(self) -> list[Entry]:
        found = list(self._entries().values())  # copied at once: another thread may add to it
        return sorted(found, key=lambda entry: [part or "" for part in entry.key])

    def add(self, entry: Entry) -> None:
        """Quarantine in this and later processes; only in this one, with one warning, where the folder is read-only.

        A death or hang is a certain strike, added to those of the version.

        Raises:
            ValueError: the entry is for another silicon.
        """
        if entry.silicon != self.silicon:
            raise ValueError(f"an entry for {entry.silicon}, not for {self.silicon}")
        if entry.kind in STRIKES:
            entry = _struck(entry, self._stored(entry), clock(), certain=True)
        self._entries()
        self._save(entry)

    def clear_strikes(self, backend: str, version: str | None) -> None:
        """Forget the strikes of a version: it was tried with success."""
        entry = self._entries().get((backend, version, ""))
        if entry is not None and entry.kind in STRIKES:
            self._remove(entry)

    def lift(self, backend: str | None = None) -> list[Entry]:
        """Lift the entries of a backend, or all, and return them. An entry whose file cannot be removed stays."""
        self.reread()
        return [entry for entry in self._all_entries() if backend in (None, entry.backend) and self._remove(entry)]

    def reread(self) -> None:
        """Read the folder again; entries that could not be written remain."""
        self.sweep()
        paths = files.listed(self.folder, self._place, ".json")
        found = filter(None, (files.read_or_none(path, self._read) for path in paths))
        _known[self._place] = {**{entry.key: entry for entry in found}, **_unsaved[self._place]}

    def sweep(self) -> list[Entry]:
        """Turn abandoned crash markers into strikes, with a warning each; safe in several processes at once."""
        found, recorded = [], []
        for path, trial in abandoned(self.folder, self.silicon):
            is_saved = True
            if trial.backend != LAST_RESORT:
                entry = self._entry_for(trial)
                entry = _struck(entry, self._stored(entry), datetime.fromtimestamp(trial.began, UTC))
                is_saved = self._save(entry)
                found.append(entry)
                lift = f"; `attn-dispatch doctor --lift {entry.backend}` lets it be tried again" if entry.holds else ""
                say_once(f"{entry.reason}{until(entry)}{lift}")
            if is_saved:  # remove the marker only once its entry is on disk
                recorded.append(path)
        for path in recorded:  # closed now, too
            with suppress(OSError):
                path.unlink()
        return found

    def _entry_for(self, trial: Trial) -> Entry:
        name = f"{trial.backend} {trial.version}" if trial.version else trial.backend
        reason = f"the process ended while {name} ran {trial.title} for the first time (crashed, killed or stopped)"
        about: dict[str, Any] = {"backend": trial.backend, "version": trial.version, "title": trial.title}
        return Entry(**about, silicon=self.silicon, kind="died", reason=reason)

    def _entries(self) -> Table:
        if self._place not in _known:
            self.reread()
        return _known.get(self._place, {})

    def _stored(self, entry: Entry) -> Entry | None:
        """The entry on disk for the same version and scope, which another process may have written; or None."""
        return files.read_or_none(self._path(entry), self._read) or _unsaved[self._place].get(entry.key)

    def _read(self, path: Path) -> Entry:
        """The entry in a file. Raises one of `files.UNREADABLE`."""
        entry = files.decode_checked(files.read(path, files.MAX_CHECKED_BYTES), Entry)
        if entry.silicon != self.silicon or path != self._path(entry):
            raise ValueError("its content does not match its name")
        if (entry.until is None) == (entry.kind in STRIKES):
            raise ValueError("it has no end, or should have none")
        return entry

    def _path(self, entry: Entry) -> Path:
        return self._place / f"{files.digest(*entry.key)}.json"

    def _save(self, entry: Entry) -> bool:
        if self._place in _known:  # else it is about to be read
            _known[self._place][entry.key] = entry
        try:
            files.refuse_links(self.folder, self._place)
            self._place.mkdir(parents=True, exist_ok=True)
            files.write(self._path(entry), files.encode_checked(entry))
        except OSError as error:
            files.say_unwritten("quarantines last for this process only", self._place, error)
            _unsaved[self._place][entry.key] = entry
            return False
        _unsaved[self._place].pop(entry.key, None)
        return True

    def _remove(self, entry: Entry) -> bool:
        try:
            files.refuse_links(self.folder, self._place)
            system.when_free(lambda: self._path(entry).unlink(missing_ok=True))
        except OSError as error:
            say_once(f"{entry.backend} stays in quarantine: {self._path(entry)} cannot be removed ({error.strerror})")
            return False
        _unsaved[self._place].pop(entry.key, None)
        self._entries().pop(entry.key, None)
        return True


def silicons(folder: Path) -> list[str]:
    """The silicons that have a quarantine in a cache folder."""
    return [path.name for path in files.listed(folder, folder / FOLDER, "") if SILICON.fullmatch(path.name)]


def until(entry: Entry) -> str:
    """The end of an entry as a suffix to its reason; empty where it has none or is over."""
    return f"; quarantined until {shown_time(entry.until)} UTC" if entry.until and entry.holds else ""


def shown_time(time: datetime | str) -> str:
    """Format a time, or an ISO time, to the minute."""
    return str(time)[:16].replace("T", " ")


def _struck(entry: Entry, earlier: Entry | None, began: datetime, *, certain: bool = False) -> Entry:
    """Add a strike, of a trial that began at ``began``, to the stored entry of the version."""
    now = clock()
    if earlier is None or earlier.created - CLOCK_ERROR > now:
        strikes, hold = 1, FIRST_HOLD if certain else NO_HOLD
    elif earlier.holds or began < earlier.created:
        return earlier
    else:
        strikes, hold = earlier.strikes + 1, min(max(FIRST_HOLD, earlier.hold * HOLD_FACTOR), LONGEST_HOLD)
        entry = msgspec.structs.replace(entry, reason=f"{entry.reason}; strike {strikes}")
    return msgspec.structs.replace(entry, strikes=strikes, created=now, until=now + hold)


# --- crash markers ----------------------------------------------------------------------------------------------------


_own_markers: dict[Path, int] = {}  # this process's markers -> descriptors that hold their locks


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a marker: the backend, the problem (`title`), when its trial began, in seconds since 1970."""

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
                _overwrite(handle, content)


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
    """The folder of a silicon's quarantine. Raises ValueError for no fingerprint: no path leaves the folder."""
    return folder / FOLDER / fingerprint(silicon)


def abandoned(folder: Path, silicon: str) -> Iterator[tuple[Path, Trial]]:
    """Find the markers of dead processes, each locked until the next; several processes may iterate at once."""
    for path in files.listed(folder, place_of(folder, silicon), ".mark"):
        try:
            with files.opened(path) as file:
                content = _abandoned(file.fileno())
                if content:
                    yield path, files.decode_checked(content, Trial)
            if content == b"":  # closed now: Windows removes no open file
                path.unlink()
        except FileNotFoundError:
            continue  # removed by its process, or by another that recorded the death
        except files.UNREADABLE as error:
            say_once(f"ignored {path}: {error}")


def _abandoned(handle: int) -> bytes | None:
    """The content of a marker whose process is gone, empty if it is old and blames nobody; None for others."""
    seen = os.fstat(handle)
    is_old = abs(time.time() - seen.st_mtime) > EXPIRY_S
    if not seen.st_size and not is_old:  # its process may be about to lock it
        return None
    try:
        if not system.lock(handle, shared=True):
            return None
    except OSError:  # a file system without locks
        if not is_old:
            return None
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, files.MAX_CHECKED_BYTES)  # now that no process writes it


def _create(folder: Path, marker: CrashMarker) -> None:
    files.refuse_links(folder, marker.path.parent)
    marker.path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(marker.path, files.NEW, 0o666)
    _own_markers[marker.path] = handle
    with suppress(OSError):  # a file system without locks
        # Before writing: other processes leave an empty marker alone.
        system.lock(handle)
    _overwrite(handle, marker.content)


def _overwrite(handle: int, content: bytes) -> None:
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, content)


def _remove(path: Path) -> None:
    handle = _own_markers.pop(path, None)
    if handle is not None:
        with suppress(OSError):
            os.ftruncate(handle, 0)  # for a process that reads it now, or if it cannot be removed
        os.close(handle)
        with suppress(OSError):
            os.unlink(path)


def _forget_parents_markers() -> None:
    """Close the parent's markers in a forked child: its copies of the descriptors would keep them locked."""
    while _own_markers:
        os.close(_own_markers.popitem()[1])


def _end() -> None:
    """Remove the markers at a regular exit: a trial still running in a thread did not end the process."""
    for path in list(_own_markers):
        _remove(path)


atexit.register(_end)
system.in_forked_child(_forget_parents_markers)
