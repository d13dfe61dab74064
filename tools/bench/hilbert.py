"""Speed-ups of Hilbert order: neighbourhoods in both orders, forward and backward, and other implementations.

    python -m tools.bench.hilbert [plane volume training]

float32, 4 heads of 64. Everything in one entry is timed in turns, in one run. The dense rate is PyTorch's own, on a
sequence of its liking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import Neighborhood, Problem
from attn_dispatch.kernels import registry
from attn_dispatch.spec.orders import HILBERT, NATURAL
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.tuning.intervals import Timing
from tools.bench.longnet import trained
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table, direction, ms

HEADS, HEAD_DIM = 4, 64
DENSE_TOKENS = 2048
HOPELESS = 6.0  #: times the fastest: beyond it, a candidate is timed only once after warm-up
RIVALS_UP_TO = 16_384  #: tokens; past it a mask of every pair would not fit, and compiling takes as long as all else
SIDES = (32, 64, 128, 256)

Calls = dict[str, Callable[[], Any]]


def calls_of(pattern: Pattern, tokens: int, needs_grad: bool, names: dict[str, tuple[str, ...]]) -> Calls:
    """A call for each backend and order."""
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM).requires_grad_(needs_grad) for _ in range(3))
    problem = Problem.of(q, k, v, pattern)
    found: Calls = {}
    for name, orders in names.items():
        backend: Any = registry.load(name)
        if backend.refusals(problem):
            continue
        for order in orders:
            chosen = {} if order == NATURAL else {"order": order}
            call = partial(out_of, backend, q, k, v, problem, **chosen)
            found[f"{name} {order}"] = trained(call, (q, k, v)) if needs_grad else call
    d, e, f = (torch.randn(1, HEADS, DENSE_TOKENS, HEAD_DIM).requires_grad_(needs_grad) for _ in range(3))
    dense = partial(scaled_dot_product_attention, d, e, f)
    found["dense"] = trained(dense, (d, e, f)) if needs_grad else dense
    return found


def out_of(backend: Any, *inputs: Any, **options: Any) -> Tensor:
    result = backend.run(*inputs, **options)
    out: Tensor = result if isinstance(result, Tensor) else result[0]
    return out


BOTH = (NATURAL, HILBERT)
OURS = {"tiles": BOTH, "native": BOTH}
RIVALS = {"flex": BOTH, "sdpa_mask": (NATURAL,)}


def neighbourhood(
    grid: tuple[int, ...],
    window: int,
    rounds: int,
    needs_grad: bool = False,
    rivals: Mapping[str, tuple[str, ...]] = RIVALS,
) -> dict[str, Any]:
    pattern, tokens = Neighborhood(grid, (window,)), math.prod(grid)
    names = {**OURS, **(rivals if tokens <= RIVALS_UP_TO else {})}
    found = turns(calls_of(pattern, tokens, needs_grad, names), rounds)
    for name in (*OURS, *RIVALS):
        registry.load(name).release()
    work = (14 if needs_grad else 4) * HEADS * HEAD_DIM
    dense_rate = work * DENSE_TOKENS**2 / found["dense"].median_ms
    needed = work * pairs(pattern)
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


def pairs(pattern: Neighborhood) -> int:
    """Of queries and keys that see each other: a product, since axes are independent."""
    axes = ((axis, torch.arange(size)) for axis, size in zip(pattern.axes, pattern.grid))
    return math.prod(int(axis.sees(places[:, None], places).sum()) for axis, places in axes)


def turns(calls: Calls, rounds: int) -> dict[str, Timing]:
    ours = [name for name in calls if name.split()[0] in OURS]
    # Without rivals only the dense call, a short one, would be timed more than once.
    hopeless = HOPELESS if any(name.split()[0] in RIVALS for name in calls) else None
    return in_turns(calls, rounds, hopeless=hopeless, incumbents=ours)


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
    arguments = parser(__doc__, "hilbert.json")
    arguments.add_argument("parts", nargs="*", default=list(PARTS), metavar="part", help=", ".join(PARTS))
    arguments.add_argument("--quick", action="store_true", help="small planes and a volume, forward, no rivals")
    options = arguments.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        arguments.error(f"part must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    if options.quick:
        options.parts = list(QUICK_PARTS)
    parts = {**PARTS, **(QUICK_PARTS if options.quick else {})}
    found = {part: parts[part]() for part in options.parts}
    whole = options.quick or set(found) == set(PARTS)
    write(options.output, {"heads": HEADS, "head_dim": HEAD_DIM, **found}, tables, whole=whole)


if __name__ == "__main__":
    main()
