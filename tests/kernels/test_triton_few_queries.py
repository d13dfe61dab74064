"""The triton backend on few queries at the end of many keys, which are read in parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.work_list import key_parts
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing import optional
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_triton import TERMS, interpreted
from tests.support.compiling import compiled, run_alone
from tests.support.pairwise import thinned

FEW = (
    Case("one", Dense(is_causal=True), (2, 1, 4, 16), k_len=150, kv_heads=1),
    Case("some", Dense(is_causal=True), (1, 5, 6, 24), k_len=333, kv_heads=2, scale=-0.3),
    Case("all-keys", Dense(), (1, 3, 2, 16), k_len=100),
    Case("masked", Dense(is_causal=True), (2, 2, 4, 16), k_len=120, kv_heads=1, key_mask=True),
    Case("window", Window(70, 0), (1, 4, 4, 16), k_len=300, kv_heads=2),
    Case("ahead", Window(None, 1), (1, 4, 4, 16), k_len=300, kv_heads=2),
    Case("short", Window(3, 0), (1, 7, 2, 16), k_len=9),
    Case("no-scale", Dense(), (1, 2, 2, 16), k_len=70, scale=0.0),
    Case("17-lanes", Dense(is_causal=True), (2, 17, 2, 80), k_len=120, key_mask=True),
    Case("16-lanes", Window(70, 0), (1, 4, 8, 80), k_len=200, kv_heads=2, key_mask=True),
    Case("33-lanes", Window(100, None), (1, 11, 6, 16), k_len=333, kv_heads=2),
    Case("64-lanes", Dense(is_causal=True), (1, 8, 16, 256), k_len=400, kv_heads=2, key_mask=True),
    Case("1-lane", Dense(), (1, 1, 2, 256), k_len=90),
)


@interpreted
@pytest.mark.usefixtures("triton_interpreter")
@thinned(("case", "dtype", "terms"), zip(FEW, cycle((torch.float32, torch.float16, torch.float16)), cycle(TERMS)), 4)
def test_few_queries_in_parts(case: Case, dtype: torch.dtype, terms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(case.problem(dtype, needs_grad=True), **TERMS[terms])
    parts = key_parts(problem)
    assert parts is not None
    assert parts.rows >= problem.heads // problem.kv_heads * problem.q_len
    assert (parts.parts > 1) == (parts.end - parts.first > parts.rows)
    gate = Oracle.of(make(problem))
    found = gate.run(registry.load("triton"))
    assert gate.check(found).failures == ()
    rows = optional.problem_of_key_lens(registry.load("triton"), problem)
    assert (rows is None) == bool(problem.bias or problem.alibi_axes)
    assert rows is None or optional.key_lens_failures(registry.load("triton"), rows) == []
    monkeypatch.setattr(support, "needs_wide_offsets", lambda tensors: True)
    assert torch.equal(gate.run(registry.load("triton"))["out"], found["out"])


@interpreted
@pytest.mark.usefixtures("triton_interpreter")
def test_slopes_count_from_the_end_of_a_row() -> None:
    problem = replace(
        Case("", Dense(True), (2, 2, 4, 16), k_len=70).problem(torch.float16, needs_grad=False), alibi_axes=1
    )
    whole, lens = make(problem), torch.full((2,), 50)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Problem, **given: torch.Tensor) -> Any:
        return registry.load("triton").run(q, whole.k, whole.v, problem, key_lens=lens, **given)

    part = replace(whole, problem=replace(problem, k_len=50), k=whole.k[:, :50], v=whole.v[:, :50])
    oracle = Oracle.of(part)
    assert oracle.check(oracle.run(adapted(SimpleNamespace(run=run)))).failures == ()


def test_which_keys_are_read_in_parts() -> None:
    def parts(pattern: Pattern, q_len: int, k_len: int, heads: int = 2, dtype: torch.dtype = torch.float16) -> Any:
        case = Case("few", pattern, (1, q_len, heads, 16), k_len=k_len, kv_heads=2)
        return key_parts(case.problem(dtype, needs_grad=False))

    assert parts(Dense(), 65, 100) is None
    assert parts(Dense(), 13, 100, heads=10) is None
    assert parts(Dense(), 17, 100, dtype=torch.float32) is None
    assert parts(Dense(), 4, 4) is None
    assert parts(Dilated((16,), (2,)), 1, 100) is None
    assert parts(Window(9, 0), 2, 100)[:2] == (89, 100)
    assert parts(Window(None, 0), 2, 100)[:2] == (0, 100)
    for k_len in range(2, 700, 7):
        found = parts(Dense(), 1, k_len)
        assert (found.parts - 1) * found.share < k_len <= found.parts * found.share
        assert found.share % found.columns == 0


#: Programs on 132 multiprocessors, by batch, q_len, heads, kv_heads, k_len and head_dim.
PROGRAMS = {
    (1, 1, 32, 8, 2**15, 128): 256,
    (1, 4, 64, 8, 2**15, 128): 256,
    (1, 16, 32, 8, 2**15, 128): 256,
    (8, 1, 32, 8, 2**15, 128): 320,
    (64, 1, 32, 8, 2**15, 128): 512,
    (1, 1, 8, 1, 2**13, 256): 256,
    (1, 1, 32, 8, 2**10, 128): 128,
    (1, 8, 32, 4, 2**10, 256): 64,  # 64 keys a part: fewer would be less than it writes
    (1, 1, 4, 4, 100, 64): 4,
}


def test_programs_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """About two for each multiprocessor, where there are keys enough."""
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    found = {}
    for batch, q_len, heads, kv_heads, k_len, head_dim in PROGRAMS:
        case = Case("decoding", Dense(is_causal=True), (batch, q_len, heads, head_dim), k_len=k_len, kv_heads=kv_heads)
        parts = key_parts.__wrapped__(case.problem(torch.bfloat16, needs_grad=False, device="cuda:0"))
        assert parts is not None
        found[batch, q_len, heads, kv_heads, k_len, head_dim] = batch * kv_heads * parts.parts
    assert found == PROGRAMS


COMPILE_FEW_QUERIES = """
from dataclasses import replace
from itertools import cycle

