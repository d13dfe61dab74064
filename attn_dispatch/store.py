"""Decisions on disk: one small JSON file each, written by atomic rename, read when asked for.

    <cache folder>/v1/<silicon>/<key>.json

The folder is $ATTN_DISPATCH_CACHE_DIR, else the user's cache folder. A file that is damaged, foreign or of another
schema is a miss and is said once. Beneath the user's decisions lie those shipped with the package. No torch here:
`inspect` must start at once.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from attn_dispatch.logging import say_once

SCHEMA = 1
MISSED = "missed.jsonl"
KEY = re.compile(r"[0-9a-f]{20}")
SILICON = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
UNREADABLE = (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one candidate. Times in milliseconds, `error` the largest absolute error of out."""

    backend: str
    order: str
    status: str
    reason: str = ""
    version: str | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    first_ms: float | None = None
    rounds: int | None = None
    peak_bytes: int | None = None
    error: float | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Which candidate runs a problem, and what is known of the others."""

    schema: int = SCHEMA
    key: str
    silicon: str
    title: str
    problem: dict[str, Any]
    choice: str
    order: str
    source: str
    candidates: tuple[Row, ...]
    versions: dict[str, str | None]
    provenance: dict[str, str]
    created: str
    budget_ms: float | None = None
    elapsed_ms: float = 0.0


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Many decisions in one file, as shipped."""

    schema: int
    decisions: tuple[Decision, ...]


class Store:
    """The decisions under one folder. Nothing is created before the first `put`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, silicon: str, key: str) -> Path:
        """Where a decision is kept.

        Raises:
            ValueError: not a key or a fingerprint; paths cannot escape the folder.
        """
        if not KEY.fullmatch(key) or not SILICON.fullmatch(silicon):
            raise ValueError(f"not a store address: {silicon!r}, {key!r}")
        return self.folder / f"v{SCHEMA}" / silicon / f"{key}.json"

    def get(self, silicon: str, key: str) -> Decision | None:
        """The stored decision, or None."""
        path = self.path(silicon, key)
        found = _read(path)
        if found is None:
            return None
        if (found.silicon, found.key) != (silicon, key):
            say_once(f"ignored {path}: it holds another problem's decision")
            return None
        return found

    def put(self, decision: Decision) -> Path | None:
        """Write a decision; the path, or None where the folder cannot be written (said once)."""
        path = self.path(decision.silicon, decision.key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, msgspec.json.format(msgspec.json.encode(decision), indent=1))
        except OSError as error:
            say_once(f"decisions are not kept: {path.parent} cannot be written ({error.strerror or error})")
            return None
        return path

    def all(self) -> Iterator[tuple[Path, Decision]]:
        """Every readable decision, by silicon and key."""
        for path in sorted(self.folder.glob(f"v{SCHEMA}/*/*.json")):
            found = _read(path)
            if found is not None:
                yield path, found


def cache_folder() -> Path:
    """$ATTN_DISPATCH_CACHE_DIR, else platformdirs' user cache folder."""
    named = os.environ.get("ATTN_DISPATCH_CACHE_DIR")
    return Path(named).expanduser() if named else platformdirs.user_cache_path("attn-dispatch", appauthor=False)


def note_missed(folder: Path, problem: dict[str, Any]) -> None:
    """Append a problem that could not be measured when it was met; `profile --from` takes the file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / MISSED).open("ab") as file:
            file.write(msgspec.json.encode(problem) + b"\n")
    except OSError as error:
        say_once(f"misses are not noted: {folder} cannot be written ({error.strerror or error})")


@cache
def shipped(silicon: str) -> dict[str, Decision]:
    """The decisions that came with the package for this silicon, by key."""
    if not SILICON.fullmatch(silicon):
        return {}
    source = files("attn_dispatch.profiles").joinpath(f"{silicon}.json")
    try:
        bundle = msgspec.json.decode(source.read_bytes(), type=Bundle)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        say_once(f"ignored the shipped profile {source}: {error}")
        return {}
    usable = bundle.decisions if bundle.schema == SCHEMA else ()
    mine = (decision for decision in usable if decision.silicon == silicon)
    return {decision.key: msgspec.structs.replace(decision, source="shipped") for decision in mine}


def _read(path: Path) -> Decision | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Decision)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        say_once(f"ignored {path}: {error}")
        return None
    if found.schema != SCHEMA:
        say_once(f"ignored {path}: schema {found.schema}, this version reads {SCHEMA}")
        return None
    return found


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing: readers see the old file or the new one, whenever the writer dies."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are its owner's alone; a cache may be shared
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@cache
def _umask() -> int:
    """The process's mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
