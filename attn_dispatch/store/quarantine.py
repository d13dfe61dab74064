"""The quarantine: backends that crashed, hung, gave wrong results or exceeded their declared memory on this machine.

    <cache folder>/quarantine/<silicon>/<digest>.json

One small checked file per entry. An entry excludes one version of a backend, for all problems or for one group; other
versions are not affected. A process killed from outside during a trial looks like a crash: the first crash therefore
excludes a version for an hour only, another one in a trial begun after that for good. Damaged and foreign files are
ignored with one warning. No torch here.
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
from attn_dispatch.store.crash_markers import Abandoned, abandoned, digest, listed, place_of, refuse_links
from attn_dispatch.text import printable

Kind = Literal["died", "hung", "incorrect", "memory"]
Key = tuple[str, str | None, str]
LAST_RESORT = "manual"  #: never quarantined for a crash, because nothing else could run. Same as in kernels.registry
FIRST_CRASH_HOLD = timedelta(hours=1)  #: for which a first crash excludes a version


def clock() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


def _now() -> str:
    return clock().isoformat(timespec="seconds")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The quarantine of one version of a backend.

    ``scope`` is "" for all problems, else the digits of a group of problems. ``reason`` is one line, ``title`` the
    problem that showed the fault, ``created`` an ISO time in UTC. ``until``, likewise, is the end after a first crash;
    None: the entry holds until it is lifted.
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
        """Whether the entry is in force now; never longer than `FIRST_CRASH_HOLD`, even if the clock was set back."""
        return self.until is None or timedelta(0) < datetime.fromisoformat(self.until) - clock() <= FIRST_CRASH_HOLD

    @property
    def key(self) -> Key:
        return self.backend, self.version, self.scope


@dataclass
class _Table:
    """One silicon's entries as read and added in this process; those in ``unsaved`` could not be written."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    unsaved: dict[Key, Entry] = field(default_factory=dict)
    is_read: bool = False


_tables: dict[Path, _Table] = {}
process_state.register(process_state.READ, _tables.clear)


class Quarantine:
    """The quarantine of one silicon. The folder is read once in a process, at the first look-up.

    Every `Quarantine` of the same folder and silicon shares the entries read and added in the process.
    """

    def __init__(self, folder: Path, silicon: str) -> None:
        """Raises ValueError where `silicon` is not a fingerprint."""
        self.silicon = silicon
        self._place = place_of(folder, silicon)
        self._table = _tables.setdefault(self._place, _Table())

    def find(self, backend: str, version: str | None, scope: str = "") -> Entry | None:
        """The entry that excludes this version, for all problems or for those of ``scope``; None if it may run."""
        entries = self._entries()
        if not entries:
            return None
        found = (entries.get((backend, version, each)) for each in ("", scope))
        return next((entry for entry in found if entry is not None and entry.holds), None)

    def entries(self) -> list[Entry]:
        """The entries in force now, sorted by backend, version and scope."""
        return [entry for entry in self._all_entries() if entry.holds]

    def _all_entries(self) -> list[Entry]:
        """All entries, expired ones included, sorted likewise."""
        found = list(self._entries().values())  # copied at once: another thread may add to it
        return sorted(found, key=lambda entry: [part or "" for part in entry.key])

    def add(self, entry: Entry) -> None:
        """Quarantine in this and later processes; only in this one, with one warning, where the folder is read-only.

        Raises:
            ValueError: the entry is for another silicon.
        """
        if entry.silicon != self.silicon:
            raise ValueError(f"an entry for {entry.silicon}, not for {self.silicon}")
        known = self._entries()
        known[entry.key] = entry = _printable(entry)
        self._save(entry)

    def lift(self, backend: str | None = None) -> list[Entry]:
        """Lift the entries of a backend, or all, and return them. An entry whose file cannot be removed stays."""
        self.reread()
        return [entry for entry in self._all_entries() if backend in (None, entry.backend) and self._remove(entry)]

    def reread(self) -> None:
        """Read the folder again; entries that could not be written remain."""
        self.sweep()
        self._table.entries = {**_read_all(self._place, self.silicon), **self._table.unsaved}
        self._table.is_read = True

    def sweep(self) -> list[Entry]:
        """Turn abandoned crash markers into entries, with a warning each; safe in several processes at once."""
        found = []
        for left in abandoned(self._place):
            entry = _entry_for(left)
            if entry is None or entry.backend == LAST_RESORT or entry.silicon != self.silicon:
                _unlink(left.path)
                continue
            entry = _with_expiry(entry, self._stored(entry), left.marker.began)
            self._table.entries[entry.key] = entry
            if self._save(entry):  # remove the marker only once its entry is on disk
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

    def _stored(self, entry: Entry) -> Entry | None:
        """The entry on disk for the same version and scope, which another process may have written; or None."""
        try:
            found = files.read_checked(self._path(entry), Entry)
            _check(found, self._path(entry), self.silicon)
        except files.UNREADABLE:  # `reread` warns of a damaged file
            return self._table.unsaved.get(entry.key)
        return found

    def _path(self, entry: Entry) -> Path:
        return self._place / f"{digest(*entry.key)}.json"

    def _save(self, entry: Entry) -> bool:
        try:
            refuse_links(self._place)
            files.write_checked(self._path(entry), entry)
        except OSError as error:
            if settings.NOWHERE not in self._place.parents:
                say_once(f"quarantines last for this process only: {self._place} cannot be written ({error.strerror})")
            self._table.unsaved[entry.key] = entry
            return False
        self._table.unsaved.pop(entry.key, None)
        return True

    def _remove(self, entry: Entry) -> bool:
        try:
            refuse_links(self._place)
            self._path(entry).unlink(missing_ok=True)
        except OSError as error:
            say_once(f"{entry.backend} stays in quarantine: {self._path(entry)} cannot be removed ({error.strerror})")
            return False
        self._table.unsaved.pop(entry.key, None)
        self._table.entries.pop(entry.key, None)
        return True


