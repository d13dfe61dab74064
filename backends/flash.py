"""The flash-attention libraries; the newest that supports the device is used: 4 (CuTe), 3 (Hopper), 2 (Ampere, newer).

Each forward returns lse; each backward takes the merged out and lse.

Source: Dao-AILab/flash-attention; checked against the source of flash-attn 2.7.0 to 2.8.3, the hopper folder of 2.8.3
and of 0251105 (2026-08), and flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.branches.backend import Branched, Package, Variant
from attn_dispatch.kernels.branches.plan import BranchPlan
from attn_dispatch.kernels.dense import Kernel, vector_aligned
from attn_dispatch.kernels.limits import HALF, LARGEST_GRID, Limits
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import Problem

TILE = 128  #: rows; backward passes round lengths up to multiples of at most this

Sides = tuple[int | None, int | None]


@dataclass(frozen=True)
class Generation(Kernel):
    """Base of the generations. `window`: keys to the left and right of a query, None for all."""

    window: Sides = (None, None)
    deterministic: bool = False

    grouped = True
    masks = False

    @classmethod
    def of(cls, problem: Problem) -> Generation:
        pattern = problem.pattern
        window = (pattern.left, pattern.right) if isinstance(pattern, Window) else (None, None)
        return cls(window, problem.deterministic)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        d = q.shape[-1]
        out, lse = self._forward(vector_aligned(q), vector_aligned(k), vector_aligned(v), is_causal, scale)
        if self.window != (None, None):
            # Generation 2 returns inf for a query without keys.
            lse = lse.masked_fill(lse == math.inf, -math.inf)
        return out[..., :d], lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d = q.shape[-1]
        if self.window != (None, None):
            lse = lse.masked_fill(lse == -math.inf, math.inf)
        grad, q, k, v, out = (vector_aligned(x) for x in (grad, q, k, v, out))
        # The kernels assume contiguous lse.
        dq, dk, dv = self._backward(grad, q, k, v, out, lse.contiguous(), is_causal, scale)
        return dq[..., :d], dk[..., :d], dv[..., :d]

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def _sides(self) -> tuple[int, int]:
        left, right = (-1 if side is None else side for side in self.window)
        return left, right


class Flash2(Generation):
    """flash-attn 2."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn.flash_attn_interface")
        left, right = self._sides()
        out, lse, *_ = library._wrapped_flash_attn_forward(
            q, k, v, 0.0, scale, is_causal, left, right, 0.0, None, False
        )
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn.flash_attn_interface")
        left, right = self._sides()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        library._wrapped_flash_attn_backward(
            *(grad, q, k, v, out, lse, dq, dk, dv),
            *(0.0, scale, is_causal, left, right, 0.0, None, self.deterministic),
        )
        return dq, dk, dv


class Flash3(Generation):
    """flash-attn 3, by its ops, whose arguments are more stable than those of its Python functions."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        left, right = self._sides()
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            *(q, k, v),
            softmax_scale=scale,
            is_causal=is_causal,
            window_size_left=left,
            window_size_right=right,
            num_splits=1,
        )
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = self._sides()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        torch.ops.flash_attn_3.bwd(
            *(grad, q, k, v, out, lse, dq, dk, dv),
            softmax_scale=scale,
            is_causal=is_causal,
            window_size_left=left,
            window_size_right=right,
            deterministic=self.deterministic,
        )
        return dq, dk, dv


class Flash4(Generation):
    """flash-attn 4; an open window side is None."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn.cute.interface")
        left, right = self.window
        out, lse, *_ = library._flash_attn_fwd(
            *(q, k, v),
            softmax_scale=scale,
            causal=is_causal,
            window_size_left=left,
            window_size_right=right,
            return_lse=True,
        )
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn.cute.interface")
        left, right = self.window
        dq, dk, dv, *_ = library._flash_attn_bwd(
            *(q, k, v, out, grad, lse),
            softmax_scale=scale,
            causal=is_causal,
            window_size_left=left,
            window_size_right=right,
            deterministic=self.deterministic,
        )
        return dq, dk, dv


def scratch_bytes(problem: Problem, plan: BranchPlan) -> int:
    """Bytes that the kernels allocate: float32 sums, of gradients with padded lengths and of split forward passes."""
    processors = _processors(problem.device)
    d = -(-(problem.head_dim + 1) // 64) * 64
    if not problem.needs_grad:
        return 2 * processors * TILE * d * 4
    batch = min(plan.batch_step, problem.batch)
    return max(
        _piece_bytes(batch * piece.q.segments, problem, piece.q.rows, piece.k.rows, processors) * d
        for block in plan.blocks
        for piece in block.pieces
    )


def _piece_bytes(batch: int, problem: Problem, q_len: int, k_len: int, processors: int) -> int:
    """Bytes per column of head_dim of one call with `batch` batch rows."""
    q_len, k_len = (-(-length // TILE) * TILE for length in (q_len, k_len))
    rows = batch * problem.heads
    sums = (rows + processors) * q_len if problem.deterministic else rows * q_len
    return 4 * (sums + 2 * rows * k_len * (problem.heads != problem.kv_heads))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


FLASH2 = Limits("cuda", dict.fromkeys(HALF, (8, 0)), head_dim=256, most_rows=LARGEST_GRID)
FLASH3 = Limits(
    "cuda",
    dict.fromkeys(HALF, (9, 0)),
    highest=(9, 0),
    head_dim=256,
    repeatable_head_dim=192,
    most_rows=LARGEST_GRID,
)
FLASH4_HOPPER = Limits(
    "cuda", dict.fromkeys(HALF, (9, 0)), highest=(9, 0), head_dim=256, most_rows=LARGEST_GRID, platforms=("linux",)
)
FLASH4_BLACKWELL = Limits(
    "cuda", dict.fromkeys(HALF, (10, 0)), highest=(11, 0), head_dim=128, most_rows=LARGEST_GRID, platforms=("linux",)
)

PACKAGE2 = Package("flash-attn", "pip install 'attn-dispatch[flash]'", "flash_attn.flash_attn_interface", (2, 7))
PACKAGE3 = Package("flash_attn_3", "it is built from flash-attention's hopper folder", "flash_attn_3._C", (3,))
PACKAGE4 = Package("flash-attn-4", "pip install 'attn-dispatch[flash4]'", "flash_attn.cute.interface", (4,))


def version() -> str:
    """The versions of all installed generations: which one runs depends on the problem.

    Raises:
        PackageNotFoundError: none is installed.
    """
    found = []
    for package in (PACKAGE4, PACKAGE3, PACKAGE2):
        try:
            found.append(f"{package.distribution} {package.version()}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        raise importlib.metadata.PackageNotFoundError(PACKAGE2.distribution)
    return ", ".join(found)


_PATTERNS = (Dense, Dilated, Window)

BACKEND = Branched(
    "flash",
    (
        Variant(FLASH4_BLACKWELL, Flash4.of, "flash-attn 4 on Blackwell", PACKAGE4, _PATTERNS, scratch_bytes),
        Variant(FLASH4_HOPPER, Flash4.of, "flash-attn 4 on Hopper", PACKAGE4, _PATTERNS, scratch_bytes),
        Variant(FLASH3, Flash3.of, "flash-attn 3", PACKAGE3, _PATTERNS, scratch_bytes),
        Variant(FLASH2, Flash2.of, "flash-attn 2", PACKAGE2, _PATTERNS, scratch_bytes),
    ),
    version,
)

name, refusals = BACKEND.name, BACKEND.refusals
flops, workspace_bytes, run, partial = BACKEND.flops, BACKEND.workspace_bytes, BACKEND.run, BACKEND.partial
