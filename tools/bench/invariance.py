"""What batch invariance costs: the same calls of `native` with and without it, in turns.

    python -m tools.bench.invariance [--quick]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from attn_dispatch import Dense, attend, batch_invariant
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table, interval, ms

TAKES = "5 minutes"
HEADS, HEAD_DIMS = ((32, 8), (8, 8)), (64, 128)  #: of q, and of k and v
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Rows of the batch, queries at the end of the keys, and keys: prompts, decoding and a part of a prompt.
SIZES = ((1, 1024, 1024), (4, 512, 512), (1, 1, 4096), (1, 1, 32_768), (8, 1, 2048), (1, 128, 4096))
ROUNDS, MOST_ROUNDS, CELL_S = 5, 60, 2.0


def measured(size: tuple[int, int, int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    (batch, queries, keys), generator = size, torch.Generator().manual_seed(0)
    shapes = (queries, heads[0]), (keys, heads[1]), (keys, heads[1])
    q, k, v = (torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for shape in shapes)
    usual = partial(attend, q, k, v, Dense(is_causal=True), backend="native")

    def invariant() -> None:
        with batch_invariant():
            usual()

    with torch.no_grad():
        found = in_turns({"invariant": invariant, "usual": usual}, ROUNDS, MOST_ROUNDS, budget_s=CELL_S, margin=0.0)
    return {
        "batch": batch,
        "queries": queries,
        "keys": keys,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: timing(each) for name, each in found.items()},
        "cost": ratio(found["invariant"], found["usual"]),
    }


def tables(found: Any) -> Iterator[Table]:
    by_size = dict[str, list[Any]]()
    for one in found["rows"]:
        heads = "{} / {}".format(*one["heads"])
        by_size.setdefault(f"{one['batch']} x {one['queries']:,} of {one['keys']:,}, {heads}", []).append(one)
    head_dims = sorted({one["head_dim"] for one in found["rows"]})
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    columns = list(itertools.product(head_dims, names))
    rows = []
    for size, ones in by_size.items():
        cells = {(one["head_dim"], one["dtype"]): interval(one["cost"]) for one in ones}
        rows.append((size, *(cells.get(each, "-") for each in columns)))
    worst = max(found["rows"], key=lambda one: one["cost"]["median"])
    yield Table(
        ("rows x queries of keys, heads", *(f"{name}, {head_dim}" for head_dim, name in columns)),
        rows,
        f"Time of `native` with batch invariance / without, causal, by dtype and head_dim. At most "
        f"{worst['cost']['median']:.2f}: {ms(worst['usual'])} without it.",
        "Batch invariance",
    )


def main() -> None:
    given = parser(__doc__, "invariance.json", quick="float32 and head_dim 64 alone").parse_args()
    cells = itertools.product(SIZES, HEADS, HEAD_DIMS[: 1 if given.quick else 2], DTYPES[: 1 if given.quick else 3])
    write(given, {"rows": [measured(*cell) for cell in cells]}, tables)


if __name__ == "__main__":
    main()
