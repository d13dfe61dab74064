"""Where a problem lies among those of its group: a point, with distances in octaves, and a bucket. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from attn_dispatch.spec.groups import group_of

PER_OCTAVE = 4  #: buckets; sizes in one differ by less than 2 ** (1 / 4), 19 %
COUNTS = ("batch", "q_len", "k_len", "heads", "kv_heads")
SOFT = ("return_lse", "deterministic", "matmul_precision", "strides")  #: neither in the group nor sizes
PRECISIONS = {"highest": 0, "high": 1, "medium": 2}
AXES = "bnhd"

# What else may differ within a group, in octaves of distance: how far away the times of such a problem may be.
LSE, SCALE, DETERMINISTIC, PRECISION, STRIDES, KV_GROUPS = 0.25, 0.25, 1.0, 2.0, 0.5, 0.5


def features(problem: Mapping[str, Any]) -> tuple[float, ...]:
    """A problem, as `Problem.to_dict` writes it, as a point; as many numbers for every problem of a group.

    log2 of q_len, of k_len and of batch * heads; of each of the pattern's sizes, which together weigh as one; then
    what may differ besides, each by the distance that it is thought to make.

    Raises:
        KeyError, TypeError, ValueError: it is not a problem.
    """
    heads = problem["heads"]
    return (
        math.log2(problem["q_len"]),
        math.log2(problem["k_len"]),
        math.log2(problem["batch"] * heads),
        *_pattern(problem),
        KV_GROUPS * math.log2(heads / problem["kv_heads"]),
        LSE * bool(problem["return_lse"]),
        SCALE * _given_scale(problem),
        DETERMINISTIC * bool(problem["deterministic"]),
        PRECISION * PRECISIONS[problem["matmul_precision"]],
        *_strides(tuple(problem["strides"])),
    )


def bucket(problem: Mapping[str, Any]) -> tuple[Any, ...]:
    """What problems share that differ by less than 19 % in every size, and in nothing else.

    Raises:
        KeyError, TypeError, ValueError: it is not a problem.
    """
    soft = [tuple(value) if isinstance(value, list) else value for value in map(problem.__getitem__, SOFT)]
    counts = [_step(problem[name]) for name in COUNTS]
    sizes = [None if size is None else _step(size) for size in _sizes(_natural(problem["pattern"]))]
    return (group_of(problem), *soft, _given_scale(problem), *counts, *sizes)


def _step(size: int) -> int:
    """The bucket of one size; a window of 0 has one of its own."""
    return math.floor(PER_OCTAVE * math.log2(size)) if size > 0 else -1


def _natural(pattern: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one inside a pattern whose tokens are in another order."""
    inner: Mapping[str, Any] = dict(pattern).get("pattern", pattern)
    return inner


def _sizes(pattern: Mapping[str, Any]) -> Iterator[int | None]:
    for name in ("left", "right", "sinks"):
        if name in pattern:
            yield pattern[name]
    for name in ("segment_lengths", "grid", "window"):
        yield from pattern.get(name, ())


def _pattern(problem: Mapping[str, Any]) -> list[float]:
    """An open side of a window reaches as far as there are keys."""
    pattern = _natural(problem["pattern"])
    itself = "left" in pattern  # a side of a window does not count the query's own place
    sizes = [problem["k_len"] if size is None else size + itself for size in _sizes(pattern)]
    weight = 1 / math.sqrt(max(len(sizes), 1))
    return [weight * math.log2(size) for size in sizes]


def _given_scale(problem: Mapping[str, Any]) -> bool:
    return bool(problem["scale"] != math.pow(problem["head_dim"], -0.5))


@lru_cache(maxsize=256)
def _strides(names: tuple[str, ...]) -> tuple[float, ...]:
    """How many of q, k and v lie in memory other than row by row, with gaps, unaligned, expanded."""
    orders = [[AXES.index(axis) for axis in name.split("+")[0]] for name in names]
    turned = sum(order != sorted(order) for order in orders)
    marked = (sum(mark in name for name in names) for mark in ("+gaps", "+unaligned", "+expanded"))
    return tuple(STRIDES * count / max(len(names), 1) for count in (turned, *marked))
