"""Stability of the choice: re-tunings on a simulated clock, where the right answer is known.

python -m tools.checks.trust_choice [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from attn_dispatch.tuning.choice import Entrant, choose
from attn_dispatch.tuning.intervals import MARGIN
from tools.lib.simulated import Machine

NOISE = 0.03
CLOSE = {f"c{index}": 1.0 + 0.005 * index for index in range(5)}  #: milliseconds, 0.5 % apart
PAIR = {"c0": 1.0, "c1": 1.02}
MANY = {f"c{index}": 1.0 + 0.005 * index for index in range(8)}
FIVE = {"max_rounds": 5, "min_rounds": 5}
CALLS = 1000
ORDER_SEED = 1_000_003
GAPS = (0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.08, 0.1)

Costs = Mapping[str, float]
Tune = Callable[[Costs, str | None, int], str]


@dataclass
class Tuner:
    """One re-tuning: timing, then the choice. Counts the calls."""

    machine: Mapping[str, Any] = field(default_factory=lambda: {"noise": NOISE})
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rounds: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])

    def __call__(self, costs: Costs, incumbent: str | None, seed: int) -> str:
        incumbents = () if incumbent is None else (incumbent,)
        machine = Machine(seed=seed, **self.machine)
        # Another seed for the order, so that it does not correlate with the noise.
        turns = machine.race(dict(costs), seed=seed + ORDER_SEED, incumbents=incumbents, **self.options)
        self.rounds.append(turns.rounds)
        self.seconds.append(turns.elapsed_s)
        entrants = [
            Entrant(name, turns.timings[name], rank=rank, dropped=turns.dropped.get(name))
            for rank, name in enumerate(costs)
        ]
        return choose(entrants, incumbent, calls=CALLS)[0]

    def effort(self) -> dict[str, float]:
        return {
            "median_rounds": statistics.median(self.rounds),
            "most_rounds": max(self.rounds),
            "median_simulated_s": round(statistics.median(self.seconds), 3),
        }


def naive(costs: Costs, incumbent: str | None, seed: int) -> str:
    """As in most tuners: the least mean of five samples in a row."""
    machine = Machine(NOISE, seed)
    means = {}
    for name, cost_ms in costs.items():
        call, start_s = machine.call(name, cost_ms), machine.clock()
        for _ in range(5):
            call()
        means[name] = machine.clock() - start_s
    return min(means, key=means.__getitem__)


def independent(tune: Tune, costs: Costs, incumbent: str | None, count: int, start: int = 0) -> list[str]:
    return [tune(costs, incumbent, start + seed) for seed in range(count)]


def chain(tune: Tune, costs: Costs, incumbent: str, count: int, start: int = 0) -> list[str]:
    """Each re-tuning starts from the pick of the last one; the first pick is the given incumbent."""
    picks = [incumbent]
    for seed in range(count):
        picks.append(tune(costs, picks[-1], start + seed))
    return picks


def flips(picks: list[str]) -> float:
    """Share that differs from the most common pick."""
    return (len(picks) - Counter(picks).most_common(1)[0][1]) / len(picks)


def changes(picks: list[str]) -> float:
    """Share of re-tunings that changed the pick of the one before."""
    return statistics.fmean(a != b for a, b in pairwise(picks))


def worst(costs: Costs, picks: list[str]) -> float:
    """How much slower than the best the worst pick is, as a share."""
    return round(max(costs[pick] for pick in picks) / min(costs.values()) - 1.0, 4)


def too_slow(costs: Costs, picks: list[str]) -> float:
    """Share of picks over 2 % slower than the best."""
    limit = min(costs.values()) * (1.0 + MARGIN) * (1 + 1e-9)
    return statistics.fmean(costs[pick] > limit for pick in picks)


def stability(tune: Tune, costs: Costs, count: int) -> dict[str, Any]:
    """Both kinds of re-tuning for each position of the incumbent."""
    found: dict[str, Any] = {}
    for index, incumbent in enumerate(costs):
        alone = independent(tune, costs, incumbent, count, start=10_000 * index)
        linked = chain(tune, costs, incumbent, count, start=10_000 * index + 5000)
        found[incumbent] = {
            "independent_flips": flips(alone),
            "chain_changes": changes(linked),
            "too_slow": too_slow(costs, alone + linked),
            "worst": worst(costs, alone + linked),
        }
    return found


def summary(tuner: Tuner, costs: Costs, count: int) -> dict[str, Any]:
    positions = stability(tuner, costs, count)
    keys = ("independent_flips", "chain_changes", "too_slow", "worst")
    return {key: max(each[key] for each in positions.values()) for key in keys} | tuner.effort()


def spreads(tune: Tune, count: int) -> dict[str, Any]:
    """Five candidates with random costs up to 20 % apart, a random one of them the incumbent."""
    losses = []
    for seed in range(count):
        draw = random.Random(seed)
        costs = {f"c{index}": 1.0 + 0.2 * draw.random() for index in range(5)}
        pick = tune(costs, draw.choice(sorted(costs)), seed)
        losses.append(costs[pick] / min(costs.values()) - 1.0)
    return {
        "too_slow": statistics.fmean(loss > MARGIN for loss in losses),
        "mean_loss": round(statistics.fmean(losses), 4),
        "worst": round(max(losses), 4),
    } | (tune.effort() if isinstance(tune, Tuner) else {})


def grey_zone(tuner: Tuner, count: int, cost_ms: float = 1.0) -> dict[str, float]:
    """Share of re-tunings in which a challenger that saves this much of the incumbent's time replaces it."""
    found = {}
    for gap in GAPS:
        costs = {"old": cost_ms, "new": cost_ms * (1.0 - gap)}
        found[f"{gap:.1%}"] = statistics.fmean(pick == "new" for pick in independent(tuner, costs, "old", count))
    return found


