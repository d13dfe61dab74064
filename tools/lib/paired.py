"""One problem by the same backend in natural and in Hilbert order, and the fastest: checked, then timed interleaved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import Problem
from attn_dispatch.backends.tiles import tile_size
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.tiles.pairs import pair_counts
from attn_dispatch.kernels.tiles.tables import TileTable, tables_of
from attn_dispatch.spec.orders import HILBERT, NATURAL
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.intervals import Timing
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.bench.hilbert import BOTH, gain
from tools.lib.common import timing

HEADS, HEAD_DIM = 8, 64
CANDIDATES = {
    "tiles natural": ("tiles", NATURAL),
    "tiles hilbert": ("tiles", HILBERT),
    "native natural": ("native", NATURAL),
    "sdpa natural": ("sdpa", NATURAL),
}
ENOUGH_S = 10.0  #: seconds of rounds, after which no further one starts
FEWEST, MOST = 2, 5  #: rounds
TILE = 64  #: tokens; of block-sparse kernels
LINE_BYTES = 64
AT_ONCE = 256  #: pairs of tiles counted at a time


def problem_of(pattern: Pattern, tokens: int, backward: bool = False, batch: int = 1) -> Problem:
    """A problem in float32 on the CPU."""
    q = torch.empty(batch, tokens, HEADS, HEAD_DIM, device="meta", requires_grad=backward)
    return Problem.of(q, q, q, pattern, device="cpu")


@cache
def compared(pattern: Pattern, tokens: int, backward: bool = False) -> dict[str, Any]:
    """Times of `CANDIDATES`, and the gain of `tiles` by Hilbert order."""
    problem = problem_of(pattern, tokens, backward)
    example = make(problem)
    able = {label: one for label, one in CANDIDATES.items() if not registry.load(one[0]).refusals(problem)}
    first_ms, check = checked(example, able)
    rounds = rounds_for(sum(first_ms.values()) / 1e3)
    calls = {label: example.call(registry.load(name), order) for label, (name, order) in able.items()}
    turns = time_in_rounds(calls, budget_s=None, min_rounds=rounds, max_rounds=rounds, hopeless=None, first_ms=first_ms)
    if turns.failures:
        raise RuntimeError(f"{pattern}, {tokens} tokens: {turns.failures}")
    entry = {"pattern": str(pattern), "tokens": tokens, "backward": backward, **figures(turns.timings, tokens)}
    print(entry, flush=True)
    return {**entry, "check": check}


def figures(found: Mapping[str, Timing], tokens: int) -> dict[str, Any]:
    best = min(found, key=lambda label: found[label].median_ms)
    return {
        "times": {label: timing(one) for label, one in found.items()},
        "gain": gain(dict(found), "tiles"),
        "best": best,
        "tokens_per_s": {label: tokens / one.median_ms * 1e3 for label, one in found.items()},
    }


def rounds_for(round_s: float) -> int:
    """As many as take `ENOUGH_S`, within bounds; `round_s` is what one of them takes, in seconds."""
    return max(FEWEST, min(MOST, int(ENOUGH_S / round_s)))


# --- results ----------------------------------------------------------------------------------------------------------


def checked(example: Example, able: Mapping[str, tuple[str, str]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Each candidate's first call in milliseconds, and the errors against float64 and between both orders.

    Raises:
        RuntimeError: a result is wrong.
    """
    gate = Oracle.of(example)
    for order in BOTH:  # by one thread, and done once: not what an order costs
        tables_of(example.problem, order, tile_size(example.problem, order))
    first_ms: dict[str, float] = {}
    errors: dict[str, float] = {}
    ordered: dict[str, dict[str, Tensor]] = {}
    for label, (name, order) in able.items():
        start = time.perf_counter()
        found = gate.run(registry.load(name), order)
        first_ms[label] = (time.perf_counter() - start) * 1e3
        verdict = gate.check(found)
        if verdict.failures:
            raise RuntimeError(f"{label}, {example.problem.pattern}: {'; '.join(verdict.failures)}")
        errors[label] = verdict.error
        if name == "tiles":
            ordered[order] = found
    tolerance = {name: one.tolerance for name, one in gate.expected.items() if name != "lse"}
    check = {"rows": len(gate.rows), "heads": len(gate.heads), "tolerance": tolerance, "error_of_out": errors}
    return first_ms, {**check, "hilbert_off_natural": differences(ordered[NATURAL], ordered[HILBERT], tolerance)}


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: Mapping[str, float]) -> Any:
    """The largest difference between two results over all rows; at most twice the tolerance.

    Raises:
        RuntimeError: a difference is larger.
    """
    found = {name: float((one[name] - other[name]).abs().max()) for name in tolerance}
    for name, difference in found.items():
        if not difference <= 2 * tolerance[name]:
            raise RuntimeError(f"{name} differs by {difference:.2e} between orders, over 2 x {tolerance[name]:.2e}")
    return found


# --- counting ---------------------------------------------------------------------------------------------------------


def read_by_tile(problem: Problem, order: str, tile: int = TILE) -> dict[str, float]:
    """Key tiles and cache lines of K and V that a tile of queries reads: the mean over all tiles and heads."""
    tiles = keys = queries = 0
    for table in tables_of(problem, order, tile):
        seen = keys_seen(table)
        tiles += int((seen > 0).sum()) * len(table.heads)
        keys += int(seen.sum()) * len(table.heads)
        queries += len(table.q_pos) * len(table.heads)
    lines = -(-problem.head_dim * problem.dtype.itemsize // LINE_BYTES)
    return {"key_tiles": tiles / queries, "cache_lines": 2 * lines * keys / queries}


def keys_seen(table: TileTable) -> Tensor:
    """The number of keys of a tile that any query of the other tile sees, int64 [pairs]."""
    if table.masks is not None:
        return table.masks.any(1).sum(1)[table.mask]
    some = zip(torch.split(table.queries(), AT_ONCE), torch.split(table.keys, AT_ONCE))
    return torch.cat([pair_counts(table.branches, queries, keys).any(1).sum(1) for queries, keys in some])


def lines(pattern: Pattern, tokens: int) -> dict[str, Any]:
    """`read_by_tile` in both orders, and the relative reduction by Hilbert order; negative for an increase."""
    problem = problem_of(pattern, tokens)
    natural, hilbert = read_by_tile(problem, NATURAL), read_by_tile(problem, HILBERT)
    fewer = {name: 1 - hilbert[name] / natural[name] for name in natural}
    entry = {"pattern": str(pattern), "tokens": tokens, NATURAL: natural, HILBERT: hilbert, "fewer": fewer}
    print(entry, flush=True)
    return entry
