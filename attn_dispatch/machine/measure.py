"""How candidates are compared: timed in turns, with intervals, and by their peak memory.

Nothing here knows of attention. What is timed and compared lies in :mod:`attn_dispatch.tuning.turns` and
:mod:`attn_dispatch.tuning.intervals`; the names below that callers need are found here.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attn_dispatch.tuning.intervals import (
    LAST_LOOK,
    MARGIN,
    Interval,
    Timing,
    faster,
    faster_at_last,
    median_interval,
    paired_ratios,
    ratio_interval,
    sure_interval,
    surely_faster,
)
from attn_dispatch.tuning.turns import Turns, time_in_turns

if TYPE_CHECKING:
    import torch

__all__ = [
    "LAST_LOOK",
    "MARGIN",
    "Interval",
    "Timing",
    "Turns",
    "faster",
    "faster_at_last",
    "median_interval",
    "paired_ratios",
    "peak_bytes",
    "ratio_interval",
    "release",
    "sure_interval",
    "surely_faster",
    "time_in_turns",
]

T = TypeVar("T")

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def peak_bytes(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Run ``call`` once; its result, and the peak of memory above what was held before, in bytes.

    CUDA: the caching allocator's own count, whose peak statistics of the device are reset. CPU: how far the process's
    resident memory rose, from Linux's high-water mark, which is reset: scratch memory of libraries and what other
    threads take meanwhile count too, and freed blocks that the C library keeps; pages that were never touched do
    not, and below a few hundred KiB it is noise.
    None for other devices, or where the mark cannot be reset. Errors of ``call`` propagate.
    """
    if device.type == "cuda":
        return _cuda_peak(call, device)
    before = _reset_resident_peak() if device.type == "cpu" else None
    result = call()
    return result, None if before is None else max(0, _status_bytes("VmHWM") - before)


def _cuda_peak(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    cuda: Any = importlib.import_module("torch.cuda")
    cuda.init()
    cuda.reset_peak_memory_stats(device)
    before: int = cuda.memory_allocated(device)
    result = call()
    return result, cuda.max_memory_allocated(device) - before


def _reset_resident_peak() -> int | None:
    """Resident bytes from which the peak counts anew, or None where that is not to be had."""
    with suppress(AttributeError):  # only glibc has it
        # Free memory that the C library keeps is resident: a call that used it again would seem to take nothing.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR_REFS.write_text("5")
        return _status_bytes("VmRSS")
    except (OSError, ValueError):
        return None


def _status_bytes(name: str) -> int:
    lines = STATUS.read_text().splitlines()
    line = next((line for line in lines if line.startswith(f"{name}:")), "")
    if not line.endswith(" kB"):
        raise ValueError(f"{STATUS} has no {name}")
    return int(line.split()[1]) * 1024


def release(device: torch.device) -> None:
    """Collect garbage and, on CUDA, hand the caching allocator's unused blocks back to the driver."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
