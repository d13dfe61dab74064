"""Small files that are whole or not read: one line of JSON with the digest of what it holds.

Nothing read from them is executed. Links, pipes, devices and files larger than `LIMIT` are not opened as such.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

LIMIT = 1 << 16  #: bytes of one file
UNREADABLE = (OSError, ValueError, msgspec.MsgspecError, RecursionError)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

T = TypeVar("T")


class _Checked(msgspec.Struct):
    sha256: str
    content: msgspec.Raw


def encode_checked(value: msgspec.Struct) -> bytes:
    """The line for a value."""
    content = msgspec.json.encode(value)
    return msgspec.json.encode(_Checked(sha256(content).hexdigest(), msgspec.Raw(content))) + b"\n"


def decode_checked(line: bytes, kind: type[T]) -> T:
    """The value of a line. Raises one of UNREADABLE for anything but what `seal` made of such a value."""
    found = msgspec.json.decode(line, type=_Checked)
    if sha256(found.content).hexdigest() != found.sha256:
        raise ValueError("its content is not what its digest says")
    return msgspec.json.decode(found.content, type=kind)


def open_regular(path: Path) -> int:
    """A descriptor to read a plain file by. Raises OSError, for links and pipes too; never waits."""
    handle = os.open(path, _READ)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a plain file")
    return handle


def content_of(handle: int) -> bytes:
    """All of a file from its start. Raises ValueError past LIMIT."""
    content = b""
    while part := os.pread(handle, LIMIT + 1 - len(content), len(content)):
        content += part
    if len(content) > LIMIT:
        raise ValueError(f"larger than {LIMIT} bytes")
    return content


def read_checked(path: Path, kind: type[T]) -> T:
    """The value of a file. Raises one of UNREADABLE."""
    handle = open_regular(path)
    try:
        return decode_checked(content_of(handle), kind)
    finally:
        os.close(handle)


def write_checked(path: Path, value: msgspec.Struct) -> None:
    """All of it or nothing, whenever the writer dies. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.stem}-{secrets.token_hex(6)}.tmp")
    try:
        with unfinished.open("xb") as file:
            file.write(encode_checked(value))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make a file's name last through a crash of the machine, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
