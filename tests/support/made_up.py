"""Synthetic backends with known times, and the decisions that the tuner would make from them."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_dispatch.spec.groups import group_of
from attn_dispatch.store.decision import Decision, Row

Name = tuple[str, str]
SILICON = "cpu-made-up-8c-8t"
ROWS = 4  #: batch * heads at which the crossovers lie
PROBLEM: dict[str, Any] = {
    "pattern": {"kind": "Dense", "is_causal": False},
    "batch": 1,
    "q_len": 1024,
    "k_len": 1024,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "dtype": "float32",
    "device": "cpu",
    "scale": 0.125,
    "dropout_p": 0.0,
    "needs_grad": False,
    "return_lse": False,
    "has_seq_lens": False,
    "has_key_mask": False,
    "strides": ["nhd", "nhd", "nhd"],
    "deterministic": False,
    "matmul_precision": "highest",
    "ranks": 1,
}


@dataclass(frozen=True, slots=True)
class Planted:
    """Milliseconds: overhead + per_unit * length ** by_length * (batch * heads) ** by_heads."""

    overhead: float
    per_unit: float
    by_length: float
    by_heads: float

    def time_ms(self, length: float, rows: float) -> float:
        return self.overhead + self.per_unit * math.pow(length, self.by_length) * math.pow(rows, self.by_heads)


def problem_at(length: int, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {**PROBLEM, "q_len": length, "k_len": length, "batch": batch, **more}


def surface(seed: int, backends: int = 5) -> dict[Name, Planted]:
    """Backends that each win over a range of lengths; at 4 rows they cross over at lengths 64 * 2 ** (1 to 7)."""
    chance = random.Random(seed)
    flips = sorted(64 * 2 ** chance.uniform(1, 7) for _ in range(backends - 1))
    last = Planted(0.01, 0.01 / 256**2, chance.uniform(1.9, 2.2), chance.uniform(0.8, 1.0))
    found: dict[Name, Planted] = {("backend0", "natural"): last}
    for index, length in enumerate(flips, 1):
        here = last.time_ms(length, ROWS)
        overhead, by_length, by_heads = here * chance.uniform(0.3, 0.9), last.by_length - 0.25, chance.uniform(0.8, 1.0)
        last = Planted(overhead, (here - overhead) / length**by_length / ROWS**by_heads, by_length, by_heads)
        found[f"backend{index}", "natural"] = last
    return found


def times_at(planted: Mapping[Name, Planted], problem: Mapping[str, Any]) -> dict[Name, float]:
    rows = problem["batch"] * problem["heads"]
    return {name: each.time_ms(problem["q_len"], rows) for name, each in planted.items()}


def measured(
    planted: Mapping[Name, Planted], problems: Iterable[dict[str, Any]], seed: int, noise: float = 0.03
) -> list[Decision]:
    """The decisions after measurements with this relative noise."""
    chance = random.Random(seed)
    return [
        decision(p, {name: t * math.exp(chance.gauss(0, noise)) for name, t in times_at(planted, p).items()})
        for p in problems
    ]


def decision(
    problem: Mapping[str, Any],
    times: Mapping[Name, float | None],
    *,
    status: Mapping[Name, str] | None = None,
    version: str | None = "1",
    **more: Any,
) -> Decision:
    """A stored decision with these medians, in milliseconds; None for a candidate that was not measured."""
    status = status or {}
    timed = {name: t for name, t in times.items() if t is not None}
    best = min(timed, key=timed.__getitem__) if timed else ("", "")
    rows = tuple(
        Row(
            backend=name[0],
            order=name[1],
            status=status.get(name, "not_measured" if t is None else "chosen" if name == best else "slower"),
            version=version,
            median_ms=t,
        )
        for name, t in times.items()
    )
    values: dict[str, Any] = {
        "key": hashlib.sha256(json.dumps(problem, sort_keys=True).encode()).hexdigest()[:20],
        "silicon": SILICON,
        "group": group_of(problem) if "pattern" in problem else "",
        "title": "made up",
        "problem": dict(problem),
        "choice": best[0],
        "order": best[1],
        "source": "measured",
        "candidates": rows,
        "versions": {},
        "provenance": {},
        "created": "2025-01-01T00:00:00+00:00",
        **more,
    }
    return Decision(**{name: values[name] for name in Decision.__struct_fields__ if name in values})
