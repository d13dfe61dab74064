"""Decisions on disk: one small JSON file each, written by atomic rename, read when asked for.

    <cache folder>/v2/<silicon>/<group>/<key>.json

The folder is $ATTN_DISPATCH_CACHE_DIR, else the user's cache folder; past $ATTN_DISPATCH_CACHE_MB those that have not
been used for longest are removed. A file that is damaged, foreign or of a later schema is a miss and is said once.
Beneath the user's decisions lie those shipped with the package. No torch here: `inspect` must start at once.
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
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from attn_dispatch import process_state
from attn_dispatch.log import say_once
from attn_dispatch.settings import NOWHERE, _most_bytes
from attn_dispatch.store import files
from attn_dispatch.store.address import GROUP, KEY, SILICON, Address
from attn_dispatch.store.bundle import Refused, read_bundle
from attn_dispatch.store.decision import MOST_BYTES, SCHEMA, Damaged, Decision, decode, encode, time_of
from attn_dispatch.store.merge import merge
from attn_dispatch.text import printable

EACH = 256  #: puts of a process from one clean-up to the next
NO_KEY = "0" * 20  #: where only the others' form matters
LONG_AGO = "1970-01-01T00:00:00+00:00"
NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)  #: a file or links in a circle; whoever writes there says so
AHEAD = timedelta(days=1)  #: no clock is that wrong by mere neglect

_touched: set[str] = set()
_puts: Counter[Path] = Counter()
process_state.register(process_state.READ, _touched.clear, _puts.clear)


class Added(NamedTuple):
    """Where a decision was put, and what that changed."""

    path: Path
    how: Literal["added", "merged", "unchanged"]


class Store:
    """The decisions under one folder. Nothing is created before the first `put`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / f"v{SCHEMA}"

    def path(self, silicon: str, group: str, key: str) -> Path:
        """Where a decision is kept.

        Raises:
            ValueError: not a key, a group or a fingerprint; paths cannot escape the folder.
        """
        if not Address(silicon, group, key).is_valid:
            raise ValueError(f"not a store address: {silicon!r}, {group!r}, {key!r}")
        return self.root / silicon / group / f"{key}.json"

    def get(self, silicon: str, group: str, key: str) -> Decision | None:
        """The stored decision, or None."""
        path = self.path(silicon, group, key)
        found = _read(path, Address(silicon, group, key))
        if found is not None:
            _touch(path)
        return found

    def put(self, decision: Decision) -> Path | None:
        """Write a decision, merged with what is there; the path, or None where it cannot be kept (said once).

        Raises:
            ValueError: as `path` does. InvalidInput: $ATTN_DISPATCH_CACHE_MB.
        """
        path = self.path(*decision.address)
        if self.folder == NOWHERE:
            return None
        try:
            return self.add(decision).path
        except OSError as error:
            # Said once for all groups, where none of them can be written.
            there = (str(each) for each in (path.parent, *path.parents) if os.path.exists(each))
            where = error.filename if error.errno == errno.ELOOP else next(there)
            say_once(f"decisions are not kept: {where} cannot be written ({error.strerror or error})")
        except Damaged as error:
            say_once(f"the decision for {printable(decision.title)} is not kept: {error}")
        return None

    def add(self, decision: Decision) -> Added:
        """`put` for those who want to know.

        Raises:
            OSError: it cannot be written. Damaged: it could not be read back.
        """
        most = _most_bytes()
        path = self.path(*decision.address)
        encode(decision)  # nothing is made for one that cannot be kept
        files.refuse_links(self.folder, path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.parent):
            there = _read(path, decision.address)
            content = _together(decision, there)
            unchanged = there is not None and content == encode(there)
            if unchanged:
                _touch(path)
            else:
                files.write(path, content)
        _puts[self.folder] += 1
        if _puts[self.folder] % EACH == 1:
            files.tidy(self.root, (SILICON, GROUP, KEY), most, keep=path)
        return Added(path, "unchanged" if unchanged else "added" if there is None else "merged")

    def amend(self, decision: Decision, **changes: Any) -> None:
        """Change fields of a stored decision that say nothing of what was measured; nothing where another has taken
        its place. Where it cannot be written, it stays as it was.
        """
        path = self.path(*decision.address)
        with suppress(OSError, Damaged):
            files.refuse_links(self.folder, path.parent)
            with files.locked(path.parent):
                there = _read(path, decision.address)
                if there is not None and there.created == decision.created:
                    files.write(path, encode(replace(there, **changes)))

    def group(self, silicon: str, group: str) -> list[Decision]:
        """Every readable decision of a group, by key."""
        folder = self.path(silicon, group, NO_KEY).parent
        found = []
        for name in _names(folder):
            address = Address(silicon, group, name.removesuffix(".json"))
            if address.key != name and address.is_valid:
                found.append(_read(f"{folder}/{name}", address))
        return [each for each in found if each is not None]

    def all(self) -> Iterator[tuple[Path, Decision]]:
        """Every readable decision, by silicon and key."""
        for silicon in _names(self.root):
            if SILICON.fullmatch(silicon):
                yield from self._all_of(silicon)

    def _all_of(self, silicon: str) -> Iterator[tuple[Path, Decision]]:
        folder = f"{self.root}/{silicon}"
        names = [(name, group) for group in _names(folder) for name in _names(f"{folder}/{group}")]
        for name, group in sorted(names):
            address = Address(silicon, group, name.removesuffix(".json"))
            if address.key != name and address.is_valid:
                path = f"{folder}/{group}/{name}"
                found = _read(path, address)
                if found is not None:
                    yield Path(path), found


