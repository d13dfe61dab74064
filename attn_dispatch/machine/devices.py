"""Lists the devices: torch's CUDA devices and their identities from NVML."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from attn_dispatch.errors import InvalidInput

if TYPE_CHECKING:
    import torch


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
def cuda_identity(index: int) -> tuple[str | None, bool]:
    """The UUID of a CUDA device (torch's, without prefix, where NVML gives none) and whether it is a MIG slice."""
    props = cuda_devices()[index]
    handle = _nvml_handle(props)
    bare = getattr(props, "uuid", None)
    uuid = ask_nvml("nvmlDeviceGetUUID", handle) or (None if bare is None else str(bare))
    return uuid, " MIG " in props.name or _in_mig_mode(handle)


def _nvml_handle(props: Any) -> Any | None:
    """Find a device's NVML handle by its identity: indices differ, since CUDA_VISIBLE_DEVICES reorders torch's."""
    bare = str(getattr(props, "uuid", "")).removeprefix("GPU-").removeprefix("MIG-")
    for prefix in ("MIG-", "GPU-"):
        if bare and (handle := ask_nvml("nvmlDeviceGetHandleByUUID", prefix + bare)):
            return handle
    if not hasattr(props, "pci_bus_id"):
        return None
    address = f"{props.pci_domain_id:08x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
    return ask_nvml("nvmlDeviceGetHandleByPciBusId", address)


def _in_mig_mode(handle: Any | None) -> bool:
    """Whether a handle is a MIG slice or a board in MIG mode, of which CUDA shows slices only."""
    current, _ = ask_nvml("nvmlDeviceGetMigMode", handle) or (0, 0)
    return bool(current or ask_nvml("nvmlDeviceIsMigDeviceHandle", handle))


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
