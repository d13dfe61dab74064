"""Step `device`: the hardware and versions, clocks without and with work, and the rates that nothing can exceed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_dispatch.machine.environment import installed
from attn_dispatch.machine.hardware import hardware
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup
from tools.lib.tables import Table

WORK_S = 0.1  #: seconds of work before clocks are read
CLOCKS = 4  #: readings, WORK_S apart
COPIED_BYTES, SIDE = 2**31, 8192  #: of the copy, and of square matrices
DRY_BYTES, DRY_SIDE = 2**16, 64
PACKAGES = ("torch", "triton", "numpy", "msgspec", "nvidia-ml-py", "nvidia-cudnn-cu13", "pytest")


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    dtypes = ("float32",) if setup.dry_run else ("bfloat16", "float16", "tf32", "float32")
    items: list[Item] = [{"item": name} for name in ("machine", "clocks idle", "clocks busy", "copy")]
    return Phase([[*items, *({"item": "matmul", "dtype": each} for each in dtypes)]]) if number == 0 else None


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    match item["item"]:
        case "machine":
            return _machine(machine)
        case "clocks idle":
            time.sleep(WORK_S)
            return machine.clocks()
        case "clocks busy":
            return {"readings": _busy_clocks(machine, DRY_SIDE if setup.dry_run else SIDE)}
        case "copy":
            return _copy(machine, DRY_BYTES if setup.dry_run else COPIED_BYTES)
        case _:
            return _matmul(machine, item["dtype"], DRY_SIDE if setup.dry_run else SIDE)


def _machine(machine: Machine) -> Row:
    cudnn: Any = torch.backends.cudnn
    return {
        "hardware": hardware().to_dict(),
        "versions": {package: installed(package) for package in PACKAGES},
        "cudnn": cudnn.version() if machine.device.type == "cuda" else None,
    }


def _product(machine: Machine, dtype: torch.dtype, side: int) -> Callable[[], Any]:
    a, b = (torch.randn(side, side, device=machine.device, dtype=dtype) for _ in range(2))
    return lambda: a @ b


def _busy_clocks(machine: Machine, side: int) -> list[dict[str, Any]]:
    """Readings while products are computed, the first after WORK_S."""
    product = _product(machine, machine.half, side)
    found: list[dict[str, Any]] = []
    start = time.perf_counter()
    while len(found) < CLOCKS:
        for _ in range(8):  # a few ms of work is queued when clocks are read, and no more
            product()
        if time.perf_counter() - start >= WORK_S * (len(found) + 1):
            found.append({"after_s": time.perf_counter() - start, **machine.clocks()})
        else:
            machine.synchronize()
    machine.synchronize()
    return found


def _copy(machine: Machine, size: int) -> Row:
    source = torch.empty(size, dtype=torch.uint8, device=machine.device).fill_(1)
    target = torch.empty_like(source)
    median_ms = machine.median_ms(lambda: target.copy_(source), 100.0)
    return {"bytes": 2 * size, "median_ms": median_ms, "gb_s": 2 * size / median_ms / 1e6}


def _matmul(machine: Machine, name: str, side: int) -> Row:
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    median_ms = machine.median_ms(_product(machine, dtype, side), 200.0)
    return {"side": side, "median_ms": median_ms, "tflops": 2 * side**3 / median_ms / 1e9}


def label(item: Item) -> str:
    return f"{item['item']} {item.get('dtype', '')}".strip()


def summary(rows: list[Row]) -> dict[str, Any]:
    """The limits: GB/s of copying, and TFLOP/s by dtype."""
    found = {}
    for row in rows:
        if "gb_s" in row:
            found["copy GB/s"] = round(row["gb_s"])
        if "tflops" in row:
            found[f"{row['dtype']} TFLOP/s"] = round(row["tflops"], 1)
    return found


def tables(found: Any) -> Iterator[Table]:
    about, limits = found["provenance"], found["summary"]
    yield Table(
        about=f"Driver {about['driver']}. Limits in the same run: {limits['copy GB/s']:,} GB/s of copies, bytes "
        f"read and written; products of matrices at {limits['bfloat16 TFLOP/s']:.0f} TFLOP/s in bfloat16, "
        f"{limits['tf32 TFLOP/s']:.0f} in tf32, {limits['float32 TFLOP/s']:.0f} in float32."
    )
