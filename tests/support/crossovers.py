"""Decisions at many lengths, with a given speed-up of a token order at each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from msgspec.structs import replace

from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.tuning.choice import Entrant, choose
from attn_dispatch.tuning.intervals import Timing
from tests.support.made_up import decision, problem_at

LENGTHS = tuple(256 << step for step in range(10))
ROUNDS = 25
NOISE = 0.03  #: of one sample
NATURAL, HILBERT, RESIDUE = ("tiles", "natural"), ("tiles", "hilbert"), ("tiles", "residue")

Curve = Callable[[int], float]


def grid(tokens: int, window: int = 13, **more: Any) -> dict[str, Any]:
    pattern = {"kind": "Neighborhood", "grid": [1, tokens], "window": [window, window], "dilation": [1, 1]}
    return problem_at(tokens, **{"pattern": {**pattern, "is_causal": [False, False], "edges": "clip"}, **more})


@cache
def samples(seed: int, tokens: int, name: str) -> tuple[float, ...]:
    """Times in ms of a candidate that takes 1 ms."""
    chance = random.Random(f"{seed} {tokens} {name}")
    return tuple(math.exp(chance.gauss(0, NOISE)) for _ in range(ROUNDS))


def measured(tokens: int, times: Mapping[tuple[str, str], float], seed: int = 0, **more: Any) -> Decision:
    """The decision of a race with the natural candidate as the incumbent, with intervals, ratios and statuses."""
    names = {f"{backend} {order}": (backend, order) for backend, order in times}
    timings = {
        text: Timing(tuple(times[name] * x for x in samples(seed, tokens, text)), 1.0) for text, name in names.items()
    }
    entrants = [Entrant(text, timing, rank, 0, 0.0) for rank, (text, timing) in enumerate(timings.items())]
    chosen, outcomes = choose(entrants, "tiles natural", calls=1000)
    made = decision(grid(tokens, **more), times)
    rows = [_row(*names[text], timings[text], outcomes[text]) for text in names]
    return replace(made, choice=names[chosen][0], order=names[chosen][1], candidates=tuple(rows))


def _row(backend: str, order: str, timing: Timing, outcome: Any) -> Row:
    return Row(
        backend=backend,
        order=order,
        status=outcome.status,
        median_ms=timing.median_ms,
        low_ms=timing.low_ms,
        high_ms=timing.high_ms,
        rounds=len(timing.samples_ms),
        ratio=outcome.ratio,
        ratio_low=outcome.ratio_low,
        ratio_high=outcome.ratio_high,
    )


def planted(speedup: Curve, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Decision]:
    return [measured(n, {NATURAL: speedup(n), HILBERT: 1.0}, seed) for n in lengths]


def crossing(tokens: int, slope: float = 0.25) -> Curve:
    return lambda n: (n / tokens) ** slope
