"""Describes this machine: its processors, their fingerprints, and the dtype to prefer on each.

Facts that cannot change during the process are read once; torch's thread count is read on every call. A fact that no
source gives is ``None``, never guessed. Free memory is in memory.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_dispatch.machine import load
from attn_dispatch.machine.devices import ask_nvml, cuda_devices, cuda_identity, other_devices, resolve
from attn_dispatch.machine.memory import (
    CGROUP,
    PROC,
    cgroup_levels,
    host_memory,
    host_psutil,
    memory_limits,
    read_text,
    total_bytes,
)

if TYPE_CHECKING:
    import torch

_MARK = re.compile(r"\((r|tm)\)")
_NOT_SLUG = re.compile(r"[^a-z0-9.]+")
_MIB = 1 << 20
_GIB = 1 << 30
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
BRAND = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")

# One table per architecture, because one flag name means different things: x86 "sme" is memory encryption.
_X86_SETS = {each: each for each in ("avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")}
_X86_SETS |= {"avx512bw": "avx512"}
_ARM_SETS = {"asimd": "neon", "asimdhp": "fp16", "bf16": "bf16", "sve": "sve", "sve2": "sve2", "sme": "sme"}
_TORCH_SETS = {"AVX2": "avx2", "AVX512": "avx2 avx512", "SVE256": "neon sve", "VSX": "vsx", "Z VECTOR": "zvector"}
_IMPLIED = {"avx512": "avx2", "avx512_bf16": "avx512", "avx512_fp16": "avx512", "amx_fp16": "amx_bf16"}
_IMPLIED |= {"sve": "neon", "sve2": "sve"}


@dataclass(frozen=True)
class Cpu:
    """The host processor as this process may use it. Sizes are bytes; ``None`` means no source gave the value.

    ``cores`` honours affinity and the cgroup CPU quota (rounded up); ``total_bytes`` honours the cgroup memory limit;
    the caches are those of core 0; ``threads`` is ``torch.get_num_threads()``.
    """

    model: str
    instruction_sets: tuple[str, ...]
    cores: int
    physical_cores: int | None
    threads: int
    l2_bytes: int | None
    l3_bytes: int | None
    total_bytes: int

    def __str__(self) -> str:
        sets = " ".join(self.instruction_sets) or "no wide vectors"
        counts = f"{self.cores} cores, {self.threads} threads, {sets}"
        caches = f"L2 {_mib(self.l2_bytes)}, L3 {_mib(self.l3_bytes)}"
        return f"cpu: {self.model}, {counts}, {caches}, {self.total_bytes / _GIB:.1f} GiB"


@dataclass(frozen=True)
class Gpu:
    """One device of CUDA or ROCm, or one MIG slice of it, under torch's index. Sizes are bytes.

    ``gfx`` is AMD's name of the architecture, "" for NVIDIA: AMD's ``capability`` compares with no other number.
    ``sm_count`` and ``total_bytes`` are the slice's when ``mig``. ``driver`` is ``None`` where NVML is unavailable;
    ``uuid`` then is torch's, without the ``GPU-`` prefix. ``shared_memory_bytes`` is per block, after opt-in.
    """

    index: int
    name: str
    uuid: str | None
    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int | None
    total_bytes: int
    driver: str | None
    mig: bool
    shared_memory_bytes: int | None
    gfx: str = ""

    @property
    def chip(self) -> tuple[str, str]:
        """The architecture, and the number of processors with their name."""
        sm = f"sm{self.capability[0]}{self.capability[1]}"
        return (self.gfx, f"{self.sm_count}cu") if self.gfx else (sm, f"{self.sm_count}sm")

    def __str__(self) -> str:
        chip = f"{', '.join(self.chip)}, L2 {_mib(self.l2_bytes)}"
        driver = f"driver {self.driver}" if self.driver else "driver unknown (NVML gave none)"
        kind = " (MIG slice)" if self.mig else ""
        return f"cuda:{self.index}: {self.name}{kind}, {chip}, {self.total_bytes / _GIB:.1f} GiB, {driver}"


@dataclass(frozen=True)
class Accelerator:
    """A device of another kind, such as ``mps:0``: torch tells its name, and the bytes of its memory or ``None``."""

    device: str
    name: str
    total_bytes: int | None

    def __str__(self) -> str:
        memory = "unknown" if self.total_bytes is None else f"{self.total_bytes / _GIB:.1f} GiB"
        return f"{self.device}: {self.name}, memory: {memory}, times by the host's clock, float64 on the CPU"


@dataclass(frozen=True)
class Hardware:
    """Every device that torch can use here, and the versions of torch, CUDA and ROCm (``None`` where it has none)."""

    cpu: Cpu
    gpus: tuple[Gpu, ...]
    torch: str
    cuda: str | None
    rocm: str | None = None
    others: tuple[Accelerator, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices."""
        return "cpu", *(f"cuda:{gpu.index}" for gpu in self.gpus), *(each.device for each in self.others)

    @property
    def toolkit(self) -> str:
        """CUDA or ROCm with its version, as messages name it."""
        return f"ROCm {self.rocm}" if self.rocm else f"CUDA {self.cuda or 'none'}"

    def to_dict(self) -> dict[str, object]:
        """Nested dicts, lists and scalars that survive a JSON round trip unchanged."""
        plain: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def __str__(self) -> str:
        return "\n".join(str(device) for device in (self.cpu, *self.gpus, *self.others))


