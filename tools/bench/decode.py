"""Decoding: few new queries at the end of long keys, next to copying K and V in the same rounds.

    python -m tools.bench.decode [--quick]

The limit is the time of reading K and V once at 0.7 of the rate at which copying them moves bytes, read and written.
Rows that no new query of a pattern sees need not be read, and do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels import registry
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.intervals import ONE_LOOK, fewest
from tools.lib.common import in_turns, parser, ratio, share_of, timing, write
from tools.lib.tables import Table, interval, ms

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
KEYS, BATCHES, NEW = (2**12, 2**15, 2**18), (1, 8), (1, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPARSE = (Window(4095, 0), Dilated((4096, 16384), (1, 4), is_causal=True))
SPARSE_KEYS = 2**15
SHARE = 0.7  #: of the copy's rate that a reader reaches
MOST_COPIED = 2**20  #: keys of all batch rows up to which F.sdpa is timed too, which takes seconds beyond
MEMORY = 0.6  #: share of the free memory that K, V and their copies may take
ROUNDS, MOST_ROUNDS, CELL_S = 5, 60, 3.0


def calls(pattern: Pattern, batch: int, keys: int, new: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int, heads: int) -> Tensor:
        # A row of noise for all keys: what the values are does not matter, and drawing billions takes minutes.
        one = torch.randn(batch, 1, heads, HEAD_DIM, generator=generator).to(dtype)
        return one.repeat(1, length, 1, 1)

    q, k, v = drawn(new, HEADS), drawn(keys, KV_HEADS), drawn(keys, KV_HEADS)
    problem = Problem.of(q, k, v, pattern)
    into = torch.empty_like(k)

    def copy() -> None:
        into.copy_(k)
        into.copy_(v)

    found: dict[str, Any] = {"copy": copy, "native": partial(registry.load("native").run, q, k, v, problem)}
    sdpa = registry.load("sdpa")
    if not sdpa.refusals(problem) and keys * batch <= MOST_COPIED // 4:
        found["sdpa"] = partial(sdpa.run, q, k, v, problem)
    return found


def rows_seen(pattern: Pattern, keys: int, new: int) -> int:
    """Rows of K that any new query of any head sees, on average over the heads of K."""
    group = HEADS // KV_HEADS
    seen = pattern.multiplicity(new, keys, HEADS, h_pos=range(HEADS)) > 0
    seen = seen.expand(HEADS, -1, -1).any(1).view(KV_HEADS, group, keys).any(1)
    return round(float(seen.sum()) / KV_HEADS)


def measured(pattern: Pattern, batch: int, keys: int, new: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """One row of the table; None where memory does not suffice."""
    size = 2 * batch * keys * KV_HEADS * HEAD_DIM * dtype.itemsize
    if 1.5 * size > MEMORY * available_bytes(torch.device("cpu")):
        return None
    found = in_turns(calls(pattern, batch, keys, new, dtype), ROUNDS, MOST_ROUNDS, budget_s=CELL_S, margin=0.0)
    seen = keys if pattern == Dense(is_causal=True) else rows_seen(pattern, keys, new)
    share = seen / keys / (2 * SHARE)  # of the copy's time: it reads and writes
    limit = share_of(share, found["copy"])
    return {
        "pattern": str(pattern),
        "batch": batch,
        "keys": keys,
        "new": new,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": size,
        "rows_seen": seen,
        **{name: timing(each) for name, each in found.items()},
        "limit_ms": limit.median_ms,
        "over_limit": ratio(found["native"], limit),
    }


def tables(found: Any) -> Iterator[Table]:
    rows = []
    for one in found["rows"]:
        if one["dtype"] == "float16" or one["batch"] * one["keys"] * one["new"] > 2**16:  # in the file
            continue
        enough = one["native"]["rounds"] >= fewest(ONE_LOOK)
        over = interval(one["over_limit"]) if enough else f"{one['over_limit']['median']:.2f}"
        sizes = f"{one['batch']}", f"{one['keys']:,}", f"{one['new']}"
        sdpa = ms(one["sdpa"], 1) if "sdpa" in one else "-"
        rows.append((one["pattern"], *sizes, one["dtype"], ms(one["native"], 1), over, sdpa))
    yield Table(
        ("pattern", "batch", "keys", "new", "dtype", "`native`", "over the estimate", "`sdpa`"),
        rows,
        f"{HEADS} query heads and {KV_HEADS} key heads of {HEAD_DIM}. The estimate reads the keys and values "
        f"that are seen once, at {found['share']:g} of a copy's rate in the same rounds. 95 % intervals where "
        f"rounds sufficed. Of the cells {len(found['left_out'])} did not fit the memory.",
    )


def main() -> None:
    given = parser(__doc__, "decode.json", quick="up to 32,768 keys, a batch of one").parse_args()
    cells: list[tuple[Pattern, int, int, int, torch.dtype]]
    cells = [(Dense(is_causal=True), *each) for each in itertools.product(BATCHES, KEYS, NEW, DTYPES)]
    cells += [(pattern, 1, SPARSE_KEYS, 1, dtype) for pattern in SPARSE for dtype in DTYPES]
    if given.quick:
        cells = [cell for cell in cells if cell[1] == 1 and cell[2] <= SPARSE_KEYS]
    found = [(cell, measured(*cell)) for cell in cells]
    left_out = [list(map(str, cell)) for cell, row in found if row is None]
    rows = [row for _, row in found if row is not None]
    write(given, {"share": SHARE, "rows": rows, "left_out": left_out}, tables)


if __name__ == "__main__":
    main()
