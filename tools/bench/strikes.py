"""Who is excluded after processes were killed, stopped or suspended in trials, and after crashes, hangs and shortages.

    python -m tools.bench.strikes [--quick]

Child processes measure small problems. After each end a new process reads the quarantine at once, and again with a
clock set forward. Kills come in series of `SERIES`, each series in a cache folder of its own.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from tools.lib.common import parser, write

SERIES = 10
COUNTS = {"kills": 100, "aimed": 20, "same_call": 20, "stops": 20, "suspensions": 5}
QUICK = {"kills": 10, "aimed": 8, "same_call": 4, "stops": 4, "suspensions": 2}
AIMED_AT = ("native", "tiles", "sdpa_mask", "sdpa")  #: the backends during whose calls processes are ended
BUDGET_MS, TIMEOUT_S, SUSPENDED_S = 300, 2.0, 4.0
PROBLEMS = 4  #: measured by one process
LATER = {"at_once": 0.0, "after_10_minutes": 601.0, "after_a_day": 86401.0}  #: seconds on the clock after an end
SHORTAGES = {
    "thread": RuntimeError("can't start new thread"),
    "fork": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    "files": OSError(errno.EMFILE, "Too many open files"),
    "memory": OSError(errno.ENOMEM, "Cannot allocate memory"),
}
FAULTS: dict[str, Callable[[], object]] = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "hang": lambda: time.sleep(60),
}
DEADLINE_S = 60.0  #: for one child


# --- the child --------------------------------------------------------------------------------------------------------


def child(pipe: Any, folder: str, offset_s: float, seed: int, problems: int, plan: dict[str, Any]) -> None:
    """Measure problems as the plan says; send who is excluded, whose strikes count and the rows of the last problem."""
    os.environ.update(ATTN_DISPATCH_CACHE_DIR=folder, ATTN_DISPATCH_BUDGET_MS=str(BUDGET_MS))
    os.environ["ATTN_DISPATCH_TIMEOUT_S"] = str(TIMEOUT_S)
    import torch

    from attn_dispatch import Dilated, Window, attend, explain
    from attn_dispatch.log import logger
    from attn_dispatch.machine.hardware import silicon
    from attn_dispatch.store import crash_markers, quarantine

    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    quarantine.clock = lambda: datetime.now(UTC) + timedelta(seconds=offset_s)
    setattr(crash_markers, "time", SimpleNamespace(time=lambda: time.time() + offset_s))  # noqa: B010 - typed so
    prepare(plan, pipe)
    pipe.send("ready")
    chance, rows = Random(seed), {}
    for _ in range(problems):
        x = torch.randn(1, chance.randrange(64, 512), 2, 16)
        pattern = chance.choice([None, Window(32, 0), Dilated((32, 64), (1, 2))])
        attend(x, x, x, pattern)
        rows = {row.backend: row.status for row in explain(x, x, x, pattern).candidates}
    found, excluded = quarantine.Quarantine(Path(folder), silicon("cpu")), {}
    struck = sorted({entry.backend for entry in found.strikes()})
    for name, later_s in LATER.items():
        later = datetime.now(UTC) + timedelta(seconds=offset_s + later_s)
        quarantine.clock = partial(datetime.fromtimestamp, later.timestamp(), UTC)
        excluded[name] = sorted({entry.backend for entry in found.entries()})
    pipe.send({"excluded": excluded, "struck": struck, "rows": rows})


def prepare(plan: dict[str, Any], pipe: Any) -> None:
    """Have this process end, halt or fail at the moment of the plan."""
    from attn_dispatch import register
    from attn_dispatch.backends import manual
    from attn_dispatch.kernels import registry
    from attn_dispatch.store.crash_markers import CrashMarker
    from attn_dispatch.tuning import gate, race

    if "fault" in plan:
        register(Faulty(plan["fault"], manual))
    if "shortage" in plan:
        backend: Any = registry.load(AIMED_AT[0])
        backend.run = failing_once(backend.run, SHORTAGES[plan["shortage"]])
    if "backend" not in plan:
        return
    calls = Counter[str]()

    def watched(method: Callable[..., None], where: str) -> Callable[..., None]:
        def call(marker: CrashMarker, *given: Any) -> None:
            method(marker, *given)
            calls[where] += names.get(marker.path) == plan["backend"] and given != (float("inf"),)
            if where == plan["where"] and calls[where] == plan["call"]:
                calls[where] += 1
                if plan.get("signal"):
                    os.kill(os.getpid(), plan["signal"])
                else:
                    pipe.send("now")
                    time.sleep(0.2)  # until the signal has come

        return call

    names: dict[Path, str] = {}
    marker: Any = CrashMarker
    marker.begin, marker.resume = watched(marker.begin, "gate"), watched(marker.resume, "race")
    modules: tuple[Any, ...] = (gate, race)
    for module in modules:
        module.crash_marker = named(module.crash_marker, names)


def named(marker: Any, names: dict[Path, str]) -> Any:
    """`crash_marker`, which notes the backend of each marker."""

    @contextmanager
    def call(folder: Path, where: str, backend: str, *given: Any, **named: Any) -> Iterator[Any]:
        with marker(folder, where, backend, *given, **named) as found:
            names[found.path] = backend
            yield found

    return call


def failing_once(run: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    left = [error]

    def call(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return run(*given, **named)

    return call


class Faulty:
    """The reference with a fault in every call."""

    def __init__(self, fault: str, reference: Any) -> None:
        self.name, self.fault = "faulty", fault
        self.refusals, self.workspace_bytes = reference.refusals, reference.workspace_bytes

    def version(self) -> str:
        return self.fault

    def run(self, *given: Any, **tensors: Any) -> Any:
        FAULTS[self.fault]()


# --- the parent -------------------------------------------------------------------------------------------------------


def context() -> Any:
    """Processes that are forked off one that has loaded torch."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch", "attn_dispatch.tuning.tuner", "attn_dispatch.decisions.decide"])
    return found


