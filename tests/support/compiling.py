"""Triton's kernels compiled to a GPU's machine code, without a GPU.

In a process of its own: where there is no GPU, conftest.py has given the kernels of this one to the interpreter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.kernels.triton.blocks import HALF, WGMMA, BlockConfig
from attn_dispatch.kernels.triton.passes import Tables
from attn_dispatch.kernels.triton.support import Meta, Terms, TritonKernel, launch, missing, shared_bytes
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
from tests.support.processes import printed
from tools.bench.kernels_compiled import gpu

compiled = pytest.mark.skipif(bool(missing()), reason="Triton is not installed")

PROBLEM = Case("compiled", Dense(), (1, 64, 2, 60)).problem(torch.bfloat16, needs_grad=True)
ROWS, SUMS = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
LENGTHS, BYTES = ROWS.long(), ROWS.byte()
TENSORS = {
    "forward": (*[ROWS] * 4, SUMS),
    "backward_q": (*[ROWS] * 5, *[SUMS] * 4, ROWS),
    "backward_kv": (*[ROWS] * 4, SUMS, SUMS, ROWS, ROWS),
}
TERMS = Terms(0.5, 2.0, SUMS, ROWS, LENGTHS, 6554, 1.5, 630, 315, 105, 1)
TABLES: Any = dict.fromkeys(Tables._fields, torch.empty(1, dtype=torch.int32))
TABLES |= {"masks": BYTES, "counts": BYTES, "block_at": torch.empty(1, dtype=torch.int64)}


def run_alone(code: str, cache: Path) -> None:
    """Run `code`, which calls `compile_for`, with an empty folder of Triton's for its cache."""
    printed("-W", "ignore", "-c", code, TRITON_CACHE_DIR=str(cache))


def compile_alone(kernel: Any, capability: int, *given: Any) -> Any:
    """What `support.launch` would launch on a GPU, compiled to its machine code."""
    compiler: Any = defaultdict(lambda: partial(kernel.warmup, grid=(1,)))
    with gpu(capability):
        return launch(compiler, 1, torch.device("cpu"), *given).compiled


def compile_for(each: TritonKernel, capability: int, lists: tuple[str, ...], low: Any = None, **more: Any) -> None:
    """In the preferred block of head_dim 60: to machine code, in no more shared memory than was estimated.

    `lists` are the names of the tables that there are, `more` the `Meta` beyond that of every kernel, or in its place.
    """
    block = BlockConfig(*HALF[capability // 10 in WGMMA][each.kernel][64][0])
    tensors = (*TENSORS[each.kernel], LENGTHS, BYTES)
    meta = Meta(2, 60, 64, 0, block.rows, block.columns)._replace(**more)
    there: Any = {name: TABLES[name] for name in lists}
    tables = Tables(*map(there.get, Tables._fields))
    strides = [(630, 315, 105, 1)] * (3 if each.kernel == "forward" else 4)
    others = (tables, *strides, 2, 3, 1, 64, 64, low, 0, TERMS)
    made = compile_alone(each.load(), capability, tensors, others, meta, block.warps, block.stages)
    estimate = shared_bytes(each, replace(PROBLEM, head_dim=meta.HEAD_DIM), block)
    assert made.metadata.shared <= estimate, (each.kernel, capability, made.metadata.shared, estimate)