@dataclass(frozen=True)
class DtypeAdvice:
    """The floating-point type to prefer for attention (a torch dtype's name), and the reason."""

    dtype: str
    reason: str


def hardware() -> Hardware:
    """Describe this machine. CUDA is not initialised where there is none."""
    import torch

    versions = str(torch.__version__), torch.version.cuda, torch.version.hip
    return Hardware(_cpu(), _gpus(), *versions, tuple(map(_accelerator, other_devices())))


def silicon(device: torch.device | str) -> str:
    """The fingerprint (`silicon_of`) of a device. Raises InvalidInput for a device that this machine lacks."""
    where = resolve(device)
    if where.type != "cpu":
        return silicon_of(_described(where))
    import torch

    return _cpu_silicon(*_chip(), torch.get_num_threads())


def silicon_of(item: Cpu | Gpu | Accelerator) -> str:
    """The fingerprint within which timings compare: a slug of [a-z0-9._-], about 100 characters at most.

    ``cuda-sm90-132sm-50mib-l2-80gib-<name>``, ``rocm-gfx942-304cu-4mib-l2-192gib-<name>``, ``mps-<name>``, or
    ``cpu-<model>-<widest instruction sets>-<cores>c-<threads>t``. GPU
    memory is rounded up to an eighth of a power of two, so that boards of one kind agree whatever the driver reserves.
    The name tells boards apart that agree in the rest but not in clocks or tensor rate, such as L40 and L40S.
    """
    if isinstance(item, Cpu):
        return _cpu_silicon(item.model, item.instruction_sets, item.cores, item.threads)
    if isinstance(item, Accelerator):
        return f"{_slug(item.device.partition(':')[0])}-{_slug(item.name)}"
    chip = f"{'rocm' if item.gfx else 'cuda'}-{'-'.join(item.chip)}"
    l2 = "unknown" if item.l2_bytes is None else f"{item.l2_bytes / _MIB:g}mib"
    step = 1 << max(0, item.total_bytes.bit_length() - 4)
    memory = math.ceil(item.total_bytes / step) * step / _GIB
    return f"{chip}-{l2}-l2-{memory:g}gib{'-mig' if item.mig else ''}-{_slug(item.name)}"


@cache
def _cpu_silicon(model: str, instruction_sets: tuple[str, ...], cores: int, threads: int) -> str:
    sets = set(instruction_sets)
    widest = "-".join(sorted(sets - {_IMPLIED.get(name) for name in sets})) or "baseline"
    return f"cpu-{_slug(model)}-{widest}-{cores}c-{threads}t"


