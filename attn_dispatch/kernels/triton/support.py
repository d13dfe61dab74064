"""What every backend of Triton's kernels needs: what it refuses, blocks that fit, launches.

Where TRITON_INTERPRET=1 was set before triton was first imported, its interpreter runs the same kernels on a CPU: a
check of results that takes thousands of times as long.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels.contract import Refusal, refuse_dropout, refuse_dtype, refuse_pattern, refuse_ranks
from attn_dispatch.kernels.triton.work_list import Side
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED_DTYPES = (torch.float16, torch.float32)  #: numpy has no bfloat16; the interpreter multiplies its bits
LEAST_CAPABILITY = (8, 0)  #: the first with bfloat16 products and asynchronous copies, which the blocks are made for
LEAST_SHARED = 99 * 2**10  #: bytes that a block of threads may ask for, on every device from capability 8.0 on
HEAD_DIM_LIMIT = 256  #: of more, no block's sums fit into registers
POSITION_LIMIT = 2**30  #: queries and keys; sums of positions are kept in 32 bits
SMALLEST_SIDE = 16  #: of a block, and of head_dim: Triton's products take no less

logger = logging.getLogger("attn_dispatch")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows and columns of the scores that are held at once, and Triton's launch options."""

    rows: int
    columns: int
    warps: int
    stages: int


# Exact float32 products run without tensor cores and hold their operands in registers, in every kernel.
SINGLE = {
    64: (Block(32, 32, 4, 2),),
    128: (Block(32, 32, 8, 2), Block(32, 16, 8, 2)),
    256: (Block(32, 16, 8, 1), Block(16, 16, 4, 1)),
}


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A kernel and its module, what its rows are, tiles of rows it keeps, products per score, and its blocks.

    Blocks for 16 bits, and `single` for float32, are listed by the largest head_dim they are for, the preferred first:
    as large as the registers of 8.0 and 9.0 hold with little or no spilling, after what ptxas reports.
    """

    kernel: str
    module: str
    side: Side
    kept: int
    products: int
    blocks: dict[int, tuple[Block, ...]]
    single: dict[int, tuple[Block, ...]]

    def load(self) -> Any:
        """The kernel, which imports triton."""
        return getattr(import_module(f"attn_dispatch.kernels.triton.{self.module}"), self.kernel)


def passes_of(kernels: str, gradients: str, single: dict[int, tuple[Block, ...]] = SINGLE) -> tuple[Pass, Pass, Pass]:
    """`forward` of one module, `backward_q` and `backward_kv` of another."""
    return (
        Pass(
            "forward",
            kernels,
            "queries",
            kept=1,
            products=2,
            blocks={
                64: (Block(128, 64, 8, 3), Block(64, 64, 4, 3)),
                128: (Block(128, 64, 8, 3), Block(128, 32, 8, 2), Block(64, 32, 4, 2)),
                256: (Block(64, 64, 8, 2), Block(64, 32, 8, 2), Block(32, 32, 4, 2)),
            },
            single=single,
        ),
        Pass(
            "backward_q",
            gradients,
            "queries",
            kept=2,
            products=3,
            blocks={
                64: (Block(128, 64, 8, 3), Block(64, 64, 4, 3)),
                128: (Block(128, 64, 8, 2), Block(128, 32, 8, 2), Block(64, 32, 4, 2)),
                256: (Block(64, 64, 8, 2), Block(64, 32, 8, 2), Block(32, 32, 4, 2)),
            },
            single=single,
        ),
        Pass(
            "backward_kv",
            gradients,
            "keys",
            kept=2,
            products=4,
            blocks={
                64: (Block(64, 64, 8, 2), Block(64, 32, 4, 2)),
                128: (Block(64, 64, 8, 2), Block(64, 32, 8, 2)),
                256: (Block(32, 64, 8, 2), Block(32, 32, 8, 2)),
            },
            single=single,
        ),
    )


def version() -> str:
    return metadata.version("triton")


def interpreting() -> bool:
    """Whether Triton's interpreter was asked for."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusals(problem: Problem, patterns: tuple[type[Pattern], ...]) -> list[Refusal]:
    """Every reason but those of one kernel's lists."""
    found = refuse_ranks(problem) + refuse_dropout(problem) + refuse_pattern(problem, patterns)
    if find_spec("triton") is None:
        found.append(Refusal("not_installed", "package triton is not installed (pip install 'attn-dispatch[triton]')"))
    found += _refuse_device(problem)
    if problem.head_dim > HEAD_DIM_LIMIT:
        found.append(Refusal("head_dim", f"has blocks up to head_dim {HEAD_DIM_LIMIT}, not {problem.head_dim}"))
    positions = problem.q_len + problem.k_len
    if positions > POSITION_LIMIT:
        found.append(Refusal("length", f"counts up to {POSITION_LIMIT} queries and keys, not {positions}"))
    return found


