"""`workspace_bytes` on a CPU: at least what a call takes, and at most LOOSE times that from MATTERS on."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from attn_dispatch import Dense, Dilated, Neighborhood, Window
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import gradients
from attn_dispatch.kernels.contract import Backend, runner
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.allocations import allocated_peak
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make
from tests.support.pairwise import covering

MATTERS = 2**24  #: bytes from which a loose bound costs a program something
LOOSE = 3
BACKENDS = ("sdpa", "sdpa_float32", "sdpa_mask", "tiles", "native")
DENSE = ("sdpa", "sdpa_float32")  #: with dense pieces: no windows and grids


def grid_of(n: int, axes: int) -> tuple[int, ...]:
    return (round(n ** (1 / axes)),) * axes


def grid_case(name: str, pattern: Neighborhood, heads: int, head_dim: int, **more: Any) -> Case:
    return Case(name, pattern, (1, math.prod(pattern.grid), heads, head_dim), **more)


LONGNET = Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True)
#: By name: the case of a number of tokens.
CASES: dict[str, Callable[[int], Case]] = {
    "dense": lambda n: Case("dense", Dense(), (1, n, 8, 64)),
    "causal": lambda n: Case("causal", Dense(is_causal=True), (2, n, 4, 64)),
    "grouped": lambda n: Case("grouped", Dense(), (2, n, 6, 80), kv_heads=2),
    "masked": lambda n: Case("masked", Dense(), (2, n - n // 8 + 3, 4, 64), key_mask=True),
    "ahead": lambda n: Case("ahead", Dense(is_causal=True), (1, n // 2, 8, 64), k_len=n),
    "longnet": lambda n: Case("longnet", LONGNET, (1, n, 8, 64)),
    "longnet-ragged": lambda n: Case("longnet-ragged", LONGNET, (2, n - n // 8 + 3, 4, 64), key_mask=True),
    "longnet-grouped": lambda n: Case("longnet-grouped", LONGNET, (2, n, 8, 32), kv_heads=2),
    "segments": lambda n: Case("segments", Dilated((1024,), (1,)), (2, n, 4, 64)),
    "sparse": lambda n: Case("sparse", Dilated((2048,), (2,)), (1, n, 8, 64)),
    "window": lambda n: Case("window", Window(256, 0), (1, n, 8, 64)),
    "window-wide": lambda n: Case("window-wide", Window(300, 100), (2, n - 5, 4, 128)),
    "window-narrow": lambda n: Case("window-narrow", Window(20, 0), (1, n, 8, 64)),
    "window-grouped": lambda n: Case("window-grouped", Window(500, 0, 4), (1, n, 8, 80), kv_heads=2),
    "window-masked": lambda n: Case("window-masked", Window(256, 0), (1, n, 8, 64), key_mask=True),
    "rows": lambda n: grid_case("rows", Neighborhood(grid_of(n, 2), (13, 13)), 8, 64),
    "rows-odd": lambda n: grid_case("rows-odd", Neighborhood((n // 50, 50), (9, 9), edges="shift"), 8, 64),
    "rows-dilated": lambda n: grid_case("rows-dilated", Neighborhood(grid_of(n, 2), (7, 7), (2, 2)), 8, 80),
    "line-dilated": lambda n: grid_case("line-dilated", Neighborhood((n,), (63,), (4,)), 8, 64),
    "rows-grouped": lambda n: grid_case("rows-grouped", Neighborhood(grid_of(n, 2), (13, 13)), 8, 64, kv_heads=2),
    "space": lambda n: grid_case("space", Neighborhood(grid_of(n, 3), (5, 5, 5)), 8, 64),
    "space-masked": lambda n: grid_case("space-masked", Neighborhood(grid_of(n, 3), (7, 3, 5)), 4, 128, key_mask=True),
}
DIRECTIONS = ("forward", "backward", "backward with lse")
DTYPES = (torch.float32, torch.bfloat16)
SHORT, LONG = 512, 2048  #: tokens


def problem_of(name: str, tokens: int, dtype: torch.dtype, direction: str) -> Problem:
    problem = CASES[name](tokens).problem(dtype, needs_grad=direction != "forward")
    return replace(problem, return_lse=direction.endswith("lse"))


def taken_bytes(backend: Backend, problem: Problem, order: str) -> int:
    """The peak of a call with its results; of the gradient's layouts the one that takes most."""
    example, run = make(problem), runner(backend, order, problem, None)

    def call(expanded: bool) -> tuple[torch.Tensor, ...]:
        if backend.forget is not None:
            backend.forget(problem)  # tables that a call makes count
        with torch.set_grad_enabled(problem.needs_grad):
            result: Any = run(example.q, example.k, example.v, problem, **example.masks)
        if not problem.needs_grad:
            return result if isinstance(result, tuple) else (result,)
        out, lse = result
        weight = weights if expanded else example.grad
        assert weight is not None
        results, of_results = ([out, lse], [weight, torch.ones_like(lse)]) if problem.return_lse else ([out], [weight])
        return out.detach(), lse.detach(), *gradients(results, (example.q, example.k, example.v), of_results)

    weights = torch.ones((), dtype=problem.dtype).expand(example.q.shape)
    call(False)  # libraries are loaded, caches filled
    gc.collect()
    return max(allocated_peak(partial(call, expanded))[1] for expanded in {False, problem.needs_grad})


