"""Tables on a problem's device, made by a first call and kept for later ones; and what its kernels are compiled for.

Kernels of other streams, and CUDA graphs at each replay, may read a table after the call that used it. So it lies in no
graph's memory, is complete before a call gets it, and is freed after the device's work; what a capture used never is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from itertools import count
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from attn_dispatch import process_state, settings
from attn_dispatch.errors import NotDecided
from attn_dispatch.spec.data import derived
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tracing import in_new_thread, make_plain

P = ParamSpec("P")
T = TypeVar("T")

MOST = 512  #: tables of one kind
MOST_BYTES = 2**30  #: of their tensors
DEVICES = ("cuda",)  #: with streams and graphs

_uses = count()
_captured: dict[int, object] = {}  #: what graphs were captured with: nothing tells when a graph is gone


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device or on the current one."""
    if device.type not in DEVICES:
        return False
    if torch.cuda.is_current_stream_capturing():  # no device may be waited for
        return True
    if device.index is None or device.index == torch.cuda.current_device():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph is captured: a first call makes what no graph can."""
    if capturing(device):
        raise RuntimeError(
            "its first call compiles, or copies lists to the device, which no CUDA graph can capture: "
            "call it once before the capture"
        )


def made_on(device: torch.device, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `make` returns, to be kept, complete for all streams. Raises RuntimeError while a CUDA graph is captured.

    In a new thread: this one may allocate from the memory of a graph (torch.compile) or of torch.cuda.use_mem_pool.
    """
    if device.type not in DEVICES:
        return make_plain(make, *args, **kwargs)
    refuse_capture(device)

    def complete() -> T:
        found = make(*args, **kwargs)
        torch.cuda.current_stream(device).synchronize()
        return found

    return in_new_thread(complete)


def derived_on(device: torch.device, data: Tensor, key: Hashable, make: Callable[[Tensor], T]) -> T:
    """What `made_on` makes of a pattern's tensors, kept as long as they are; it raises as that does."""

    def made() -> T:
        refuse_capture(device)
        if device.type in DEVICES:
            torch.cuda.current_stream(device).synchronize()  # it may have filled them; `make` has another one
        return made_on(device, make, data)

    found = derived(data, (key, device), made)
    if capturing(device):
        _captured[id(found)] = found
    return found


def bytes_of(table: object) -> int:
    """Bytes of the tensors in a table."""
    if isinstance(table, Tensor):
        return table.numel() * table.itemsize
    if is_dataclass(table):
        return sum(bytes_of(getattr(table, each.name)) for each in fields(table))
    return sum(map(bytes_of, table)) if isinstance(table, tuple) else 0


@dataclass(slots=True)
class _Table(Generic[T]):
    found: T
    size: int
    device: torch.device
    users: set[Problem] = field(default_factory=set[Problem])
    latest: Problem | None = None  #: user
    used: int = 0  #: in `_uses`


