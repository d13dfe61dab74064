"""The density and imbalance of masks made of data: in forms, keys and texts; the data themselves are in none."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Blocks, Dense, Ranges, explain
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.data import SPARSEST, BlocksForm, DataPattern, Form, RangesForm
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make

N = 64  #: tokens


def causal(share: float = 1.0) -> Ranges:
    at = torch.arange(N)[None]
    return Ranges(at - at, (at * share).int())


def window(reach: int) -> Ranges:
    at = torch.arange(N)[None]
    return Ranges((at - reach).clamp(0, N - reach), (at - reach).clamp(0, N - reach) + reach - 1)


def table(*rows: int) -> Tensor:
    """Blocks of 8: how many each row sees."""
    return (torch.arange(8) < torch.tensor(rows)[:, None])[None, None]


def listed(*rows: int) -> Tensor:
    return torch.arange(8).where(table(*rows), -1)


CLASSES: list[tuple[DataPattern, tuple[int, int]]] = [
    (causal(), (-2, 1)),
    (causal(0.5), (-4, 1)),
    (window(16), (-4, 0)),
    (window(64), (0, 0)),
    (Ranges(torch.ones(1, N).int(), torch.zeros(1, N).int()), (SPARSEST, 0)),
    (Ranges(torch.zeros(2, N).int(), torch.tensor([31, 0])[:, None].expand(2, N)), (-4, 1)),  # by row
    *((Blocks(make(*[8] * 8), 8), (0, 0)) for make in (table, listed)),
    *((Blocks(make(*range(1, 9)), 8), (-2, 1)) for make in (table, listed)),
    *((Blocks(make(8, 1, 1, 1, 1, 1, 1, 1), 8), (-4, 2)) for make in (table, listed)),
    (Blocks(torch.tensor([[[[3, 3, 3, -1]] * 8]]), 8), (-6, 0)),  # an entry that stands thrice
    (Blocks(table(*[0] * 8), 8), (SPARSEST, 0)),
    (Blocks(torch.cat([table(*[8] * 8), table(*[1] * 8)], 1), 8), (-2, 1)),  # by head
]


@pytest.mark.parametrize(("pattern", "expected"), CLASSES, ids=str)
def test_classes(pattern: DataPattern, expected: tuple[int, int]) -> None:
    form = pattern.form(N, 2, 2)
    assert (form.density, form.imbalance) == expected
    assert ("longest row" in str(form)) == (expected[1] > 0)
    unknown = replace(form, density=None, imbalance=None)  # type: ignore[type-var]
    assert pattern.form(None, 2, 2) == unknown
    assert len({form, unknown}) == 2


def problem_of(pattern: DataPattern) -> Problem:
    q = torch.empty(1, N, 2, 8)
    return Problem.of(q, q, q, pattern)


def test_keys_hold_classes_and_never_the_data() -> None:
    even, other = Blocks(table(*[4, 5] * 4), 8), Blocks(table(*[5, 4] * 4).flip(-1), 8)
    uneven = Blocks(table(1, 2, 3, 4, 5, 6, 7, 8), 8)
    keys = [problem_of(each).key("made-up") for each in (even, other, uneven)]
    assert keys[0] == keys[1] != keys[2]
    assert problem_of(even).pattern.density == problem_of(uneven).pattern.density  # type: ignore[attr-defined]
    problem = problem_of(uneven)
    assert Problem.from_dict(problem.to_dict()) == problem
    q = torch.empty(1, N, 2, 8)
    assert "longest row 2x" in explain(q, q, q, uneven).problem


@pytest.mark.parametrize("wrong", [3, -1, "x", 0.5])
def test_wrong_imbalance(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"imbalance must be None or octaves in 0\.\.2"):
        RangesForm(1, False, -2, wrong)


FORMS: tuple[Form, ...] = (
    RangesForm(1, False),
    RangesForm(2, True),
    *(BlocksForm((8, 8), "heads", True, is_list, Dense()) for is_list in (False, True)),
    BlocksForm((2, 16), "all", False, False, Dense(True)),
)
#: A row cannot see more than all keys.
FEASIBLE = [(density, uneven) for density, uneven in product(range(0, -11, -1), range(3)) if 2 * uneven <= -density]


@pytest.mark.parametrize("classes", FEASIBLE)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_examples_have_the_classes_of_their_form(form: Form, classes: tuple[int, int]) -> None:
    """So that the backends are timed on work like the caller's."""
    pattern: Any = replace(form, density=classes[0], imbalance=classes[1])  # type: ignore[type-var]
    problem = Case("", pattern, (2, 1024, 4, 8), kv_heads=2).problem(torch.float32, needs_grad=False)
    data = make(problem).masks["pattern_data"]
    assert pattern.bound(data).form(1024, 4, 2) == pattern
