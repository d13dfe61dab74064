"""Blocks of the Triton kernels: which fit, in which order, what they are compiled to, and the version of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.backends import triton, triton_tiles
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.blocks import HEAD_DIM_LIMIT, SMALLEST_SIDE, BlockConfig, padded, parts_of, precision
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make
from tests.kernels.test_triton import CUDA, fake_gpu, interpreted
from tests.support.cases import failures
from tests.support.compiling import compiled, run_alone
from tests.support.distributions import skip_without


@pytest.fixture(autouse=True)
def _fresh_blocks() -> Iterator[None]:
    yield
    triton.block_configs.cache_clear()


@pytest.mark.parametrize("shared", [99 * 2**10, 163 * 2**10, 227 * 2**10])
@pytest.mark.parametrize("dtype", support.LIMITS.dtypes, ids=str)
@pytest.mark.parametrize("head_dim", [1, 16, 64, 96, 100, 128, 192, 256])
def test_blocks_fit(head_dim: int, dtype: torch.dtype, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0), shared)
    problem = replace(CUDA, head_dim=head_dim, dtype=dtype)
    for each in (triton.FORWARD, triton.BACKWARD_Q, triton.BACKWARD_KV):
        found = triton.block_configs(each, problem)
        assert found
        for block in found:
            assert support.shared_bytes(each, problem, block) <= shared
            assert min(block.rows, block.columns) >= 16
            assert block.rows & (block.rows - 1) == 0


def test_short_segments_get_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    problem = replace(CUDA, pattern=Dilated((64, 128), (1, 2)))
    assert {block.rows for block in triton.block_configs(triton.FORWARD, problem)} == {32}


def test_a_block_that_needs_too_much_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    large, small = BlockConfig(128, 128, 8, 3), BlockConfig(64, 64, 4, 2)
    started = []

    def start(block: BlockConfig) -> None:
        started.append(block)
        if block == large:
            raise errors.OutOfResources(2**20, 2**18, "shared memory")

    here = replace(CUDA, device=torch.device("cpu"))
    for problem in (here, here, replace(here, dtype=torch.float16)):
        support.in_fitting_block(triton.FORWARD, problem, (large, small), start)
    assert started == [large, small, small, large, small]


def test_products_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(CUDA, dtype=torch.float32)
    for capability, expected in (((8, 0), "tf32x3"), ((8, 6), "ieee"), ((9, 0), "tf32x3"), ((12, 0), "ieee")):
        fake_gpu(monkeypatch, capability)
        assert precision(problem) == expected
        assert precision(replace(problem, matmul_precision="high")) == "tf32"
    assert precision(replace(problem, device=torch.device("cpu"))) == "ieee"


def test_products_from_registers_have_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products of an H100's block spill 11 KiB a thread on 8.0."""
    problem = replace(CUDA, head_dim=64, dtype=torch.float32)
    first = []
    for capability, shared in (((8, 0), 163 * 2**10), ((9, 0), 227 * 2**10)):
        fake_gpu(monkeypatch, capability, shared)
        first.append(triton.block_configs(triton.BACKWARD_Q, problem)[0])
    assert first == [BlockConfig(128, 16, 8, 2), BlockConfig(128, 64, 8, 2)]


