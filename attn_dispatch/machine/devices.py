"""Lists the devices that torch knows: CUDA's and ROCm's, with NVML's identities, and those of other accelerators."""

from __future__ import annotations

import importlib
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from attn_dispatch.errors import InvalidInput

if TYPE_CHECKING:
    import torch

KNOWN = ("cpu", "cuda")  #: types of devices whose kernels are called by name; others need not have float64
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")  # of torch.cuda.get_arch_list


def resolve(device: torch.device | str) -> torch.device:
    """Resolve a device and fill in its index. Raises InvalidInput for a device that this machine lacks."""
    import torch

    try:
        where = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        where = None
    if where is not None and where.type == "cpu" and not where.index:
        return where
    found = [torch.device("cuda", index) for index in range(len(cuda_devices()))] + other_devices()
    if where is not None and where.index is None and where.type in {each.type for each in found}:
        where = torch.device(where.type, current_index(where.type))
    if where not in found:
        raise InvalidInput(f"device must be one of {', '.join(map(str, ('cpu', *found)))}; got {device!r}")
    return where


def current_index(kind: str) -> int:
    """The index of the current device of a type; 0 of a type that has one device."""
    import torch

    found: int = getattr(torch.get_device_module(kind), "current_device", int)()
    return found


def other_devices() -> list[torch.device]:
    """The devices of torch's accelerator, where that is neither CUDA nor ROCm, such as `mps:0` and `xpu:0`."""
    import torch

    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cuda" or not torch.accelerator.is_available():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, without which NCCL's calls may hang; nothing for other devices."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for what a device was given to do."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


@cache
def cuda_devices() -> tuple[Any, ...]:
    """The properties of each device of CUDA or ROCm, in torch's order. Initialises neither where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))


@cache
def cuda_identity(index: int) -> str:
    """The UUID of a CUDA device; torch's, without prefix, where NVML gives none."""
    known = str(cuda_devices()[index].uuid)  # not the index, since CUDA_VISIBLE_DEVICES reorders torch's
    handles = (ask_nvml("nvmlDeviceGetHandleByUUID", prefix + known) for prefix in ("MIG-", "GPU-"))
    return next(filter(None, (ask_nvml("nvmlDeviceGetUUID", each) for each in handles)), known)


def missing_code(device: torch.device) -> str:
    """Why no kernel of this torch runs on a CUDA device: it was built without code for it; empty where it has some."""
    return _missing_code(resolve(device).index) if device.type == "cuda" and cuda_devices() else ""


@cache
def _missing_code(index: int) -> str:
    """Compare what torch was built for with the device's capability.

    A GPU runs the machine code (sm) of its major capability up to its own minor one, and compiles the code of any
    older one (compute) itself. The suffix "a" is for one capability alone, "f" for its family.
    """
    import torch

    props, built_for = cuda_devices()[index], torch.cuda.get_arch_list()
    known = [found for each in built_for if (found := _ARCHITECTURE.fullmatch(each)) is not None]
    here = props.major, props.minor
    if not known or any(_runs(each, here) for each in known):
        return ""
    return (
        f"torch {torch.__version__} has no code for {props.name} (sm_{props.major}{props.minor}), only for "
        f"{' '.join(built_for)}: install a build for another CUDA version"
    )


def _runs(code: re.Match[str], here: tuple[int, int]) -> bool:
    kind, major, minor, suffix = code.groups()
    built_for = int(major), int(minor)
    if suffix == "a":
        return here == built_for
    return here >= built_for and (here[0] == built_for[0] or (kind == "compute" and not suffix))


def ask_nvml(function: str, *args: object) -> Any | None:
    """Call an NVML function; None where NVML is absent or fails (no such device, old driver, unsupported board)."""
    nvml = _nvml()
    if nvml is None or None in args:
        return None
    try:
        return getattr(nvml, function)(*args)
    except nvml.NVMLError:
        return None


@cache
def _nvml() -> Any | None:
    import torch

    if torch.version.hip is not None:
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
