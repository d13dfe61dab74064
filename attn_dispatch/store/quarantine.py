"""The quarantine: backends that crashed, hung, gave wrong results or exceeded their declared memory on this machine.

    <cache folder>/quarantine/<silicon>/<digest>.json

One small checked file per entry. An entry excludes one version of a backend, for all problems or for one group; other
versions are not affected. Damaged and foreign files are ignored with one warning. No torch here.

Wrong results and undeclared memory are proven: their entries (`incorrect`, `memory`) hold until they are lifted. The
death or hang of a process (`died`, `hung`) is a strike, since most processes die for other reasons: preemption, a
supervisor, memory that others took. How long strikes exclude a version depends on the evidence:

- Sure: the process noted a crash (SIGSEGV, SIGABRT, ..., see `signal_notes`), or a call ran longer than its time limit
  while this process was awake. Would the version be tried again at once, a supervisor's restarts would all crash: it
  is out for `FIRST_HOLD`, after the second strike for a day, then twice as long for each, up to `LONGEST_HOLD`.
- Unsure: the process left no note, as after SIGKILL, or received a stop signal late in a call, during which it may have
  been suspended.
  A restarted job that leaves out its fastest backend is slow as long as it runs, so the first such death excludes
  nothing, nor does one in another call of the trial than the last: kills from outside come at any moment. If the next
  trial ends in the same call, the version is out for `FIRST_HOLD`, then six times as long for each, up to
  `LONGEST_UNSURE_HOLD`. A crash without a note, as by exit() in C code, costs two processes instead of one.

Processes killed together, as the ranks of a job are, count as one strike: a trial that began before the end of the hold
adds none. Strikes are forgotten a day after their hold, or after as long as it lasted; a trial that times the version
clears them at once.
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
STRIKES = ("died", "hung")  #: kinds of entries that expire
FIRST_HOLD = timedelta(minutes=10)  #: for which a first sure strike, or a second unsure one, excludes a version
SECOND_HOLD = timedelta(days=1)  #: for which a second sure strike does; each further one holds twice as long
LONGEST_HOLD = timedelta(days=30)
UNSURE_FACTOR = 6  #: ratio of the holds of unsure strikes
LONGEST_UNSURE_HOLD = timedelta(hours=12)
REMEMBERED = timedelta(days=1)  #: for which strikes count after their hold, at least
CLOCK_ERROR = timedelta(minutes=1)  #: by which the clocks of machines that share the folder may differ


def clock() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


def _now() -> str:
    return clock().isoformat()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The quarantine of one version of a backend.

    ``scope`` is "" for all problems, else the digits of a group of problems. ``reason`` is one line, ``title`` the
    problem that showed the fault, ``created`` an ISO time in UTC. Of deaths and hangs, ``strikes`` are the sure ones,
    ``unsure`` the others in the same call of a trial (``progress``), ``created`` the time of the last and ``until``,
    likewise, the end of its hold; None: `LONGEST_HOLD` after ``created``. Other entries have no end.
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
    strikes: int = 0
    unsure: int = 0
    progress: str = ""

    @property
    def end(self) -> datetime | None:
        """The end of a hold; None for an entry that is proven."""
        if self.kind not in STRIKES:
            return None
        return _time(self.created) + LONGEST_HOLD if self.until is None else _time(self.until)

    @property
    def holds(self) -> bool:
        """Whether the entry excludes its version now."""
        end = self.end
        return end is None or _time(self.created) - CLOCK_ERROR <= clock() < end

    @property
    def counts(self) -> bool:
        """Whether its strikes count, during the hold and for some time after it; not if the clock was set back."""
        end = self.end
        if end is None:
            return True
        made = _time(self.created)
        return made - CLOCK_ERROR <= clock() < end + max(REMEMBERED, end - made)

    @property
    def is_doubtful(self) -> bool:
        """Whether it rests on two deaths that left no note, as after SIGKILL: the least that excludes a version."""
        return self.kind == "died" and not self.strikes and self.unsure <= 2

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

    def strikes(self) -> list[Entry]:
        """The entries that exclude nothing now, but whose strikes count, sorted likewise."""
        return [entry for entry in self._all_entries() if entry.counts and not entry.holds]

    def _all_entries(self) -> list[Entry]:
        """All entries, expired ones included, sorted likewise."""
        found = list(self._entries().values())  # copied at once: another thread may add to it
        return sorted(found, key=lambda entry: [part or "" for part in entry.key])

    def add(self, entry: Entry) -> None:
        """Quarantine in this and later processes; only in this one, with one warning, where the folder is read-only.

        A death or hang is a sure strike, added to those of the version.

        Raises:
            ValueError: the entry is for another silicon.
        """
        if entry.silicon != self.silicon:
            raise ValueError(f"an entry for {entry.silicon}, not for {self.silicon}")
        known = self._entries()
        entry = _printable(entry)
        if entry.kind in STRIKES:
            entry = _with_strike(entry, self._stored(entry), clock(), sure=True)
        known[entry.key] = entry
        self._save(entry)

    def clear_strikes(self, backend: str, version: str | None, scope: str = "") -> None:
        """Forget the strikes of a version, for all problems and for those of ``scope``: it was tried with success."""
        entries = self._entries()
        for each in {"", scope} if entries else ():
            entry = entries.get((backend, version, each))
            if entry is not None and entry.kind in STRIKES:
                self._remove(entry)

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
            began = datetime.fromtimestamp(left.marker.began, UTC)
            entry = _with_strike(entry, self._stored(entry), began, sure=bool(left.noted.crash))
            self._table.entries[entry.key] = entry
            if self._save(entry):  # remove the marker only once its entry is on disk
                _unlink(left.path)
            found.append(entry)
            lift = f"; `attn-dispatch doctor --lift {entry.backend}` lets it be tried again" if entry.holds else ""
            say_once(f"{entry.reason}{until(entry)}{lift}")
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
    """The end of an entry as a suffix to its reason; empty where it has none or is over."""
    end = entry.end
    return f"; quarantined until {shown_time(end.isoformat())} UTC" if end is not None and entry.holds else ""


def shown_time(text: str) -> str:
    """Format an ISO time to the minute."""
    return text[:16].replace("T", " ")


def _with_strike(entry: Entry, earlier: Entry | None, began: datetime, *, sure: bool) -> Entry:
    """Add a strike to the stored entry of the version, which a trial that began at ``began`` gave."""
    now = clock()
    if earlier is None or not earlier.counts:
        earlier = None
    elif earlier.end is None or began < earlier.end:
        return earlier
    strikes = sure + (earlier.strikes if earlier else 0)
    repeated = earlier is not None and (sure or earlier.progress == entry.progress)
    unsure = (not sure) + (earlier.unsure if earlier and repeated else 0)
    until = (now + _hold(strikes, unsure, sure=sure)).isoformat()
    known = strikes + unsure - 1
    reason = entry.reason if not known else f"{entry.reason}; {known} strike{'s' * (known > 1)} before"
    return msgspec.structs.replace(
        entry, reason=_one_line(reason), created=now.isoformat(), until=until, strikes=strikes, unsure=unsure
    )


def _hold(strikes: int, unsure: int, *, sure: bool) -> timedelta:
    """How long the last of these strikes excludes its version."""
    if sure:
        doubled = min(strikes - 2, 10)  # past which the longest hold is exceeded
        return FIRST_HOLD if strikes == 1 else min(SECOND_HOLD * 2**doubled, LONGEST_HOLD)
    number = min(strikes + unsure, 10)
    return timedelta(0) if number == 1 else min(FIRST_HOLD * UNSURE_FACTOR ** (number - 2), LONGEST_UNSURE_HOLD)


def _entry_for(left: Abandoned) -> Entry | None:
    """The entry for an abandoned marker; None where a signal, reboot or power loss may have ended the process."""
    marker, crash = left.marker, left.noted.crash
    name = f"{marker.backend} {marker.version}" if marker.version else marker.backend
    trial = f"{name} ran {marker.title} for the first time"
    kind: Kind = "died"
    if crash:
        reason = f"the process crashed while {trial} ({_one_line(crash)})"
    elif left.noted.stopped:
        if left.overdue_s is None:
            return None
        kind = "hung"
        reason = f"the process had to be stopped while {trial}, {left.overdue_s:.0f} s into a call"
    elif left.rebooted or marker.crashes_only:
        return None
    else:
        reason = f"the process died while {trial} (killed, out of memory, or a crash that left no note)"
    entry = Entry(
        backend=marker.backend,
        version=marker.version,
        silicon=marker.silicon,
        kind=kind,
        scope=marker.scope,
        reason=reason,
        title=marker.title,
        progress=left.progress,
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


def _time(text: str) -> datetime:
    """Read an ISO time. Raises ValueError where it is none, or has no time zone."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"not a time in UTC: {text}")
    return found


def _check(entry: Entry, path: Path, silicon: str) -> None:
    if entry.silicon != silicon or path.name != f"{digest(*entry.key)}.json":
        raise ValueError("its content does not match its name")
    if entry.kind in STRIKES:
        _time(entry.created)
    if entry.until is not None:
        _time(entry.until)
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
