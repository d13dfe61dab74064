"""What Linux, macOS and Windows do each in their own way: locks of files, flags of os.open, files in use, forks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

T = TypeVar("T")

#: Flags of os.open, 0 where the system lacks them. Without NONBLOCK, opening a pipe would wait for its other end for
#: ever; without BINARY, Windows would change the ends of lines.
NOFOLLOW, NONBLOCK, BINARY = (getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "NONBLOCK", "BINARY"))
LOCKED_BYTE = 1 << 30  #: which Windows locks: behind all content, which others can read then
IN_USE_S = 0.5  #: seconds for which another process may have a file open


def lock(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file, at the latest until its process ends; whether it was free.

    Args:
        shared: whether others may share the lock; on Windows none can.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(handle: int) -> None:
    """Give a lock back. Raises OSError: it was not taken."""
    if sys.platform == "win32":
        os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_UN)


def when_free(call: Callable[[], T]) -> T:
    """What a call returns that reads, replaces or removes a file. Windows refuses it while another process has the file
    open: there it is tried again for `IN_USE_S`.
    """
    end = time.monotonic() + IN_USE_S
    while True:
        try:
            return call()
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > end:
                raise
            time.sleep(0.001)


def in_forked_child(call: Callable[[], object]) -> None:
    """Have a function called as each forked child begins; Windows forks none."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=call)
