"""Peak memory against known allocations."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attn_dispatch.machine import memory
from attn_dispatch.testing.allocations import allocated_peak
from tests.support import processes

CPU = torch.device("cpu")
MIB = 2**20


def empty(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def serial() -> None:
    for _ in range(3):
        empty(64)


def nested() -> None:
    outer = empty(64)
    inner = empty(32)
    del outer, inner
    empty(80)


@pytest.mark.parametrize(
    ("call", "expected_mib"),
    [(lambda: None, 0), (lambda: empty(64), 64), (serial, 64), (nested, 96), (lambda: (empty(3), empty(4)), 7)],
)
def test_allocated_peak_of_plain_tensors_is_right_to_the_byte(call: Callable[[], object], expected_mib: int) -> None:
    for _ in range(2):
        assert allocated_peak(call)[1] == expected_mib * MIB


# In a process of its own: what an older heap keeps of freed blocks is resident too. In a thread, as in trials,
# glibc takes blocks up to the size that was freed before from its heap, and retains what is freed at its end.
RESIDENT = """
import ctypes
import threading
import torch
from attn_dispatch.machine import memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def touched(mib):
    return torch.ones(mib << 20, dtype=torch.uint8)

def show(call):
    print(memory.peak_bytes(call, torch.device("cpu"))[1] / 2**20)

def nested():
    outer = touched(128)
    inner = touched(64)
    del outer, inner
    touched(160)

def in_a_thread():
    touched(30)
    block = libc.malloc(24 << 20)
    ctypes.memset(block, 1, 24 << 20)
    libc.free(ctypes.c_void_p(block))
    show(lambda: touched(16))

thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
touched(512)
before = touched(64)
for call in (lambda: None, lambda: touched(96), nested, lambda: touched(32)):
    show(call)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no high-water mark to reset")
@pytest.mark.full
def test_cpu_peak_is_the_memory_that_becomes_resident() -> None:
    found = [float(line) for line in processes.run(RESIDENT).stdout.split()]
    assert found[0] == pytest.approx(16, abs=1)
    assert found[1:] == pytest.approx([0, 96, 192, 32], abs=4)


def test_peak_is_none_without_a_mark_to_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "not" / "there")
    assert memory.peak_bytes(lambda: 7, CPU) == (7, None)
    monkeypatch.undo()
    (tmp_path / "status").write_text("Name: python\n")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    assert memory.peak_bytes(lambda: 7, CPU) == (7, None)


def test_peak_is_none_for_other_devices() -> None:
    assert memory.peak_bytes(lambda: 7, torch.device("meta")) == (7, None)


def test_peak_raises_errors_of_the_call() -> None:
    with pytest.raises(ZeroDivisionError):
        memory.peak_bytes(lambda: 1 / 0, CPU)


def test_cuda_peak_excludes_earlier_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a device without an index: torch.cuda.get_per_process_memory_fraction takes an index or None."""
    asked: list[object] = []
    reset: list[torch.device] = []

    def fraction(index: int | None) -> float:
        asked.append(index)
        return 1.0

    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", fraction)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset.append)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 100)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 164)
    devices = [torch.device("cuda"), torch.device("cuda", 1)]
    assert [memory.peak_bytes(lambda: "result", device) for device in devices] == [("result", 64)] * 2
    assert asked == [None, 1]
    assert reset == devices