def silicons(folder: Path) -> list[str]:
    """The silicons that have a quarantine in a cache folder."""
    return [path.name for path in listed(folder / "quarantine", "") if SILICON.fullmatch(path.name)]


def until(entry: Entry) -> str:
    """The end of an entry as a suffix to its reason; empty where it has none."""
    return "" if entry.until is None else f"; quarantined until {shown_time(entry.until)} UTC"


def shown_time(text: str) -> str:
    """Format an ISO time to the minute."""
    return text[:16].replace("T", " ")


def _with_expiry(entry: Entry, earlier: Entry | None, began: float) -> Entry:
    """Set how long a crash excludes its version, given the stored entry and the trial's start (seconds since 1970).

    Processes killed together, as the ranks of a job are, count as one crash: a trial that began before the first
    entry's end adds nothing to it.
    """
    if entry.kind != "died":
        return entry
    if earlier is None:
        return msgspec.structs.replace(entry, until=(clock() + FIRST_CRASH_HOLD).isoformat(timespec="seconds"))
    if earlier.until is None:
        return entry
    end = datetime.fromisoformat(earlier.until)
    if began < end.timestamp() and end - clock() <= FIRST_CRASH_HOLD:  # further ahead only by a wrong clock
        return earlier
    again = f"{entry.reason}; an earlier process died likewise, recorded on {shown_time(earlier.created)} UTC"
    return _printable(msgspec.structs.replace(entry, reason=again))


def _entry_for(left: Abandoned) -> Entry | None:
    """The entry for an abandoned marker; None where a signal, reboot or power loss may have ended the process."""
    marker = left.marker
    name = f"{marker.backend} {marker.version}" if marker.version else marker.backend
    trial = f"{name} ran {marker.title} for the first time"
    if not left.stop_signal and left.rebooted:
        return None
    if not left.stop_signal:
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
            continue  # lifted meanwhile
        except files.UNREADABLE as error:
            say_once(f"ignored {path}: {error}")
            continue
        found[entry.key] = entry
    return found


def _check(entry: Entry, path: Path, silicon: str) -> None:
    if entry.silicon != silicon or path.name != f"{digest(*entry.key)}.json":
        raise ValueError("its content does not match its name")
    if entry.until is not None and datetime.fromisoformat(entry.until).tzinfo is None:
        raise ValueError("its end is not a time in UTC")
    if entry != _printable(entry) or not "".join(map(str, entry.key)).isprintable():
        raise ValueError("it holds unprintable characters")


def _printable(entry: Entry) -> Entry:
    """The entry with printable, one-line texts, free of terminal control characters."""
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
