"""Runs functions in a Python process of its own, so that whatever ends that process does not end this one.

No `multiprocessing`: its way to start afresh runs the program's main module again.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

KILLED_S = 5.0  #: seconds that a killed process is waited for: one in a driver's call may take for ever
_BEGUN = b"begun\n"
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from attn_dispatch.machine.child import serve
serve({handle})
"""


class Outcome(NamedTuple):
    """What became of a function.

    ``begun`` is whether it announced its beginning, ``value`` what it returned, None without an answer. Then ``code``
    is the exit status of its process, negative for a signal, and None where it took too long and was killed.
    """

    begun: bool
    value: Any = None
    code: int | None = None


class _Child:
    """A process, its input, and a pipe for its answer."""

    def __init__(self) -> None:
        self.answer, writable = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable or "python3", "-c", _PROGRAM.format(path=sys.path, handle=writable)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writable,),
            )
        except BaseException:
            os.close(self.answer)
            raise
        finally:
            os.close(writable)

    def ask(self, given: bytes, start_s: float, limit_s: float) -> Outcome:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as is read below
            self.process.stdin.write(given)
            self.process.stdin.flush()
        text, end, poll = b"", time.monotonic() + start_s, select.poll()  # select() takes no descriptor above 1023
        poll.register(self.answer, select.POLLIN)
        while poll.poll(max(0.0, end - time.monotonic()) * 1e3):
            part = os.read(self.answer, 1 << 16)
            if not part:
                with suppress(subprocess.TimeoutExpired):
                    return Outcome(text.startswith(_BEGUN), code=self.process.wait(KILLED_S))
                break
            if not text and part.startswith(_BEGUN):
                end = time.monotonic() + limit_s
            text += part
            if text.endswith(b"\n") and text != _BEGUN:
                return Outcome(True, json.loads(text.removeprefix(_BEGUN)))
        return Outcome(text.startswith(_BEGUN))

    def end(self) -> None:
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self.answer)


def run_alone(module: str, function: str, args: tuple[object, ...], *, start_s: float, limit_s: float) -> Outcome:
    """Call ``module.function(begin, *args)`` in a new process, which has this one's variables and search path.

    Args:
        function: calls ``begin()`` once it is prepared, and returns what JSON can hold, not None.
        args: are pickled.
        start_s: seconds until ``begin``. limit_s: seconds from there to the answer.

    Raises:
        OSError: no process can be started.
    """
    child = _Child()
    try:
        return child.ask(pickle.dumps((module, function, args)), start_s, limit_s)
    finally:
        child.end()


def serve(handle: int) -> None:
    """In the new process: call a function and write what it returns. Ends the process."""
    module, function, args = pickle.load(sys.stdin.buffer)
    call: Callable[..., object] = getattr(importlib.import_module(module), function)
    value = call(lambda: os.write(handle, _BEGUN), *args)
    os.write(handle, json.dumps(value).encode() + b"\n")
    os._exit(0)  # whatever would be waited for at a regular exit


def end_with(parent: int) -> None:
    """In a child of `parent`: on Linux, end as soon as the thread that started this process does, however it ends."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # a C library without prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)
