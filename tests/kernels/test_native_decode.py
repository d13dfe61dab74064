"""Few queries in the native kernel: grouped heads share a tile, and long keys are cut into splits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attn_dispatch import attend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import run
from attn_dispatch.kernels.native.run import work_units
from attn_dispatch.spec.data import BlocksForm, RangesForm
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.testing import optional
from attn_dispatch.testing.cases import Case
from tests.support.cases import failures
from tests.support.pairwise import by_turns, thinned

NATIVE = registry.load("native")

pytestmark = pytest.mark.usefixtures("three_threads")

THREADS = 3
LONG = 3 * run.SPLIT + 77
CAUSAL = Dense(is_causal=True)
FEW = {
    "one query": Case("", CAUSAL, (2, 1, 8, 32), k_len=LONG, kv_heads=2),
    "one query, one head": Case("", CAUSAL, (1, 1, 1, 40), k_len=LONG),
    "many queries for each key head": Case("", CAUSAL, (1, 1, 20, 16), k_len=LONG, kv_heads=1),
    "four new tokens": Case("", CAUSAL, (1, 4, 8, 32), k_len=LONG, kv_heads=2),
    "a group of three": Case("", CAUSAL, (1, 5, 6, 8), k_len=LONG, kv_heads=2),
    "as many lanes as a tile has": Case("", CAUSAL, (1, 16, 4, 8), k_len=LONG, kv_heads=1),
    "more than a tile has": Case("", CAUSAL, (1, 17, 4, 8), k_len=LONG, kv_heads=1),
    "odd head_dim": Case("", CAUSAL, (1, 2, 4, 9), k_len=LONG, kv_heads=2),
    "not causal": Case("", Dense(), (1, 3, 4, 16), k_len=LONG, kv_heads=2),
    "window": Case("", Window(1100, 0), (1, 4, 4, 16), k_len=LONG, kv_heads=2),
    "window and sinks": Case("", Window(9, 2, sinks=4), (1, 4, 4, 16), k_len=LONG, kv_heads=2),
    "dilated": Case("", Dilated((64, 2048), (1, 2), is_causal=True), (1, 3, 4, 16), k_len=LONG, kv_heads=2),
    "heads with other offsets": Case(
        "", Dilated((64, 512), (2, 4), is_causal=True), (1, 3, 8, 16), k_len=LONG, kv_heads=2
    ),
    "more queries of heads with other offsets": Case(
        "", Dilated((64, 512), (2, 4), is_causal=True), (1, 5, 8, 16), k_len=LONG, kv_heads=2
    ),
    "groups with other offsets": Case(
        "", Dilated((64, 96, 512), (2, 3, 8)), (2, 4, 16, 32), k_len=LONG, kv_heads=8, key_mask=True
    ),
    "branches with the same keys": Case("", Dilated((64, 64), (2, 2)), (1, 2, 4, 16), k_len=128, kv_heads=2),
    "queries of no branch": Case("", Dilated((512,), (8,), is_causal=True), (1, 2, 4, 16), k_len=LONG, kv_heads=1),
    "across a segment's border": Case(
        "", Dilated((64, 1024), (1, 4), is_causal=True), (1, 16, 2, 64), k_len=1024 + 70, kv_heads=2
    ),
    "two groups of lanes": Case("", CAUSAL, (1, 2, 8, 96), k_len=LONG, kv_heads=2, key_mask=True),
    "equal lengths": Case("", Dense(), (2, 6, 4, 16), kv_heads=2),
    "hidden keys": Case("", CAUSAL, (2, 2, 4, 16), k_len=LONG, kv_heads=2, key_mask=True),
    "lengths of rows": Case("", CAUSAL, (3, 12, 6, 16), kv_heads=2, seq_lens=True),
    "packed memory": Case("", CAUSAL, (1, 2, 4, 16), k_len=LONG, kv_heads=2, strides=("bhnd", "bhnd", "bndh")),
}


BLOCKS = BlocksForm((16, 32), "heads", False, True, CAUSAL, density=-1)  #: all different for each head
#: Patterns that hold tensors, whose runs of keys are of few queries each.
DATA = {
    "one table": Case("", replace(BLOCKS, heads="all", is_list=False), (2, 1, 8, 32), k_len=LONG, kv_heads=2),
    "a table for each key head": Case("", replace(BLOCKS, heads="kv_heads"), (2, 2, 8, 32), k_len=LONG, kv_heads=2),
    "a table for each head": Case("", BLOCKS, (2, 2, 8, 32), k_len=LONG, kv_heads=2),
    "and for each row": Case("", replace(BLOCKS, by_row=True), (3, 1, 6, 9), k_len=LONG, kv_heads=2, key_mask=True),
    "blocks of queries": Case("", replace(BLOCKS, size=(3, 5), within=Dense()), (1, 8, 4, 16), k_len=LONG, kv_heads=1),
    "a whole tile": Case("", replace(BLOCKS, size=(5, 64)), (1, 16, 8, 16), k_len=LONG, kv_heads=2),
    "tiles of a vector": Case("", replace(BLOCKS, size=(16, 16), density=-6), (1, 200, 8, 16), k_len=LONG, kv_heads=2),
    "listed keys": Case("", replace(BLOCKS, size=(64, 32), within=Dense()), (1, 200, 4, 16), k_len=LONG, kv_heads=2),
    "listed keys of half a tile": Case(
        "", replace(BLOCKS, size=(32, 16), within=Dense(), density=-7), (1, 290, 4, 16), k_len=LONG, kv_heads=2
    ),
    "heads by themselves": Case("", BLOCKS, (1, 5, 4, 16), k_len=LONG),
    "intervals": Case("", RangesForm(2, False, -2), (2, 5, 8, 16), k_len=LONG, kv_heads=2),
    "intervals of rows": Case("", RangesForm(3, True, -2), (2, 1, 6, 16), k_len=LONG, kv_heads=6),
    "intervals of more queries": Case("", RangesForm(2, True, -2), (2, 30, 4, 16), k_len=LONG, kv_heads=2),
}


@by_turns(("name", "dtype"), FEW | DATA, tuple(run.DTYPES))
def test_few_queries_are_exact(name: str, dtype: torch.dtype) -> None:
    assert failures(NATIVE, (FEW | DATA)[name].problem(dtype, needs_grad=False)) == ()


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("name", FEW)
def test_specialized_calls_give_the_same_bits(name: str, return_lse: bool) -> None:
    problem = replace(FEW[name].problem(torch.bfloat16, needs_grad=False), return_lse=return_lse)
    asked = optional.problem_of_specialized(NATIVE, problem)
    assert (asked is None) == problem.masked
    if asked is not None:
        assert optional.specialized_failures(NATIVE, asked) == []


@thinned("name", FEW | DATA, 2)
def test_gradients_are_those_of_the_shared_tiles(name: str) -> None:
    """The backward pass takes out and lse of a forward pass in splits."""
    assert failures(NATIVE, (FEW | DATA)[name].problem(torch.float32, needs_grad=True)) == ()


@pytest.mark.parametrize("name", FEW)
def test_states_fit_their_declared_bytes(name: str) -> None:
    problem = FEW[name].problem(torch.float32, needs_grad=False)
    _, _, splits, tiles = work_units(problem, THREADS)
    used = 4 * tiles * splits * run.state_floats(problem) if splits > 1 else 0
    assert used <= run.scratch_bytes(problem)


def test_a_piece_without_keys_and_a_piece_with_infinite_scores() -> None:
    """The join of splits takes -inf for a split whose keys are all hidden."""
    q, k = torch.ones(1, 1, 2, 8), torch.ones(1, LONG, 1, 8)
    v = torch.arange(LONG).float().view(1, -1, 1, 1) * torch.ones(8)
    mask = torch.zeros(1, LONG, dtype=torch.bool)
    mask[0, -1] = True
    found, lse = attend(q, k, v, CAUSAL, key_mask=mask, backend="native", return_lse=True)
    assert torch.equal(found, torch.full_like(found, LONG - 1))
    assert torch.allclose(lse, torch.full_like(lse, math.sqrt(8)))
    nothing, lse = attend(q, k, v, CAUSAL, key_mask=mask & False, backend="native", return_lse=True)
    assert torch.equal(nothing, torch.zeros_like(nothing))
    assert bool((lse == -math.inf).all())


def test_step_by_step_equals_all_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, LONG, heads, 16, generator=generator) for heads in (4, 2, 2))
    pattern = Dilated((256, 1024), (1, 2), is_causal=True)
    whole = attend(q, k, v, pattern, backend="native")
    for end in (LONG - 9, LONG - 1, LONG):
        last = attend(q[:, end - 1 : end], k[:, :end], v[:, :end], pattern, backend="native")
        assert torch.allclose(last, whole[:, end - 1 : end], atol=2e-6, rtol=1e-5)
