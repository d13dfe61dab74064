"""Nanoseconds per point of the curve on one thread, interleaved with the installed packages.

    pip install numpy-hilbert-curve hilbertcurve
    python -m tools.bench.hilbert_curve

They know squares and cubes of a power of two, and give coordinates; ours gives positions. The caches of ours are
emptied before each call.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from attn_dispatch.spec.hilbert import curve
from attn_dispatch.tuning.intervals import Timing
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.lib.common import parser, ratio, write

Grid = tuple[int, ...]

SHARED: tuple[Grid, ...] = ((64, 64), (256, 256), (32, 32, 32))
OURS: tuple[Grid, ...] = ((65536,), (1024, 1024), (64, 64, 64), (1000, 777), (4, 16384), (33, 33, 33), (61, 67, 59))
NOT_INSTALLED = "not installed"
PACKAGES = {"numpy-hilbert-curve": "hilbert", "hilbertcurve": "hilbertcurve"}


def ours(grid: Grid) -> None:
    curve.cache_clear()
    curve(grid)


def numpy_hilbert_curve(grid: Grid) -> Any:
    numpy, library = importlib.import_module("numpy"), importlib.import_module("hilbert")
    return library.decode(numpy.arange(math.prod(grid)), len(grid), grid[0].bit_length() - 1)


def hilbertcurve(grid: Grid) -> Any:
    library = importlib.import_module("hilbertcurve.hilbertcurve")
    return library.HilbertCurve(grid[0].bit_length() - 1, len(grid)).points_from_distances(range(math.prod(grid)))


THEIRS: dict[str, Callable[[Grid], Any]] = {"numpy-hilbert-curve": numpy_hilbert_curve, "hilbertcurve": hilbertcurve}


def checked(name: str, grid: Grid) -> None:
    """Check that the timed result is a curve through the grid.

    Raises:
        ValueError: it is none.
    """
    points = [tuple(map(int, point)) for point in THEIRS[name](grid)]
    single = all(sum(abs(x - y) for x, y in zip(*pair)) == 1 for pair in pairwise(points))
    if not single or len(set(points)) != math.prod(grid):
        raise ValueError(f"{name} gives no curve through {grid}")


def measured(grid: Grid, rivals: list[str], rounds: int) -> dict[str, Any]:
    def bound(function: Callable[[Grid], Any]) -> Callable[[], Any]:
        return lambda: function(grid)

    calls = {"ours": bound(ours)} | {name: bound(THEIRS[name]) for name in rivals}
    found = time_in_rounds(calls, budget_s=None, max_rounds=rounds, min_rounds=rounds, hopeless=None).timings
    row: dict[str, Any] = {"grid": grid, "points": math.prod(grid)}
    for name, each in found.items():
        row[name] = per_point(each, math.prod(grid))
        if name != "ours":
            row[name]["times_ours"] = ratio(each, found["ours"])
    print(f"{'x'.join(map(str, grid)):>12}", *(f"{name} {row[name]['median_ns']:.1f} ns" for name in found), sep="   ")
    return row


def per_point(found: Timing, points: int) -> dict[str, Any]:
    milliseconds = {"median_ns": found.median_ms, "low_ns": found.low_ms, "high_ns": found.high_ms}
    return {name: value * 1e6 / points for name, value in milliseconds.items()} | {"rounds": len(found.samples_ms)}


def main() -> None:
    arguments = parser(__doc__, "hilbert_curve.json").parse_args()
    torch.set_num_threads(1)
    there = [name for name, module in PACKAGES.items() if find_spec(module)]
    for name in there:
        checked(name, SHARED[0])
    load = os.getloadavg()[0]
    rows = [measured(grid, there, 7) for grid in SHARED] + [measured(grid, [], 25) for grid in OURS]
    packages = {name: version(name) if name in there else NOT_INSTALLED for name in PACKAGES}
    print(packages, f"load before: {load:.1f}")
    write(arguments.output, {"threads": 1, "load_before": load, "packages": packages, "grids": rows})


if __name__ == "__main__":
    main()
