"""The native kernel's lists of neighbours in every order, and its results with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_dispatch.backends import native
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import run
from attn_dispatch.kernels.native.tables import TILE, VECTOR, native_table_bytes, native_tables
from attn_dispatch.spec.orders import ORDERS, Reordered
from attn_dispatch.spec.pattern import Dilated, Neighborhood
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from tests.support.cases import failures
from tests.support.pairwise import crossed

NATIVE = registry.load("native")

SHAPES = [
    Neighborhood((9, 13), (5, 3)),
    Neighborhood((9, 13), (5, 3), edges="shift"),
    Neighborhood((20, 13), (5, 3), (2, 3), (True, False)),
    Neighborhood((12, 11), (3, 5), (4, 2), (True, True), "shift"),
    Neighborhood((5, 6, 7), (3, 5, 3), is_causal=(False, True, False)),
    Neighborhood((100,), (5,), (3,)),
    Neighborhood((1, 70), (1, 9)),
    Neighborhood((20, 13), (6, 5), (1, 2), (False, True), "shift", (4, 3)),
    Neighborhood((100,), (8,), (3,), edges="shift", stride=(5,)),
]


def asked(pattern: Neighborhood, dtype: torch.dtype = torch.float32, stored: str = "", **more: Any) -> Problem:
    given = Reordered(pattern, stored) if stored else pattern
    case = Case("", given, (2, math.prod(pattern.grid), 4, 24), kv_heads=2, **more)
    return case.problem(dtype, needs_grad=True)


def list_multiplicity(problem: Problem, order: str) -> torch.Tensor:
    """How many times each query sees each key by the lists; a key that no query of its vectors sees is an error."""
    tables: Any = native_tables(problem, order)
    found = torch.zeros(problem.q_len, problem.k_len, dtype=torch.int64)
    for first, step, count, first_run, runs in tables.tiles.tolist():
        assert (step, 1 <= count <= TILE) == (0, True)
        queries = tables.order[first : first + count].long()
        for start, step, keys, low, high in tables.runs[first_run : first_run + runs].tolist():
            assert step == 0
            listed, bits = tables.listed[start : start + keys].long(), tables.lanes[start : start + keys]
            sees = bits[None, :] >> torch.arange(TILE)[:, None] & 1
            assert sees[:low].sum() + sees[high:].sum() + sees[count:].sum() == 0
            by_vector = sees[low:high].view(-1, VECTOR, keys).any(1)
            assert by_vector[0].all()
            assert by_vector[-1].all()
            assert not (by_vector.long().diff(dim=0) == 1).any(), "a vector between two is computed in vain"
            found[queries[:, None], listed] += sees[:count]
    return found


@given(st.data())
def test_lists_of_any_neighbourhood(data: st.DataObject) -> None:
    grid, odd = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)), st.sampled_from([1, 3, 5, 7, 9])
    axes, edges = len(grid), data.draw(st.sampled_from(["clip", "shift"]))
    dilation = [data.draw(st.integers(1, size if edges == "shift" else 4)) for size in grid]
    widths = [st.integers(1, size // e) if edges == "shift" else odd for size, e in zip(grid, dilation)]
    window = [data.draw(each) for each in widths]
    stride = tuple(data.draw(st.integers(1, w)) if edges == "shift" else 1 for w in window)
    causal = data.draw(st.lists(st.booleans(), min_size=axes, max_size=axes))
    pattern = Neighborhood(tuple(grid), tuple(window), tuple(dilation), tuple(causal), edges, stride)  # type: ignore[arg-type]
    problem = Case("", pattern, (1, math.prod(grid), 1, 4)).problem(torch.float32, needs_grad=False)
    if isinstance(problem.pattern, Neighborhood):  # not equal to a Window
        found = list_multiplicity(problem, data.draw(st.sampled_from(ORDERS)))
        assert torch.equal(found, pattern.multiplicity(problem.q_len)[0].long())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pattern", SHAPES, ids=str)
def test_lists_fit_their_declared_bytes(pattern: Neighborhood, order: str) -> None:
    tables: Any = native_tables(asked(pattern), order)
    used = sum(x.nbytes for x in (tables.listed, tables.lanes, tables.tiles, tables.runs))
    assert 2 * used <= native_table_bytes(asked(pattern), order)


@crossed(pattern=SHAPES, order=ORDERS, dtype=run.DTYPES, stored=(False, True))
def test_results_in_any_order(pattern: Neighborhood, order: str, dtype: torch.dtype, stored: bool) -> None:
    """Nothing is permuted where tokens are stored in it: the lists hold rows of the tensors."""
    assert failures(NATIVE, asked(pattern, dtype, order if stored else ""), "natural" if stored else order) == ()


@pytest.mark.parametrize("order", ORDERS)
def test_masks_in_any_order(order: str) -> None:
    """Padding and masked keys go by position, not by place in the lists."""
    assert failures(NATIVE, asked(SHAPES[1], torch.bfloat16, seq_lens=True, key_mask=True), order) == ()


def test_offered_orders() -> None:
    reordered = asked(SHAPES[0], stored="hilbert")
    assert native.refusals(reordered) == []
    assert native.orders(reordered) == ("natural",)
    other = replace(asked(SHAPES[0]), pattern=Reordered(Dilated((64,), (2,)), "residue"))
    assert [refusal.code for refusal in native.refusals(other)] == ["pattern"]
    assert native.orders(asked(SHAPES[0])) == ("natural", "hilbert")
    assert native.orders(asked(SHAPES[5])) == ("natural", "residue")
    assert native.orders(asked(SHAPES[6])) == ("natural",)
