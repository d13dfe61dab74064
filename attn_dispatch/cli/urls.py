"""Files and URLs, shared by the commands that exchange decisions. fsspec is loaded for a URL only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attn_dispatch.store import files

NO_DECISIONS = ("quarantine", "native")  #: folders at the top of a cache folder
MOST_BYTES = 1 << 30  #: of one file; nothing that holds decisions alone is larger


class Unreachable(Exception):
    """A place cannot be read or written; the message says why."""


def is_url(name: str) -> bool:
    return "://" in name


def each_file(name: str) -> list[str]:
    """The name itself, or every JSON file under it if it is a folder, without what else a cache folder holds; links to
    folders are not followed.
    """
    if is_url(name) or not os.path.isdir(name):
        return [name]
    return [
        os.path.join(folder, each)
        for folder, _, names in sorted(os.walk(name))
        if os.path.relpath(folder, name).split(os.sep)[0] not in NO_DECISIONS
        for each in sorted(names)
        if each.endswith(".json") and not each.startswith(".")
    ]


def read(name: str) -> bytes:
    """Everything that is there.

    Raises:
        Unreachable: it cannot be read or holds more than 1 GiB.
    """
    with _reaching():
        if not is_url(name):
            return files.read(name, MOST_BYTES)
        with _open(name, "rb") as file:
            content: bytes = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise OSError(f"more than {MOST_BYTES} bytes")
        return content


def write(name: str, content: bytes) -> None:
    """Put it there, all or nothing where it is a file.

    Raises:
        Unreachable: it cannot be written.
    """
    with _reaching():
        if is_url(name):
            with _open(name, "wb") as file:
                file.write(content)
            return
        path = Path(name).resolve()  # a link stays one
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # a pipe or a device: to be written to, not replaced
        else:
            files.write(path, content)


def _open(name: str, how: str) -> Any:
    import fsspec  # type: ignore[import-untyped]  # only now: most names are files

    return fsspec.open(name, how)


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every protocol has its own errors, and some lack a package
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise Unreachable(" ".join(text.split()) or type(error).__name__) from error
