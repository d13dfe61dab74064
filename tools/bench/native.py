"""Rates of the native kernel, each next to the processor's limit in the same rounds.

    python -m tools.bench.native [--quick]

A rate counts the arithmetic that a pattern needs: for each query and key that see each other 4 operations forward and
10 backward per entry of a row. The limit is the rate of multiply-adds, or of bfloat16 dot products, on sums in
registers, or that at which inputs and results can be read once, if that is lower. Neighbourhoods are in Hilbert order.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import subprocess
import tempfile
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import library
from attn_dispatch.kernels.native.variants import FLAGS, LINK_FLAGS, SOURCE
from attn_dispatch.machine.compiler import compiler
from attn_dispatch.spec.orders import HILBERT
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import pair_count
from attn_dispatch.tuning.intervals import Timing
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table

TAKES = "5 minutes"
HEAD_DIM = 64
SEGMENT, STEPS = 2048, (1, 2, 4, 8, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PEAK_MS = 20.0  #: what a sample of a limit takes, at least
READ_BYTES = 2**28  #: more than any cache holds
ROUNDS, QUICK_ROUNDS = 9, 3
FORWARD, BACKWARD = 4, 10  #: operations per pair and entry
TITLES = {
    "multiply_add": "multiply-adds",
    "dot_product": "bfloat16 dot products",
    "tile_product": "bfloat16 tiles",
    "read": "reading memory",
}

Call = Callable[[], Any]


class Row(NamedTuple):
    """A pattern at a number of tokens and heads."""

    pattern: Pattern
    tokens: int
    heads: int


def rows(quick: bool) -> list[Row]:
    tokens, dense = (2 * SEGMENT, SEGMENT) if quick else (8 * SEGMENT, 2 * SEGMENT)
    found = [Row(Dense(), dense, 8)] + [Row(Dilated((SEGMENT,), (step,)), tokens, 8) for step in STEPS]
    grids: list[tuple[tuple[int, ...], int]] = [((side, side), 13) for side in (64, 128, 256)]
    grids = grids[:1] if quick else [*grids, ((32, 32, 32), 7)]
    return found + [Row(Neighborhood(grid, (window,)), math.prod(grid), 4) for grid, window in grids]


class Limits:
    """The compiled micro-benchmarks; a call of one takes PEAK_MS or more in one thread."""

    def __init__(self, folder: Path) -> None:
        source, path = Path(__file__).with_name("native_peak.cpp"), folder / "native_peak.so"
        options = (*FLAGS, *library.OPTIONS, *LINK_FLAGS, f"-I{SOURCE.parent}")
        subprocess.run([*compiler(), *options, str(source), "-o", str(path)], check=True)
        self._library = ctypes.CDLL(str(path))
        lanes, pairs = self._library.sum_lanes(), self._library.dot_product_terms()
        terms = {"multiply_add": lanes, "dot_product": pairs * lanes, "tile_product": self._library.tile_terms()}
        self._terms: dict[str, int] = {name: count for name, count in terms.items() if count}  # multiply-adds of a step
        self.names = list(self._terms)
        self._steps = dict.fromkeys(self.names, 2**16)
        for name in self.names:
            while timeit.timeit(self.call(name, 1), number=1) * 1e3 < PEAK_MS:
                self._steps[name] *= 2

    def call(self, name: str, threads: int) -> Call:
        return partial(getattr(self._library, name), ctypes.c_int64(threads), ctypes.c_int64(self._steps[name]))

    def operations(self, name: str, threads: int) -> int:
        """Of one call."""
        return 2 * self._terms[name] * self._steps[name] * threads

    def name_of(self, dtype: torch.dtype) -> str:
        """The limit of products: the kernel computes float16 in float32."""
        return self.names[-1] if dtype == torch.bfloat16 else self.names[0]

    def measured(self, threads: int, rounds: int) -> dict[str, Any]:
        calls: dict[str, Call] = {name: self.call(name, threads) for name in self.names}
        torch.set_num_threads(threads)
        found = in_turns({**calls, "read": torch.ones(READ_BYTES // 4).sum}, rounds)
        rates = {f"{name}_gflops": self.operations(name, threads) / found[name].median_ms / 1e6 for name in self.names}
        return {"threads": threads, **rates, "read_gb_per_s": READ_BYTES / found["read"].median_ms / 1e6}


def call_of(row: Row, dtype: torch.dtype, backward: bool) -> Call:
    """A forward pass, or a backward pass alone."""
    shape = 1, row.tokens, row.heads, HEAD_DIM
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_(backward) for _ in range(3))
    order = {"order": HILBERT} if isinstance(row.pattern, Neighborhood) else {}
    forward = partial(registry.load("native").run, q, k, v, Problem.of(q, k, v, row.pattern), **order)
    if not backward:
        return forward
    out = forward()[0]
    return partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)


def operations(row: Row, backward: bool) -> int:
    """Of the pairs of queries and keys that see each other."""
    seen = pair_count(row.pattern, row.tokens, row.tokens, row.heads)
    return seen * HEAD_DIM * (BACKWARD if backward else FORWARD)


def least_bytes(row: Row, dtype: torch.dtype, backward: bool) -> int:
    """Of the rows of q, k and v that a head selects, backward of out and its gradient too, and of all results, once."""
    step = row.pattern.dilation_rates[0] if isinstance(row.pattern, Dilated) else 1
    rows = (5 / step + 3) if backward else (3 / step + 1)
    return round(rows * row.tokens * row.heads * HEAD_DIM * dtype.itemsize)


def measured(
    row: Row, dtype: torch.dtype, backward: bool, machine: dict[str, Any], limits: Limits, rounds: int
) -> dict[str, Any]:
    """One row in one dtype, direction and number of threads, in turns with its limit."""
    threads, name = machine["threads"], limits.name_of(dtype)
    torch.set_num_threads(threads)
    with torch.set_grad_enabled(backward):
        found = in_turns({"native": call_of(row, dtype, backward), "limit": limits.call(name, threads)}, rounds)
    work, moved = operations(row, backward), least_bytes(row, dtype, backward)
    share, read_ms = work / limits.operations(name, threads), moved / machine["read_gb_per_s"] / 1e6
    limit = Timing(tuple(max(each * share, read_ms) for each in found["limit"].samples_ms), 0.0)
    return {
        "pattern": str(row.pattern),
        "tokens": row.tokens,
        "heads": row.heads,
        "dtype": str(dtype).removeprefix("torch."),
        "backward": backward,
        "threads": threads,
        "operations": work,
        "bytes": moved,
        "native": timing(found["native"]),
        "limit": "read" if limit.median_ms <= read_ms else name,
        "gflops": work / found["native"].median_ms / 1e6,
        "limit_gflops": work / limit.median_ms / 1e6,
        "share": ratio(limit, found["native"]),
    }


def tables(found: Any) -> Iterator[Table]:
    names = [name for name in TITLES if f"{name}_gflops" in found["machine"][0]]
    head = ("threads", *(TITLES[name] for name in names), TITLES["read"])
    limits = []
    for one in found["machine"]:
        rates = (f"{one[f'{name}_gflops']:,.0f} GFLOP/s" for name in names)
        limits.append((str(one["threads"]), *rates, f"{one['read_gb_per_s']:,.1f} GB/s"))
    yield Table(head, limits, "What the processor reaches at most, measured in registers, and in reading memory.")
    columns = list(dict.fromkeys((one["backward"], one["threads"]) for one in found["rows"]))
    titles = [f"{'backward' if backward else 'forward'}, {n} thread{'s' * (n != 1)}" for backward, n in columns]
    lines: dict[tuple[str, str, str], dict[tuple[bool, int], str]] = {}
    for one in found["rows"]:
        if one["dtype"] == "float16":  # computed in float32, as fast as that
            continue
        cell = f"{one['gflops']:,.0f}: {one['share']['median']:.2f}{' *' * (one['limit'] == 'read')}"
        line = lines.setdefault((one["pattern"], f"{one['tokens']:,}", one["dtype"]), {})
        line[one["backward"], one["threads"]] = cell
    yield Table(
        ("pattern", "tokens", "dtype", *titles),
        [(*line, *(cells[column] for column in columns)) for line, cells in lines.items()],
        "GFLOP/s that the pattern needs, and their share of the limit in the same rounds: multiply-adds, for "
        "bfloat16 dot products or AMX tiles; * reading memory. Batch 1, heads of 64: "
        "8, or 4 in Hilbert order for neighbourhoods.",
    )


def main() -> None:
    quick = "fewer tokens, one grid, 3 rounds; less than a minute"
    given = parser(__doc__, "native.json", quick=quick).parse_args()
    rounds = QUICK_ROUNDS if given.quick else ROUNDS
    counts = sorted({1, torch.get_num_threads()})
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(Path(folder))
        machines = [limits.measured(threads, rounds) for threads in counts]
        found = [
            measured(row, dtype, backward, machine, limits, rounds)
            for row, dtype, backward, machine in itertools.product(rows(given.quick), DTYPES, (False, True), machines)
        ]
    write(given, {"head_dim": HEAD_DIM, "quick": given.quick, "machine": machines, "rows": found}, tables)


if __name__ == "__main__":
    main()
