"""A virtual clock that calls advance by given costs with given disturbances. Runs in no real time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from attn_dispatch.machine.load import Load
from attn_dispatch.tuning import rounds
from attn_dispatch.tuning.clocks import HostStopwatch
from attn_dispatch.tuning.rounds import Rounds

Call = Callable[[], None]
PERIOD_S = 0.1
SLICE_S = 0.003  #: for which the scheduler lets a program run


class Machine:
    """Args:
    noise: standard deviation of independent normal noise, as a share of a call's cost.
    seed: of all random numbers.
    slow_from_s: time from which every call takes twice as long.
    tail: share of calls that take ten times as long.
    swing: all costs go up and down by this share, once in 0.1 s.
    bias: standard deviation of a factor drawn once per call, as a memory layout might add.
    neighbours: other programs that run on the same cores: they take turns with every call of more than a slice, and
        with most shorter ones that begin without a rest.
    """

    def __init__(
        self,
        noise: float = 0.0,
        seed: int = 0,
        slow_from_s: float = math.inf,
        *,
        tail: float = 0.0,
        swing: float = 0.0,
        bias: float = 0.0,
        neighbours: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.cpu_s = 0.0
        self.switches = 0
        self.rested = False
        self._neighbours = neighbours
        self.log: list[str] = []
        self._noise, self._slow_from_s, self._tail, self._swing, self._bias = noise, slow_from_s, tail, swing, bias
        self._random = random.Random(seed)

    def clock(self) -> float:
        return self.now_s

    def load(self) -> Load:
        return Load(self.cpu_s, self.now_s, self.switches)

    def rest(self, seconds: float) -> None:
        self.now_s += seconds
        self.rested = True

    def stopwatch(self) -> HostStopwatch:
        """A stopwatch that notices the neighbours."""
        return HostStopwatch(self.clock, reading=self.load, rest=self.rest)

    def call(self, name: str, cost_ms: float, first_ms: float | None = None) -> Call:
        """A call that takes `cost_ms`, the first time `first_ms`."""
        costs_ms = iter([cost_ms if first_ms is None else first_ms])
        bias = self._random.gauss(1.0, self._bias) if self._bias else 1.0

        def run() -> None:
            self.log.append(name)
            own_s = next(costs_ms, cost_ms) / 1e3 * bias * self._factor()
            self.cpu_s += own_s
            self.now_s += own_s + self._taken_s(own_s)

        return run

    def _taken_s(self, own_s: float) -> float:
        """Seconds that neighbours run during a call."""
        if not self._neighbours:
            return 0.0
        slices = int(own_s / SLICE_S)
        alone = 0.8 if self.rested else 0.3 / self._neighbours
        self.rested = self.rested and slices == 0 and self._random.random() < 0.8
        slices += self._random.random() > alone
        self.switches += slices
        if not slices:
            return 0.0
        return slices * SLICE_S * self._neighbours * (1 + self._random.uniform(-0.5, 0.5) / math.sqrt(slices))

    def race(self, costs_ms: dict[str, float], budget_s: float | None = None, **options: Any) -> Rounds:
        calls = {name: self.call(name, cost_ms) for name, cost_ms in costs_ms.items()}
        options = {"stopwatch": self.stopwatch(), **options} if self._neighbours else options
        return rounds.time_in_rounds(calls, budget_s=budget_s, clock=self.clock, **options)

    def _factor(self) -> float:
        factor = 2.0 if self.now_s >= self._slow_from_s else 1.0
        if self._swing:
            factor *= 1.0 + self._swing * math.sin(2 * math.pi * self.now_s / PERIOD_S)
        if self._tail and self._random.random() < self._tail:
            factor *= 10.0
        return factor * max(self._random.gauss(1.0, self._noise), 0.01)
