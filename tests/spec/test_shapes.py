"""The problem that is measured for another length, and the problems of a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_dispatch.spec.groups import DIGITS, group_of, title
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import FEW_QUERIES, measured_for, problem_of, quick_problems, standard_problems

CPU = torch.device("cpu")


def lengths(q_len: int, k_len: int, pattern: Pattern, **more: object) -> Problem:
    whole = problem_of((5, k_len, 4, 8), Dense(), torch.float32, CPU)
    return replace(whole, q_len=q_len, pattern=pattern, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "longer"),
    [
        (Dense(), Dense()),
        (Window(30, 0), Window(30, 0)),
        (Dilated((25, 100), (1, 2), is_causal=True), Dilated((25, 128), (1, 2), is_causal=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [1, FEW_QUERIES])
def test_few_queries_are_measured_at_a_power_of_two_of_keys(q_len: int, pattern: Pattern, longer: Pattern) -> None:
    problem = lengths(q_len, 100, pattern)
    assert measured_for(problem) == replace(problem, k_len=128, pattern=longer)


@pytest.mark.parametrize(
    "problem",
    [
        lengths(FEW_QUERIES + 1, 100, Dense()),
        lengths(1, 128, Dense()),
        lengths(12, 12, Dense()),
        lengths(1, 100, Neighborhood((10, 10), (3, 3))),
    ],
    ids=str,
)
def test_others_are_measured_as_they_are(problem: Problem) -> None:
    assert measured_for(problem) == problem


def test_documents_are_measured_at_powers_of_two() -> None:
    documents = lengths(100, 100, Dilated((25, 100), (1, 2)), bias=(5, 1), is_document=True)
    found = measured_for(documents)
    assert not found.is_document
    assert (found.batch, found.q_len, found.k_len, found.bias) == (4, 128, 128, (4, 1))
    assert found.pattern == Dilated((25, 128), (1, 2))
    grids = lengths(100, 100, Neighborhood((10, 10), (3, 3)), is_document=True)
    assert measured_for(grids) == replace(grids, is_document=False)
    assert not measured_for(grids).is_document


def test_a_standard_profile_has_every_kind_dtype_and_direction_at_each_length() -> None:
    found = standard_problems(CPU)
    assert [each.q_len for each in found] == sorted(each.q_len for each in found)
    kinds = {(each.q_len, type(each.pattern), each.dtype, each.needs_grad) for each in found}
    longest = max(each.q_len for each in found)
    assert kinds == {
        (length, kind, dtype, needs_grad)
        for length in (512, 1024, 2048, 4096, 8192)
        for kind in (Dense, Window, Dilated, Neighborhood)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for needs_grad in (False, True)
        if kind is not Dense or length < longest
    }
    for each in found:
        if isinstance(each.pattern, Dilated):
            assert each.pattern.segment_lengths == (each.q_len // 4, each.q_len // 2, each.q_len)


def test_a_quick_profile_has_every_kind_and_one_training_step() -> None:
    found = quick_problems(CPU)
    assert {type(each.pattern) for each in found} == {Dense, Window, Dilated, Neighborhood}
    assert [each.needs_grad for each in found].count(True) == 1
    assert {each.dtype for each in found} == {torch.float32}


# --- groups -----------------------------------------------------------------------------------------------------------


def group(pattern: Pattern, shape: tuple[int, int, int, int] = (1, 64, 2, 8), **more: Any) -> str:
    problem: Problem = problem_of(shape, pattern, more.pop("dtype", torch.float32), CPU, **more)
    return group_of(problem.to_dict())


def reordered(order: str, grid: tuple[int, ...] = (8, 8), window: tuple[int, ...] = (3, 3)) -> Pattern:
    return Reordered(Neighborhood(grid, window), order)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (group(Dense()), group(Dense(), (2, 4096, 16, 8))),
        (group(Window(3, 0)), group(Window(30, 0))),
        (group(Window(3, 0, 1)), group(Window(30, 0, 4))),
        (group(Dilated((16, 32), (1, 2))), group(Dilated((32, 64), (1, 2)), (1, 128, 4, 8))),
        (group(Neighborhood((8, 8), (3, 3))), group(Neighborhood((4, 16), (3, 5)))),
        (group(reordered("hilbert")), group(reordered("hilbert", (4, 16), (3, 5)))),
    ],
)
def test_sizes_keep_the_group(one: str, other: str) -> None:
    assert one == other
    assert len(one) == DIGITS


def test_other_fields_change_the_group() -> None:
    groups = [
        group(Dense()),
        group(Dense(is_causal=True)),
        group(Dense(), dtype=torch.bfloat16),
        group(Dense(), (1, 64, 2, 16)),
        group(Dense(), backward=True),
        group(Window(3, 0)),
        group(Window(3, 3)),
        group(Window(3, 0, 4)),
        group(Dilated((16, 32), (1, 2))),
        group(Dilated((16, 32), (2, 1))),
        group(Dilated((16, 32), (1, 2), is_causal=True)),
        group(Neighborhood((64,), (3,), dilation=(2,))),
        group(Neighborhood((8, 8), (3, 3))),
        group(Neighborhood((4, 4, 4), (3, 3, 3))),
        group(reordered("hilbert")),
        group(Reordered(Dense(is_causal=True), "hilbert")),
        group(Reordered(Dilated((16, 32), (1, 2)), "residue")),
        group(Reordered(Dilated((16, 32), (1, 2)), "hilbert")),
    ]
    assert len(set(groups)) == len(groups)


def test_a_title_has_the_ranks_where_there_are_several() -> None:
    plain = problem_of((1, 64, 2, 8), Dense(), torch.float32, CPU).to_dict()
    assert title(plain) == "float32 d8 Dense() forward"
    assert title({**plain, "ranks": 2}) == "float32 d8 Dense() forward ranks 2"
