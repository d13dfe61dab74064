"""Speed-ups of Hilbert order: neighbourhoods in both orders, forward and backward, and other implementations.

    python -m tools.bench.hilbert [plane volume training]

float32, 4 heads of 64. Everything in one entry is timed in turns, in one run. The dense rate is PyTorch's own, on a
sequence of its liking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from attn_dispatch import Dense, Neighborhood, Problem
from attn_dispatch.kernels import registry
from attn_dispatch.spec.orders import HILBERT, NATURAL
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.shapes import pair_count, problem_of
from attn_dispatch.tuning.example import make
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table, direction, ms

HEADS, HEAD_DIM = 4, 64
DENSE_TOKENS = 2048
HOPELESS = 6.0  #: times the fastest: beyond it, a candidate is timed only once after warm-up
RIVALS_UP_TO = 16_384  #: tokens; past it a mask of every pair would not fit, and compiling takes as long as all else
SIDES = (32, 64, 128, 256)
BOTH = (NATURAL, HILBERT)
OURS = {"tiles": BOTH, "native": BOTH}
RIVALS = {"flex": BOTH, "sdpa_mask": (NATURAL,)}


def problem(pattern: Pattern, tokens: int, needs_grad: bool) -> Problem:
    shape = (1, tokens, HEADS, HEAD_DIM)
    return problem_of(shape, pattern, torch.float32, torch.device("cpu"), backward=needs_grad)


def neighbourhood(
    grid: tuple[int, ...],
    window: int,
    rounds: int,
    needs_grad: bool = False,
    rivals: Mapping[str, tuple[str, ...]] = RIVALS,
) -> dict[str, Any]:
    pattern, tokens = Neighborhood(grid, (window,)), math.prod(grid)
    names = {**OURS, **(rivals if tokens <= RIVALS_UP_TO else {})}
    example, dense = make(problem(pattern, tokens, needs_grad)), problem(Dense(), DENSE_TOKENS, needs_grad)
    calls = {"dense": make(replace(dense, strides=("bhnd",) * 3)).call(registry.load("sdpa"))}
    for backend in map(registry.load, names):
        if not backend.refusals(example.problem):
            calls |= {f"{backend.name} {order}": example.call(backend, order) for order in names[backend.name]}
    # Without rivals only the dense call, a short one, would be timed more than once.
    hopeless = HOPELESS if any(name.split()[0] in RIVALS for name in calls) else None
    found = in_turns(calls, rounds, hopeless=hopeless, incumbents=[name for name in calls if name.split()[0] in OURS])
    work = (14 if needs_grad else 4) * HEADS * HEAD_DIM
    dense_rate = work * DENSE_TOKENS**2 / found["dense"].median_ms
    needed = work * pair_count(pattern, tokens, tokens, 1)
    return {
        "pattern": str(pattern),
        "tokens": tokens,
        "backward": needs_grad,
        "times": {name: timing(one) for name, one in found.items()},
        "dense_gflops": dense_rate / 1e6,
        "useful_share_of_dense": {name: needed / one.median_ms / dense_rate for name, one in found.items()},
        "gain": {
            name: ratio(found[f"{name} {NATURAL}"], found[f"{name} {HILBERT}"])
            for name in ("tiles", "native", "flex")
            if f"{name} {HILBERT}" in found
        },
    }


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "plane": lambda: [neighbourhood((side, side), 13, 5) for side in SIDES],
    "volume": lambda: [neighbourhood((side,) * 3, 7, 5) for side in (16, 32)],
    "training": lambda: [
        *(neighbourhood((side, side), 13, 3, needs_grad=True) for side in SIDES[1:]),
        neighbourhood((32, 32, 32), 7, 3, needs_grad=True),
    ],
}
#: Without flex, whose compilation takes longer than all else.
QUICK_PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "plane": lambda: [neighbourhood((side, side), 13, 7, rivals={}) for side in SIDES[1:3]],
    "volume": lambda: [neighbourhood((16,) * 3, 7, 7, rivals={})],
}


def tables(found: Any) -> Iterator[Table]:
    rows = []
    for one in (*found.get("plane", ()), *found.get("volume", ()), *found.get("training", ())):
        times, share = one["times"], one["useful_share_of_dense"].get(f"native {HILBERT}")
        cells = (both(times, name, one["gain"].get(name)) for name in ("tiles", "native", "flex"))
        mask = ms(times[f"sdpa_mask {NATURAL}"]) if f"sdpa_mask {NATURAL}" in times else "-"
        what = f"{one['pattern'].removeprefix('Neighborhood')}, {direction(one)}"
        rows.append((what, *cells, mask, "-" if share is None else f"{share:.2f}"))
    yield Table(
        ("neighbourhood", "`tiles`", "`native`", "`flex`", "`sdpa_mask`", "`native` / dense"),
        rows,
        "Milliseconds in natural / in Hilbert order, and the gain: the median of paired ratios, with its 95 % "
        f"interval. float32, {found['heads']} heads of {found['head_dim']}. The last column: useful operations "
        "per second of `native` in Hilbert order, over those of dense attention.",
    )


def both(times: Any, name: str, gain: Any) -> str:
    natural, hilbert = times.get(f"{name} {NATURAL}"), times.get(f"{name} {HILBERT}")
    if natural is None or hilbert is None:
        return "-"
    once = min(natural["rounds"], hilbert["rounds"]) < 2
    known = "one pair" if once else f"{gain['low']:.2f} to {gain['high']:.2f}"
    return f"{natural['median_ms']:,.1f} / {hilbert['median_ms']:,.1f}: {gain['median']:.2f}x ({known})"


def main() -> None:
    quick = "small planes and a volume, forward, no rivals"
    options = parser(__doc__, "hilbert.json", quick=quick)
    options.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    given = options.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        options.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    parts = QUICK_PARTS if given.quick else {name: PARTS[name] for name in given.parts}
    found = {name: part() for name, part in parts.items()}
    figures = {"heads": HEADS, "head_dim": HEAD_DIM, **found}
    write(given, figures, tables, whole=len(found) == len(PARTS))


if __name__ == "__main__":
    main()
