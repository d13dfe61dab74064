"""The early reports' projections over many devices (001), by the arithmetic of `attn-dispatch plan`.

python -m tools.bench.projections

Counted, for devices that nothing was ever run on: memory and bytes shipped. Time is left out, since no rate of theirs
was measured. The devices are made up here by their capability and sizes, which is all that a backend asks them for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from attn_dispatch.ring.engine.parts import solver
from attn_dispatch.ring.plan.forecast import Forecast, forecasts_over
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.spec.pattern import Dilated, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from tools.lib.common import parser, write
from tools.lib.tables import table

TAKES = "1 min"
GB = 10**9
BATCH, HEADS, HEAD_DIM = 1, 8, 64
SEGMENTS, RATES = (2048, 4096, 8192), (1, 2, 4)
DTYPES = (torch.float16, torch.float32)
KEYS = 2048  #: keys that a query sees in a branch over the whole sequence


@dataclass(frozen=True, slots=True)
class Device:
    """Properties of a device that backends read, and its nominal memory.

    Args:
        index: of its own, since what is worked out is kept by problem, and a problem names its device.
    """

    name: str
    index: int
    memory_bytes: int
    capability: tuple[int, int]
    shared_memory_per_block_optin: int
    L2_cache_size: int
    multi_processor_count: int


GTX_1080 = Device("GTX 1080", 101, 8 * GB, (6, 1), 48 << 10, 2 << 20, 20)
A100 = Device("A100", 102, 80 * GB, (8, 0), 163 << 10, 40 << 20, 108)
DEVICES = {device.index: device for device in (GTX_1080, A100)}


@dataclass(frozen=True, slots=True)
class Reported:
    """A row of the reports: tokens, devices and memory per device."""

    device: Device
    ranks: int
    title: str
    tokens: int
    gb: float | None = None


REPORTED = (
    Reported(GTX_1080, 1, "425K", 425_984, 4.2),
    Reported(GTX_1080, 2, "850K", 2 * 425_984, 4.2),
    Reported(GTX_1080, 4, "1.7M", 4 * 425_984, 4.2),
    Reported(GTX_1080, 8, "3.4M", 8 * 425_984, 4.2),
    Reported(A100, 1, "8M", 8 << 20),
    Reported(A100, 8, "64M", 64 << 20),
    Reported(A100, 64, "512M", 512 << 20),
)

Patterns = Callable[[int], Dilated]  #: from the length of the whole sequence


def near(tokens: int) -> Dilated:
    """The reports' pattern."""
    return Dilated(SEGMENTS, RATES)


