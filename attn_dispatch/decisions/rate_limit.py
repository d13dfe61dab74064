"""Limits the time per minute that attend() calls add on trials, however many new problems appear."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0


class RateLimit:
    """Sums the seconds of trials within the last minute. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trials: deque[tuple[float, float]] = deque()

    def allows(self, most_s: float) -> bool:
        """Whether trials within the last minute took less than `most_s` seconds, so that another may start."""
        now = self._clock()
        while self._trials and self._trials[0][0] <= now - WINDOW_S:
            self._trials.popleft()
        return sum(seconds for _, seconds in self._trials) < most_s

    def add(self, seconds: float) -> None:
        """Add the seconds of a trial that has just ended."""
        self._trials.append((self._clock(), seconds))

    def clear(self) -> None:
        """Forget all trials."""
        self._trials.clear()
