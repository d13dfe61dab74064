"""Ranks for tests: processes of one gloo process group, started once, which run one job after the other.

A job is a function of a module. It is called in every process that takes part, with that rank's arguments; its result
or error is sent back. A process that exceeds the time limit writes its stacks to a file and exits.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attn_dispatch.errors import RankLost
from attn_dispatch.kernels.native import library
from tests.support import processes

PREFIX = "ATTN_DISPATCH_"
GROUP_S = 20.0  #: time-out of process groups
JOB_S = 60.0  #: time limit of a job
MARGIN_S = 5.0  #: time to write stacks after it
SIZES = (2, 3)  #: a larger world also has groups of its first 2 and 3 ranks

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Exited:
    """The outcome of a job whose process exited, with the stacks that it wrote, if any."""

    exitcode: int | None
    stacks: str


class Ranks:
    """Processes 0 to size - 1 of one process group.

    Args:
        timeout_s: of the process group: the longest that a rank waits for another.
    """

    def __init__(self, size: int, timeout_s: float = GROUP_S) -> None:
        with suppress(ImportError):  # no compiler
            library.load()  # once here, not in every process at once
        self.size = size
        self.broken = False
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = processes.context()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.folder, timeout_s, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def everywhere(self, job: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """The results of a job by rank, with the same arguments on all. Raises the error of the first rank with one."""
        return self.each(job, [args] * (ranks or self.size))

    def each(self, job: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of a job by rank, with each rank's arguments. Raises the error of the first rank with one."""
        found = self.outcomes(job, args)
        for rank, one in enumerate(found):
            if isinstance(one, Exception | Exited):
                cause = one if isinstance(one, Exception) else None
                raise AssertionError(f"rank {rank} of {len(found)}: {one!r}") from cause
        return found

    def outcomes(
        self, job: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, but: Sequence[int] = ()
    ) -> list[Any]:
        """The results or errors of a job by rank; `Exited` if the process exited.

        Args:
            args: of each rank that takes part: all, or the first few.
            but: ranks not to wait for; their outcome is None.
        """
        settings = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        for pipe, each in zip(self.pipes, args):
            pipe.send_bytes(pickle.dumps((settings, len(args), job, each)))
        end = time.monotonic() + JOB_S + MARGIN_S
        found = [None if rank in but else self._answer(rank, end) for rank in range(len(args))]
        self.broken |= any(isinstance(one, Exited | RankLost) for one in found)  # messages may be left in the group
        return found

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    @property
    def usable(self) -> bool:
        return not self.broken and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Kill all processes, stopped and hanging ones included."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes):
            process.join()
            pipe.close()
        shutil.rmtree(self.folder)

    def _answer(self, rank: int, end: float) -> Any:
        pipe, process = self.pipes[rank], self.processes[rank]
        try:
            if pipe.poll(max(0.0, end - time.monotonic())):
                return pickle.loads(pipe.recv_bytes())
            process.kill()  # it did not exit by itself
        except (EOFError, ConnectionResetError):
            pass
        process.join()
        return Exited(process.exitcode, _stacks(self.folder, rank).read_text(encoding="utf-8"))


_open: dict[int, Ranks] = {}


def ranks_of(size: int) -> Ranks:
    """`size` processes; the same at each call while all are usable."""
    found = _open.get(size)
    if found is not None and not found.usable:
        found.close()
        found = None
    if found is None:
        found = _open[size] = Ranks(size)
    return found


def close_all() -> None:
    while _open:
        _open.popitem()[1].close()


# --- in a process -----------------------------------------------------------------------------------------------------

_groups: dict[int, Group] = {}  #: by their number of ranks
_taking_part = 0


def group() -> Group:
    """In a job: the process group of the ranks that take part."""
    return _groups[_taking_part]


def rank() -> int:
    """In a job: this process's rank in the group."""
    return int(dist.get_rank(group()))


def forget() -> None:
    """In a job: clear what this process remembers, like a new process; decisions on disk remain."""
    from attn_dispatch.ring import link
    from attn_dispatch.ring.engine import steps
    from attn_dispatch.ring.rows import traffic
    from tests.support import calls

    calls.forget()
    for cached in (steps.steps_of, traffic.traffic_of):
        cached.cache_clear()
    for each in link._links.values():
        each.transport.release()


def _serve(number: int, size: int, folder: Path, timeout_s: float, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with _stacks(folder, number).open("w") as stacks:
        faulthandler.dump_traceback_later(JOB_S, file=stacks, exit=True)
        _join(number, size, folder, timedelta(seconds=timeout_s))
        faulthandler.cancel_dump_traceback_later()
        while True:
            try:
                settings, taking_part, job, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)  # the test process has exited
            faulthandler.dump_traceback_later(JOB_S, file=stacks, exit=True)
            pipe.send_bytes(_done(settings, number, taking_part, job, args))
            faulthandler.cancel_dump_traceback_later()


def _join(number: int, size: int, folder: Path, timeout: timedelta) -> None:
    begin = timedelta(seconds=GROUP_S)  # processes may start at different times
    dist.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=size, timeout=begin)
    for few in (*(few for few in SIZES if few < size), size):
        made = dist.new_group(range(few), timeout=timeout)
        if isinstance(made, dist.ProcessGroup):  # this process is in the group
            _groups[few] = made


def _done(
    settings: Mapping[str, str], number: int, taking_part: int, job: Callable[..., Any], args: tuple[Any, ...]
) -> bytes:
    global _taking_part
    _taking_part = taking_part
    try:
        _adopt(settings, number)
        return pickle.dumps(job(*args))
    except Exception as error:  # noqa: BLE001 - any error is sent to the test
        error.add_note(traceback.format_exc())
        return _pickled(error)


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - the text is sent instead
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def _adopt(settings: Mapping[str, str], number: int) -> None:
    """Take over the test's settings, with a cache folder for each rank, and forget decisions of another test."""
    folder = settings[f"{PREFIX}CACHE_DIR"] + f"-rank{number}"
    if os.environ.get(f"{PREFIX}CACHE_DIR") != folder:
        forget()
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(settings)
    os.environ[f"{PREFIX}CACHE_DIR"] = folder


def _stacks(folder: Path, number: int) -> Path:
    return folder / f"stacks-{number}"
