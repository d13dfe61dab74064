"""Whether other programs take processor time from this process: while something was measured, and now.

While a neighbour runs on every core, Linux takes a core from a busy thread after each of its slices of a few
milliseconds; on a quiet machine it hardly does. That holds in containers and for any number of cores.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from attn_dispatch.machine.memory import PROC, host_psutil, read_text, resource

DISTURBED_PER_S = 90.0  #: involuntary context switches per second of CPU time from which a measurement is disturbed
STRAY_SWITCHES = 4  #: switches that occur on a quiet machine however short the measurement
CALM_PRESSURE = 0.10  #: share of the last ten seconds in which a task waited for a core, below which a machine is calm


def involuntary_switches() -> int:
    """How often a core was taken from a thread of this process, so far; Windows does not count it."""
    return 0 if resource is None else int(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)


class Load(NamedTuple):
    """What took place beside a measurement: CPU and wall seconds of this process, and involuntary context switches."""

    cpu_s: float
    wall_s: float
    switches: int

    @classmethod
    def so_far(cls) -> Load:
        """What this process took since some fixed time."""
        return cls(time.process_time(), time.monotonic(), involuntary_switches())

    def since(self, before: Load) -> Load:
        """Between two readings."""
        return Load(self.cpu_s - before.cpu_s, self.wall_s - before.wall_s, self.switches - before.switches)

    def plus(self, other: Load) -> Load:
        return Load(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s, self.switches + other.switches)

    @property
    def disturbed(self) -> bool:
        """Whether other programs took cores from this process."""
        return self.switches > STRAY_SWITCHES + DISTURBED_PER_S * self.cpu_s


NO_LOAD = Load(0.0, 0.0, 0)


def is_calm(proc: Path = PROC) -> bool:
    """Whether a measurement that begins now is likely to have its cores to itself."""
    pressure = _pressure(proc)
    if pressure is not None:
        return pressure < CALM_PRESSURE
    try:
        averages = getattr(os, "getloadavg", None) or host_psutil().getloadavg
        return bool(averages()[0] < cores())  # of the last minute: this process's own start counts too
    except OSError:
        return True


def _pressure(proc: Path) -> float | None:
    """Share of the last ten seconds in which some task waited for a core; None where the kernel does not say."""
    for line in (read_text(proc / "pressure" / "cpu") or "").splitlines():
        kind, average, *_ = line.split()
        if kind == "some" and average.startswith("avg10="):
            return float(average.removeprefix("avg10=")) / 100
    return None


def cores() -> int:
    """How many cores this process may use, without regard to quotas."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