@cache
def shipped(silicon: str) -> dict[str, Decision]:
    """The decisions that came with the package for this silicon, by key."""
    if not SILICON.fullmatch(silicon):
        return {}
    source = package_files("attn_dispatch.profiles").joinpath(f"{silicon}.json")
    found = {}
    try:
        for each in read_bundle(source.read_bytes()):
            if isinstance(each, Refused):
                say_once(f"ignored {each.what} of the shipped profile {source}: {each.reason}")
            elif each.silicon == silicon:
                found[each.key] = replace(each, source="shipped")
    except FileNotFoundError:
        return {}
    except (OSError, Damaged) as error:
        say_once(f"ignored the shipped profile {source}: {error}")
    return found


process_state.register(process_state.READ, shipped.cache_clear)


def _together(given: Decision, old: Decision | None) -> bytes:
    """The content of the file after a put."""
    given = _timely(given)
    if old is not None and old != given:
        with suppress(Damaged):  # each rules the other's choice out: the one at hand holds
            return encode(merge(_dated(_timely(old)), _dated(given)))
    return encode(given)


def _timely(decision: Decision) -> Decision:
    """A time that has not come was told by a wrong clock, and would win over all that is measured: it counts as the
    oldest.
    """
    latest = datetime.now(UTC) + AHEAD
    if any(time_of(row.measured) > latest for row in decision.candidates):
        rows = (replace(r, measured=LONG_AGO) if time_of(r.measured) > latest else r for r in decision.candidates)
        decision = replace(decision, candidates=tuple(rows))
    return replace(decision, created=LONG_AGO) if time_of(decision.created) > latest else decision


def _dated(decision: Decision) -> Decision:
    """Rows that do not say when they were measured are as old as their decision, as long as it is theirs alone."""
    rows = (row if row.measured else replace(row, measured=decision.created) for row in decision.candidates)
    return replace(decision, candidates=tuple(rows))


def _touch(path: Path) -> None:
    """Note that a file is in use, once in a process."""
    name = str(path)
    if name not in _touched:
        _touched.add(name)
        with suppress(OSError):
            os.utime(name, follow_symlinks=False)


def _names(folder: Path | str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read(path: Path | str, address: Address) -> Decision | None:
    try:
        found = decode(files.read(path, MOST_BYTES))
    except (OSError, Damaged) as error:
        if not isinstance(error, FileNotFoundError) and getattr(error, "errno", None) not in NO_FOLDER:
            say_once(f"ignored {path}: {error}")
        return None
    if found.address != address:
        say_once(f"ignored {path}: it holds another problem's decision")
        return None
    return found
