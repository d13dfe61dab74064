"""Block sizes of the Triton kernels by GPU, dtype and head_dim, and the shared memory they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from attn_dispatch.spec.problem import Problem

Kernel = Literal["forward", "backward_q", "backward_kv"]

LEAST_SHARED = 99 * 2**10  #: bytes of shared memory per thread block on every device from capability 8.0 on
SMALLEST_SIDE = 16  #: of a block, and head_dim: the least for tl.dot
HEAD_DIM_LIMIT = 256  #: of a larger one no block's sums fit into registers

#: Capabilities whose tensor cores multiply tf32 at several times the rate of exact float32. On the others (GeForce and
#: the like) three products of tf32 take longer than an exact one.
TF32_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Rows and columns of a block of scores, and Triton's launch options."""

    rows: int
    columns: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}, {self.warps} warps, {self.stages} stages"


#: Fields of `BlockConfig`s in order of preference, by the largest head_dim they are for.
Blocks = dict[int, list[tuple[int, int, int, int]]]

WGMMA = (9, 10)  #: major capabilities whose warp groups multiply from shared memory

#: 16-bit dtypes. On WGMMA capabilities: the fastest of those that `tools.checks.gpu_check` times on an H100, by the
#: geometric mean over dense, causal and dilated attention. On others, not measured: those that spill nothing in the
#: main loop by `tools/results/kernels_compiled.json`, of similar ones the faster on the H100. Those of 96
#: and 192, on all not measured, are for sums of two powers of two (`parts_of`), which take less than the next power.
HALF: dict[bool, dict[Kernel, Blocks]] = {
    True: {
        "forward": {
            64: [(64, 128, 4, 3), (64, 64, 4, 3)],
            96: [(128, 64, 8, 3), (64, 64, 4, 3)],  # 128 x 128 spills in the main loop
            128: [(128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2)],
            256: [(128, 32, 8, 3), (64, 32, 4, 3), (32, 32, 4, 2)],
        },
        "backward_q": {
            64: [(64, 64, 4, 3), (64, 64, 4, 2)],
            128: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)],
            256: [(128, 32, 8, 2), (64, 32, 4, 3), (32, 32, 4, 2)],
        },
        "backward_kv": {
            64: [(64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
            128: [(64, 64, 4, 2), (64, 32, 4, 3)],
            256: [(64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)],
        },
    },
    False: {
        "forward": {
            64: [(128, 64, 4, 3), (64, 64, 4, 3)],
            96: [(128, 32, 4, 3), (64, 32, 4, 2)],
            128: [(128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2)],
            192: [(64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
            256: [(64, 32, 4, 2), (32, 32, 4, 2)],
        },
        "backward_q": {
            64: [(128, 32, 4, 3), (64, 64, 4, 3)],
            96: [(128, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
            128: [(64, 64, 4, 2), (64, 32, 4, 2)],
            192: [(64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
            256: [(64, 64, 8, 2), (32, 32, 4, 2)],
        },
        "backward_kv": {
            64: [(128, 32, 4, 2), (64, 32, 4, 2)],
            80: [(64, 32, 4, 2)],  # 64 x 64 spills in the main loop on 12.0
            96: [(64, 64, 4, 2), (64, 32, 4, 2)],
            128: [(64, 32, 4, 2)],
            192: [(32, 64, 4, 2), (32, 32, 4, 2)],
            256: [(32, 32, 4, 2)],
        },
    },
}

# float32, for every kernel. Exact products hold their operands in registers. Up to head_dim 128 the first blocks are
# the fastest, or within a tenth of it, of those that `tools.checks.gpu_check` times on an H100, for each kernel.
_EXACT: Blocks = {
    64: [(32, 32, 4, 2)],
    128: [(32, 32, 4, 2), (32, 32, 8, 2), (32, 16, 8, 2)],
    256: [(32, 16, 8, 2), (16, 16, 4, 2)],  # with one stage backward_q spills most of what it holds
}
_TF32: Blocks = {
    64: [(128, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2)],
    128: [(32, 32, 4, 2), (32, 16, 4, 2)],
    256: [(16, 32, 4, 2), (16, 16, 4, 2)],
}
# Not measured: three products from registers spill most of what they hold in larger blocks.
_THREE_FROM_REGISTERS = _TF32 | {64: [(128, 16, 8, 2), (64, 16, 4, 2), (32, 32, 4, 2)]}
#: float32, by `input_precision` and whether the capability is one of WGMMA.
SINGLE: dict[str, dict[bool, Blocks]] = {
    "ieee": {True: _EXACT, False: _EXACT},
    "tf32": {True: _TF32, False: _TF32},
    "tf32x3": {True: _TF32, False: _THREE_FROM_REGISTERS},
}


def precision(problem: Problem) -> str:
    """`input_precision` of float32 products.

    tf32x3 adds three products of tf32 numbers to about float32's error.
    """
    if problem.matmul_precision != "highest":
        return "tf32"
    exact = problem.device.type != "cuda" or torch.cuda.get_device_capability(problem.device) not in TF32_CAPABILITIES
    return "ieee" if exact else "tf32x3"


def blocks_for(kernel: Kernel, problem: Problem, single: Blocks | None = None) -> tuple[BlockConfig, ...]:
    """The blocks of a kernel on the problem's GPU, in order of preference; `single`: for float32, if others."""
    wgmma = torch.cuda.get_device_capability(problem.device)[0] in WGMMA
    of_single = single or SINGLE[precision(problem)][wgmma]
    table = of_single if problem.dtype == torch.float32 else HALF[wgmma][kernel]
    listed = table[min(limit for limit in table if limit >= problem.head_dim)]
    return tuple(BlockConfig(*each) for each in listed)


def multiplies_from_registers(problem: Problem) -> bool:
    """Whether a warp's products take both operands from its registers, on the problem's GPU."""
    if problem.device.type != "cuda" or torch.cuda.get_device_capability(problem.device)[0] in WGMMA:
        return False
    return problem.dtype != torch.float32 or precision(problem) == "ieee"


def shared_limit(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED))


def clipped(block: BlockConfig, rows: int, columns: int | None = None) -> BlockConfig:
    """The block limited to `rows` and `columns`; with 4 warps if that reduces its rows."""
    across = block.columns if columns is None else min(block.columns, columns)
    return BlockConfig(min(block.rows, rows), across, block.warps if block.rows <= rows else 4, block.stages)


def padded(head_dim: int) -> int:
    """head_dim rounded up to a power of two, at least SMALLEST_SIDE."""
    return max(SMALLEST_SIDE, next_power_of_two(head_dim))


def parts_of(head_dim: int) -> tuple[int, int]:
    """head_dim rounded up to the sum of two powers of two of at least SMALLEST_SIDE, the second smaller, or 0.

    A product of both takes as many instructions as their sum has dims: of 96 dims three quarters of those of 128.
    """
    whole = padded(head_dim)
    first, rest = whole // 2, padded(max(0, head_dim - whole // 2))
    return (first, rest) if rest < first else (whole, 0)


def next_power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least else 0
