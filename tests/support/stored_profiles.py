"""Stores with made-up decisions of every kind that a report shows: crossings, orders, quarantines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.store.folder import Store
from tests.support import made_up as planted
from tests.support.made_up import Name, Planted

LENGTHS = (1024, 2048, 4096, 8192, 16384)
SDPA, MASK, NATIVE, FLEX = (("sdpa", "natural"), ("sdpa_mask", "natural"), ("native", "natural"), ("flex", "natural"))
HILBERT = ("native", "hilbert")
MS_PER_TOKEN = 1e-3
#: sdpa is overtaken by native at 3,000 tokens.
TIMES = {
    SDPA: Planted(0.0, MS_PER_TOKEN / 3000, 2.0, 0.0),
    NATIVE: Planted(0.0, MS_PER_TOKEN, 1.0, 0.0),
    FLEX: Planted(2.0, 2.5e-3, 1.0, 0.0),
}
REFUSED = Row(backend="flash", order="natural", status="not_installed", reason="package flash_attn is not installed")


def crossing(lengths: Iterable[int] = LENGTHS, **more: Any) -> list[Decision]:
    """Decisions of one series, with intervals of 2 %, memory, and a backend that is not installed."""
    return [whole(problem, planted.times_at(TIMES, problem)) for problem in problems(lengths, **more)]


def problems(lengths: Iterable[int], **more: Any) -> Iterator[dict[str, Any]]:
    return (planted.problem_at(length, **more) for length in lengths)


def neighbourhood(side: int, **more: Any) -> dict[str, Any]:
    pattern = {
        "kind": "Neighborhood", "grid": [side, side], "window": [13, 13], "dilation": [1, 1],
        "is_causal": [False, False], "edges": "clip",
    }  # fmt: skip
    return planted.problem_at(side * side, pattern=pattern, **more)


def orders(sides: Iterable[int] = (32, 64, 128), **more: Any) -> list[Decision]:
    """Neighbourhoods in two orders; Hilbert order is faster above about 3,000 tokens."""
    found = []
    for side in sides:
        natural = 1e-3 * side * side
        times = {MASK: 4 * natural, NATIVE: natural, HILBERT: natural * math.pow(3000 / side**2, 0.2)}
        found.append(whole(neighbourhood(side, **more), times))
    return found


def whole(problem: dict[str, Any], times: dict[Name, float | None] | dict[Name, float], **more: Any) -> Decision:
    """A decision with all that a measurement gives."""
    made = planted.decision(problem, dict(times), title=title(problem), **more)
    best = min(each for each in times.values() if each is not None)
    rows = [_measured(row, best, problem) for row in made.candidates]
    return msgspec.structs.replace(made, candidates=(*rows, REFUSED))


def title(problem: dict[str, Any]) -> str:
    shape = f"[{problem['batch']}, {problem['q_len']}, {problem['heads']}, {problem['head_dim']}]"
    pattern = dict(problem["pattern"])
    sizes = ", ".join(f"{name}={tuple(pattern[name])}" for name in ("grid", "window") if name in pattern)
    causal = "causal" if pattern.get("is_causal") is True else ""
    direction = "forward + backward" if problem["needs_grad"] else "forward"
    return f"{shape}   {problem['dtype']}   {pattern['kind']}({sizes or causal})   {direction}"


def _measured(row: Row, best: float, problem: dict[str, Any]) -> Row:
    if row.median_ms is None:
        return msgspec.structs.replace(
            row, reason=f"needs {problem['q_len'] / 1000:.1f} s, with 0 s of the budget left"
        )
    ratio = row.median_ms / best
    times = {"low_ms": row.median_ms * 0.98, "high_ms": row.median_ms * 1.02, "rounds": 100}
    ratios = {} if row.status == "chosen" else {"ratio": ratio, "ratio_low": ratio * 0.99, "ratio_high": ratio * 1.01}
    memory = int(problem["q_len"] * 1000 * (1 + len(row.backend)))
    return msgspec.structs.replace(row, peak_bytes=memory, error=2.4e-07, **times, **ratios)


def provisional(decision: Decision) -> Decision:
    return msgspec.structs.replace(decision, provisional="other programs took the cores while it was measured")


def many() -> list[Decision]:
    """About 500 decisions: 100 series of five lengths, each with ten candidates."""
    more = {(f"other{n}", "natural"): Planted(0.1 * n, (2 + n) * 1e-3, 1.0, 0.0) for n in range(6)}
    found = []
    for dtype in ("float32", "bfloat16"):
        for batch in range(1, 6):
            for head_dim in (32, 64, 80, 96, 128):
                for grad in (False, True):
                    for problem in problems(LENGTHS, dtype=dtype, batch=batch, head_dim=head_dim, needs_grad=grad):
                        found.append(whole(problem, planted.times_at({**TIMES, **more}, problem)))
    return found


def store(folder: Path, decisions: Iterable[Decision]) -> None:
    place = Store(folder)
    for decision in decisions:
        place.put(decision)