def rows(tokens: int) -> list[Any]:
    """Few of all, with every pair of a backend, a kind of pattern, a dtype and a direction."""

    def factors(backend: str, name: str, dtype: torch.dtype, direction: str) -> dict[str, object]:
        kind = type(CASES[name](SHORT).pattern).__name__
        return {"backend": backend, "pattern": kind, "dtype": dtype, "direction": direction}

    def takes(backend: str, name: str, dtype: torch.dtype, direction: str) -> bool:
        dense = isinstance(CASES[name](SHORT).pattern, Dense | Dilated)
        return (dense or backend not in DENSE) and (dtype != torch.float32 or backend != "sdpa_float32")

    every = [row for row in product(BACKENDS, CASES, DTYPES, DIRECTIONS) if takes(*row)]
    marks = [] if tokens == SHORT else [pytest.mark.full]
    few = covering(every, factors)
    return [pytest.param(*row, tokens, marks=marks) for row in every if row in few]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "case", "dtype", "direction", "tokens"),
    [*rows(SHORT), *rows(LONG), ("sdpa", "longnet", torch.float32, "backward", 2048)],
)
def test_a_call_takes_no_more_than_declared(
    name: str, case: str, dtype: torch.dtype, direction: str, tokens: int
) -> None:
    backend, problem = registry.load(name), problem_of(case, tokens, dtype, direction)
    declared = backend.workspace_bytes(problem) + problem.result_bytes
    taken = max(taken_bytes(backend, problem, order) for order in backend.orders(problem))
    print(f"declared {declared / 2**20:.1f} MiB, {declared / taken:.2f} of what was taken")
    assert taken <= declared
    if name != "native":  # whose tables stay from call to call, so that building them counts in neither
        assert taken < MATTERS or declared <= LOOSE * taken


def test_a_mask_of_dilated_keys_takes_memory_linear_in_the_length() -> None:
    """PyTorch's kernel for CPUs copies a mask with gaps for every query."""

    def peak(length: int) -> int:
        q, mask = torch.ones(1, length, 1, 8), torch.ones(1, length, dtype=torch.bool)
        problem = Problem.of(q, q, q, Dilated((length,), (2,)), key_mask=mask)
        found = allocated_peak(lambda: registry.load("sdpa").run(q, q, q, problem, key_mask=mask))[1]
        assert found is not None
        return found

    assert peak(8192) < 3 * peak(4096)  # four times as much if quadratic
