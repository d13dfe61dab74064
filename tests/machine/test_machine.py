"""machine.py against made-up machines: cpuinfo texts, cgroup trees, NVML and torch device properties."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_dispatch.machine import devices, hardware, memory
from tests.support.calls import threads
from tests.support.definition import texts
from tests.support.fakes import (
    GIB,
    GTX1080,
    H100,
    MI300X,
    MIB,
    SLICE,
    FakeNvmlError,
    fake_cuda,
    fake_nvml,
    fake_rocm,
    raising,
    write,
)

INTEL_AMX = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
"""
AMD_ZEN3 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC Processor
flags\t\t: fpu sse2 avx avx2 fma sme sev sha_ni
"""
ARM_V1 = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes asimdhp cpuid sve i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""

CPU = hardware.Cpu("Some CPU 1", ("avx2",), 8, 4, 4, MIB, None, 16 * GIB)
GPU = hardware.Gpu(0, "Some GPU", "GPU-a", (9, 0), 132, 50 * MIB, 79 * GIB, "550.54", False, 232448)


pytestmark = pytest.mark.usefixtures("fresh_machine")


# --- CPU --------------------------------------------------------------------------------------------------------------


def cpu_from(tmp_path: Path, cpuinfo: str) -> hardware.Cpu:
    write(tmp_path / "proc" / "cpuinfo", cpuinfo)
    return hardware._read_cpu(tmp_path / "cgroup", tmp_path / "proc", tmp_path / "cache")


@pytest.mark.parametrize(
    ("cpuinfo", "sets", "model", "dtype"),
    [
        (INTEL_AMX, "amx_bf16 avx2 avx512 avx512_bf16 avx512_fp16", "Intel(R) Xeon(R) Platinum 8480+", "bfloat16"),
        (AMD_ZEN3, "avx2", "AMD EPYC Processor family 25 model 1", "float32"),
        (ARM_V1, "bf16 fp16 neon sve", "ARM 0x41-0xd40", "bfloat16"),
    ],
    ids=["intel", "amd", "arm"],
)
def test_cpuinfo(tmp_path: Path, cpuinfo: str, sets: str, model: str, dtype: str) -> None:
    cpu = cpu_from(tmp_path, cpuinfo)
    assert (" ".join(cpu.instruction_sets), cpu.model) == (sets, model)
    assert hardware.advise(cpu).dtype == dtype


@pytest.mark.parametrize(
    ("capability", "arch", "sets"),
    [
        ("AVX512", "x86_64", ("avx2", "avx512")),
        ("DEFAULT", "arm64", ("neon",)),
        ("SVE256", "aarch64", ("neon", "sve")),
        ("NO AVX", "x86_64", ()),
    ],
)
def test_torch_gives_the_capability_without_cpuinfo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, arch: str, sets: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("platform.machine", lambda: arch)
    monkeypatch.setattr("platform.processor", lambda: "")
    cpu = hardware._read_cpu(tmp_path, tmp_path, tmp_path)
    assert (cpu.instruction_sets, cpu.model, cpu.l2_bytes, cpu.l3_bytes) == (sets, arch, None, None)


@pytest.mark.parametrize(
    ("command", "model"), [((sys.executable, "-c", "print('Apple M2')"), "Apple M2"), (("/no/sysctl",), "arm")]
)
def test_macos_names_the_processor(
    command: tuple[str, ...], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(hardware, "BRAND", command)
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert hardware._read_cpu(tmp_path, tmp_path, tmp_path).model == model


def test_cache_sizes(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (2, "Instruction", "1K"), (2, "Unified", "2048K"), (3, "Unified", "105M")]
    ):
        for name, value in (("level", level), ("type", kind), ("size", size)):
            write(tmp_path / "cache" / f"index{index}" / name, value)
    cpu = cpu_from(tmp_path, INTEL_AMX)
    assert (cpu.l2_bytes, cpu.l3_bytes) == (2 * MIB, 105 * MIB)


def test_cpu_memory_and_cores_respect_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    write(tmp_path / "proc" / "self" / "cgroup", "0::/a/b")
    write(tmp_path / "cgroup" / "a" / "b" / "cpu.max", "max 100000")
    write(tmp_path / "cgroup" / "a" / "cpu.max", "250000 100000")
    write(tmp_path / "cgroup" / "a" / "memory.max", 64 * MIB)
    cpu = cpu_from(tmp_path, INTEL_AMX)
    assert (cpu.cores, cpu.total_bytes) == (3, 64 * MIB)


# --- GPUs -------------------------------------------------------------------------------------------------------------


#: What NVML knows, and what is read: uuid, slice, shared memory, dtype. The second has neither opt-in nor MIG.
GPUS: dict[str, tuple[Any, set[str], tuple[object, ...], str]] = {
    "cuda-sm90-132sm-50mib-l2-80gib-nvidia-h100-80gb-hbm3": (
        H100,
        {"GPU-aaaa-1"},
        ("GPU-aaaa-1", False, 232448),
        "bfloat16",
    ),
    "cuda-sm61-20sm-2mib-l2-8gib-nvidia-geforce-gtx-1080": (
        GTX1080,
        {"GPU-bbbb-2"},
        ("GPU-bbbb-2", False, None),
        "float32",
    ),
    "cuda-sm80-14sm-5mib-l2-5gib-mig-nvidia-a100-sxm4-40gb-mig-1g.5gb": (
        SLICE,
        {"GPU-dddd-4", "MIG-cccc-3"},
        ("MIG-cccc-3", True, None),
        "bfloat16",
    ),
}


@pytest.mark.parametrize("silicon", GPUS)
def test_a_gpu(silicon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, boards, expected, dtype = GPUS[silicon]
    fake_cuda(monkeypatch, device)
    fake_nvml(monkeypatch, boards)
    (gpu,) = hardware.hardware().gpus
    assert (gpu.uuid, gpu.mig, gpu.shared_memory_bytes) == expected
    assert gpu.capability == (device.major, device.minor)
    assert (gpu.name, gpu.total_bytes) == (device.name, device.total_memory)
    assert gpu.sm_count == device.multi_processor_count
    assert hardware.silicon("cuda:0") == hardware.silicon("cuda") == silicon
    assert hardware.dtype_advice(torch.device("cuda", 0)).dtype == dtype
    assert gpu.driver == hardware.provenance("cuda")["driver"] == "550.54.15"


def test_unequal_gpus_in_another_order_than_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, GTX1080, H100)
    fake_nvml(monkeypatch, {"GPU-aaaa-1", "GPU-bbbb-2"})
    assert [gpu.uuid for gpu in hardware.hardware().gpus] == ["GPU-bbbb-2", "GPU-aaaa-1"]
    assert hardware.silicon("cuda") == hardware.silicon("cuda:1") != hardware.silicon("cuda:0")


@pytest.mark.parametrize("broken", ["missing", "init", "driver"])
def test_without_nvml_torch_alone_describes(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    fail = raising(FakeNvmlError("Unknown Error"))
    fake_cuda(monkeypatch, H100)
    nvml = fake_nvml(monkeypatch, set())
    if broken == "missing":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.setattr(nvml, {"init": "nvmlInit", "driver": "nvmlSystemGetDriverVersion"}[broken], fail)
    (gpu,) = hardware.hardware().gpus
    assert (gpu.driver, gpu.uuid, gpu.mig, gpu.total_bytes) == (None, "aaaa-1", False, 85_045_018_624)
    assert "driver unknown" in str(gpu)
    assert hardware.provenance("cuda:0")["driver"] == "unknown"


def test_a_gpu_of_rocm_has_a_silicon_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers of capability are AMD's, and NVML is another maker's."""
    fake_rocm(monkeypatch, MI300X)
    fake_nvml(monkeypatch, {"GPU-dddd-4"})
    found = hardware.hardware()
    (gpu,) = found.gpus
    assert hardware.silicon("cuda") == "rocm-gfx942-304cu-4mib-l2-192gib-amd-instinct-mi300x"
    assert (gpu.uuid, gpu.driver, gpu.gfx, found.toolkit) == ("dddd-4", None, "gfx942", "ROCm 6.2")
    assert "gfx942, 304cu" in str(found)
    assert hardware.dtype_advice("cuda").dtype == "float16"
    assert hardware.provenance("cuda")["cuda"] == "ROCm 6.2"
    assert hardware.silicon_of(replace(gpu, gfx="", capability=(9, 4))).startswith("cuda-sm94")


