"""Problems that share a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_dispatch.spec.groups import DIGITS, group_of, title
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of

CPU = torch.device("cpu")


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
