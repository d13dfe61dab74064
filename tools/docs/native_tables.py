"""The rates of the native kernel against the processor's limits, from tools/results/native.json."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from tools.docs.results import machine
from tools.lib.tables import table

LIMITS = {"multiply_add": "multiply-adds", "dot_product": "bfloat16 dot products", "read": "reading memory"}


def native(found: Any) -> str:
    """What was measured, the limits, a picture and the table."""
    about = (
        "By `python -m tools.bench.native`: the rate of the arithmetic that a pattern needs, and its share of the "
        "processor's limit in the same rounds, with 95 % intervals. The limit is that of multiply-adds, or of bfloat16 "
        "dot products, on sums in registers, unless a row says otherwise; float16 is computed in float32. Batch 1, "
        f"heads of {found['head_dim']}; 8 heads, of which each has an offset of its own where a pattern is dilated; 4 "
        f"for neighbourhoods, in Hilbert order. {machine(found)}."
    )
    picture = "![Rates against operations per byte, below the processor's limits](../../tools/results/native.svg)"
    return "\n\n".join((about, ceilings(found), picture, rates(found)))


def ceilings(found: Any) -> str:
    names = [name for name in ("multiply_add", "dot_product") if f"{name}_gflops" in found["machine"][0]]
    head = ("threads", *(LIMITS[name] for name in names), LIMITS["read"])
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in found["machine"]:
        cells = [f"{one[f'{name}_gflops']:,.0f} GFLOP/s" for name in names]
        rows.append((str(one["threads"]), *cells, f"{one['read_gb_per_s']:,.1f} GB/s"))
    return table(rows)


def rates(found: Any) -> str:
    """A row for each pattern and dtype, a column for each direction and number of threads."""
    columns = list(dict.fromkeys((one["backward"], one["threads"]) for one in found["rows"]))
    titles = [f"{'backward' if backward else 'forward'}, {n} thread{'s' * (n != 1)}" for backward, n in columns]
    rows: list[tuple[str, ...]] = [("pattern", "tokens", "dtype", *titles), ("---",) * (3 + len(columns))]
    for (pattern, tokens, dtype), group in groupby(found["rows"], _pattern):
        cells = {(one["backward"], one["threads"]): _rate(one) for one in group}
        rows.append((pattern, f"{tokens:,}", dtype, *(cells[column] for column in columns)))
    return table(rows)


def _pattern(one: Any) -> tuple[str, int, str]:
    return one["pattern"], one["tokens"], one["dtype"]


def _rate(one: Any) -> str:
    share = one["share"]
    bound = f", limit: {LIMITS['read']}" if one["limit"] == "read" else ""
    return f"{one['gflops']:,.0f} GFLOP/s: {share['median']:.2f} ({share['low']:.2f} to {share['high']:.2f}){bound}"
