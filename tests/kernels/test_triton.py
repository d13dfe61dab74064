"""The triton backend beyond conformance: work lists, refusals, blocks, compiling for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from itertools import cycle, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_dispatch.backends import triton, triton_tiles
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.triton import support
from attn_dispatch.kernels.triton.blocks import BlockConfig
from attn_dispatch.kernels.triton.work_list import (
    Side,
    WorkList,
    _row_groups_of,
    covers,
    heads_in_turn,
    key_parts,
    largest_row_group,
    work_list_bytes,
    work_list_of,
)
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing import optional
from attn_dispatch.testing.cases import CASES, Case
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tests.support.cases import failures
from tests.support.definition import problems
from tests.support.distributions import skip_without
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import thinned

TRITON = registry.load("triton")


def interpreted(test: Any) -> Any:
    """A test in Triton's interpreter."""
    skipped = pytest.mark.skipif(not INTERPRETED, reason="Triton is not installed, or there is a GPU for it")
    return pytest.mark.usefixtures("triton_interpreter")(skipped(test))


LONGNET = Dilated((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16), is_causal=True)
SIDES: tuple[Side, ...] = ("queries", "keys")
TERMS: dict[str, Any] = {"none": {}, "softcap": {"softcap": 2.0}, "bias": {"bias": (1, 1)}, "slopes": {"alibi_axes": 1}}
TERMS["all"] = {"softcap": 300.0, "bias": (1, 1), "alibi_axes": 2}


