"""`workspace_bytes` on a CPU: at least what a call takes, and near it where that is 16 MiB or more: see LOOSE."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from attn_dispatch import Dense, Dilated, Neighborhood, Window
from attn_dispatch.backends import tiles
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import gradients
from attn_dispatch.kernels.contract import runner
from attn_dispatch.kernels.tiles.memory import cpu_workspace_bytes
from attn_dispatch.spec.orders import NATURAL, TOKEN_ORDERS
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.allocations import allocated_peak
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make

MATTERS = 2**24  #: bytes from which a loose bound costs a program something
LOOSE = 1.3
#: Of `tiles`: many sizes of query tiles, each of which may fill a chunk; 1.34 with 4,096 tokens.
#: 3.33 is the most, of 5 x 5 x 5 on 25^3 along the Hilbert curve, bfloat16, forward.
LOOSER = 3.5

LONGNET = Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True)
#: By name: the case of a number of tokens.
CASES = {
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
}
DIRECTIONS = ("forward", "backward", "backward with lse")
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (512, 2048, 4096, 16384)
SHORTEST, LONGEST = TOKENS[0], TOKENS[-1]
MOST_DENSE = 4096  #: tokens: dense attention of more takes seconds


def problem_of(name: str, tokens: int, dtype: torch.dtype, direction: str) -> Problem:
    problem = CASES[name](tokens).problem(dtype, needs_grad=direction != "forward")
    return replace(problem, return_lse=direction.endswith("lse"))


def taken_bytes(backend_name: str, problem: Problem, order: str = NATURAL) -> int:
    """The peak of a call with its results; of the gradient's layouts the one that takes most."""
    backend, example = registry.load(backend_name), make(problem)
    run, forget = runner(backend, order, problem, None), getattr(backend, "forget", None)

    def call(expanded: bool) -> tuple[torch.Tensor, ...]:
        if forget is not None:
            forget(problem)  # tables that a call makes count
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


def has_row(name: str, tokens: int, dtype: torch.dtype, direction: str) -> bool:
    """Long ones take seconds: of these, only what takes the most memory."""
    if not isinstance(CASES[name](tokens).pattern, Dilated):
        return tokens <= MOST_DENSE
    return tokens < LONGEST or (dtype, direction) == (torch.bfloat16, "backward")


def marks(tokens: int, dtype: torch.dtype, direction: str) -> list[pytest.MarkDecorator]:
    short = tokens == SHORTEST or (tokens, dtype, direction) == (2048, torch.bfloat16, "backward")
    return [] if short else [pytest.mark.full]


ROWS = [
    pytest.param(*row, marks=marks(*row[1:])) for row in product(CASES, TOKENS, DTYPES, DIRECTIONS) if has_row(*row)
]


@pytest.mark.parametrize(("name", "tokens", "dtype", "direction"), ROWS)
def test_sdpa_declares_what_it_takes(name: str, tokens: int, dtype: torch.dtype, direction: str) -> None:
    problem = problem_of(name, tokens, dtype, direction)
    declared = registry.load("sdpa").workspace_bytes(problem) + problem.result_bytes
    taken = taken_bytes("sdpa", problem)
    print(f"declared {declared / 2**20:.1f} MiB, {declared / taken:.2f} of what was taken")
    assert taken <= declared
    assert taken < MATTERS or declared <= LOOSE * taken


def grid_of(n: int, axes: int) -> tuple[int, ...]:
    return (round(n ** (1 / axes)),) * axes


def grid_case(name: str, pattern: Neighborhood, heads: int, head_dim: int, **more: Any) -> Case:
    return Case(name, pattern, (1, math.prod(pattern.grid), heads, head_dim), **more)


