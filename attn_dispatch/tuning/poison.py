"""Memory that shows where it is used without having been written: NaN in what a backend allocates, and around views."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch.spec.problem import DTYPES, Problem

MARGIN = 4096  #: entries before and after a view; a multiple of what tensors are aligned to
SPAN = 3  #: dense tensors of the shape that the memory has room for: who mistakes the strides reads NaN, and not beyond
COPIES = 3  #: freed blocks of each size
_ATEN = torch.ops.aten
_UNWRITTEN = {
    getattr(_ATEN, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
}


def framed(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values in this memory order, with NaN between them and on both sides. Axes of stride 0 keep one entry."""
    sizes = [size if stride else 1 for size, stride in zip(values.shape, strides)]
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    room = max(span, SPAN * values.numel()) + 2 * MARGIN
    base = torch.full((room,), math.nan, dtype=values.dtype, device=values.device)
    once = tuple(slice(size) for size in sizes)
    base.as_strided(sizes, strides, MARGIN).copy_(values[once])
    return base.as_strided(values.shape, strides, MARGIN)


@dataclass(frozen=True, slots=True)
class Seal:
    """A tensor's whole memory as it was, what lies around the view included."""

    name: str
    memory: Tensor
    copy: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Seal:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return cls(name, memory, memory.clone())

    def broken(self) -> bool:
        """Whether something was written since; it is as it was afterwards."""
        broken = not torch.equal(self.memory, self.copy)
        if broken:
            self.memory.copy_(self.copy)
        return broken


@contextmanager
def poisoned(problem: Problem, *, in_torch: bool) -> Iterator[None]:
    """NaN in memory that is handed out.

    Args:
        in_torch: what Python code gets from torch.empty and its kin, forward and backward, is NaN for certain.
            Otherwise, and for what kernels allocate themselves, freed memory holds NaN, which may be given out again.
    """
    _foul(problem)
    # Where a mode cannot be told to leave compiled code alone, code that is first met under one is never compiled.
    if in_torch and hasattr(TorchDispatchMode, "ignore_compile_internals"):
        with _Poison():  # type: ignore[no-untyped-call]
            yield
    else:
        yield


class _Poison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNWRITTEN and result.dtype in DTYPES:
            result.fill_(math.nan)
        return result


def _foul(problem: Problem) -> None:
    """Leave NaN in freed blocks as large as the results, in their dtype and in what sums are kept in."""
    rows = problem.batch * problem.q_len * problem.heads
    keys = problem.batch * problem.k_len * problem.kv_heads
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    sizes = {rows, rows * problem.head_dim, keys * problem.head_dim}
    for dtype in {problem.dtype, wide}:
        for size in sizes:
            # Alive together, so that they are different blocks.
            blocks = [torch.full((size,), math.nan, dtype=dtype, device=problem.device) for _ in range(COPIES)]
            del blocks
