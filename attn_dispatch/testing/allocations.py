"""Every byte that torch allocates, for calls of few operations.

The record itself takes memory and keeps freed blocks from being used again: over the thousands of operations of a
long call it can cost many times what it measures, so that trials use the operating system's figure instead.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from typing import TypeVar

from attn_dispatch.private import of_torch

T = TypeVar("T")


def allocated_peak(call: Callable[[], T]) -> tuple[T, int]:
    """Run `call` once; its result, and the peak of torch's allocations on this thread, in bytes."""
    # The legacy profiler, since the newer one prints to stderr as it starts (seen with torch 2.13).
    start, stop = (of_torch(f"torch.autograd:_{name}able_profiler_legacy") for name in ("en", "dis"))
    start(of_torch("torch.autograd.profiler_legacy:profile")(profile_memory=True).config())
    try:
        result = call()
    finally:
        records = list(chain.from_iterable(stop()))
    begun = next(record for record in records if record.name() == "__start_profile")
    changes = sorted((record for record in records if record.kind() == "memory_alloc"), key=begun.cpu_elapsed_us)
    # Allocations are positive, frees negative.
    return result, max(accumulate((change.cpu_memory_usage() for change in changes), initial=0))