def figures(quick: bool = False) -> dict[str, Any]:
    """Every figure; `quick` re-tunes 40 instead of 200 times."""
    count = 40 if quick else 200
    return {
        "retunings": count,
        "close": summary(Tuner(), CLOSE, count),
        "close_naive": naively(count),
        "pair": summary(Tuner(), PAIR, count),
        "many": summary(Tuner(), MANY, count // 4),
        "spreads": spreads(Tuner(), count),
        "spreads_naive": spreads(naive, count),
        "disturbed": {name: disturbed(machine, {}, count // 4) for name, machine in MACHINES.items()},
        "five_rounds": {name: disturbed(machine, FIVE, count) for name, machine in MACHINES.items()},
        "grey_zone": {name: grey_zone(Tuner(machine, options), count, ms) for name, machine, options, ms in GREY},
    }


def naively(count: int) -> dict[str, float]:
    picks = independent(naive, CLOSE, None, count)
    return {"independent_flips": flips(picks), "chain_changes": changes(picks), "worst": worst(CLOSE, picks)}


def disturbed(machine: Mapping[str, Any], options: Mapping[str, Any], count: int) -> dict[str, Any]:
    return {
        "close": summary(Tuner(machine, options), CLOSE, count),
        "spreads": spreads(Tuner(machine, options), count),
    }


MACHINES: dict[str, dict[str, Any]] = {
    "noise": {"noise": NOISE},
    "heavy tails": {"noise": NOISE, "tail": 0.05},
    "swing": {"noise": NOISE, "swing": 0.2},
    "bias": {"noise": NOISE, "bias": 0.01},
}


GREY: tuple[tuple[str, dict[str, Any], dict[str, Any], float], ...] = (
    ("noise 3%, 5 rounds", {"noise": 0.03}, FIVE, 1.0),
    ("noise 3%, 25 rounds", {"noise": 0.03}, {"max_rounds": 25}, 1.0),
    ("noise 3%, calls of 1 ms", {"noise": 0.03}, {}, 1.0),
    ("noise 3%, calls of 0.2 ms", {"noise": 0.03}, {}, 0.2),
    ("noise 1%, 25 rounds", {"noise": 0.01}, {"max_rounds": 25}, 1.0),
    ("noise 1%, calls of 1 ms", {"noise": 0.01}, {}, 1.0),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="40 re-tunings instead of 200")
    print(json.dumps(figures(options.parse_args().quick), indent=1))


if __name__ == "__main__":
    main()
