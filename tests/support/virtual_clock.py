"""A clock that stands still but for what a test says has passed, so that no test sleeps or times anything."""

from __future__ import annotations

import time
from typing import Any

import pytest

from attn_dispatch.tuning import clocks, rounds


class VirtualClock:
    """Seconds since it was made. Time passes by `sleep` alone: every call that is timed must take some."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def install(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials, their gate and their races go by this clock, instead of the machine's."""
    monkeypatch.setattr(time, "perf_counter", clock)
    # These have looked the machine's clock up already.
    race: Any = rounds.sampled_in_rounds
    monkeypatch.setitem(race.__kwdefaults__, "clock", clock)
    stopwatch: Any = clocks.HostStopwatch.__init__
    _, *others = stopwatch.__defaults__
    monkeypatch.setattr(stopwatch, "__defaults__", (clock, *others))