def _refuse_device(problem: Problem) -> list[Refusal]:
    if problem.device.type == "cpu" and interpreting():
        return refuse_dtype(problem, INTERPRETED_DTYPES)
    found = refuse_dtype(problem, DTYPES)
    if problem.device.type != "cuda":
        return [*found, Refusal("device", f"runs on cuda, not {problem.device.type}")]
    capability = torch.cuda.get_device_capability(problem.device)
    if capability < LEAST_CAPABILITY:
        has, least = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        found.append(Refusal("capability", f"needs CUDA capability {least}, {problem.device} has {has}"))
    return found


def fitting(each: Pass, problem: Problem) -> tuple[Block, ...]:
    """The blocks for a problem on CUDA that fit into shared memory, the preferred first; the smallest if none does."""
    table = each.single if problem.dtype == torch.float32 else each.blocks
    listed = table[min(limit for limit in table if limit >= problem.head_dim)]
    limit = _shared_limit(problem.device)
    return tuple(block for block in listed if shared_bytes(each, problem, block) <= limit) or listed[-1:]


def _shared_limit(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED))


def shared_bytes(each: Pass, problem: Problem, block: Block) -> int:
    """Upper bound of the shared memory a block takes: rows that are kept, columns in flight, scores on their way."""
    streamed = 2 * block.columns * block.stages
    return problem.dtype.itemsize * (
        block_d(problem) * (each.kept * block.rows + streamed) + block.rows * block.columns
    )


def cut(block: Block, rows: int, columns: int | None = None) -> Block:
    """With no more than so many rows and columns, and fewer warps where rows are fewer."""
    across = block.columns if columns is None else min(block.columns, columns)
    return Block(min(block.rows, rows), across, block.warps if block.rows <= rows else 4, block.stages)


def given(grad: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of out, zeros that take no memory where there is none."""
    return torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape) if grad is None else grad


def launch(kernel: str, blocks: Sequence[Block], device: torch.device, start: Callable[[Block], None]) -> None:
    """Start a kernel with the first block that fits."""
    errors: Any = import_module("triton.runtime.errors")
    *first, last = blocks
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for block in first:
            # A release of Triton may need more than was estimated, and says so once it has compiled.
            try:
                start(block)
            except errors.OutOfResources as error:
                logger.debug("%s with %s: %s", kernel, block, error)
            else:
                return
        start(last)


def block_d(problem: Problem) -> int:
    """head_dim as kernels have it."""
    return max(SMALLEST_SIDE, power_of_two(problem.head_dim))


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least else 0


def precision(problem: Problem) -> str:
    """Of float32 products."""
    return "ieee" if problem.matmul_precision == "highest" else "tf32"


def float32(scale: float) -> float:
    """The scale as kernels take it; what is less or more than float32's normal numbers would be passed as float64."""
    limits = torch.finfo(torch.float32)
    return math.copysign(min(abs(scale), limits.max / 2), scale) if abs(scale) >= limits.tiny else 0.0
