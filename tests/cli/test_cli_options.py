"""From the options of a command to the problems that it is about."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from tests.support.commands import problems


def facts(found: Sequence[Problem]) -> list[tuple[int, int, int, int, int]]:
    return [(p.batch, p.q_len, p.heads, p.kv_heads, p.head_dim) for p in found]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--shape", "2,64,4,32", "--shape", "1,1K,8/2,64"), [(2, 64, 4, 4, 32), (1, 1024, 8, 2, 64)]),
        (("--lengths", "1k:5k"), [(1, n, 8, 8, 64) for n in (1024, 2048, 4096)]),
        (("--lengths", "100:200"), [(1, n, 8, 8, 64) for n in (100, 200)]),
        (("--lengths", "1000,3000", "--shape", "1,7,2,8"), [(1, 1000, 2, 2, 8), (1, 3000, 2, 2, 8)]),
        (("--grid", "4,6,8", "--window", "3"), [(1, 192, 8, 8, 64)]),
        (("--shape", "1,64,2,8", "--shape", "1,64,2,8"), [(1, 64, 2, 2, 8)]),
    ],
)
def test_shapes(arguments: tuple[str, ...], expected: list[tuple[int, int, int, int, int]]) -> None:
    assert facts(problems(*arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), [Dense()]),
        (("--causal",), [Dense(is_causal=True)]),
        (("--causal", "both"), [Dense(), Dense(is_causal=True)]),
        (("--window", "9"), [Window(9, 0)]),
        (("--window", "9,none"), [Window(9, None)]),
        (("--window=-,5",), [Window(None, 5)]),
        (("--window", "9,0,4"), [Window(9, 0, 4)]),
        (("--segments", "16,32", "--dilations", "1,2", "--causal"), [Dilated((16, 32), (1, 2), is_causal=True)]),
        (("--grid", "8,8", "--window", "3,5"), [Neighborhood((8, 8), (3, 5))]),
        (
            ("--grid", "8,8", "--window", "4,5", "--edges", "shift", "--stride", "2"),
            [Neighborhood((8, 8), (4, 5), edges="shift", stride=(2,))],
        ),
        (("--grid", "8,8", "--window", "3", "--edges", "clip"), [Neighborhood((8, 8), (3,))]),
        (("--grid", "8,8", "--window", "3", "--causal"), [Neighborhood((8, 8), (3,), is_causal=(True,))]),
    ],
)
def test_patterns(arguments: tuple[str, ...], expected: list[Pattern]) -> None:
    assert [problem.pattern for problem in problems("--shape", "1,64,2,8", *arguments)] == expected


def test_dtypes_and_passes() -> None:
    found = problems("--lengths", "64", "--dtype", "bf16,float64", "--backward", "both")
    seen = {(problem.dtype, problem.needs_grad) for problem in found}
    assert seen == {(dtype, grad) for dtype in (torch.bfloat16, torch.float64) for grad in (False, True)}
    assert [problem.dtype for problem in problems("--lengths", "64")] == [torch.float32]
    short = problems("--lengths", "64", "--dtype", "f16,BF16,f32,double")
    assert [problem.dtype for problem in short] == [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_invalid_problems_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must divide"):
        problems("--shape", "1,64,4/3,16")
    with pytest.raises(InvalidInput, match="holds 36 tokens, but the sequence has 64"):
        problems("--shape", "1,64,4,16", "--grid", "6,6", "--window", "3")
    with pytest.raises(InvalidInput, match=r"window must be odd on every axis, got \(4, 4\)"):
        problems("--shape", "1,64,4,16", "--grid", "8,8", "--window", "4")
    with pytest.raises(InvalidInput, match="overflow"):
        problems("--shape", "999999999,99999999999,8,64")