def problem_of(
    pattern: Pattern, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Problem:
    return Case("one", pattern, shape).problem(dtype, needs_grad=True, device=device)


# --- work lists -------------------------------------------------------------------------------------------------------


def tile_runs(work: WorkList, problem: Problem) -> Iterator[tuple[int, Tensor, Tensor, int]]:
    """The query head, a tile's rows, the columns of one of its runs, and 1 for one of sinks."""
    heads = len(work.kind_of)
    for head, kind in enumerate(work.kind_of.tolist()):
        for start, step, count, first_run, end_run in work.tiles[
            int(work.first_tile[kind]) : int(work.first_tile[kind + 1])
        ].tolist():
            rows = torch.arange(count) * step + start
            for run_start, run_step, run_count, member in work.runs[first_run:end_run].tolist():
                columns = torch.arange(run_count) * run_step + run_start
                yield head * problem.heads // heads + member // 2, rows, columns, member % 2


def listed_multiplicity(work: WorkList, problem: Problem, side: Side) -> Tensor:
    """How many times the work list pairs each query of each head with each key."""
    found = torch.zeros(problem.heads, problem.q_len, problem.k_len, dtype=torch.int32)
    for head, rows, columns, sinks in tile_runs(work, problem):
        low, high = work.bounds[sinks]
        distance = columns - rows[:, None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if low is not None:
            visible &= distance >= low
        if high is not None:
            visible &= distance <= high
        if side == "queries":
            found[head, rows[:, None], columns] += visible
        else:
            found[head, columns, rows[:, None]] += visible
    return found


@given(problems(Neighborhood), st.sampled_from(SIDES), st.sampled_from([1, 4, 16]))
def test_work_lists_match_the_multiplicity(problem: Problem, side: Side, block: int) -> None:
    work = work_list_of(problem, side, block)
    expected = problem.pattern.multiplicity(problem.q_len, problem.k_len, problem.heads)
    assert torch.equal(listed_multiplicity(work, problem, side), expected)
    assert int(expected.sum()) <= work.pairs(block, 4)
    assert sum(4 * x.numel() for x in (work.tiles, work.runs, work.first_tile, work.kind_of)) <= work_list_bytes(
        problem, side, block
    )


@given(problems(Neighborhood), st.sampled_from(SIDES))
def test_every_row_is_in_at_most_one_tile(problem: Problem, side: Side) -> None:
    work = work_list_of(problem, side, 8)
    length = problem.q_len if side == "queries" else problem.k_len
    for kind in range(len(work.first_tile) - 1):
        seen = torch.zeros(length, dtype=torch.int64)
        for start, step, count, first_run, end_run in work.tiles[
            int(work.first_tile[kind]) : int(work.first_tile[kind + 1])
        ].tolist():
            assert 1 <= count <= min(8, largest_row_group(problem, side))
            assert first_run < end_run
            seen[start : start + count * step : step] += 1
        assert int(seen.max()) <= 1
        assert not covers(problem, side) or int(seen.min()) == 1


@pytest.mark.parametrize("side", SIDES)
def test_a_million_tokens_fill_every_tile(side: Side) -> None:
    problem = problem_of(LONGNET, (1, 2**20, 16, 128), torch.bfloat16)
    work = work_list_of(problem, side, 128)
    assert set(work.tiles[:, 2].tolist()) == {128}
    assert len(work.tiles) == 16 * 2**20 // 128
    assert covers(problem, side)


def test_hundreds_of_thousands_of_segments() -> None:
    work = work_list_of(problem_of(Dilated((3, 7), (1, 2)), (1, 4 * 10**5, 2, 16)), "queries", 16)
    assert len(work.tiles) > 10**5


@pytest.mark.parametrize("pattern", [Dilated((64, 128), (1, 2)), Window(20, 3)], ids=str)
def test_the_default_device_is_not_that_of_lists(pattern: Pattern) -> None:
    """They are kept for later calls."""
    problem = problem_of(pattern, (1, 256, 2, 16))

    def lists() -> list[Any]:
        work = work_list_of(problem, "queries", 64)
        held = triton._on_device(problem, "queries", support.INTERPRETED_BLOCK)
        numbers = [largest_row_group(problem, "queries"), covers(problem, "queries"), triton.flops(problem)]
        tables = (work.tiles, work.runs, work.longest_first(16).tiles, held.tiles, held.runs)
        return [*numbers, *(table.tolist() for table in tables)]

    found = []
    for device in ("meta", "cpu"):
        triton.forget(problem)
        _row_groups_of.cache_clear()
        covers.cache_clear()
        triton.block_configs.cache_clear()
        with torch.device(device):
            found.append(lists())
    assert found[0] == found[1] == lists()


@given(problems(Neighborhood), st.sampled_from(SIDES))
def test_longest_first_reorders_the_tiles_of_each_kind(problem: Problem, side: Side) -> None:
    work = work_list_of(problem, side, 4)
    found = work.longest_first(4)
    for first, last in pairwise(found.first_tile.tolist()):
        blocks = [int(found._blocks(4)[n]) for n in range(first, last)]
        assert blocks == sorted(blocks, reverse=True)
        assert sorted(found.tiles[first:last].tolist()) == sorted(work.tiles[first:last].tolist())


def test_heads_take_turns_while_their_columns_fit_the_cache() -> None:
    cache = 2**20  # bytes
    problem = problem_of(Dense(), (1, 1024, 8, 64), torch.bfloat16)  # keys and values of a head: 256 KiB
    grouped = replace(problem, kv_heads=2)
    assert heads_in_turn(problem, "queries", cache) == (2, True)
    assert heads_in_turn(grouped, "queries", cache) == (8, True)
    assert heads_in_turn(grouped, "keys", cache) == (1, True)
    long = problem_of(Dense(), (1, 2**14, 8, 64), torch.bfloat16)
    assert heads_in_turn(long, "queries", cache) == (1, True)
    # Dilated tiles at the same place read about the same columns, those of the same length do not.
    assert heads_in_turn(replace(long, pattern=LONGNET), "queries", cache) == (1, False)


def test_flops_follow_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    problem = problem_of(Dense(), (3, 128, 2, 16))
    pairs = 3 * 2 * 128 * 128
    assert triton.flops(problem) == pairs * 16 * 2 * (2 + 3 + 4)
    assert triton.flops(replace(problem, needs_grad=False)) == pairs * 16 * 2 * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared: int = 227 * 2**10) -> None:
    """A GPU of this capability; skips where Triton, whose absence would be every refusal, is not installed."""
    skip_without("triton")
    properties = SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    triton.block_configs.cache_clear()


@pytest.fixture(autouse=True)
def _fresh_blocks() -> Iterator[None]:
    yield
    triton.block_configs.cache_clear()


def texts(problem: Problem) -> list[str]:
    return [refusal.text for refusal in triton.refusals(problem)]


CUDA = problem_of(LONGNET, (1, 4096, 16, 128), torch.bfloat16, "cuda:0")


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_older_gpus_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, capability)
    assert texts(CUDA) == [f"needs compute capability 8.0 or higher, cuda:0 has {capability[0]}.{capability[1]}"]


