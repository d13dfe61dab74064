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
    # The legacy profiler, since the newer one prints to stderr as it starts (seen with torch 2.13).
    autograd: Any = importlib.import_module("torch.autograd")
    legacy: Any = importlib.import_module("torch.autograd.profiler_legacy")
    autograd._enable_profiler_legacy(legacy.profile(profile_memory=True).config())
    try:
        result = call()
    finally:
        records = list(chain.from_iterable(autograd._disable_profiler_legacy()))
    start = next(record for record in records if record.name() == "__start_profile")
    changes = sorted((record for record in records if record.kind() == "memory_alloc"), key=start.cpu_elapsed_us)
    # Allocations are positive, frees negative.
    return result, max(accumulate((change.cpu_memory_usage() for change in changes), initial=0))
