"""Made-up machines: their name, files, torch device properties, NVML and meshes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attn_dispatch.machine import hardware
from attn_dispatch.machine.devices import _missing_code, _nvml, cuda_devices, cuda_identity

MIB, GIB = 1 << 20, 1 << 30
CUDA = (cuda_devices, cuda_identity, _missing_code)
SILICON = "cpu-made-up-8c-8t"


def forget() -> None:
    """Drop everything that the two modules read once."""
    for cached in (hardware._gpus, hardware._accelerator, hardware._read_cpu, hardware._chip, _nvml, *CUDA):
        cached.cache_clear()


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that takes anything, and raises this."""

    def fail(*given: object, **named: object) -> Any:
        raise error

    return fail


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def props(name: str, capability: tuple[int, int], sms: int, l2: int, total: int, **more: object) -> SimpleNamespace:
    major, minor = capability
    known = {"multi_processor_count": sms, "L2_cache_size": l2, "total_memory": total, "uuid": "none", **more}
    return SimpleNamespace(name=name, major=major, minor=minor, **known)


H100 = props(
    *("NVIDIA H100 80GB HBM3", (9, 0), 132, 50 * MIB, 85_045_018_624),
    uuid="aaaa-1",
    shared_memory_per_block_optin=232448,
)
GTX1080 = props("NVIDIA GeForce GTX 1080", (6, 1), 20, 2 * MIB, 8_510_701_568, uuid="bbbb-2")
SLICE = props("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 14, 5 * MIB, 5_100_273_664, uuid="cccc-3")


MI300X = props(
    *("AMD Instinct MI300X", (9, 4), 304, 4 * MIB, 206_141_652_992), uuid="dddd-4", gcnArchName="gfx942:sramecc+:xnack-"
)


class FakeNvmlError(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, boards: set[str]) -> ModuleType:
    """A pynvml whose handles are UUIDs, these."""

    def look_up(uuid: str) -> str:
        if uuid not in boards:
            raise FakeNvmlError("Not Found")
        return uuid

    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError = FakeNvmlError
    nvml.nvmlInit = lambda: None
    nvml.nvmlSystemGetDriverVersion = lambda: "550.54.15"
    nvml.nvmlDeviceGetHandleByUUID = look_up
    nvml.nvmlDeviceGetUUID = lambda handle: handle
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml  # type: ignore[no-any-return]


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *devices: SimpleNamespace) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(devices))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: devices[index])
    monkeypatch.setattr("torch.cuda.get_arch_list", list)
    monkeypatch.setattr("torch.cuda.current_device", lambda: len(devices) - 1)
    cuda_memory(monkeypatch, free=0)


def fake_rocm(monkeypatch: pytest.MonkeyPatch, *devices: SimpleNamespace) -> None:
    fake_cuda(monkeypatch, *devices)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", "6.2")


def cuda_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int = 0, allocated: int = 0, fraction: float = 1.0
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (free, 0))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda index: reserved)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda index: allocated)
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda index: fraction)


def pluggable_allocator(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """As of CUDAPluggableAllocator: no fraction, no statistics."""
    text = "CUDAPluggableAllocator does not yet support this. If you need it, please file an issue"
    unsupported = raising(RuntimeError(text))
    cuda_memory(monkeypatch, free=free)
    names = ("get_per_process_memory_fraction", "set_per_process_memory_fraction", "reset_peak_memory_stats")
    for name in (*names, "memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", unsupported)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
