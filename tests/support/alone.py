"""Functions for a process of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

Begin = Callable[[], object]


def pid(begin: Begin, given: object) -> list[object]:
    begin()
    return [os.getpid(), given, os.environ.get("ATTN_DISPATCH_TEST")]


def dies(begin: Begin, at: str, how: str) -> list[object]:
    """Before it has begun, or later; by an exception, an exit, a signal or never."""
    if at == "later":
        begin()
    if how == "raises":
        raise ValueError("no")
    if how == "exits":
        os._exit(3)
    if how == "hangs":
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)
    return []
