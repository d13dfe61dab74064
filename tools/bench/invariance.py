"""What batch invariance costs: the same calls of `native` with and without it, in turns.

python -m tools.bench.invariance
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from attn_dispatch import Dense, attend, batch_invariant
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table

TAKES = "2 minutes"
HEADS = (32, 8), (8, 8)  #: of q, and of k and v
COLUMNS = tuple(itertools.product((32, 64, 128), ("float32", "bfloat16", "float16")))  #: head_dim and dtype
#: Rows of the batch, queries at the end of the keys, and keys: prompts, decoding and a part of a prompt.
SIZES = (1, 1024, 1024), (4, 512, 512), (1, 1, 4096), (1, 1, 32_768), (8, 1, 2048), (1, 128, 4096)
ROUNDS, MOST_ROUNDS, CELL_S = 5, 60, 2.0


def measured(size: tuple[int, int, int], heads: tuple[int, int], head_dim: int, dtype: str) -> dict[str, Any]:
    (batch, queries, keys), generator = size, torch.Generator().manual_seed(0)
    shapes = (queries, heads[0]), (keys, heads[1]), (keys, heads[1])
    q, k, v = (torch.randn(batch, *each, head_dim, generator=generator).to(getattr(torch, dtype)) for each in shapes)
    usual = partial(attend, q, k, v, Dense(is_causal=True), backend="native")

    def invariant() -> None:
        with batch_invariant():
            usual()

    with torch.no_grad():
        found = in_turns({"invariant": invariant, "usual": usual}, ROUNDS, MOST_ROUNDS, budget_s=CELL_S, margin=0.0)
    return {"cost": ratio(found["invariant"], found["usual"]), **{name: timing(each) for name, each in found.items()}}


def tables(found: Any) -> Iterator[Table]:
    shown = found["rows"][:: len(HEADS)]  # grouped heads
    rows = [(row["size"], *(f"{cell['cost']['median']:.2f}" for cell in row["cells"])) for row in shown]
    columns = (f"{dtype}, {head_dim}" for head_dim, dtype in found["columns"])
    about = "Time of `native`, causal, with batch invariance / without, by dtype and head_dim."
    yield Table(("rows x queries of keys, heads", *columns), rows, about)


def main() -> None:
    given, rows = parser(__doc__, "invariance.json").parse_args(), list[dict[str, Any]]()
    for (batch, queries, keys), heads in itertools.product(SIZES, HEADS):
        size = f"{batch}x{queries:,} of {keys:,}, {heads[0]}/{heads[1]}"
        rows.append({"size": size, "cells": [measured((batch, queries, keys), heads, *each) for each in COLUMNS]})
    write(given, {"columns": COLUMNS, "rows": rows}, tables)


if __name__ == "__main__":
    main()
