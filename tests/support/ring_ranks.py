"""Ranks for tests: processes that share a gloo process group, are started once, and do one job after the other.

A job is a module's function: it is called in every process that takes part, with arguments of that rank's own, and
what it returns or raises comes back. A process that takes too long writes down where it is, and ends.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
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

PREFIX = "ATTN_DISPATCH_"
GROUP_S = 20.0  #: the process groups' time-out
JOB_S = 60.0  #: that one job may take
MARGIN_S = 5.0  #: that a process has to say where it hangs
SIZES = (2, 3, 4)  #: groups of the first ranks that a larger world has besides

#: Imported once, before processes are forked off; the compiler is what DistributedDataParallel asks for.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest"]

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Gone:
    """What comes back from a process that ended before it was done, with the stacks that it wrote down, if any."""

    exitcode: int | None
    stacks: str


class Ranks:
    """Processes 0 to size - 1 of one process group.

    Args:
        timeout_s: of the process group: after it, ranks that wait for another one give up.
    """

    def __init__(self, size: int, timeout_s: float = GROUP_S) -> None:
        with suppress(ImportError):  # no compiler
            library.load()  # once here, not in every process at once
        self.size = size
        self.broken = False
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
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
        """What the job returned, by rank, the arguments being the same on all. Raises what it raised on one of them."""
        return self.each(job, [args] * (ranks or self.size))

    def each(self, job: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What the job returned, by rank, with each rank's arguments. Raises what it raised on one of them."""
        found = self.outcomes(job, args)
        for rank, one in enumerate(found):
            if isinstance(one, Exception | Gone):
                raise AssertionError(f"rank {rank} of {len(found)}: {one!r}") from _error(one)
        return found

    def outcomes(
        self, job: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, but: Sequence[int] = ()
    ) -> list[Any]:
        """What the job returned or raised, by rank; `Gone` where the process ended.

        Args:
            args: of each rank that takes part: all of them, or the first few.
            but: ranks that are not waited for; None stands for what they give.
        """
        settings = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        for pipe, each in zip(self.pipes, args):
            pipe.send_bytes(pickle.dumps((settings, len(args), job, each)))
        end = time.monotonic() + JOB_S + MARGIN_S
        found = [None if rank in but else self._answer(rank, end) for rank in range(len(args))]
        self.broken |= any(isinstance(one, Gone | RankLost) for one in found)  # messages may be left under way
        return found

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    @property
    def usable(self) -> bool:
        return not self.broken and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End all processes, stopped and hanging ones too."""
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
            process.kill()  # it could not even end itself
        except (EOFError, ConnectionResetError):
            pass
        process.join()
        return Gone(process.exitcode, _stacks(self.folder, rank).read_text(encoding="utf-8"))


_open: dict[int, Ranks] = {}


def ranks_of(size: int) -> Ranks:
    """So many processes, the same ones every time, as long as none of them is gone."""
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
    """In a job: this process's place in it."""
    return int(dist.get_rank(group()))


def forget() -> None:
    """In a job: what this process keeps in memory, as if it were a new one; decisions on disk count."""
    from attn_dispatch.ring import link
    from attn_dispatch.ring.engine import steps
    from attn_dispatch.ring.rows import traffic
    from tests.support import calls

    calls.forget()
    for kept in (steps.steps_of, traffic.traffic_of):
        kept.cache_clear()
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
                os._exit(0)  # whoever asked is gone
            faulthandler.dump_traceback_later(JOB_S, file=stacks, exit=True)
            pipe.send_bytes(_done(settings, number, taking_part, job, args))
            faulthandler.cancel_dump_traceback_later()


def _join(number: int, size: int, folder: Path, timeout: timedelta) -> None:
    begin = timedelta(seconds=GROUP_S)  # processes may start one long after the other
    dist.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=size, timeout=begin)
    for few in (*(few for few in SIZES if few < size), size):
        made = dist.new_group(range(few), timeout=timeout)
        if isinstance(made, dist.ProcessGroup):  # of which this process is one
            _groups[few] = made


def _done(
    settings: Mapping[str, str], number: int, taking_part: int, job: Callable[..., Any], args: tuple[Any, ...]
) -> bytes:
    global _taking_part
    _taking_part = taking_part
    try:
        _adopt(settings, number)
        return pickle.dumps(job(*args))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
        error.add_note(traceback.format_exc())
        return _pickled(error)


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - its text is better than nothing
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def _adopt(settings: Mapping[str, str], number: int) -> None:
    """The test's own settings, each rank with a cache folder of its own; another test's decisions are forgotten."""
    folder = settings[f"{PREFIX}CACHE_DIR"] + f"-rank{number}"
    if os.environ.get(f"{PREFIX}CACHE_DIR") != folder:
        forget()
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(settings)
    os.environ[f"{PREFIX}CACHE_DIR"] = folder


def _stacks(folder: Path, number: int) -> Path:
    return folder / f"stacks-{number}"


def _error(one: Exception | Gone) -> Exception | None:
    return one if isinstance(one, Exception) else None