def test_nothing_is_asked_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, H100)
    monkeypatch.setattr("torch.cuda.device_count", lambda: pytest.fail("CUDA was asked"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert hardware.hardware().gpus == ()


def test_cpu_questions_do_not_touch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("CUDA was asked"))
    for ask in (hardware.silicon, hardware.provenance, hardware.dtype_advice, memory.available_bytes):
        assert ask("cpu")


def test_nvml_functions_exist_in_the_real_package() -> None:
    pynvml = pytest.importorskip("pynvml")
    sources = "".join(Path(str(module.__file__)).read_text() for module in (devices, hardware))
    names = set(re.findall(r"\bnvml[A-Z]\w+", sources))
    assert len(names) >= 4
    assert {name for name in names if not hasattr(pynvml, name)} == set()
    assert issubclass(pynvml.NVMLError, Exception)


# --- advice, slugs, output --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        *[((5, 2), "float32"), ((6, 1), "float32"), ((5, 3), "float16"), ((6, 0), "float16"), ((6, 2), "float16")],
        *[((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")],
    ],
)
def test_gpu_advice(capability: tuple[int, int], dtype: str) -> None:
    advice = hardware.advise(replace(GPU, capability=capability))
    assert advice.dtype == dtype
    assert f"sm_{capability[0]}{capability[1]}" in advice.reason


@given(model=texts(80), total=st.integers(1, 1 << 42), mig=st.booleans())
def test_silicon_is_a_short_slug(model: str, total: int, mig: bool) -> None:
    sets = ("amx_bf16", "amx_fp16", "avx2", "avx512", "avx512_bf16", "avx512_fp16")
    cpu = hardware.silicon_of(replace(CPU, model=model, instruction_sets=sets, cores=128, threads=128))
    for slug in (cpu, hardware.silicon_of(replace(GPU, name=model, total_bytes=total, mig=mig))):
        assert re.fullmatch(r"[a-z0-9._-]{1,110}", slug)


def test_threads_change_the_cpu_fingerprint() -> None:
    before = torch.get_num_threads()
    first = hardware.silicon("cpu")
    with threads(before + 1):
        assert hardware.silicon("cpu") == first.replace(f"-{before}t", f"-{before + 1}t") != first
        assert hardware.hardware().cpu.threads == before + 1


def test_real_machine() -> None:
    found = hardware.hardware()
    assert found.cpu.cores >= 1
    assert found.cpu.model
    assert hardware.silicon("cpu") == hardware.silicon_of(found.cpu)
    assert hardware.provenance("cpu")["name"] == found.cpu.model
    assert set(hardware.provenance("cpu")) == {"name", "driver", "torch", "cuda", "python", "platform"}
