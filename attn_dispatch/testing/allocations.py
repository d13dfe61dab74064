"""Every byte that torch allocates, for calls of few operations.

The record itself takes memory and keeps freed blocks from being used again: over the thousands of operations of a
long call it can cost many times what it measures, so that trials use the operating system's figure instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any, TypeVar

T = TypeVar("T")


def allocated_peak(call: Callable[[], T]) -> tuple[T, int]:
    """Run `call` once; its result, and the peak of torch's allocations on this thread, in bytes."""
    stop_record = _start_memory_record()
    try:
        result = call()
    finally:
        records = stop_record()
    return result, _highest_sum(list(chain.from_iterable(records)))


def _start_memory_record() -> Callable[[], list[list[Any]]]:
    # The legacy profiler, since the newer one prints to stderr as it starts (seen with torch 2.13).
    autograd: Any = importlib.import_module("torch.autograd")
    legacy: Any = importlib.import_module("torch.autograd.profiler_legacy")
    stop: Callable[[], list[list[Any]]] = autograd._disable_profiler_legacy
    autograd._enable_profiler_legacy(legacy.profile(profile_memory=True).config())
    return stop


def _highest_sum(records: list[Any]) -> int:
    """Peak of the running sum of the allocations (positive) and frees (negative) in order of time."""
    start = next(record for record in records if record.name() == "__start_profile")
    changes = sorted((record for record in records if record.kind() == "memory_alloc"), key=start.cpu_elapsed_us)
    sizes: list[int] = [change.cpu_memory_usage() for change in changes]
    return max(accumulate(sizes, initial=0))
