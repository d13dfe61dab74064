"""Step `smoke`: each backend and dtype in a process of its own, against the float64 oracle, gradients too.

Besides patterns, dtypes and head_dims: masks, other orders in memory, odd head_dims, and few queries of more keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup, cuda_backends
from tools.lib.tables import Table

PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "causal": Dense(is_causal=True),
    "window": Window(255, 0),
    "longnet": Dilated((256, 512, 1024), (1, 2, 4), is_causal=True),
    "neighborhood": Neighborhood((32, 32), (7, 7)),
    "sinks": Window(255, 0, sinks=4),
}
DRY_PATTERNS: dict[str, Pattern] = {"causal": Dense(is_causal=True), "longnet": Dilated((16, 32), (1, 2))}
BATCH, LENGTH, HEADS, GROUPED = 2, 1024, 8, 2  #: the last: key heads
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 128, 256)
FLEX = ("flex", "flex_flash")
FLEX_KINDS = {"bfloat16": ("causal", "longnet", "neighborhood"), "float16": (), "float32": ("causal",)}
ODD_DIMS = (40, 80, 96, 192)
EXTRAS: dict[str, dict[str, Any]] = {
    "seq_lens": {"has_seq_lens": True},
    "key_mask": {"has_key_mask": True},
    "bhnd": {"strides": ("bhnd",) * 3},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi_axes": 1},
    "bias": {"bias": (1, HEADS)},
}
FEW = (1, 4, 16)  #: queries, which with GROUPED key heads are 4, 16 and 64 rows that share keys
#: Backends that compile: their groups are smaller and start first.
COMPILING = ("triton_tiles", "triton", "flash", "flex", "flex_flash")


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    if number:
        return None
    if setup.dry_run:
        kinds = [_item("sdpa", "float32", 16, kind, 1, extra) for kind in DRY_PATTERNS for extra in ("", *EXTRAS)]
        kinds += [_item("triton", "float32", 16, "causal", 2, queries=queries) for queries in (1, 32)]
        return Phase(groups_of(kinds), 2)
    return Phase(groups_of(cases()), setup.cores, item_s=90.0)


def cases() -> list[Item]:
    names = [*COMPILING, *(name for name in cuda_backends() if name not in COMPILING)]
    found = []
    for name, dtype in product(names, DTYPES):
        if name in FLEX:  # half a minute of compiling each
            found += [_item(name, dtype, 64, kind, HEADS) for kind in FLEX_KINDS[dtype]]
            continue
        for head_dim, kind, kv_heads in product(HEAD_DIMS, PATTERNS, (HEADS, GROUPED)):
            if kv_heads == GROUPED or head_dim == HEAD_DIMS[0] or name not in COMPILING:
                found.append(_item(name, dtype, head_dim, kind, kv_heads))
    for name, dtype in product([name for name in names if name not in FLEX], ("bfloat16", "float32")):
        found += [_item(name, dtype, 64, kind, GROUPED, extra) for kind, extra in product(PATTERNS, EXTRAS)]
        if dtype == "bfloat16":
            found += [_item(name, dtype, each, kind, GROUPED) for each in ODD_DIMS for kind in ("causal", "longnet")]
        found += [
            _item(name, dtype, head_dim, kind, GROUPED, extra, queries)
            for head_dim, kind, queries in product((64, 128), ("dense", "causal", "window"), FEW)
            for extra in ("", "key_mask", "softcap", "alibi", "bias")
        ]
    return found


def _item(
    backend: str, dtype: str, head_dim: int, pattern: str, kv_heads: int, extra: str = "", queries: int = LENGTH
) -> Item:
    whole = {"backend": backend, "dtype": dtype, "head_dim": head_dim, "pattern": pattern, "kv_heads": kv_heads}
    return {**whole, "extra": extra, "queries": queries}


def groups_of(found: list[Item]) -> list[list[Item]]:
    """Each in a process of its own: a backend and dtype; of Triton's also a head_dim, of flex also a pattern."""
    groups: dict[tuple[Any, ...], list[Item]] = {}
    for item in found:
        name, few = item["backend"], item["queries"] < LENGTH
        part = "few" if few else item["extra"] or ("odd" if item["head_dim"] in ODD_DIMS else item["head_dim"])
        key = name, item["dtype"], part if name in COMPILING else "", item["pattern"] if name in FLEX else ""
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    backend, problem = registry.load(item["backend"]), _problem(item, machine, setup.dry_run)
    refusals = refusals_of(backend, problem)
    if refusals:
        return {"refused": "; ".join(f"{each.code}: {each.text}" for each in refusals)}
    oracle = Oracle.of(make(problem))
    result = oracle.run(backend)
    machine.synchronize()
    checked = oracle.check(result)
    wrong = {"failed": "; ".join(checked.failures)} if checked.failures else {}
    return {"error": checked.error, "tolerance": oracle.expected["out"].tolerance, **wrong}


def _problem(item: Item, machine: Machine, dry: bool) -> Problem:
    pattern, extra = (DRY_PATTERNS if dry else PATTERNS)[item["pattern"]], item["extra"]
    shape = (1, 32, 2, item["head_dim"]) if dry else (BATCH, LENGTH, HEADS, item["head_dim"])
    dtype, few = getattr(torch, item["dtype"]), item["queries"] < shape[1]
    found = problem_of(shape, pattern, dtype, machine.device, kv_heads=item["kv_heads"], backward=not few)
    if few:
        found = replace(found, q_len=item["queries"], pattern=pattern.simplify(item["queries"], shape[1], shape[2]))
    more = {"bias": (1, 2)} if dry and extra == "bias" else EXTRAS.get(extra, {})
    return replace(found, **more)


def label(item: Item) -> str:
    more = f" {item['extra']}" * bool(item["extra"]) + f" {item['queries']} queries"
    return f"{item['backend']} {item['dtype']} {item['pattern']} hd{item['head_dim']} kv{item['kv_heads']}{more}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """By backend, how many items agree, failed and were refused."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        kind = "failed" if "failed" in row else "refused" if "refused" in row else "agree"
        found.setdefault(row["backend"], Counter())[kind] += 1
    return {name: ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) for name, counts in found.items()}


def tables(found: Any) -> Iterator[Table]:
    failed = sorted({f"`{row['backend']}`: {row['failed'][:60]}" for row in found["rows"] if "failed" in row})
    counts = sorted((name, text) for name, text in found["summary"].items() if isinstance(text, str))
    patterns = ", ".join(dict.fromkeys(row["pattern"] for row in found["rows"]))
    dims = ", ".join(map(str, sorted({row["head_dim"] for row in found["rows"]})))
    yield Table(
        ("backend", "problems"),
        [(f"`{name}`", text) for name, text in counts],
        f"Patterns: {patterns}; head_dim {dims}; as many key heads as query heads, and fewer; masks; score terms; few "
        f"queries of {LENGTH:,} keys; forward and backward. No time was left for {found['summary']['left_out']} "
        f"problems. Failed: {'; '.join(failed) or 'none'}.",
    )
