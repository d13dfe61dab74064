"""The store of decisions: one small JSON file each, written by atomic rename, read on demand.

    <cache folder>/v2/<silicon>/<group>/<key>.json

The folder is $ATTN_DISPATCH_CACHE_DIR, else the user's cache folder; past $ATTN_DISPATCH_CACHE_MB the least recently
used are removed. A damaged or foreign file is a miss, with one warning. Decisions shipped with the package come second
to the user's own. No torch here: `inspect` must start at once.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from attn_dispatch import process_state
from attn_dispatch.log import say_once
from attn_dispatch.settings import NO_HOME, NOWHERE, max_cache_mb
from attn_dispatch.store import files
from attn_dispatch.store.address import SILICON, STORED, Address
from attn_dispatch.store.bundle import Refused, read_bundle
from attn_dispatch.store.decision import MAX_BYTES, SCHEMA, Damaged, Decision, decode, encode, from_elsewhere, time_of
from attn_dispatch.store.merge import merge
from attn_dispatch.text import printable

PUTS_PER_CLEANUP = 256  #: a process cleans the store up at its first write, then at every 256th
ANY_KEY = "0" * 20  #: a valid key, for paths that need silicon and group only
LONG_AGO = "1970-01-01T00:00:00+00:00"
CLOCK_TOLERANCE = timedelta(days=1)  #: times further ahead than this come from a wrong clock


_touched: set[str] = set()
_puts: Counter[Path] = Counter()
_examined: set[Path] = set()  # cache folders, once it is known whether others can write to them
_unstored: dict[Path, str] = {}  # why a decision could not be written, by cache folder
process_state.register(process_state.READ, _touched.clear, _puts.clear, _examined.clear, _unstored.clear)


class Store:
    """The decisions under one folder. Nothing is created before the first `put`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / f"v{SCHEMA}"

    def path(self, silicon: str, group: str, key: str) -> Path:
        """The path of a decision.

        Raises:
            ValueError: an argument is not a fingerprint, a group or a key; paths cannot leave the folder.
        """
        if not Address(silicon, group, key).is_valid:
            raise ValueError(f"not a store address: {silicon!r}, {group!r}, {key!r}")
        return self.root / silicon / group / f"{key}.json"

    def get(self, silicon: str, group: str, key: str) -> Decision | None:
        """The stored decision, or None."""
        path = self.path(silicon, group, key)
        self._warn_if_shared()
        found = _read(path)
        if found is not None:
            _touch(path)
        return found

    def put(self, decision: Decision) -> Path | None:
        """Write a decision, merged with the stored one; its path, or None, with one warning, where that fails.

        Raises:
            ValueError: as `path` does. InvalidInput: $ATTN_DISPATCH_CACHE_MB.
        """
        self.path(*decision.address)  # checks the address
        why = NO_HOME
        try:
            if self.folder != NOWHERE:
                self.add(decision)
                return self.path(*decision.address)
        except OSError as error:
            # Not the file, nor the group's folder, which there may be room for: one warning for all.
            there = (str(each) for each in (self.root, *self.root.parents) if os.path.exists(each))
            where = error.filename if error.errno == errno.ELOOP else next(there)
            why = f"{where} cannot be written ({error.strerror or error})"
            say_once(f"decisions are not stored: {why}")
        except Damaged as error:
            why = f"the decision for {printable(decision.title)} is not stored: {error}"
            say_once(why)
        _unstored[self.folder] = why
        return None

    def why_unstored(self) -> str:
        """Why this process could not store a decision here, the last time; empty if it could store all."""
        return _unstored.get(self.folder, "")

    def add(self, decision: Decision) -> Literal["added", "merged", "unchanged"]:
        """Write a decision as `put` does, but raise on failure; the effect.

        Raises:
            OSError: the file cannot be written. Damaged: the decision could not be read back.
        """
        most, path = max_cache_mb() * 1e6, self.path(*decision.address)
        content = encode(decision)  # before folders are created: it raises where the decision is invalid
        self._warn_if_shared()
        with files.locked(self.folder, path.parent):
            there = _read(path)
            if there is not None and there != decision:
                with suppress(Damaged):  # each rules out the other's choice: write the given one
                    content = encode(merge(_dated(there), _dated(decision)))
            unchanged = there is not None and content == encode(there)
            if unchanged:
                _touch(path)
            else:
                files.write(path, content)
        _puts[self.folder] += 1
        if _puts[self.folder] % PUTS_PER_CLEANUP == 1:
            files.tidy(self.root, STORED, most, keep=path)
        return "unchanged" if unchanged else "added" if there is None else "merged"

    def shared(self) -> str:
        """Say which folder of the store other users can write to, and why; empty if there is none."""
        return files.open_to_others(self.folder) or files.open_to_others(self.root)

    def _warn_if_shared(self) -> None:
        if self.folder not in _examined:
            _examined.add(self.folder)
            if found := self.shared():
                say_once(f"other users can choose this user's backends: {found}")

    def amend(self, decision: Decision, **changes: Any) -> None:
        """Change fields of a stored decision other than its measurements; do nothing where another has replaced it.

        Where it cannot be written, it stays unchanged.
        """
        path = self.path(*decision.address)
        with suppress(OSError, Damaged), files.locked(self.folder, path.parent):
            there = _read(path)
            if there is not None and there.created == decision.created:
                files.write(path, encode(replace(there, **changes)))

    def group(self, silicon: str, group: str, most: int | None = None) -> list[Decision]:
        """The readable decisions of a group, sorted by key; of more than `most`, those used last."""
        paths = files.listed(self.folder, self.path(silicon, group, ANY_KEY).parent, ".json")
        if most is not None and len(paths) > most:
            paths = sorted(sorted(paths, key=lambda path: -_used(path))[:most])
        return [found for found in map(_read, paths) if found is not None]

    def all(self) -> Iterator[tuple[Path, Decision]]:
        """Every readable decision with its path, sorted by silicon and key."""
        for silicon in self._names():
            folders = (self.root / silicon / group for group in self._names(silicon))
            paths = [path for folder in folders for path in files.listed(self.folder, folder, ".json")]
            for path in sorted(paths, key=lambda path: (path.stem, path)):
                if (found := _read(path)) is not None:
                    yield path, found

    def _names(self, *below: str) -> list[str]:
        """The sorted names in a folder below the root, given by its names."""
        return [path.name for path in files.listed(self.folder, self.root.joinpath(*below), "")]