@pytest.mark.parametrize(
    ("each", "head_dim", "dtype", "first"),
    [
        (triton.BACKWARD_Q, 128, torch.bfloat16, BlockConfig(64, 64, 4, 2)),
        (triton.FORWARD, 256, torch.bfloat16, BlockConfig(64, 32, 4, 2)),
        (triton.BACKWARD_Q, 256, torch.float32, BlockConfig(32, 16, 8, 2)),
    ],
)
def test_a_stage_in_registers_takes_no_shared_memory(
    each: Any, head_dim: int, dtype: torch.dtype, first: BlockConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs with 99 KiB, blocks that fit and would not, were all stages in shared memory."""
    problem = replace(CUDA, head_dim=head_dim, dtype=dtype)
    fake_gpu(monkeypatch, (8, 6), 99 * 2**10)
    assert triton.block_configs(each, problem)[0] == first
    there = support.shared_bytes(each, problem, first)
    fake_gpu(monkeypatch, (9, 0))
    assert there <= 99 * 2**10 < support.shared_bytes(each, problem, first)


@pytest.mark.parametrize(
    ("stride", "wide"), [((2**31 - 64) // 2 // 16 * 16, False), (2**30, True)], ids=["32-bit", "64-bit"]
)
def test_wide_offsets(stride: int, wide: bool) -> None:
    x = torch.empty_strided((1, 3, 2, 16), (3 * stride, stride, 16, 1), dtype=torch.float16, device="meta")
    y = torch.empty(1, 3, 2, 16, dtype=torch.float16, device="meta")
    assert support.needs_wide_offsets((y, x)) == wide


@pytest.mark.parametrize(("backend", "enter"), [(triton, "run"), (triton, "partial"), (triton_tiles, "run")])
def test_a_strided_mask_is_copied(backend: Any, enter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels know no strides of it."""
    passes: list[Any] = []
    monkeypatch.setattr(backend, "Hidden", SimpleNamespace(of=lambda *_, **more: SimpleNamespace(around=passes.append)))
    x, mask = torch.zeros(2, 32, 1, 16), torch.empty_strided((2, 32), (1, 2), dtype=torch.bool, device="meta")
    problem = Case("", Dilated((16,), (1,)), (2, 32, 1, 16), key_mask=True).problem(torch.float32, needs_grad=False)
    with suppress(AttributeError):  # nothing runs
        getattr(backend, enter)(*[x, x, x] * (enter == "run"), problem, key_mask=mask)
    assert passes[0].given.key_mask.stride() == (32, 1)


def test_the_version_changes_with_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skip_without("triton")
    before = triton.version()
    for path in Path(support.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(support, "__file__", str(tmp_path / "support.py"))
    support._digest.cache_clear()
    assert triton.version() == before
    (tmp_path / "forward.py").write_text("# another kernel")
    support._digest.cache_clear()
    assert triton.version() != before
    support._digest.cache_clear()


COMPILED: dict[str, str] = {}
COMPILED["triton"] = """
from attn_dispatch.backends.triton import BACKWARD_KV, BACKWARD_Q, FORWARD
from tests.support.compiling import compile_for

LISTS = "tiles", "runs", "first_tile", "kind_of"
for each, capability in ((FORWARD, 80), (BACKWARD_Q, 90), (BACKWARD_KV, 80)):
    compile_for(each, capability, LISTS, -9 if each is FORWARD else None)
    terms = dict.fromkeys(("SOFTCAP", "BIAS", "ALIBI", "DROPS"), True)
    compile_for(each, capability, LISTS, **terms, ROWS=64, COLUMNS=32)
"""
COMPILED["triton_tiles"] = """
from attn_dispatch.backends.triton_tiles import BACKWARD_KV, BACKWARD_Q, FORWARD
from tests.support.compiling import compile_for

SUM = {"HEAD_DIM": 80, "BLOCK_D": 64, "REST_D": 16}
CASES = ((FORWARD, 80, 0, {}), (FORWARD, 90, 2, {}), (BACKWARD_Q, 90, 1, {}), (BACKWARD_KV, 90, 0, {}))
CASES += ((FORWARD, 90, 0, SUM), (BACKWARD_Q, 80, 0, SUM), (BACKWARD_KV, 80, 0, SUM))
CASES += ((FORWARD, 90, 1, {"BY_ROW": True}), (BACKWARD_KV, 80, 1, {"BY_ROW": True}), (BACKWARD_KV, 90, 2, {}))
COMPUTED = "reach", "counts", "block_at"

for each, capability, branches, more in CASES:
    lists = "row_pos", "column_pos", "kind_of", "tiles", "runs", *(COMPUTED if branches else ["masks"])
    compile_for(each, capability, lists, TILE=128, BRANCHES=branches, AXES=branches, **more)
"""
#: For every block size, in the shared memory that every device has.
COMPILED["few queries"] = """
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
@pytest.mark.parametrize("code", COMPILED.values(), ids=COMPILED)
def test_kernels_compile_without_a_gpu(code: str, tmp_path: Path) -> None:
    """To machine code: the interpreter accepts code that the compiler rejects."""
    run_alone(code, tmp_path)


class Launched:
    """Stands for a kernel; notes the options of its launches."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **options: self.options.append(options)


@interpreted
@pytest.mark.parametrize(
    ("backend", "pattern", "q_len", "launches"),
    [(triton, Dense(), 64, 3), (triton, Dense(), 1, 2), (triton_tiles, Dilated((32, 64), (1, 2)), 64, 3)],
    ids=["triton", "few queries", "triton_tiles"],
)
def test_products_and_sums_are_fused(
    backend: Any, pattern: Pattern, q_len: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.10 does not fuse them unless it is told to."""
    kernel = Launched()
    monkeypatch.setattr(support.TritonKernel, "load", lambda self: kernel)
    for name in ("part", "join"):
        monkeypatch.setattr(f"attn_dispatch.kernels.triton.few_queries.{name}", kernel)
    case = Case("launched", pattern, (1, q_len, 2, 16), k_len=64)
    example = make(case.problem(torch.float32, needs_grad=q_len > 1))
    example.call(adapted(backend))()
    assert [options.get("enable_fp_fusion") for options in kernel.options] == [True] * launches


# --- a head_dim that is the sum of two powers of two ------------------------------------------------------------------

HEAD_DIMS = (80, 96, 160, 192)
DILATED = Dilated((16, 32), (1, 2), is_causal=True)
KINDS: dict[str, tuple[Any, Pattern]] = {
    "causal": (triton, Dense(is_causal=True)),
    "dilated": (triton, DILATED),
    "tiles": (triton_tiles, DILATED),
}


def test_parts_of_a_head_dim() -> None:
    found = {head_dim: parts_of(head_dim) for head_dim in (1, 17, 40, 64, 72, 80, 96, 112, 160, 192, 200, 256)}
    assert found == {
        1: (16, 0),
        17: (32, 0),  # 16 + 16 is no less
        40: (32, 16),
        64: (64, 0),
        72: (64, 16),
        80: (64, 16),
        96: (64, 32),
        112: (128, 0),
        160: (128, 32),
        192: (128, 64),
        200: (256, 0),
        256: (256, 0),
    }
    for head_dim in range(1, HEAD_DIM_LIMIT + 1):
        first, rest = parts_of(head_dim)
        assert head_dim <= first + rest <= padded(head_dim)
        assert first == padded(first)
        assert rest == 0 or SMALLEST_SIDE <= rest == padded(rest) < first


@pytest.mark.full
@interpreted
@pytest.mark.parametrize(
    ("masked", "kind", "head_dim"),
    [(True, "causal", 80), (False, "dilated", 96), (True, "tiles", 160), (True, "dilated", 192)],
)
def test_sums_of_two_powers(masked: bool, kind: str, head_dim: int) -> None:
    """Grouped heads, forward and backward, against float64."""
    backend, pattern = KINDS[kind]
    case = Case("sum", pattern, (1, 40, 4, head_dim), kv_heads=2, key_mask=masked, seq_lens=masked, scale=-0.3)
    assert failures(adapted(backend), case.problem(torch.float32, needs_grad=True)) == ()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_memory_is_that_of_both_parts(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    for each in (triton.FORWARD, triton.BACKWARD_Q, triton.BACKWARD_KV):
        whole = replace(CUDA, head_dim=padded(head_dim))
        block = triton.block_configs(each, whole)[0]
        scores = whole.dtype.itemsize * block.rows * block.columns
        needed = support.shared_bytes(each, replace(whole, head_dim=head_dim), block) - scores
        assert needed * padded(head_dim) == (support.shared_bytes(each, whole, block) - scores) * head_dim
