"""Backends that are kept out on this machine: they took the process down, hung, gave wrong results or lied on memory.

    <cache folder>/quarantine/<silicon>/<digest>.json

One small checked file each. What is kept out is one version of a backend, whole or for one group of problems: another
version gets its own chance. A process that was killed from outside in the middle of a trial looks like one that died of
it: the first death keeps a version out for an hour, another one, in a trial begun after that, for good. Damaged and
foreign files are ignored and said once. No torch here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from attn_dispatch import process_state, settings
from attn_dispatch.log import say_once
from attn_dispatch.store import files
from attn_dispatch.store.address import SILICON
from attn_dispatch.store.crash_markers import Dead, dead, digest, listed, place_of, refuse_links
from attn_dispatch.text import printable

Kind = Literal["died", "hung", "incorrect", "memory"]
Key = tuple[str, str | None, str]
LAST_RESORT = "manual"  #: never in quarantine for a death: there is nothing else to run. The registry has the same name


FIRST = timedelta(hours=1)  #: for which the first death keeps a version out


def clock() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


def _now() -> str:
    return clock().isoformat(timespec="seconds")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Why one version of a backend is kept out.

    ``scope`` is "" for the whole version, else the digits of a group of problems. ``reason`` is one line, ``title`` the
    problem it was seen on, ``created`` ISO time in UTC. ``until``, likewise, is when a first death no longer keeps it
    out; None: it is kept out until it is lifted.
    """

    backend: str
    version: str | None
    silicon: str
    kind: Kind
    scope: str = ""
    reason: str
    title: str
    created: str = msgspec.field(default_factory=_now)
    provenance: dict[str, str] | None = None
    until: str | None = None

    @property
    def holds(self) -> bool:
        """Whether it keeps out now; where the clock was set back meanwhile, no longer than it should."""
        return self.until is None or timedelta(0) < datetime.fromisoformat(self.until) - clock() <= FIRST

    @property
    def key(self) -> Key:
        return self.backend, self.version, self.scope


