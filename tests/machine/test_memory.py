"""memory.py against made-up cgroup trees, limits, CUDA devices and NVML answers."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attn_dispatch.machine import memory
from attn_dispatch.tuning.guard import capped
from tests.support.fakes import GIB, H100, MIB, cuda_memory, fake_cuda, pluggable_allocator, raising, write

SMAPS = Path("/proc/self/smaps")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


pytestmark = pytest.mark.usefixtures("fresh_machine")


# --- host memory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 100 GiB free and no address space limit."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100 * GIB, total=128 * GIB))
    monkeypatch.setattr(memory, "address_space_left", lambda: None)


def level(name: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    """The files of a cgroup of version 2."""
    prefix = f"{name}/" if name else ""
    values = {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {inactive}"}
    return {prefix + each: value for each, value in values.items()}


V1 = {
    "memory/memory.limit_in_bytes": 16 * GIB,
    "memory/memory.usage_in_bytes": 12 * GIB,
    "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {3 * GIB}",
}
INNER = {**level("slice/job", 8 * GIB, GIB), **level("slice", 50 * GIB, GIB)}
TREES: dict[str, tuple[str, dict[str, object], int]] = {
    "the tightest level wins": (
        "0::/slice/job",
        {**level("slice/job", "max", 9 * GIB), **level("slice", 10 * GIB, 9 * GIB, 2 * GIB)},
        3 * GIB,
    ),
    "inner limit": ("0::/slice/job", INNER, 7 * GIB),
    "memory.high": ("0::/slice/job", {**INNER, "slice/job/memory.high": 4 * GIB}, 3 * GIB),
    "the root": ("0::/", level("", 6 * GIB, 2 * GIB), 4 * GIB),
    "above the namespace": ("0::/../other", {**level("", 6 * GIB, 2 * GIB), "other/memory.max": 1}, 4 * GIB),
    "beside version 1": ("4:memory:/\n0::/job", level("unified/job", 5 * GIB, GIB), 4 * GIB),
    "overfull": ("0::/", level("", GIB, 2 * GIB), 0),
    "version 1, the container at the root": ("4:memory:/docker/0123\n0::/", V1, 7 * GIB),
    "version 1, unlimited": ("4:memory:/", {"memory/memory.limit_in_bytes": 9223372036854771712}, 100 * GIB),
    "no cgroups": ("", {}, 100 * GIB),
}


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("tree", TREES)
def test_room_under_cgroups(tree: str, tmp_path: Path) -> None:
    of_process, files, room = TREES[tree]
    for name, text in {"self/cgroup": of_process, **files}.items():
        write(tmp_path / name, text)
    assert memory._host_available(tmp_path, tmp_path) == room


def test_address_space_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vms = memory.host_psutil().Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (vms + GIB, resource.RLIM_INFINITY))
    assert 0 < memory._host_available(tmp_path, tmp_path) < GIB + 256 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert memory.address_space_left() is None


def meminfo(total: object, available: object) -> str:
    return f"MemTotal: {total} kB\nMemFree:        7 kB\nMemAvailable:    {available} kB\nHugePages_Total: 0"


@linux
def test_host_memory_is_that_of_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the same copy: free memory changes between two readings."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    write(tmp_path / "meminfo", text.strip())
    psutil = memory.host_psutil()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    expected = psutil.virtual_memory()
    monkeypatch.setattr(memory, "host_psutil", lambda: pytest.fail("psutil was called"))
    assert memory.host_memory(tmp_path) == (expected.total, expected.available)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    "text",
    ["", "MemTotal: 5 kB", meminfo(5, 0), meminfo(5, 6), "MemTotal: 0 kB\nMemAvailable: 0 kB"],
    ids=["empty", "old", "none", "more-than-all", "hidden"],
)
def test_psutil_is_used_if_the_file_lacks_the_numbers(tmp_path: Path, text: str) -> None:
    write(tmp_path / "meminfo", text)
    assert memory.host_memory(tmp_path) == (128 * GIB, 100 * GIB)


# --- CUDA memory ------------------------------------------------------------------------------------------------------


def test_cuda_available_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, H100)
    cuda_memory(monkeypatch, free=10 * GIB, reserved=5 * GIB, allocated=2 * GIB)
    assert memory.available_bytes("cuda:0") == 13 * GIB
    cuda_memory(monkeypatch, free=9 * GIB)
    assert memory.available_bytes("cuda:0") == 9 * GIB
    cuda_memory(monkeypatch, free=70 * GIB, reserved=2 * GIB, allocated=2 * GIB, fraction=0.5)
    assert memory.available_bytes("cuda:0") == 85_045_018_624 // 2 - 2 * GIB


def test_a_pluggable_allocator_is_neither_asked_nor_capped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda(monkeypatch, H100)
    pluggable_allocator(monkeypatch, free=10 * GIB)
    device = torch.device("cuda", 0)
    assert memory.available_bytes(device) == 10 * GIB
    assert memory.peak_bytes(lambda: "result", device) == ("result", None)
    with capped(device):
        pass
    assert [each.getMessage() for each in caplog.records if "neither capped nor measured" in each.getMessage()]


def test_an_error_of_the_device_is_no_pluggable_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    fake_cuda(monkeypatch, H100)
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", raising(error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        memory.available_bytes("cuda:0")


# --- this machine -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SMAPS.exists() or memory.MADV_HUGEPAGE is None, reason="the system tells nothing of its pages")
def test_large_pages_are_asked_for() -> None:
    x = torch.empty(16 * memory.LARGE_PAGE // 4)
    assert memory.in_large_pages(x) is x
    middle, flags, inside = x.data_ptr() + x.nbytes // 2, "", False
    for line in SMAPS.read_text("ascii", "replace").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags
    x.fill_(1)
    assert float(x.sum()) == x.numel()
