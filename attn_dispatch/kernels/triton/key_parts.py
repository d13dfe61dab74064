"""How the keys of few queries are read in parts, as many as keep the device busy; `few_queries` has the kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from attn_dispatch.kernels.triton.blocks import SMALLEST_SIDE, padded
from attn_dispatch.spec.pattern import Dense, Window
from attn_dispatch.spec.problem import Problem

FEW_LANES = 16  #: queries by heads that share keys, up to which the keys are read in parts
PART_BYTES = 2**14  #: of a block of keys, one of four that its loads keep in shared memory
LEAST_PART = 4  #: blocks of keys that a part has at least
MOST_PARTS = {True: 32, False: 64}  #: whether head_dim is above 128: sums of all parts are joined in registers
PARTS_PER_PROCESSOR = 2  #: programs for each multiprocessor
INTERPRETED_PARTS = 5


class KeyParts(NamedTuple):
    """Keys `first` to `end` that a problem's few queries see, in `parts` parts of `share`, by blocks of `columns`."""

    first: int
    end: int
    parts: int
    share: int
    columns: int
    low: int | None  #: bounds of key - query
    high: int | None


@lru_cache(maxsize=4096)
def key_parts(problem: Problem) -> KeyParts | None:
    """How the keys of few queries are read in parts; None where they are not."""
    lanes = problem.heads // problem.kv_heads * problem.q_len
    if lanes > FEW_LANES or problem.k_len <= problem.q_len or not isinstance(problem.pattern, Dense | Window):
        return None
    (band,) = problem.pattern.bands(problem.q_len, problem.k_len, ())
    first = 0 if band.low is None else min(max(0, band.low), problem.k_len)
    last = problem.k_len - 1 if band.high is None else min(problem.k_len - 1, problem.q_len - 1 + band.high)
    keys = last + 1 - first
    if keys <= 0:
        return None
    columns = min(128, max(SMALLEST_SIDE, PART_BYTES // (padded(problem.head_dim) * problem.dtype.itemsize)))
    if problem.device.type == "cpu":
        columns, wanted = SMALLEST_SIDE, INTERPRETED_PARTS
    else:
        processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
        wanted = -(-PARTS_PER_PROCESSOR * processors // (problem.batch * problem.kv_heads))
    blocks = -(-keys // columns)
    count = max(1, min(wanted, blocks // LEAST_PART or 1, MOST_PARTS[padded(problem.head_dim) > 128]))
    share = -(-blocks // count) * columns
    return KeyParts(first, last + 1, -(-keys // share), share, columns, band.low, band.high)
