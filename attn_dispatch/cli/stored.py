"""The stored decisions, for the commands that show, write or compare them."""

from __future__ import annotations

import os
from pathlib import Path

from attn_dispatch.errors import AttnDispatchError
from attn_dispatch.settings import NO_HOME, NOWHERE, cache_folder
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store


def existing_folder() -> Path:
    """The cache folder, for commands that need one. Raises AttnDispatchError: there is no home."""
    folder = cache_folder()
    if folder == NOWHERE:
        raise AttnDispatchError(NO_HOME)
    return folder


def decisions(folder: Path, *, silicon: str = "", key: str = "") -> list[tuple[Path, Decision]]:
    """Every readable decision whose silicon and key begin so, with its path.

    Raises:
        AttnDispatchError: there is none, and something cannot be read, so that the store may not be empty.
    """
    found = [(path, d) for path, d in Store(folder).all() if d.silicon.startswith(silicon) and d.key.startswith(key)]
    if not found and folder != NOWHERE and (why := why_unreadable(folder)):
        raise AttnDispatchError(why)
    return found


def why_unreadable(folder: Path) -> str:
    """Which folder of a store cannot be read, and why; empty where all can, or there is none."""
    errors: list[OSError] = []
    next(os.walk(folder, onerror=errors.append), None)
    for _ in os.walk(Store(folder).root, onerror=errors.append):
        pass
    error = next((error for error in errors if not isinstance(error, FileNotFoundError)), None)
    return "" if error is None else f"{error.filename} cannot be read ({error.strerror})"
