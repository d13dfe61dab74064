"""Triton's kernels compiled to a GPU's machine code, without a GPU.

In a process of its own: where there is no GPU, conftest.py has given the kernels of this one to the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.kernels.triton.blocks import HALF, WGMMA
from attn_dispatch.kernels.triton.support import TritonKernel, shared_bytes
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
from tests.support.processes import printed

compiled = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

PROBLEM = Case("compiled", Dense(), (1, 64, 2, 60)).problem(torch.bfloat16, needs_grad=True)
POINTERS = dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), "*bf16")
POINTERS |= dict.fromkeys(("lse", "grad_lse", "scaled_lse", "delta"), "*fp32") | {"seq_lens": "*i64", "key_mask": "*u8"}
LISTS = {"tiles", "runs", "first_tile", "kind_of", "row_pos", "column_pos", "masks", "reach"}


def run_alone(code: str, cache: Path) -> None:
    """Run `code`, which calls `compile_for`, with an empty folder of Triton's for its cache."""
    printed("-W", "ignore", "-c", code, TRITON_CACHE_DIR=str(cache))


def compile_for(each: TritonKernel, capability: int, lists: Mapping[str, str], more: Mapping[str, Any]) -> None:
    """In the preferred block of head_dim 60: to machine code, in no more shared memory than was estimated.

    `lists` are the types of pointers to its lists, those left out None; `more` its constants beyond those of every
    kernel, or in place of those, such as another HEAD_DIM.
    """
    triton: Any = import_module("triton")
    compiler: Any = import_module("triton.compiler")
    kernel, block = each.load(), HALF[capability // 10 in WGMMA][each.kernel][64][0]
    constants: dict[str, Any] = {"ROWS": block.rows, "COLUMNS": block.columns, "PRECISION": "ieee", "WIDE": False}
    constants |= {"GROUP": 2, "HEAD_DIM": 60, "BLOCK_D": 64, "REST_D": 0, "TILE": 0, "BRANCHES": 0, "AXES": 0}
    constants |= dict.fromkeys(LISTS - lists.keys(), None) | dict(more)
    # The last stride is 1 in nearly every call, and a constant then.
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("_d")}
    types = POINTERS | {"scale": "fp32"} | dict(lists)
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        source = compiler.ASTSource(kernel, signature, constants=constants)
    else:
        source = compiler.ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    target = import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": block.warps, "num_stages": block.stages})
    assert made.asm["cubin"]
    estimate = shared_bytes(each, replace(PROBLEM, head_dim=constants["HEAD_DIM"]), block)
    assert made.metadata.shared <= estimate, (each.kernel, capability, made.metadata.shared, estimate)