@cache
def shipped(silicon: str) -> dict[str, Decision]:
    """The decisions shipped with the package for this silicon, by key."""
    if not SILICON.fullmatch(silicon):
        return {}
    source: Any = "attn_dispatch.profiles"
    found = {}
    try:
        source = package_files(source).joinpath(f"{silicon}.json")
        for each in read_bundle(source.read_bytes()):
            if isinstance(each, Refused):
                say_once(f"ignored {each.what} of the shipped profile {source}: {each.reason}")
            elif each.silicon == silicon:
                found[each.key] = from_elsewhere(replace(each, source="shipped"), "shipped")
    except FileNotFoundError:
        return {}
    except (OSError, Damaged) as error:
        say_once(f"ignored the shipped profile {source}: {error}")
    return found


process_state.register(process_state.READ, shipped.cache_clear)


def _dated(decision: Decision) -> Decision:
    """Date rows without a time by their decision, and those of a wrong clock, which would win for ever, long ago."""
    latest = datetime.now(UTC) + CLOCK_TOLERANCE

    def past(text: str) -> str:
        return LONG_AGO if time_of(text) > latest else text

    rows = [replace(row, measured=past(row.measured or decision.created)) for row in decision.candidates]
    return replace(decision, created=past(decision.created), candidates=tuple(rows))


def _touch(path: Path) -> None:
    """Update a file's modification time, once in a process, so that clean-ups see it in use."""
    name = str(path)
    if name not in _touched:
        _touched.add(name)
        with suppress(OSError):
            os.utime(name, follow_symlinks=os.utime not in os.supports_follow_symlinks)


def _used(path: Path) -> float:
    """When a file was last written or used; 0 if it is gone."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> Decision | None:
    """The decision in a file of the store; None, with one warning, where it cannot be read."""
    address = Address(path.parent.parent.name, path.parent.name, path.stem)

    def read(path: Path) -> Decision:
        found = decode(files.read(path, MAX_BYTES))
        if found.address != address:
            raise Damaged("it holds another problem's decision")
        return found

    return files.read_or_none(path, read) if address.is_valid else None
