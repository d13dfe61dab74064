"""The problem that is measured for another length, and the problems of a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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
