"""Stability of the choice: re-tunings on a simulated clock, where the right answer is known."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from attn_dispatch.tuning.choice import Entrant, choose
from attn_dispatch.tuning.intervals import MARGIN
from tests.support.simulated import Machine

NOISE = 0.03
CLOSE = {f"c{index}": 1.0 + 0.005 * index for index in range(5)}  #: milliseconds, 0.5 % apart
CALLS = 1000
ORDER_SEED = 1_000_003
Costs = Mapping[str, float]
Tune = Callable[[Costs, str | None, int], str]


@dataclass
class Tuner:
    """One re-tuning: timing, then the choice."""

    machine: Mapping[str, Any] = field(default_factory=lambda: {"noise": NOISE})
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, costs: Costs, incumbent: str | None, seed: int) -> str:
        incumbents = () if incumbent is None else (incumbent,)
        machine = Machine(seed=seed, **self.machine)
        # Another seed for the order, so that it does not correlate with the noise.
        turns = machine.race(dict(costs), seed=seed + ORDER_SEED, incumbents=incumbents, **self.options)
        entrants = [
            Entrant(name, turns.timings[name], rank=rank, dropped=turns.dropped.get(name))
            for rank, name in enumerate(costs)
        ]
        return choose(entrants, incumbent, calls=CALLS)[0]


def independent(tune: Tune, costs: Costs, incumbent: str | None, count: int, start: int = 0) -> list[str]:
    return [tune(costs, incumbent, start + seed) for seed in range(count)]


def stability(tune: Tune, costs: Costs, count: int) -> dict[str, tuple[float, float, float]]:
    """For each incumbent, shares: of picks that are not the most common one; where each re-tuning starts from the pick
    of the last one, of picks that changed; of all that are over 2 % slower than the best.
    """
    found = {}
    for index, incumbent in enumerate(costs):
        alone, linked = independent(tune, costs, incumbent, count, start=10_000 * index), [incumbent]
        for seed in range(count):
            linked.append(tune(costs, linked[-1], 10_000 * index + 5000 + seed))
        flips = 1 - Counter(alone).most_common(1)[0][1] / count
        changes = statistics.fmean(a != b for a, b in pairwise(linked))
        limit = min(costs.values()) * (1.0 + MARGIN) * (1 + 1e-9)
        found[incumbent] = flips, changes, statistics.fmean(costs[pick] > limit for pick in alone + linked)
    return found


def spreads(tune: Tune, count: int) -> dict[str, Any]:
    """Five candidates with random costs up to 20 % apart, a random one of them the incumbent."""
    losses = []
    for seed in range(count):
        draw = random.Random(seed)
        costs = {f"c{index}": 1.0 + 0.2 * draw.random() for index in range(5)}
        pick = tune(costs, draw.choice(sorted(costs)), seed)
        losses.append(costs[pick] / min(costs.values()) - 1.0)
    return {"mean_loss": statistics.fmean(losses), "worst": max(losses)}