class Child:
    """A child process, and the other end of its pipe."""

    def __init__(self, folder: Path, offset_s: float, seed: int = 0, problems: int = PROBLEMS, **plan: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        given = (theirs, str(folder), offset_s, seed, problems, plan)
        self.process = context().Process(target=child, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.receive()  # "ready"

    def receive(self) -> Any:
        """What the child sends next; None if it is gone, or if it sends nothing in time."""
        with suppress(EOFError, ConnectionResetError):
            if self.pipe.poll(DEADLINE_S):
                return self.pipe.recv()
        return None

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def finish(self) -> Any:
        """The report, None if the child died."""
        found = self.receive()
        self.process.join(DEADLINE_S)
        if self.process.exitcode is None:
            self.send(signal.SIGKILL)
            self.process.join()
        self.pipe.close()
        return found if isinstance(found, dict) else None


def look(folder: Path, offset_s: float = 0.0) -> dict[str, Any]:
    """Who is excluded, now and later, and whose strikes count, as a new process sees it."""
    found: dict[str, Any] = Child(folder, offset_s, problems=0).finish()
    return found


class Ends:
    """Counts after how many ends any backend of this package was excluded, for how long, and how many left strikes."""

    def __init__(self) -> None:
        self.ends = self.deaths = self.with_strikes = 0
        self.excluding = dict.fromkeys(LATER, 0)
        self.excluded = {name: Counter[str]() for name in LATER}

    def add(self, folder: Path, died: bool) -> None:
        self.ends += 1
        self.deaths += died
        found = look(folder)
        self.with_strikes += bool(found["struck"] or found["excluded"]["at_once"])
        for name, backends in found["excluded"].items():
            self.excluding[name] += bool(backends)
            self.excluded[name].update(backends)

    def figures(self) -> dict[str, Any]:
        return {
            "ends": self.ends,
            "deaths": self.deaths,
            "with_strikes": self.with_strikes,
            "excluding": self.excluding,
            "excluded": {name: dict(counts) for name, counts in self.excluded.items()},
        }


def in_series(count: int, end: Callable[[Path, int], bool]) -> dict[str, Any]:
    """End `count` processes; a day after each series a new process measures again, and none of its rows is excluded."""
    ends, rows = Ends(), Counter[str]()
    for start in range(0, count, SERIES):
        with tempfile.TemporaryDirectory() as folder:
            for number in range(start, min(start + SERIES, count)):
                ends.add(Path(folder), end(Path(folder), number))
            rows.update(set(a_day_later(Path(folder)).values()))
    return {**ends.figures(), "statuses_a_day_later": sorted(rows)}


def a_day_later(folder: Path, **plan: Any) -> dict[str, str]:
    """The status of each backend in a process that measures a new problem a day later."""
    report = Child(folder, LATER["after_a_day"], seed=1000, problems=1, **plan).finish()
    return {} if report is None else report["rows"]


def kills(count: int) -> dict[str, Any]:
    """SIGKILL at random moments of a process's run."""
    chance, whole_s = Random(0), 0.0
    for _ in range(2):  # the first starts the process that the others are forked off
        with tempfile.TemporaryDirectory() as folder:
            one = Child(Path(folder), 0.0)
            begin = time.perf_counter()
            one.finish()
            whole_s = time.perf_counter() - begin

    def end(folder: Path, number: int) -> bool:
        one = Child(folder, 0.0, seed=number)
        time.sleep(chance.uniform(0, 0.8 * whole_s))
        one.send(signal.SIGKILL)
        return one.finish() is None

    return {"run_s": whole_s, **in_series(count, end)}


def aimed(count: int, number_of_signal: int, where: tuple[str, ...]) -> dict[str, Any]:
    """A signal in a call of one backend after the other, in the gate or in the race."""

    def end(folder: Path, number: int) -> bool:
        backend, place = AIMED_AT[number % len(AIMED_AT)], where[number // len(AIMED_AT) % len(where)]
        plan: dict[str, Any] = {"backend": backend, "where": place, "call": 1 + number % 3, "signal": number_of_signal}
        return Child(folder, 0.0, seed=number, **plan).finish() is None

    return in_series(count, end)


def same_call(count: int) -> dict[str, Any]:
    """SIGKILL in the first call of one backend in each series: what a backend would look like that exits by itself."""

    def end(folder: Path, number: int) -> bool:
        plan: dict[str, Any] = {"where": "gate", "call": 1, "signal": signal.SIGKILL}
        return Child(folder, 0.0, seed=number, backend=AIMED_AT[number // SERIES], **plan).finish() is None

    return in_series(count, end)


def suspensions(count: int) -> dict[str, Any]:
    """SIGSTOP in a call, for longer than a call may take; then SIGTERM and SIGCONT, or SIGCONT alone."""

    def end(folder: Path, number: int) -> bool:
        backend, where = AIMED_AT[number % len(AIMED_AT)], ("gate", "race")[number // 2 % 2]
        one = Child(folder, 0.0, seed=number, backend=backend, where=where, call=1)
        if one.receive() == "now":
            one.send(signal.SIGSTOP)
            time.sleep(SUSPENDED_S)
            if number % 2 == 0:
                one.send(signal.SIGTERM)
            one.send(signal.SIGCONT)
        return one.finish() is None

    return in_series(count, end)


def shortages() -> dict[str, Any]:
    """One error of each kind in a call: who is excluded, and the backend's status at once and a day later."""
    found = {}
    for kind in SHORTAGES:
        with tempfile.TemporaryDirectory() as folder:
            report = Child(Path(folder), 0.0, problems=1, shortage=kind).finish()
            seen = look(Path(folder))
            later = Child(Path(folder), LATER["after_a_day"], problems=1).finish()
            statuses = [each["rows"].get(AIMED_AT[0]) for each in (report, later)]
            found[kind] = {"excluded": seen["excluded"]["at_once"], "at_once": statuses[0], "after_a_day": statuses[1]}
    return found


def faults() -> dict[str, Any]:
    """A backend that crashes or hangs in every call: whether processes die, and whether it is out, as time passes."""
    found = {}
    hours = {"first": 0.0, "next": 0.01, "second": 0.25, "an_hour_later": 1.25, "20_hours_later": 20.25}
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            steps = {}
            for seed, (name, hour) in enumerate(hours.items()):
                offset_s = hour * 3600
                report = Child(Path(folder), offset_s, seed=seed, problems=1, fault=fault).finish()
                excluded = look(Path(folder), offset_s)["excluded"]["at_once"]
                steps[name] = {"died": report is None, "excluded": excluded}
            found[fault] = steps
    return found


def main() -> None:
    options = parser(__doc__, "strikes.json")
    options.add_argument("--quick", action="store_true", help="a tenth of it")
    arguments = options.parse_args()
    counts = QUICK if arguments.quick else COUNTS
    found: dict[str, Any] = {"series": SERIES}
    begin = time.perf_counter()
    parts: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
        ("kills", lambda: kills(counts["kills"])),
        ("aimed", lambda: aimed(counts["aimed"], signal.SIGKILL, ("gate", "race"))),
        ("same_call", lambda: same_call(counts["same_call"])),
        ("stops", lambda: aimed(counts["stops"], signal.SIGTERM, ("race",))),
        ("suspensions", lambda: suspensions(counts["suspensions"])),
        ("shortages", shortages),
        ("faults", faults),
    )
    for name, figures in parts:
        found[name] = figures()
        print(name, f"{time.perf_counter() - begin:.0f} s", found[name], flush=True)
    write(arguments.output, found)


if __name__ == "__main__":
    main()
