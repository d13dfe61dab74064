"""Measures the memory available on a device, and the peak that a call allocates.

Available memory is read on every call: the host, cgroups, address-space limits, torch's devices.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attn_dispatch.log import say_once
from attn_dispatch.machine.devices import cuda_devices, resolve
from attn_dispatch.text import one_line

if TYPE_CHECKING:
    import torch

#: Limits of this process, and what it used; None on Windows.
resource: Any = None if sys.platform == "win32" else importlib.import_module("resource")
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
UNKNOWN = sys.maxsize  #: free bytes of a device that does not tell them: nothing is refused for lack of memory
_UNLIMITED = 1 << 62  #: bytes; a limit above this means "none" in cgroups version 1
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")

T = TypeVar("T")

MADV_DONTNEED: int = getattr(mmap, "MADV_DONTNEED", 0)  #: not of Windows
MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  #: of Linux alone
LARGE_PAGE = 2**21  #: bytes, on x86-64 and most of aarch64

BLOCK, MOST_BLOCKS = 2**20, 256  #: bytes of a block of free heap, and how many are discarded at most

CLEAR_REFS = PROC / "self" / "clear_refs"
STATUS = PROC / "self" / "status"


def available_bytes(device: torch.device | str) -> int:
    """Bytes that a trial could allocate on ``device`` now, read on every call.

    On the CPU the least of free RAM and the room in every enclosing cgroup and under ``RLIMIT_AS``; on CUDA the
    free memory by the driver plus torch's idle cache, within torch's per-process memory fraction.
    Of a pluggable allocator, which tells neither, the free memory alone. Of other devices what torch tells, or UNKNOWN.

    Raises:
        InvalidInput: this machine lacks the device.
        RuntimeError: torch's, where the driver does not give a CUDA device's free memory.
    """
    where = resolve(device)
    if where.type == "cpu":
        return _host_available()
    return _cuda_available(where.index) if where.type == "cuda" else _reported(where)[0]


def total_bytes(device: torch.device) -> int | None:
    """Bytes of memory of a device that is neither a CPU nor one of CUDA; None: torch does not tell."""
    return _reported(device)[1]


def _reported(device: torch.device) -> tuple[int, int | None]:
    """Free bytes, with torch's idle cache, and all, by the device's module or by torch.accelerator."""
    import torch

    modules: dict[str, Any] = {"mem_get_info": torch.get_device_module(device), "get_memory_info": torch.accelerator}
    for name, module in modules.items():
        with suppress(AttributeError, RuntimeError):  # an older torch, or a device that does not tell
            free, total = getattr(module, name)(device)
            return int(free + module.memory_reserved(device) - module.memory_allocated(device)), int(total)
    return UNKNOWN, None


def _host_available(root: Path = CGROUP, proc: Path = PROC) -> int:
    rooms = [host_memory(proc)[1], *(room for _, room in memory_limits(root, proc))]
    if (left := address_space_left()) is not None:
        rooms.append(left)
    return max(0, min(rooms))


def host_memory(proc: Path = PROC) -> tuple[int, int]:
    """Total and available RAM in bytes, by psutil's definitions; read from /proc, since psutil is slow to import."""
    sizes = _sizes(proc / "meminfo")
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    if 0 < available <= total:
        return total, available
    memory = host_psutil().virtual_memory()  # not Linux, a kernel before 3.14, or a container that hides some of it
    return memory.total, memory.available


def address_space_left() -> int | None:
    """Bytes that may still be mapped under RLIMIT_AS; None without that limit."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft - _mapped_bytes()


def limit_address_space(room: int) -> bool:
    """Let this process map ``room`` bytes more than now, for good; whether the system enforces it, as Linux does.

    Allocations beyond it fail. A process that maps memory for new threads or libraries has that much less.
    """
    if sys.platform == "win32":
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _mapped_bytes() + room
    if soft == resource.RLIM_INFINITY or wanted < soft:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
        except (OSError, ValueError):
            return False
    try:
        mmap.mmap(-1, room + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()  # used by nothing
    except (OSError, ValueError):
        return True
    return False


def _mapped_bytes() -> int:
    return int(host_psutil().Process().memory_info().vms)


def memory_limits(root: Path, proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, room left under it) in bytes for each enclosing cgroup that has a limit."""
    for level in cgroup_levels("memory", root, proc):
        # memory.high does not kill, but a process above it is throttled until its timings mean nothing.
        limits = [limit for name in _MEMORY_LIMITS if (limit := _integer(level / name)) is not None]
        if limits and min(limits) < _UNLIMITED:
            yield min(limits), min(limits) - _unreclaimable(level)


def _unreclaimable(level: Path) -> int:
    used = _integer(level / "memory.current") or _integer(level / "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in (read_text(level / "memory.stat") or "").splitlines())
    return max(0, used - int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0))


