"""Items of a step, measured one after the other in a process of their own: a crash or a hang costs one item.

    python -m tools.checks.gpu.workers STEP SETUP        # items as JSON on stdin, a line of JSON for each on stdout

After a crash or a hang the other items go on in a new process, and the item's row says what happened.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attn_dispatch.errors import NoBackend
from attn_dispatch.text import one_line

ROOT = Path(__file__).resolve().parents[3]
START_S = 60.0  #: seconds more for a process's first item: importing torch, a context on the device
END_S = 20.0  #: seconds for a process to end after its last item
MOST_TEXT = 600  #: characters of stderr that a row keeps

Item = dict[str, Any]
Row = dict[str, Any]


class Setup(NamedTuple):
    """What every step takes. `output`: the folder of results. `dry_run`: tiny problems on the CPU. `backends`: those
    that are checked, all where empty.
    """

    output: str
    dry_run: bool
    cores: int
    backends: Sequence[str] = ()


class Phase(NamedTuple):
    """A part of a step: groups of items, each group in a process of its own, `parallel` groups at a time.

    `share` is the part of the step's remaining seconds that it may take, and `item_s` the seconds of one item.
    """

    groups: list[list[Item]]
    parallel: int = 1
    share: float = 1.0
    item_s: float = 60.0


class Worker:
    """A process that measures items. A context manager: at its end the process and its children are ended."""

    def __init__(self, command: Sequence[str], items: Sequence[Item], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by __exit__
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, **pipes, text=True, cwd=ROOT, env=environment, process_group=0)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: the first row says so
            self._process.stdin.write(json.dumps(items))
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a lost device may stay
            self._process.wait(END_S)
        self._reader.join(END_S)
        self._errors.close()

    def row(self, seconds: float) -> Row:
        """The next item's row; one with `failed` where the process ended, or took longer than `seconds`."""
        try:
            line = self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return {"failed": f"no result within {seconds:.0f} s", "ended": True}
        if line is None:
            return {"failed": f"the process ended with {self._code()}: {self._tail()}", "ended": True}
        found: Row = json.loads(line)
        return found

    def end(self, seconds: float) -> str:
        """Wait for the process to end after its last item; what went wrong in that, or nothing."""
        code = self._code(seconds)
        return "" if code == 0 else f"after its last item the process ended with {code}: {self._tail()}"

    def _code(self, seconds: float = END_S) -> int | str:
        try:
            return self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return f"nothing within {seconds:.0f} s"

    def _tail(self) -> str:
        self._errors.seek(0)
        return " ".join(self._errors.read()[-MOST_TEXT:].split())


def cuda_backends() -> list[str]:
    """All but the one that refuses every CUDA device."""
    from attn_dispatch.kernels import registry

    return [name for name in registry.names() if name != "native"]


def command_of(step: str, setup: Setup) -> list[str]:
    return [sys.executable, "-m", "tools.checks.gpu.workers", step, json.dumps(setup)]


def rows_of(
    items: Sequence[Item], command: Sequence[str], item_s: float, end: float, environment: dict[str, str]
) -> Iterator[Row]:
    """A row for each item that is done, or has failed, before `end`, a time of `time.monotonic()`."""
    left = list(items)
    while left and time.monotonic() < end:
        with Worker(command, left, environment) as worker:
            more = START_S
            while left:
                measured = worker.row(min(item_s + more, end - time.monotonic()))
                ended = measured.pop("ended", False)
                if ended and time.monotonic() >= end:
                    return
                yield {**left.pop(0), **measured}
                if ended:
                    break
                more = 0.0
            else:
                wrong = worker.end(min(END_S, end - time.monotonic()))
                if wrong and time.monotonic() < end:
                    yield {**items[-1], "failed": wrong}


def serve(step: str, setup: Setup, items: Sequence[Item], say: Callable[[Row], None]) -> None:
    """Measure the items in this process. A step with ENDS_AFTER_FAILURE ends the process after a failed item."""
    from tools.checks.gpu.machine import machine_of

    module = importlib.import_module(f"tools.checks.gpu.{step}")
    machine = machine_of(setup.dry_run)
    for item in items:
        start = time.monotonic()
        try:
            found: Row = module.measure(item, machine, setup)
        except NoBackend as error:
            found = {"refused": one_line(error)}
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a result
            found = {"failed": one_line(error)}
        ends = "failed" in found and getattr(module, "ENDS_AFTER_FAILURE", False)
        say({**found, "took_s": round(time.monotonic() - start, 3)} | ({"ended": True} if ends else {}))
        if ends:
            return


def main() -> None:
    # Libraries print to stdout: rows have a descriptor of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(row: Row) -> None:
        print(json.dumps(row), file=channel, flush=True)

    step, setup = sys.argv[1], Setup(*json.loads(sys.argv[2]))
    serve(step, setup, json.load(sys.stdin), say)
    # Autograd's thread drops its last node, for which it may wait for the interpreter: PyTorch aborts if that ends.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