def far(tokens: int) -> Dilated:
    """The reports' pattern with one more branch, over the whole sequence."""
    return Dilated((*SEGMENTS, tokens), (*RATES, tokens // KEYS))


@contextmanager
def made_up() -> Iterator[None]:
    """Simulate both kinds of device, with no packages but torch."""
    with ExitStack() as stack:
        for name in ("capability", "properties"):
            stack.enter_context(mock.patch(f"torch.cuda.get_device_{name}", getattr(_CudaProperties, name)))
        stack.enter_context(mock.patch("attn_dispatch.kernels.branches.backend.installed", return_value=None))
        yield


class _CudaProperties:
    """Replacements for torch.cuda's queries."""

    @staticmethod
    def capability(device: Any) -> tuple[int, int]:
        return DEVICES[torch.device(device).index].capability

    @staticmethod
    def properties(device: Any) -> Any:
        found = DEVICES[torch.device(device).index]
        return SimpleNamespace(**{name: getattr(found, name) for name in found.__slots__})


def problem(device: Device, pattern: Pattern, tokens: int, dtype: torch.dtype, backward: bool) -> Problem:
    where = torch.device("cuda", device.index)
    return problem_of((BATCH, tokens, HEADS, HEAD_DIM), pattern, dtype, where, backward=backward)


def least(found: list[Forecast]) -> Forecast:
    """The exchange with the least memory; among equals, that which sends least."""
    able = [each for each in found if each.memory is not None]
    return min(able, key=lambda each: (each.memory.peak_bytes if each.memory else 0, each.shipped_bytes))


def forecast(row: Reported, patterns: Patterns, tokens: int, dtype: torch.dtype, backward: bool) -> Forecast:
    whole = problem(row.device, patterns(tokens), tokens, dtype, backward)
    return least(forecasts_over(whole, Layout(deal(tokens, row.ranks)), None))


def longest(row: Reported, patterns: Patterns, dtype: torch.dtype, backward: bool) -> int:
    """The most tokens that fit, in whole segments of every rank."""
    unit = max(SEGMENTS) * row.ranks

    def fits(units: int) -> bool:
        found = forecast(row, patterns, units * unit, dtype, backward).memory
        return found is not None and found.peak_bytes <= row.device.memory_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def projected(row: Reported, patterns: Patterns, dtype: torch.dtype) -> dict[str, Any]:
    """One row, forward and forward + backward."""
    found: dict[str, Any] = {
        "device": row.device.name, "ranks": row.ranks, "reported": row.title, "tokens": row.tokens,
        "reported_gb": row.gb, "dtype": str(dtype).removeprefix("torch."), "pattern": str(patterns(row.tokens)),
        "kernel": kernel(row, patterns, dtype),
    }  # fmt: skip
    for name, backward in (("forward", False), ("backward", True)):
        best = forecast(row, patterns, row.tokens, dtype, backward)
        assert best.memory is not None
        found[name] = {
            "exchange": best.exchange,
            "peak_bytes": best.memory.peak_bytes,
            "fits": best.memory.peak_bytes <= row.device.memory_bytes,
            "shipped_bytes": best.shipped_bytes,
            "setup_bytes": best.memory.setup_bytes,
            "longest_tokens": longest(row, patterns, dtype, backward),
        }
    return found


def kernel(row: Reported, patterns: Patterns, dtype: torch.dtype) -> str:
    """The backend for a device's own part."""
    tokens = row.tokens // row.ranks
    pattern = patterns(row.tokens).simplify(tokens, tokens, HEADS)
    return str(solver(problem(row.device, pattern, tokens, dtype, False)).name)


def projections() -> dict[str, Any]:
    with made_up():
        return {
            "batch": BATCH,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "devices": {device.name: device.memory_bytes for device in DEVICES.values()},
            "near": [projected(row, near, dtype) for row in REPORTED for dtype in DTYPES],
            "far": [projected(row, far, torch.float16) for row in REPORTED if row.ranks > 1],
        }


# --- the README's tables ----------------------------------------------------------------------------------------------


def markdown(found: Any) -> str:
    devices = ", ".join(f"{name} {memory / GB:.0f} GB" for name, memory in found["devices"].items())
    about = (
        "The early reports' projections over many devices, by `python -m tools.bench.projections`: **predicted** by "
        "the arithmetic of `attn-dispatch plan`, nothing was run on these devices. Time is not predicted, since no "
        "rate of theirs was measured. The reports state neither heads nor dtype (a later one has float16 for 425K); "
        f"here batch {found['batch']}, {found['heads']} heads of {found['head_dim']}. Memory is the most that a device "
        "takes at once, the upper bound of its kernel's own share included; GB are 10^9 bytes, and nothing is set "
        f"aside for CUDA itself ({devices}). The longest sequence is sought in whole segments for every device. The "
        "kernel is the one that runs there of those that PyTorch brings along."
    )
    text = f"{found['near'][0]['pattern']}: whole segments on every device, so that nothing is shipped."
    far_text = (
        f"The same in {found['far'][0]['dtype']} with one more branch over the whole sequence, of which a query sees "
        f"{KEYS:,} keys: {found['far'][-1]['pattern']} on {found['far'][-1]['ranks']}. Of several exchanges, the one "
        "that takes least memory."
    )
    return "\n\n".join((about, text, table(near_rows(found["near"])), far_text, table(far_rows(found["far"]))))


def near_rows(rows: Any) -> list[tuple[str, ...]]:
    head = (
        "devices", "reported: tokens, memory of each", "tokens", "dtype", "kernel", "forward", "forward + backward",
        "longest, forward", "longest, forward + backward",
    )  # fmt: skip
    found = [head, ("---",) * len(head)]
    for one in rows:
        memory = "not stated" if one["reported_gb"] is None else f"{one['reported_gb']} GB"
        passes = [one["forward"], one["backward"]]
        found.append((
            f"{one['ranks']} {one['device']}", f"{one['reported']}, {memory}", f"{one['tokens']:,}", one["dtype"],
            f"`{one['kernel']}`", *map(memory_of, passes), *(f"{each['longest_tokens']:,}" for each in passes),
        ))  # fmt: skip
    return found


def far_rows(rows: Any) -> list[tuple[str, ...]]:
    head = (
        "devices", "tokens", "kernel", "pass", "exchange", "memory of each", "each sends at most",
        "host memory at the first call", "longest",
    )  # fmt: skip
    found = [head, ("---",) * len(head)]
    for one in rows:
        for name, title in (("forward", "forward"), ("backward", "forward + backward")):
            each = one[name]
            found.append((
                f"{one['ranks']} {one['device']}", f"{one['tokens']:,}", f"`{one['kernel']}`", title,
                f"`{each['exchange']}`", memory_of(each), f"{each['shipped_bytes'] / 1e6:,.1f} MB",
                gb(each["setup_bytes"]), f"{each['longest_tokens']:,}",
            ))  # fmt: skip
    return found


def memory_of(one: Any) -> str:
    return f"{gb(one['peak_bytes'])}: {'fits' if one['fits'] else 'does not fit'}"


def gb(count: int) -> str:
    return f"{count / GB:,.1f} GB"


def main() -> None:
    arguments = parser(__doc__, "projections.json").parse_args()
    found = projections()
    print(markdown(found))
    write(arguments.output, found)


if __name__ == "__main__":
    main()