@dataclass
class _Table:
    """What one process knows of one silicon; ``unkept`` could not be written."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    unkept: dict[Key, Entry] = field(default_factory=dict)
    is_read: bool = False


_tables: dict[Path, _Table] = {}
process_state.register(process_state.READ, _tables.clear)


class Quarantine:
    """What is kept out on one silicon. The folder is read once in a process, when it is first asked.

    Every `Quarantine` of the same folder and silicon shares what was read and added in the process.
    """

    def __init__(self, folder: Path, silicon: str) -> None:
        """Raises ValueError: not a fingerprint."""
        self.silicon = silicon
        self._place = place_of(folder, silicon)
        self._table = _tables.setdefault(self._place, _Table())

    def find(self, backend: str, version: str | None, scope: str = "") -> Entry | None:
        """Why this version is kept out, as a whole or from the problems of ``scope``, or None."""
        entries = self._entries()
        if not entries:
            return None
        found = (entries.get((backend, version, each)) for each in ("", scope))
        return next((entry for entry in found if entry is not None and entry.holds), None)

    def entries(self) -> list[Entry]:
        """All that is kept out now, by backend, version and scope."""
        return [entry for entry in self._noted() if entry.holds]

    def _noted(self) -> list[Entry]:
        """Those too whose time is over."""
        found = list(self._entries().values())  # at once: another thread may add to it
        return sorted(found, key=lambda entry: [part or "" for part in entry.key])

    def add(self, entry: Entry) -> None:
        """Keep out, here and in later processes; only in this one where the folder cannot be written (said once).

        Raises:
            ValueError: an entry for another silicon.
        """
        if entry.silicon != self.silicon:
            raise ValueError(f"an entry for {entry.silicon}, not for {self.silicon}")
        known = self._entries()
        known[entry.key] = entry = _printable(entry)
        self._keep(entry)

    def lift(self, backend: str | None = None) -> list[Entry]:
        """Let a backend's versions, or all, be tried again, as if they had never failed; what was lifted. A file that
        cannot go stays in force.
        """
        self.reread()
        return [entry for entry in self._noted() if backend in (None, entry.backend) and self._remove(entry)]

    def reread(self) -> None:
        """Read the folder anew; what could not be written is kept."""
        self.sweep()
        self._table.entries = {**_read_all(self._place, self.silicon), **self._table.unkept}
        self._table.is_read = True

    def sweep(self) -> list[Entry]:
        """Make entries of the markers that dead processes left, and warn of each. Any number of processes may."""
        found = []
        for left in dead(self._place):
            entry = _obituary(left)
            if entry is None or entry.backend == LAST_RESORT or entry.silicon != self.silicon:
                _unlink(left.path)
                continue
            entry = _sentence(entry, self._before(entry), left.marker.began)
            self._table.entries[entry.key] = entry
            if self._keep(entry):  # the marker goes only when its news is safe
                _unlink(left.path)
            found.append(entry)
            say_once(
                f"{entry.reason}{until(entry)}; `attn-dispatch doctor --lift {entry.backend}` lets it be tried again"
            )
        return found

    def _entries(self) -> dict[Key, Entry]:
        if not self._table.is_read:
            self.reread()
        return self._table.entries

    def _before(self, entry: Entry) -> Entry | None:
        """What was noted of the same version up to now, by other processes too."""
        try:
            found = files.read_checked(self._path(entry), Entry)
            _check(found, self._path(entry), self.silicon)
        except files.UNREADABLE:  # `reread` says so where there is something
            return self._table.unkept.get(entry.key)
        return found

    def _path(self, entry: Entry) -> Path:
        return self._place / f"{digest(*entry.key)}.json"

    def _keep(self, entry: Entry) -> bool:
        try:
            refuse_links(self._place)
            files.write_checked(self._path(entry), entry)
        except OSError as error:
            if settings.NOWHERE not in self._place.parents:
                say_once(f"quarantines last for this process only: {self._place} cannot be written ({error.strerror})")
            self._table.unkept[entry.key] = entry
            return False
        self._table.unkept.pop(entry.key, None)
        return True

    def _remove(self, entry: Entry) -> bool:
        try:
            refuse_links(self._place)
            self._path(entry).unlink(missing_ok=True)
        except OSError as error:
            say_once(f"{entry.backend} stays in quarantine: {self._path(entry)} cannot be removed ({error.strerror})")
            return False
        self._table.unkept.pop(entry.key, None)
        self._table.entries.pop(entry.key, None)
        return True


def silicons(folder: Path) -> list[str]:
    """The silicons of which something is kept in a cache folder."""
    return [path.name for path in listed(folder / "quarantine", "") if SILICON.fullmatch(path.name)]


def until(entry: Entry) -> str:
    """Until when it is kept out, to stand behind what happened; empty where that is for good."""
    return "" if entry.until is None else f"; kept out until {shown_time(entry.until)} UTC"


def shown_time(text: str) -> str:
    """An ISO time to the minute."""
    return text[:16].replace("T", " ")


def _sentence(entry: Entry, before: Entry | None, began: float) -> Entry:
    """The entry with how long a death keeps its version out.

    Processes that are killed at once, as the ranks of a job are, are one death: what began before the time of the first
    one is over adds nothing to it.
    """
    if entry.kind != "died":
        return entry
    if before is None:
        return msgspec.structs.replace(entry, until=(clock() + FIRST).isoformat(timespec="seconds"))
    if before.until is None:
        return entry
    over = datetime.fromisoformat(before.until)
    if began < over.timestamp() and over - clock() <= FIRST:  # no time is further ahead, unless the clock was wrong
        return before
    again = f"{entry.reason}; another process had died of it, noted on {shown_time(before.created)} UTC"
    return _printable(msgspec.structs.replace(entry, reason=again))


def _obituary(left: Dead) -> Entry | None:
    """The entry for a dead process's marker, or None where it was told to stop in the middle of a trial, or where a
    reboot or a loss of power may have ended it.
    """
    marker = left.marker
    name = f"{marker.backend} {marker.version}" if marker.version else marker.backend
    trial = f"{name} ran {marker.title} for the first time"
    if not left.told_to_stop and left.rebooted:
        return None
    if not left.told_to_stop:
        kind: Kind = "died"
        reason = f"the process died while {trial} (segfault, abort or out-of-memory kill)"
    elif marker.patience_s is not None and left.after_s > marker.patience_s:
        kind = "hung"
        reason = f"the process had to be stopped while {trial}, after {left.after_s:.0f} s"
    else:
        return None
    entry = Entry(
        backend=marker.backend,
        version=marker.version,
        silicon=marker.silicon,
        kind=kind,
        scope=marker.scope,
        reason=reason,
        title=marker.title,
    )
    return _printable(entry)


def _read_all(place: Path, silicon: str) -> dict[Key, Entry]:
    found = {}
    for path in listed(place, ".json"):
        try:
            entry = files.read_checked(path, Entry)
            _check(entry, path, silicon)
        except FileNotFoundError:
            continue  # lifted at this moment
        except files.UNREADABLE as error:
            say_once(f"ignored {path}: {error}")
            continue
        found[entry.key] = entry
    return found


def _check(entry: Entry, path: Path, silicon: str) -> None:
    if entry.silicon != silicon or path.name != f"{digest(*entry.key)}.json":
        raise ValueError("it is about something else than its name says")
    if entry.until is not None and datetime.fromisoformat(entry.until).tzinfo is None:
        raise ValueError("it ends at no time in UTC")
    if entry != _printable(entry) or not "".join(map(str, entry.key)).isprintable():
        raise ValueError("it holds what cannot be printed")


def _printable(entry: Entry) -> Entry:
    """On one line, without what a terminal would act on."""
    shown = {name: _one_line(getattr(entry, name)) for name in ("reason", "title", "created")}
    if entry.until is not None:
        shown["until"] = _one_line(entry.until)
    return msgspec.structs.replace(entry, **shown)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))[:4000]


def _unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        say_once(f"{path} cannot be removed ({error.strerror})")