def test_newer_gpus_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 6), (9, 0)):
        fake_gpu(monkeypatch, capability)
        assert texts(CUDA) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": torch.float64}, "computes in bfloat16, float16, float32, not float64"),
        ({"head_dim": 257}, "takes a head_dim up to 256, not 257"),
        ({"ranks": 2}, "runs on one rank, the sequence is sharded over 2"),
        ({"device": torch.device("cpu")}, "runs on cuda, not cpu"),
        (
            {"pattern": Neighborhood((64, 64), (3, 3))},
            "computes Dense, Window, Dilated, not Neighborhood(grid=(64, 64)",
        ),
        ({"pattern": Dense(), "q_len": 2**30}, "counts up to 536870912 queries and keys, not 1073745920"),
        (
            {"pattern": Dilated((1, 2), (1, 1)), "q_len": 2**28, "k_len": 2**28},
            "lists the tiles of Dilated((1, 2), (1, 1)) in up to ",
        ),
    ],
)
def test_refusals(change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    found = texts(replace(CUDA, **change))
    assert len(found) == 1
    assert found[0].startswith(text)


def test_without_the_package_or_with_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    fake_gpu(monkeypatch, (9, 0))
    for version, refused in (("3.3.1", True), ("3.4.0", False), ("3.10.0", False)):
        monkeypatch.setattr(support, "installed", lambda name, version=version: version)
        assert texts(CUDA) == ["package triton is 3.3.1, needs 3.4 or newer, which torch 2.8 and newer bring"] * refused
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    monkeypatch.setattr("importlib.metadata.version", missing)
    assert [(refusal.code, refusal.text) for refusal in triton.refusals(CUDA)] == [
        ("not_installed", "package triton is not installed (pip install 'attn-dispatch[triton]')")
    ]
    assert registry.version_of(TRITON) is None


@interpreted
def test_the_interpreter_has_no_bfloat16() -> None:
    assert texts(replace(CUDA, device=torch.device("cpu"))) == ["computes in float16, float32, not bfloat16"]


# --- results ----------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.full
def test_results_are_deterministic() -> None:
    problem = next(case for case in CASES if case.id == "longnet-short").problem(torch.float16, needs_grad=True)
    gate = Oracle.of(make(problem))
    first, second = gate.run(TRITON), gate.run(TRITON)
    assert all(torch.equal(first[name], second[name]) for name in first)


SEVERAL = (
    Case("window", Window(20, 9), (1, 40, 2, 16), kv_heads=1, key_mask=True),
    Case("causal", Dense(is_causal=True), (1, 40, 2, 16), kv_heads=1),
    Case("causal-ahead", Dense(is_causal=True), (1, 34, 1, 16), k_len=50),
    Case("sinks", Window(9, 3, 20), (1, 40, 2, 16), kv_heads=1, key_mask=True, seq_lens=True),
    Case("rows-without-keys", Window(2, 0), (1, 40, 1, 16), k_len=20),
    Case("longnet", Dilated((20, 40), (1, 2), True), (1, 45, 2, 16), kv_heads=1, key_mask=True, seq_lens=True),
    Case("uncovered", Dilated((70,), (2,), offsets="block"), (1, 75, 1, 16)),
)


@interpreted
@thinned(("case", "terms"), product(SEVERAL, TERMS), 7, ids=lambda x: getattr(x, "id", x))
def test_tiles_of_several_blocks(case: Case, terms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "INTERPRETED_BLOCK", BlockConfig(32, 16, 4, 1))
    triton.block_configs.cache_clear()
    assert failures(TRITON, replace(case.problem(torch.float32, needs_grad=True), **TERMS[terms])) == ()


@interpreted
@pytest.mark.parametrize("scale", [0.0, 1e-300, -1.0])
def test_any_scale(scale: float) -> None:
    case = Case("scaled", Dense(is_causal=True), (1, 20, 2, 16), scale=scale)
    assert failures(TRITON, case.problem(torch.float32, needs_grad=True)) == ()


@interpreted
@pytest.mark.parametrize("backend", [triton, triton_tiles], ids=lambda backend: backend.name)
def test_wide_offsets_change_nothing(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("wide", Dilated((32,), (2,)), (1, 32, 2, 16), kv_heads=1, key_mask=True, seq_lens=True, scale=-0.3)
    gate = Oracle.of(make(case.problem(torch.float32, needs_grad=True)))
    narrow = gate.run(adapted(backend))
    assert gate.check(narrow).failures == ()
    monkeypatch.setattr(support, "needs_wide_offsets", lambda tensors: True)
    wide = gate.run(adapted(backend))
    assert all(torch.equal(wide[name], narrow[name]) for name in narrow)


# --- few queries at the end of many keys, which are read in parts -----------------------------------------------------


FEW = (
    Case("one", Dense(is_causal=True), (1, 1, 4, 16), k_len=100, kv_heads=1),
    Case("some", Dense(is_causal=True), (1, 5, 6, 24), k_len=333, kv_heads=2, scale=-0.3),
    Case("all-keys", Dense(), (1, 3, 2, 16), k_len=100),
    Case("masked", Dense(is_causal=True), (2, 2, 4, 16), k_len=120, kv_heads=1, key_mask=True),
    Case("window", Window(70, 0), (1, 4, 4, 16), k_len=300, kv_heads=2),
    Case("ahead", Window(None, 1), (1, 4, 4, 16), k_len=300, kv_heads=2),
    Case("short", Window(3, 0), (1, 7, 2, 16), k_len=9),
    Case("no-scale", Dense(), (1, 2, 2, 16), k_len=70, scale=0.0),
    Case("17-lanes", Dense(is_causal=True), (1, 17, 2, 80), k_len=80, key_mask=True),
    Case("16-lanes", Window(70, 0), (1, 4, 8, 80), k_len=200, kv_heads=2, key_mask=True),
    Case("33-lanes", Window(100, None), (1, 11, 6, 16), k_len=333, kv_heads=2),
    Case("64-lanes", Dense(is_causal=True), (1, 8, 16, 256), k_len=400, kv_heads=2, key_mask=True),
    Case("1-lane", Dense(), (1, 1, 2, 256), k_len=90),
)


@interpreted
@thinned(
    ("case", "dtype", "terms", "needs_grad"),
    zip(FEW, cycle((torch.float32, torch.float16, torch.float16)), cycle(TERMS), cycle((True, False, False))),
    4,
)
def test_few_queries_in_parts(
    case: Case, dtype: torch.dtype, terms: str, needs_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass is that of more queries."""
    problem = replace(case.problem(dtype, needs_grad=needs_grad), **TERMS[terms])
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
def test_slopes_count_from_the_end_of_a_row() -> None:
    problem = replace(
        Case("", Dense(True), (2, 2, 2, 16), k_len=70).problem(torch.float16, needs_grad=False), alibi_axes=1
    )
    whole, lens = make(problem), torch.full((2,), 50)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Problem, **given: torch.Tensor) -> Any:
        return registry.load("triton").run(q, whole.k, whole.v, problem, key_lens=lens, **given)

    part = replace(whole, problem=replace(problem, k_len=50), k=whole.k[:, :50], v=whole.v[:, :50])
    assert failures(adapted(SimpleNamespace(run=run)), part) == ()


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
    (64, 1, 32, 8, 2**15, 128): 512,
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
