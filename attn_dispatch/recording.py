"""`record`: writes the problems of a real run to a file, with how often each was called and for how long.

The file has one JSON object per line: a problem when it first occurs, and again with `calls` and `seconds` at the end
of the block. Numbers of several lines, blocks and processes add up. `read_record` reads it for `profile`.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch

from attn_dispatch import process_state
from attn_dispatch.decisions.call import observing
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.autograd import is_result_known
from attn_dispatch.kernels.device_cache import capturing
from attn_dispatch.log import say_once
from attn_dispatch.settings import record_file
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Amount, Count
from attn_dispatch.text import printable

USES = ("calls", "seconds")  #: fields of a line beside the problem's
CUDA_SAMPLES = 16  #: calls of a problem that are timed by events on a GPU


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Append every problem of `attend` calls inside the block to a file, with its calls and their time.

    Calls are those of the forward pass that are not traced into a graph; a call of a compiled function counts. Of few
    queries and many keys, the next power of two of keys is recorded, which is what is decided.

    Args:
        path: a JSON Lines file, created if missing; `profile` and `attn-dispatch profile --from` read it. Where it
            cannot be written any more, calls go on unrecorded, with one warning.

    Raises:
        InvalidInput: it is no path. OSError: the file cannot be opened.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidInput(f"path must be a path, got {path!r}")
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed below, where it may fail
    recorder = _Recorder(file)
    try:
        with observing(recorder.note, recorder.around):
            try:
                yield
            finally:
                recorder.write_uses()
    finally:
        with suppress(OSError):  # of what could not be written before
            file.close()


def record_by_environment() -> None:
    """Record all calls of this process where $ATTN_DISPATCH_RECORD names a file.

    Raises:
        InvalidInput: the file cannot be written.
    """
    path = record_file()
    if path is None:
        return
    recording = record(path)
    try:
        recording.__enter__()
    except OSError as error:
        raise InvalidInput(f"$ATTN_DISPATCH_RECORD: {path} cannot be written ({error.strerror or error})") from error
    atexit.register(recording.__exit__, None, None, None)


@dataclass
class _Use:
    """Calls of a problem; the seconds of the first, which may plan or compile, and of the others that were timed."""

    calls: int = 0
    first_s: float = 0.0
    timed: int = 0
    timed_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of all calls, as long each as those that were timed are in the mean."""
        return self.calls * (self.timed_s / self.timed if self.timed else self.first_s)

    def add(self, seconds: float, *, first: bool) -> None:
        if first:
            self.first_s = seconds
        else:
            self.timed += 1
            self.timed_s += seconds


class _Recorder:
    def __init__(self, file: TextIO) -> None:
        self.file, self.process, self.lock = file, os.getpid(), process_state.lock()
        self.ended = False  # nothing more is written
        self.uses: dict[Problem, _Use] = {}
        self.events: list[tuple[_Use, bool, Any, Any]] = []  # CUDA events whose times are not read yet

    def note(self, problem: Problem) -> None:
        with self.lock:
            if problem not in self.uses:
                self.uses[problem] = _Use()
                self._write(problem.to_dict())  # at once, so that a crashed run leaves its problems

    def around(self, run: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
        self.note(problem)
        use, cuda = self.uses[problem], problem.device.type == "cuda"

        def counted(*args: Any, **tensors: Any) -> Any:
            if is_result_known() or capturing(problem.device):
                return run(*args, **tensors)
            with self.lock:
                first, by_events = use.calls == 0, cuda and use.calls <= CUDA_SAMPLES
                use.calls += 1
            if by_events:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                result = run(*args, **tensors)
                end.record()
                with self.lock:
                    self.events.append((use, first, start, end))
                return result
            start_s = time.perf_counter()
            result = run(*args, **tensors)
            if problem.device.type == "cpu":  # others are not waited for
                with self.lock:
                    use.add(time.perf_counter() - start_s, first=first)
            return result

        return counted

    def write_uses(self) -> None:
        """Append what was counted."""
        with self.lock:
            for use, first, start, end in self.events:
                if end.query():  # the GPU has done it
                    use.add(start.elapsed_time(end) / 1e3, first=first)
            for problem, use in self.uses.items():
                if use.calls:
                    self._write({**problem.to_dict(), "calls": use.calls, "seconds": use.seconds})

    def _write(self, line: dict[str, Any]) -> None:
        if self.ended or os.getpid() != self.process:  # a forked process has this one's counts, and the same file
            return
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except (OSError, ValueError) as error:
            self.ended = True  # a line may have been cut off, and must not go on with the next one
            if isinstance(error, OSError):  # else the block has ended, before a call of another thread
                name, why = printable(str(self.file.name)), error.strerror or error
                say_once(f"calls are not recorded any more: {name} cannot be written ({why})")


class Use(msgspec.Struct, frozen=True):
    """How often a recorded problem was called, and the seconds that its calls took; 0 where a file has no counts."""

    calls: Count = 0
    seconds: Amount = 0.0


def read_record(
    path: str | os.PathLike[str], device: torch.device | str | None = None, text: str | None = None
) -> dict[Problem, Use]:
    """Read the distinct problems of a file that `record` wrote, in order, with the sum of their uses.

    Args:
        device: where to measure them; by default the kind of device they were recorded on.
        text: the file's, where it was read.

    Raises:
        InvalidInput: a line is not a problem; the message names it.
    """
    text = Path(path).read_text(encoding="utf-8") if text is None else text
    found: dict[Problem, Use] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            plain = msgspec.json.decode(line)
            use = msgspec.convert(plain, Use)
            problem = Problem.from_dict({name: plain[name] for name in plain if name not in USES}, device)
        except (msgspec.MsgspecError, RecursionError, InvalidInput) as error:
            cut = isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError)
            why = f"not JSON ({error}); if a run was cut off there, delete the line" if cut else str(error)
            raise InvalidInput(f"{path}, line {number}: {why}") from error
        before = found.get(problem, Use())
        found[problem] = Use(before.calls + use.calls, before.seconds + use.seconds)
    return found