import torch

from attn_dispatch.kernels.triton import few_queries
from attn_dispatch.kernels.triton.support import Meta
from tests.support.compiling import BYTES, LENGTHS, SUMS, TERMS, compile_alone

SIZES = {(torch.bfloat16, 64): 128, (torch.bfloat16, 128): 64, (torch.bfloat16, 256): 32}
SIZES |= {(torch.float32, 128): 32, (torch.float32, 256): 16}
DEVICES = ((80, False, 64), (90, True, 32), (120, False, 64))
for (capability, wide, rows), ((dtype, width), columns) in zip(cycle(DEVICES), SIZES.items()):
    rows, columns = (16, columns) if dtype == torch.float32 else (rows, min(columns, 4096 // rows))
    precision = "tf32x3" if dtype == torch.float32 and capability != 120 else "ieee"
    meta = Meta(2, width, width, 0, rows, columns, PRECISION=precision, WIDE=wide)
    x, strides, warps = torch.empty(1, dtype=dtype), (64, 32, 16, 1), 8 if rows > 32 else 4
    lens = None if wide else LENGTHS
    part = (x, x, x, SUMS, SUMS, SUMS, BYTES, lens), (*[strides] * 3, 2, 3, 5, 7, 9, 0, 9, -9, 0, TERMS), meta, warps, 2
    join = (SUMS, SUMS, SUMS, x, SUMS), (2, 3, 7), meta, warps
    for kernel, given in ((few_queries.part, part), (few_queries.join, join)):
        made = compile_alone(kernel, capability, *given)
        assert made.asm["cubin"]
        assert made.metadata.shared <= 99 * 1024, (capability, dtype, width, made.metadata.shared)
"""


@compiled
@pytest.mark.full
def test_kernels_of_few_queries_compile_without_a_gpu(tmp_path: Path) -> None:
    """For every block size, in the shared memory that every device has."""
    run_alone(COMPILE_FEW_QUERIES, tmp_path)