def cgroup_levels(controller: str, root: Path, proc: Path) -> Iterator[Path]:
    """Directories of the cgroups (v1 and v2) around this process, innermost first; some may not exist."""
    for line in (read_text(proc / "self" / "cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mounts = (root / names, root / controller) if names else (root / "unified",)
        base = next((mount for mount in mounts if mount.is_dir()), root)
        # A path with ".." lies above this namespace's root; then only the root is visible.
        parts = [] if ".." in path.split("/") else [part for part in path.split("/") if part]
        yield from (base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _cuda_available(index: int) -> int:
    import torch

    free, fraction = int(torch.cuda.mem_get_info(index)[0]), memory_fraction(index)
    if fraction is None:
        return free
    allocated = torch.cuda.memory_allocated(index)
    room = free + torch.cuda.memory_reserved(index) - allocated
    return max(0, min(room, int(fraction * cuda_devices()[index].total_memory) - allocated))


def memory_fraction(index: int | None) -> float | None:
    """Torch's per-process memory fraction of a CUDA device, by default the current one; None of a pluggable
    allocator, such as RMM's.

    These support neither this cap nor statistics, and raise RuntimeError where they are asked.
    """
    import torch

    try:
        return float(torch.cuda.get_per_process_memory_fraction(index))
    except RuntimeError as error:
        if "support" not in str(error):  # an error of the device
            raise
        say_once(f"memory of candidates on CUDA is neither capped nor measured: {one_line(error)}")
        return None


def host_psutil() -> Any:
    return importlib.import_module("psutil")


def _integer(path: Path) -> int | None:
    text = read_text(path)
    return None if text is None or text == "max" else int(text)


def read_text(path: Path) -> str | None:
    """Read a small file of /proc or /sys, stripped; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def peak_bytes(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Run ``call`` once; its result, and the peak of memory above the amount allocated before, in bytes.

    CUDA: by the caching allocator's statistics of the device, whose peak is reset. CPU: the rise of the process's
    resident memory, by Linux's high-water mark, which is reset. It includes scratch memory of libraries,
    allocations of other threads and freed blocks that the C library retains, not pages that were never touched,
    nor memory that another thread's heap retained before; below a few hundred KiB it is noise. None for other
    devices, for a pluggable CUDA allocator, or where the mark cannot be reset. Exceptions of ``call`` propagate.
    """
    if device.type == "cuda":
        return _cuda_peak(call, device)
    before = _reset_resident_peak() if device.type == "cpu" else None
    result = call()
    return result, None if before is None else max(0, _sizes(STATUS)["VmHWM"] - before)


def _cuda_peak(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    cuda: Any = importlib.import_module("torch.cuda")
    cuda.init()
    if memory_fraction(device.index) is None:
        return call(), None
    cuda.reset_peak_memory_stats(device)
    before: int = cuda.memory_allocated(device)
    result = call()
    return result, cuda.max_memory_allocated(device) - before


def _reset_resident_peak() -> int | None:
    """Reset the high-water mark of resident memory; the resident bytes now, or None where it cannot be reset."""
    with suppress(AttributeError):  # only glibc has these functions, the last since 2.33
        _discard_free_heap()
    try:
        CLEAR_REFS.write_text("5")
        return _sizes(STATUS).get("VmRSS")
    except OSError:
        return None


def _discard_free_heap() -> None:
    """Return free memory that glibc retains to the system. It is resident: a call that reused it would seem to
    allocate nothing.

    Raises AttributeError where the C library is not glibc, or an old one.
    """
    libc: Any = _libc()
    libc.malloc_trim(0)
    # It leaves what is free at the end of a thread's heap. Blocks of all free memory reach that end, and cost
    # little: they are not written to.
    blocks = [libc.malloc(BLOCK) for _ in range(min(libc.mallinfo2().fordblks // BLOCK + 1, MOST_BLOCKS))]
    for start in filter(None, blocks):
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + BLOCK) // mmap.PAGESIZE * mmap.PAGESIZE
        libc.madvise(first, last - first, MADV_DONTNEED)
    for start in blocks:
        libc.free(start)


def _sizes(path: Path) -> dict[str, int]:
    """The lines of a file of /proc such as `VmRSS: 5 kB`, in bytes."""
    lines = (line.partition(":") for line in (read_text(path) or "").splitlines() if line.endswith(" kB"))
    return {name: int(size.removesuffix("kB")) << 10 for name, _, size in lines}


def release(device: torch.device) -> None:
    """Collect garbage and return the unused blocks of a device's caching allocator to its driver."""
    import torch

    gc.collect()
    getattr(torch.get_device_module(device), "empty_cache", bool)()


def in_large_pages(x: torch.Tensor) -> torch.Tensor:
    """Ask Linux for large pages behind x, a new tensor on a CPU that nothing has been written to; returns x.

    Fresh memory costs a fault for each page of 4 KiB. Where large pages are never given, or always, nothing changes.
    """
    first, last = -(-x.data_ptr() // LARGE_PAGE) * LARGE_PAGE, (x.data_ptr() + x.nbytes) // LARGE_PAGE * LARGE_PAGE
    if last - first >= 2 * LARGE_PAGE and MADV_HUGEPAGE is not None:
        _libc().madvise(first, last - first, MADV_HUGEPAGE)
    return x


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`. `fordblks`: free bytes of all heaps."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL:
    """The C library, with the types of the functions called here that it has; on Windows those of the interpreter."""
    libc = ctypes.pythonapi if sys.platform == "win32" else ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    functions: dict[str, tuple[Any, list[Any]]] = {
        "malloc": (pointer, [size]),
        "free": (None, [pointer]),
        "madvise": (ctypes.c_int, [pointer, size, ctypes.c_int]),
        "malloc_trim": (ctypes.c_int, [size]),
        "mallinfo2": (_MallocInfo, []),
    }
    for name, types in functions.items():
        with suppress(AttributeError):
            function = getattr(libc, name)
            function.restype, function.argtypes = types
    return libc
