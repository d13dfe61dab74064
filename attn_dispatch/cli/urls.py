"""Reading and writing files and URLs, for `export` and `import`. fsspec is imported for a URL only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from attn_dispatch.errors import AttnDispatchError
from attn_dispatch.store import files

NO_DECISIONS = ("quarantine", "native", "blocks", "passed")  #: folders at the top of a cache folder
MAX_BYTES = 1 << 30  #: of one file; files of decisions are smaller


class Unreachable(AttnDispatchError):
    """A file or URL cannot be read or written; the message says why."""


def target(text: str) -> str:
    """A name to write to, of an option: any but -."""
    if text == "-":
        raise argparse.ArgumentTypeError("- does not mean the standard output: use /dev/stdout")
    return text


def each_file(name: str, onerror: Callable[[OSError], object]) -> list[str]:
    """The name itself, or every JSON file under it if it is a folder, except a cache folder's other files;
    links to folders are not followed.

    Args:
        onerror: called for each folder that cannot be read.
    """
    if "://" in name or not os.path.isdir(name):
        return [name]
    return [
        os.path.join(folder, each)
        for folder, _, names in sorted(os.walk(name, onerror=onerror))
        if os.path.relpath(folder, name).split(os.sep)[0] not in NO_DECISIONS
        for each in sorted(names)
        if each.endswith(".json") and not each.startswith(".")
    ]


def read(name: str) -> bytes:
    """The whole content.

    Raises:
        Unreachable: it cannot be read or is larger than 1 GiB.
    """
    with _unreachable():
        if "://" not in name:
            return files.read(name, MAX_BYTES, follow=True)
        with _open(name, "rb") as file:
            content: bytes = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise OSError(f"more than {MAX_BYTES} bytes")
        return content


def write(name: str, content: bytes) -> None:
    """Write the content; atomic for a file.

    Raises:
        Unreachable: it cannot be written.
    """
    with _unreachable(f"{name} cannot be written: "):
        if "://" in name:
            with _open(name, "wb") as file:
                file.write(content)
            return
        path = Path(name)
        # Before links are followed: those of /dev/fd name no file.
        if _is_standard_output(name) or (path.exists() and not path.is_file()):
            with path.open("ab") as file:  # an output, a pipe or a device is written to, not replaced
                file.write(content)
        else:
            files.write(path.resolve(), content)  # a link stays one


def beside(name: str) -> redirect_stdout[TextIO]:
    """Inside, what is printed about a file goes to stdout, or to stderr if that is what the name means."""
    return redirect_stdout(sys.stderr if _is_standard_output(name) else sys.stdout)


def _is_standard_output(name: str) -> bool:
    with suppress(OSError):
        return "://" not in name and os.path.samefile(name, "/dev/stdout")
    return False


def _open(name: str, mode: str) -> Any:
    import fsspec  # type: ignore[import-untyped]  # here: most names are files

    return fsspec.open(name, mode)


@contextmanager
def _unreachable(what: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each protocol raises its own errors, or needs a missing package
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise Unreachable(what + (" ".join(text.split()) or type(error).__name__)) from error