class DeviceCache(Generic[P, T]):
    """A function of a problem, and more, whose results are kept: the latest `most`, in `most_bytes` together.

    Args:
        key: of what a result depends on, from the same arguments; all by default. Problems share those of one key.
        size: bytes of a result.
    """

    def __init__(
        self,
        make: Callable[Concatenate[Problem, P], T],
        key: Callable[..., Hashable] | None = None,
        size: Callable[[T], int] = bytes_of,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.make, self.key, self.size, self.most, self.most_bytes = make, key, size, most, most_bytes
        self._tables: dict[Hashable, _Table[T]] = {}
        self._lock = process_state.lock()

    def __call__(self, problem: Problem, *more: P.args, **none: P.kwargs) -> T:
        key = (problem, *more) if self.key is None else self.key(problem, *more)
        table = self._tables.get(key)
        if table is None:
            found = made_on(problem.device, self.make, problem, *more, **none)  # it may hang: without the lock
            with self._lock:
                table = self._tables.get(key)  # another thread may have been faster
                if table is None:
                    table = _Table(found, self.size(found), problem.device)
                    self._make_room(table.size)
                    self._tables[key] = table
        table.used = next(_uses)
        if table.latest is not problem:
            table.users.add(problem)
            table.latest = problem
        if problem.device.type in DEVICES and capturing(problem.device):
            _captured[id(table.found)] = table.found
        return table.found

    def peek(self, problem: Problem, *more: P.args, **none: P.kwargs) -> T | None:
        """The result if it is kept."""
        table = self._tables.get((problem, *more) if self.key is None else self.key(problem, *more))
        return None if table is None else table.found

    def forget(self, problem: Problem) -> None:
        """Free what is kept for this problem and for no other."""
        with self._lock:
            for key, table in list(self._tables.items()):
                if problem in table.users:
                    table.users.remove(problem)
                    table.latest = None
                    if not table.users:
                        self._free(key)

    def cache_clear(self) -> None:
        """Free everything."""
        with self._lock:
            for key in list(self._tables):
                self._free(key)

    def _make_room(self, size: int) -> None:
        while (there := len(self._tables)) and (
            there >= self.most or sum(each.size for each in self._tables.values()) + size > self.most_bytes
        ):
            self._free(min(self._tables, key=lambda key: self._tables[key].used))

    def _free(self, key: Hashable) -> None:
        device = self._tables[key].device
        if device.type in DEVICES:
            torch.cuda.synchronize(device)
        del self._tables[key]


def kv_head_index(heads: range, group: int, device: torch.device) -> Tensor:
    """The key head of each of these query heads, int64 on the device, cached. Nothing is copied from host memory, which
    would wait for the device and cannot be captured in a CUDA graph.
    """
    if capturing(device):
        return _kv_head_index(heads, group, device)  # not cached: the graph fills it at each replay, in its own memory
    return _cached_kv_head_index(heads, group, device)


@lru_cache(maxsize=1024)
def _cached_kv_head_index(heads: range, group: int, device: torch.device) -> Tensor:
    return made_on(device, _kv_head_index, heads, group, device)


def _kv_head_index(heads: range, group: int, device: torch.device) -> Tensor:
    return torch.arange(heads.start, heads.stop, heads.step, device=device) // group


# --- compiled kernels -----------------------------------------------------------------------------------------

_compiled: set[Hashable] = set()  #: what kernels of this process are compiled for, or loaded from a cache on disk


@lru_cache(maxsize=4096)
def note(name: str, problem: Problem, more: Hashable = None) -> None:
    """Note that a call of the problem has been made; `more`: what its kernels are compiled for besides.

    Every call of a backend notes itself: the cache makes all but a problem's first cheap.
    """
    _compiled.add((name, kernel_class(problem), more))


def is_noted(name: str, problem: Problem, more: Hashable = None) -> bool:
    """Whether the kernels of a problem are compiled: a call with such kernels has been noted."""
    return (name, kernel_class(problem), more) in _compiled


@lru_cache(maxsize=4096)
def kernel_class(problem: Problem) -> Hashable:
    """What kernels are compiled for: neither lengths nor the number of heads."""
    pattern = problem.pattern.natural
    bands = pattern.bands(problem.q_len, problem.k_len, pattern.head_offsets(0, problem.heads)) or ()
    sides = tuple((band.low is None, band.high is None) for band in bands)
    masks = problem.has_seq_lens, problem.has_key_mask, problem.score_terms
    results = problem.needs_grad, problem.return_lse, problem.deterministic
    numbers = problem.dtype, problem.matmul_precision, problem.head_dim, problem.heads // problem.kv_heads
    axes = len(pattern.branches), len(pattern.axes)
    return problem.device, type(pattern), sides, axes, masks, results, numbers


process_state.register(process_state.FACTS, _compiled.clear, note.cache_clear)

_compiling: list[None] = []  #: an entry for each block of `compiling` that some thread is in


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, in all threads, kernels may be compiled, whatever the settings: in trials, and in `warm`."""
    _compiling.append(None)
    try:
        yield
    finally:
        _compiling.pop()


def refuse_compiling(what: str) -> None:
    """Raise NotDecided where calls may not wait for a compiler, nor for what an earlier process compiled."""
    if not (_compiling or settings.compiles()):
        text = "$ATTN_DISPATCH_COMPILE is never, and this process has not compiled or loaded"
        more = "call attn_dispatch.warm() when it starts, and run `attn-dispatch warm` before"
        raise NotDecided(f"{text} {what}: {more}")
