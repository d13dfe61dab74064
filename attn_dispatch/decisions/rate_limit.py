"""How much of a minute calls of attend() may spend on measuring: many new lengths must not cause a storm of trials."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0


class Pace:
    """Seconds spent within the last minute, against what is allowed. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: deque[tuple[float, float]] = deque()

    def allows(self, most_s: float) -> bool:
        """Whether another trial may start: what was spent within the last minute is below `most_s` seconds."""
        now = self._clock()
        while self._spent and self._spent[0][0] <= now - WINDOW_S:
            self._spent.popleft()
        return sum(seconds for _, seconds in self._spent) < most_s

    def spend(self, seconds: float) -> None:
        """Note a trial that has just ended."""
        self._spent.append((self._clock(), seconds))

    def clear(self) -> None:
        """As if nothing had been spent."""
        self._spent.clear()
