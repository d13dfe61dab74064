"""Lists the devices: torch's CUDA devices and their identities from NVML."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from attn_dispatch.errors import InvalidInput

if TYPE_CHECKING:
    import torch

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")  # of torch.cuda.get_arch_list


def resolve(device: torch.device | str) -> torch.device:
    """Resolve a device and fill in its CUDA index. Raises InvalidInput for a device that this machine lacks."""
    import torch

    try:
        where = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        where = None
    if where is not None and where.type == "cpu" and not where.index:
        return where
    count = len(cuda_devices())
    if where is not None and where.type == "cuda" and count:
        index = torch.cuda.current_device() if where.index is None else where.index
        if index < count:
            return torch.device("cuda", index)
    choices = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
    raise InvalidInput(f"device must be one of {choices}; got {device!r}")


@cache
def cuda_devices() -> tuple[Any, ...]:
    """The properties of each CUDA device, in torch's order. Does not initialise CUDA where there is no device."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
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
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