def provenance(device: torch.device | str) -> dict[str, str]:
    """Names and versions to record with a decision: "none" does not apply here, "unknown" could not be read.

    Raises InvalidInput for a device that this machine lacks.
    """
    import torch

    where = resolve(device)
    item = None if where.type == "cpu" else _described(where)
    return {
        "name": _chip()[0] if item is None else item.name,
        "driver": "none" if item is None else getattr(item, "driver", None) or "unknown",
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "none"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def dtype_advice(device: torch.device | str) -> DtypeAdvice:
    """The dtype to prefer (`advise`) on a device. Raises InvalidInput for a device that this machine lacks."""
    where = resolve(device)
    return advise(_cpu() if where.type == "cpu" else _described(where))


def advise(item: Cpu | Gpu | Accelerator) -> DtypeAdvice:
    """The dtype to prefer, by the description alone (CPU flags; the CUDA programming guide's throughput table)."""
    if isinstance(item, Cpu):
        for name in ("amx_bf16", "avx512_bf16", "bf16"):
            if name in item.instruction_sets:
                return DtypeAdvice("bfloat16", f"{name} multiplies bfloat16 in hardware")
        return DtypeAdvice("float32", "this CPU is not known to multiply bfloat16 in hardware")
    if isinstance(item, Accelerator):
        return DtypeAdvice("float32", "nothing is known of this device's arithmetic")
    if item.gfx:
        return DtypeAdvice("float16", f"{item.gfx} is fast in float16; of bfloat16 torch does not tell")
    capability, sm = item.capability, f"sm_{item.capability[0]}{item.capability[1]}"
    if capability >= (8, 0):
        return DtypeAdvice("bfloat16", f"{sm} has bfloat16 at float16 speed, with float32's range")
    if capability >= (7, 0) or capability in {(5, 3), (6, 0), (6, 2)}:
        return DtypeAdvice("float16", f"{sm} is fast in float16 and has no bfloat16")
    return DtypeAdvice("float32", f"half precision is slow or absent on {sm}")


def _cpu() -> Cpu:
    import torch

    return dataclasses.replace(_read_cpu(), threads=torch.get_num_threads())


@cache
def _read_cpu(root: Path = CGROUP, proc: Path = PROC, caches: Path = _CACHES) -> Cpu:
    model, instruction_sets, cores = _chip(root, proc)
    return Cpu(
        model=model,
        instruction_sets=instruction_sets,
        cores=cores,
        physical_cores=host_psutil().cpu_count(logical=False),
        threads=0,
        l2_bytes=_cache_bytes("2", caches),
        l3_bytes=_cache_bytes("3", caches),
        total_bytes=min([host_memory(proc)[0], *(limit for limit, _ in memory_limits(root, proc))]),
    )


@cache
def _chip(root: Path = CGROUP, proc: Path = PROC) -> tuple[str, tuple[str, ...], int]:
    """The fields of `Cpu` in its fingerprint, which are faster to read than the rest: model, sets and cores."""
    fields = cpuinfo(proc)
    return _model(fields), _instruction_sets(fields), _usable_cores(root, proc)


def cpuinfo(proc: Path = PROC) -> dict[str, str]:
    """What Linux says of the first core, by name; empty where it says nothing."""
    with suppress(OSError), (proc / "cpuinfo").open(encoding="utf-8") as file:
        pairs = (line.partition(":") for line in takewhile(str.strip, file))
        return {key.strip(): value.strip() for key, _, value in pairs}
    return {}


def _model(fields: dict[str, str]) -> str:
    name = fields.get("model name", "")
    if "CPU part" in fields:
        return f"{name or 'ARM'} {fields.get('CPU implementer')}-{fields['CPU part']}"
    # A hypervisor often passes a family name alone ("AMD EPYC"), which several generations share.
    if name and not any(map(str.isdecimal, name.partition("@")[0])):
        return f"{name} family {fields.get('cpu family')} model {fields.get('model')}"
    return name or _brand() or platform.processor() or platform.machine() or "unknown"


def _brand() -> str:
    """The processor's name on macOS, where `platform` knows its architecture alone; empty on other systems."""
    if sys.platform != "darwin":
        return ""
    with suppress(OSError):
        return subprocess.run(BRAND, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _instruction_sets(fields: dict[str, str]) -> tuple[str, ...]:
    import torch

    for field, table in (("flags", _X86_SETS), ("Features", _ARM_SETS)):
        if field in fields:
            return tuple(sorted(table[flag] for flag in set(fields[field].split()) & table.keys()))
    baseline = "neon" if platform.machine().lower() in {"arm64", "aarch64"} else ""
    return tuple(_TORCH_SETS.get(torch.backends.cpu.get_cpu_capability(), baseline).split())


def _usable_cores(root: Path, proc: Path) -> int:
    quotas = [quota for level in cgroup_levels("cpu", root, proc) if (quota := _cpu_quota(level)) is not None]
    return min([load.cores(), *quotas])


def _cpu_quota(level: Path) -> int | None:
    quota, _, period = (read_text(level / "cpu.max") or read_text(level / "cpu.cfs_quota_us") or "max").partition(" ")
    if quota in {"max", "-1"}:
        return None
    period = period or read_text(level / "cpu.cfs_period_us") or ""
    return math.ceil(int(quota) / int(period)) if period else None


def _cache_bytes(wanted: str, caches: Path) -> int | None:
    for index in caches.glob("index*"):
        size = read_text(index / "size")
        if size and read_text(index / "level") == wanted and read_text(index / "type") != "Instruction":
            return int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
    return None


@cache
def _gpus() -> tuple[Gpu, ...]:
    return tuple(_gpu(index, props) for index, props in enumerate(cuda_devices()))


def _described(device: torch.device) -> Gpu | Accelerator:
    """A device that is not a CPU, as `resolve` returns it."""
    return _gpus()[device.index] if device.type == "cuda" else _accelerator(device)


@cache
def _accelerator(device: torch.device) -> Accelerator:
    import torch

    module, name = torch.get_device_module(device), device.type
    backend: Any = getattr(torch.backends, device.type, None)
    with suppress(AttributeError, RuntimeError):  # this device's module tells no name
        name = str(getattr(module, "get_device_name", lambda _: backend.get_name())(device))
    with suppress(AttributeError, RuntimeError):  # Apple's chips of one name differ in them
        name += f" {backend.get_core_count()} cores"
    return Accelerator(str(device), name, total_bytes(device))


def _gpu(index: int, props: Any) -> Gpu:
    import torch

    return Gpu(
        index=index,
        name=props.name,
        uuid=cuda_identity(index),
        capability=(props.major, props.minor),
        sm_count=props.multi_processor_count,
        l2_bytes=getattr(props, "L2_cache_size", None) or None,
        total_bytes=props.total_memory,
        driver=ask_nvml("nvmlSystemGetDriverVersion"),
        mig=" MIG " in props.name,  # as CUDA names slices
        shared_memory_bytes=getattr(props, "shared_memory_per_block_optin", None),
        gfx=props.gcnArchName.partition(":")[0] if torch.version.hip else "",  # without its features
    )


def _slug(model: str) -> str:
    return _NOT_SLUG.sub("-", _MARK.sub("", model.lower())).strip("-.")[:60] or "unknown"


def _mib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _MIB:g} MiB"
