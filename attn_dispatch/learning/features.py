"""Maps problems of a group to points, with distances in octaves, and to buckets of similar size. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from attn_dispatch.spec.groups import group_of

BUCKETS_PER_OCTAVE = 4  #: sizes in one bucket differ by less than 2 ** (1 / 4), 19 %
SIZE_FIELDS = ("batch", "q_len", "k_len", "heads", "kv_heads")
OTHER_FIELDS = ("return_lse", "deterministic", "matmul_precision", "strides")  #: not sizes, and not in the group
PRECISION_LEVELS = {"highest": 0, "high": 1, "medium": 2}
AXIS_LETTERS = "bnhd"

# Octaves of distance for a difference in fields that are not sizes: how much they may change the times.
LSE_DISTANCE = SCALE_DISTANCE = 0.25
DETERMINISTIC_DISTANCE = 1.0
PRECISION_DISTANCE = 2.0  #: for each level of `PRECISION_LEVELS`
STRIDES_DISTANCE = 0.5  #: where q, k and v all differ
KV_GROUPS_DISTANCE = 0.5  #: for each doubling of heads / kv_heads
#: For each half octave of what a mask made of data leaves, and each octave by which its longest row is longer.
OF_DATA_DISTANCES = {"density": 1.0, "imbalance": 0.5}


def features(problem: Mapping[str, Any]) -> tuple[float, ...]:
    """The coordinates of a problem, given as `Problem.to_dict` writes it; equally many for all problems of a group.

    log2 of q_len, k_len and batch * heads; log2 of each of the pattern's sizes, weighted so that all sizes together
    count as one; then the fields that are not sizes, scaled by the `*_DISTANCE` constants.

    Raises:
        KeyError, TypeError, ValueError: `problem` is invalid.
    """
    heads = problem["heads"]
    return (
        math.log2(problem["q_len"]),
        math.log2(problem["k_len"]),
        math.log2(problem["batch"] * heads),
        *_pattern_octaves(problem),
        *_data_distances(problem["pattern"]),
        KV_GROUPS_DISTANCE * math.log2(heads / problem["kv_heads"]),
        LSE_DISTANCE * bool(problem["return_lse"]),
        SCALE_DISTANCE * _has_custom_scale(problem),
        DETERMINISTIC_DISTANCE * bool(problem["deterministic"]),
        PRECISION_DISTANCE * PRECISION_LEVELS[problem["matmul_precision"]],
        *_strides_distances(tuple(problem["strides"])),
    )


def bucket(problem: Mapping[str, Any]) -> tuple[Any, ...]:
    """A hashable value shared by problems that differ by less than 19 % in every size, and in nothing else.

    Raises:
        KeyError, TypeError, ValueError: `problem` is invalid.
    """
    others = [tuple(value) if isinstance(value, list) else value for value in map(problem.__getitem__, OTHER_FIELDS)]
    counts = [_bucket_index(problem[name]) for name in SIZE_FIELDS]
    pattern = _natural_pattern(problem["pattern"])
    sizes = [None if size is None else _bucket_index(size) for size in _pattern_sizes(pattern)]
    axes = tuple(size > 1 for size in problem.get("bias", ())), problem.get("alibi_axes", 0)
    others += [problem.get("flash_kernel"), _data_distances(pattern)]
    return (group_of(problem), *others, _has_custom_scale(problem), *axes, *counts, *sizes)


def _bucket_index(size: int) -> int:
    """The bucket of one size; a window of 0 has a bucket of its own."""
    return math.floor(BUCKETS_PER_OCTAVE * math.log2(size)) if size > 0 else -1


def _natural_pattern(pattern: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pattern in natural order: the inner pattern of `Reordered`, else the pattern itself."""
    inner: Mapping[str, Any] = dict(pattern).get("pattern", pattern)
    return inner


def _pattern_sizes(pattern: Mapping[str, Any]) -> Iterator[int | None]:
    for name in ("left", "right", "sinks"):
        if name in pattern:
            yield pattern[name]
    for name in ("segment_lengths", "grid", "window"):
        yield from pattern.get(name, ())


def _pattern_octaves(problem: Mapping[str, Any]) -> list[float]:
    """log2 of the pattern's sizes, weighted; an open side of a window counts as k_len."""
    pattern = _natural_pattern(problem["pattern"])
    itself = "left" in pattern  # a window's sides do not count the query's own position
    sizes = [problem["k_len"] if size is None else size + itself for size in _pattern_sizes(pattern)]
    weight = 1 / math.sqrt(max(len(sizes), 1))
    return [weight * math.log2(size) for size in sizes]


def _data_distances(pattern: Mapping[str, Any]) -> tuple[float, ...]:
    """Unknown ones are in the group."""
    return tuple(scale * pattern[name] for name, scale in OF_DATA_DISTANCES.items() if pattern.get(name) is not None)


def _has_custom_scale(problem: Mapping[str, Any]) -> bool:
    return bool(problem["scale"] != math.pow(problem["head_dim"], -0.5))


@lru_cache(maxsize=256)
def _strides_distances(names: tuple[str, ...]) -> tuple[float, ...]:
    """Shares of q, k and v with permuted axes, gaps, unaligned or expanded strides, scaled."""
    orders = [[AXIS_LETTERS.index(axis) for axis in name.split("+")[0]] for name in names]
    permuted = sum(order != sorted(order) for order in orders)
    marked = (sum(mark in name for name in names) for mark in ("+gaps", "+unaligned", "+expanded"))
    return tuple(STRIDES_DISTANCE * count / max(len(names), 1) for count in (permuted, *marked))
