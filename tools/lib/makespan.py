"""A model of when the programs of a causal kernel end: in order, each on the first multiprocessor that is free."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

import torch

from attn_dispatch.kernels.triton.launch_order import L2Cache, heads_in_turn
from attn_dispatch.kernels.triton.work_list import WorkList, work_list_of
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of

HEADS_AND_TOKENS = ((8, 4096), (16, 4096), (8, 16384))
MULTIPROCESSORS = (108, 132)  #: of an A100 and an H100
L2_BYTES = 50 * 2**20
BLOCK = 64  #: rows and columns
BESIDE = 0.5  #: time of a program besides its blocks, in blocks


def makespan(durations: Iterable[float], workers: int) -> float:
    """When the last of the tasks ends, each of which begins in order on the first free worker."""
    ends = [0.0] * workers
    for duration in durations:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def of_least(heads: int, tokens: int, multiprocessors: int, longest_first: bool = True) -> float:
    """The time of the programs, one at a time on each multiprocessor, over that of their work divided evenly.

    Args:
        longest_first: in natural order, as `triton` launches them, or by position.
    """
    problem = problem_of((1, tokens, heads, 64), Dense(is_causal=True), torch.bfloat16, torch.device("cpu"))
    together, sorts = heads_in_turn(problem, "queries", L2Cache(L2_BYTES, multiprocessors))
    work = work_list_of(problem, "queries", BLOCK)
    found = _durations(work.longest_first(BLOCK) if sorts and longest_first else work, heads, together)
    return makespan(found, multiprocessors) * multiprocessors / sum(found)


def _durations(work: WorkList, heads: int, together: int) -> list[float]:
    blocks = work._blocks(BLOCK).tolist()
    turns = [min(together, heads - first) for first in range(0, heads, together)]
    return [blocks[at] + BESIDE for beside in turns for at in range(work.most_tiles) for _ in range(beside)]


def schedules() -> list[dict[str, Any]]:
    """`of_least` of all sizes, longest first and by position."""
    return [
        {
            "heads": heads,
            "tokens": tokens,
            "multiprocessors": count,
            "of_least": of_least(heads, tokens, count),
            "by_position": of_least(heads, tokens, count, longest_first=False),
        }
        for heads, tokens in HEADS_AND_TOKENS
        for count in MULTIPROCESSORS
    ]