TILED: dict[str, Callable[[int], Case]] = {
    "dense": lambda n: Case("dense", Dense(), (1, n, 8, 64)),
    "causal-grouped": lambda n: Case("causal-grouped", Dense(is_causal=True), (1, n, 6, 80), kv_heads=2),
    "window": lambda n: Case("window", Window(256, 0), (1, n, 8, 64)),
    "window-wide": lambda n: Case("window-wide", Window(300, 100), (2, n - 5, 4, 128)),
    "window-narrow": lambda n: Case("window-narrow", Window(20, 0), (1, n, 8, 64)),
    "window-grouped": lambda n: Case("window-grouped", Window(500, 0, 4), (1, n, 8, 80), kv_heads=2),
    "window-masked": lambda n: Case("window-masked", Window(256, 0), (1, n, 8, 64), key_mask=True),
    "longnet": lambda n: Case("longnet", LONGNET, (1, n, 8, 64)),
    "longnet-grouped": lambda n: Case("longnet-grouped", LONGNET, (1, n, 8, 64), kv_heads=2),
    "longnet-masked": lambda n: Case("longnet-masked", LONGNET, (2, n - n // 8 + 3, 4, 128), key_mask=True),
    "rows": lambda n: grid_case("rows", Neighborhood(grid_of(n, 2), (13, 13)), 8, 64),
    "rows-odd": lambda n: grid_case("rows-odd", Neighborhood((n // 50, 50), (9, 9), edges="shift"), 8, 64),
    "rows-dilated": lambda n: grid_case("rows-dilated", Neighborhood(grid_of(n, 2), (7, 7), (2, 2)), 8, 80),
    "line-dilated": lambda n: grid_case("line-dilated", Neighborhood((n,), (63,), (4,)), 8, 64),
    "rows-grouped": lambda n: grid_case("rows-grouped", Neighborhood(grid_of(n, 2), (13, 13)), 8, 64, kv_heads=2),
    "space": lambda n: grid_case("space", Neighborhood(grid_of(n, 3), (5, 5, 5)), 8, 64),
    "space-masked": lambda n: grid_case("space-masked", Neighborhood(grid_of(n, 3), (7, 3, 5)), 4, 128, key_mask=True),
}
TILED_TOKENS = (512, 4096)


def tiled_problem(name: str, tokens: int, dtype: torch.dtype, direction: str) -> Problem:
    problem = TILED[name](tokens).problem(dtype, needs_grad=direction != "forward")
    return replace(problem, return_lse=direction.endswith("lse"))


def has_tiled_row(name: str, tokens: int, dtype: torch.dtype, direction: str, order: str) -> bool:
    if not isinstance(TILED[name](tokens).pattern, Dense) or tokens <= MOST_DENSE:
        return order in tiles.orders(tiled_problem(name, tokens, dtype, direction))
    return False


def tiled_marks(name: str, tokens: int, dtype: torch.dtype, direction: str) -> list[pytest.MarkDecorator]:
    short = tokens == TILED_TOKENS[0] or (tokens == MOST_DENSE and name in ("window", "rows"))
    return [] if short and (dtype, direction) == (torch.bfloat16, "backward") else [pytest.mark.full]


TILED_ROWS = [
    pytest.param(*row, marks=tiled_marks(*row[:4]))
    for row in product(TILED, TILED_TOKENS, DTYPES, DIRECTIONS, TOKEN_ORDERS)
    if has_tiled_row(*row)
]


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Allocations are recorded on the calling thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("name", "tokens", "dtype", "direction", "order"), TILED_ROWS)
def test_tiles_declares_what_it_takes(name: str, tokens: int, dtype: torch.dtype, direction: str, order: str) -> None:
    problem = tiled_problem(name, tokens, dtype, direction)
    tile = tiles.tile_size(problem, order)
    declared = cpu_workspace_bytes(problem, order, tile) + problem.result_bytes
    assert declared <= tiles.workspace_bytes(problem) + problem.result_bytes
    taken = taken_bytes("tiles", problem, order)
    print(f"declared {declared / 2**20:.1f} MiB, {declared / taken:.2f} of what was taken")
    assert taken <= declared
    assert taken < MATTERS or declared <= LOOSER * taken
