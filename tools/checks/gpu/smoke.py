"""Step `smoke`: each backend and dtype in a process of its own, against the float64 oracle, gradients too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup
from tools.lib.tables import Table

PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "causal": Dense(is_causal=True),
    "window": Window(255, 0),
    "longnet": Dilated((256, 512, 1024), (1, 2, 4), is_causal=True),
    "neighborhood": Neighborhood((32, 32), (7, 7)),
}
DRY_PATTERNS: dict[str, Pattern] = {"causal": Dense(is_causal=True), "longnet": Dilated((16, 32), (1, 2))}
BATCH, LENGTH, HEADS, GROUPED = 2, 1024, 8, 2  #: the last: key heads
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 128, 256)
FLEX_KINDS = {"bfloat16": ("causal", "longnet", "neighborhood"), "float16": (), "float32": ("causal",)}
#: Backends that compile: their groups are smaller and start first.
COMPILING = ("triton_tiles", "triton", "flex")
NOT_HERE = ("native",)  #: refuses every CUDA device


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    if number:
        return None
    if setup.dry_run:
        kinds = [("sdpa", "float32", 16, kind, 1) for kind in DRY_PATTERNS] + [("triton", "float32", 16, "causal", 2)]
        return Phase(groups_of(kinds), 2)
    return Phase(groups_of(cases()), setup.cores, item_s=90.0)


def cases() -> list[tuple[str, str, int, str, int]]:
    """Backend, dtype, head_dim, pattern and key heads of each item."""
    names = [*COMPILING, *(name for name in registry.names() if name not in (*COMPILING, *NOT_HERE))]
    found = []
    for name, dtype in product(names, DTYPES):
        if name == "flex":  # half a minute of compiling each
            found += [(name, dtype, 64, kind, HEADS) for kind in FLEX_KINDS[dtype]]
            continue
        for head_dim, kind, kv_heads in product(HEAD_DIMS, PATTERNS, (HEADS, GROUPED)):
            if kv_heads == GROUPED or head_dim == HEAD_DIMS[0] or name not in COMPILING:
                found.append((name, dtype, head_dim, kind, kv_heads))
    return found


def groups_of(found: list[tuple[str, str, int, str, int]]) -> list[list[Item]]:
    """Each in a process of its own: a backend and dtype; of Triton's also a head_dim, of flex also a pattern."""
    groups: dict[tuple[Any, ...], list[Item]] = {}
    for name, dtype, head_dim, kind, kv_heads in found:
        key = (name, dtype, head_dim if name in COMPILING else 0, kind if name == "flex" else "")
        item = {"backend": name, "dtype": dtype, "head_dim": head_dim, "pattern": kind, "kv_heads": kv_heads}
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    backend, dry = registry.load(item["backend"]), setup.dry_run
    pattern = (DRY_PATTERNS if dry else PATTERNS)[item["pattern"]]
    shape = (1, 32, 2, item["head_dim"]) if dry else (BATCH, LENGTH, HEADS, item["head_dim"])
    dtype = getattr(torch, item["dtype"])
    problem = problem_of(shape, pattern, dtype, machine.device, kv_heads=item["kv_heads"], backward=True)
    refusals = backend.refusals(problem)
    if refusals:
        return {"refused": "; ".join(f"{each.code}: {each.text}" for each in refusals)}
    oracle = Oracle.of(make(problem))
    result = oracle.run(backend)
    machine.synchronize()
    checked = oracle.check(result)
    wrong = {"failed": "; ".join(checked.failures)} if checked.failures else {}
    return {"error": checked.error, "tolerance": oracle.expected["out"].tolerance, **wrong}


def label(item: Item) -> str:
    return f"{item['backend']} {item['dtype']} {item['pattern']} hd{item['head_dim']} kv{item['kv_heads']}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """By backend, how many items agree, failed and were refused."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        kind = "failed" if "failed" in row else "refused" if "refused" in row else "agree"
        found.setdefault(row["backend"], Counter())[kind] += 1
    return {name: ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) for name, counts in found.items()}


def tables(found: Any) -> Iterator[Table]:
    failed = sorted({f"`{row['backend']}`: {row['failed']}" for row in found["rows"] if "failed" in row})
    counts = sorted((name, text) for name, text in found["summary"].items() if isinstance(text, str))
    yield Table(
        ("backend", "problems"),
        [(f"`{name}`", text) for name, text in counts],
        f"Patterns: {', '.join(PATTERNS)}; head_dim {', '.join(map(str, HEAD_DIMS))}; as many key heads as query "
        f"heads, and fewer; forward and backward. No time was left for {found['summary']['left_out']} problems. "
        f"Failed: {'; '.join(failed) or 'none'}.",
    )
