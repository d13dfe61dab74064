"""Where compiled code is kept: for all cache folders of this user, and beside decisions that go to other machines.

It is executed: what another user than this one and root could have written is not loaded.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

import platformdirs

from attn_dispatch.settings import cache_folder

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folders(name: str) -> list[Path]:
    """The folders with this name, which need not be there: the user's, then that of `$ATTN_DISPATCH_CACHE_DIR`."""
    found = []
    with suppress(RuntimeError):  # no home folder
        found.append(platformdirs.user_cache_path("attn-dispatch", appauthor=False) / name)
    if os.environ.get("ATTN_DISPATCH_CACHE_DIR"):
        found.append(cache_folder() / name)
    return list(dict.fromkeys(found))


def is_trusted(place: Path) -> bool:
    """Whether only this user or root can have written a file or folder. On Windows nobody knows: it says no."""
    if sys.platform == "win32":
        return False
    try:
        about = os.lstat(place)
    except OSError:
        return False
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & OTHERS_WRITE


def is_writable(folder: Path) -> bool:
    """Whether this user can write to a folder and nobody else but root can; it is made if it is missing."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        return is_trusted(folder) and os.access(folder, os.W_OK | os.X_OK)
    return False


def writable(name: str) -> Path | None:
    """The first of the `folders` that is writable."""
    return next(filter(is_writable, folders(name)), None)
