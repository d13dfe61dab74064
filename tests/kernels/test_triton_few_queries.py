"""The triton backend on few queries at the end of many keys, which are read in parts."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.backends import triton
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.triton.work_list import key_parts
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_triton import interpreted
from tests.support.compiling import compiled, run_alone
from tests.support.pairwise import thinned

FEW = (
    Case("one", Dense(is_causal=True), (2, 1, 8, 16), k_len=200, kv_heads=2),
    Case("some", Dense(is_causal=True), (1, 5, 6, 24), k_len=333, kv_heads=2, scale=-0.3),
    Case("all-keys", Dense(), (1, 3, 2, 16), k_len=100),
    Case("masked", Dense(is_causal=True), (2, 2, 4, 16), k_len=120, kv_heads=1, key_mask=True),
    Case("window", Window(70, 0), (1, 4, 4, 16), k_len=300, kv_heads=2),
    Case("ahead", Window(None, 1), (1, 4, 4, 16), k_len=300, kv_heads=2),
    Case("short", Window(3, 0), (1, 7, 2, 16), k_len=9),
    Case("no-scale", Dense(), (1, 2, 2, 16), k_len=70, scale=0.0),
)


@interpreted
@pytest.mark.usefixtures("triton_interpreter")
@thinned(("case", "dtype"), zip(FEW, cycle((torch.float32, torch.float16, torch.float16))), 3)
def test_keys_of_few_queries_in_parts(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case.problem(dtype, needs_grad=True)
    parts = key_parts(problem)
    assert parts is not None
    assert (parts.parts > 1) == (parts.end - parts.first > 7 * parts.columns)
    gate = Oracle.of(make(problem))
    found = gate.run(registry.load("triton"))
    assert gate.check(found).failures == ()
    monkeypatch.setattr(triton, "needs_wide_offsets", lambda tensors: True)
    assert torch.equal(gate.run(registry.load("triton"))["out"], found["out"])


def test_which_keys_are_read_in_parts() -> None:
    def parts(pattern: Pattern, q_len: int, k_len: int, heads: int = 2) -> Any:
        return key_parts(
            Case("few", pattern, (1, q_len, heads, 16), k_len=k_len, kv_heads=2).problem(
                torch.float32, needs_grad=False
            )
        )

    assert parts(Dense(), 17, 100) is None
    assert parts(Dense(), 4, 100, heads=10) is None
    assert parts(Dense(), 4, 4) is None
    assert parts(Dilated((16,), (2,)), 1, 100) is None
    assert parts(Window(9, 0), 2, 100)[:2] == (89, 100)
    assert parts(Window(None, 0), 2, 100)[:2] == (0, 100)
    for k_len in range(2, 700, 7):
        found = parts(Dense(), 1, k_len)
        assert (found.parts - 1) * found.share < k_len <= found.parts * found.share
        assert found.share % found.columns == 0


COMPILE_FEW_QUERIES = """
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_dispatch.kernels.triton import few_queries

TYPES = {"lse": "*fp32", "sums": "*fp32", "maxima": "*fp32", "totals": "*fp32", "key_mask": "*u8", "scale": "fp32"}
SIZES = {("*bf16", 64): 128, ("*bf16", 128): 64, ("*bf16", 256): 32, ("*fp32", 128): 32, ("*fp32", 256): 16}
for (capability, wide), ((kind, width), columns) in product(((80, False), (90, True), (120, False)), SIZES.items()):
    constants = {"GROUP": 2, "HEAD_DIM": width, "BLOCK_D": width, "ROWS": 16, "COLUMNS": columns, "SPLITS": 32}
    constants["WIDE"] = wide
    constants["PRECISION"] = "tf32x3" if kind == "*fp32" and capability != 120 else "ieee"
    for kernel, stages in ((few_queries.part, 2), (few_queries.join, 3)):
        own = {name: value for name, value in constants.items() if name in kernel.arg_names}
        own |= {name: 1 for name in kernel.arg_names if name.endswith("_d")}
        types = dict.fromkeys(("q", "k", "v", "out"), kind) | TYPES
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in own}
        source = ASTSource(kernel, signature | dict.fromkeys(own, "constexpr"), constexprs=own)
        options = {"num_warps": 4, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
        assert made.metadata.shared <= 99 * 1024, (capability, kind, width, made.metadata.shared)
"""


@compiled
@pytest.mark.full
def test_kernels_of_few_queries_compile_without_a_gpu(tmp_path: Path) -> None:
    """For every block size, in the shared memory that every device has."""
    run_alone(COMPILE_FEW_QUERIES, tmp_path)
