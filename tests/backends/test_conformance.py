"""Registry x patterns x shapes x dtypes: a backend agrees with float64, or refuses also when forced."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import refusals_of
from attn_dispatch.kernels.triton.work_list import work_list_of
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.allocations import allocated_peak
from attn_dispatch.testing.cases import CASES, DTYPES, Case
from attn_dispatch.testing.drawn import random_problem
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.guard import CUDA_SLACK
from attn_dispatch.tuning.oracle import Oracle
from tests.support.cases import factors_of as case_factors
from tests.support.cases import gate, kind_of
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import Factors, chosen, covering, parameters, wanted

pytestmark = pytest.mark.usefixtures("triton_interpreter")

BACKENDS = registry.names()
# Backends that no CPU runs, and the code of their refusal. Here only the refusal is tested; test_libraries.py tests
# them with fake libraries, test_on_cuda on a device.
ELSEWHERE = {
    "flash": "device",
    "xformers": "device",
    "sdpa_cudnn": "device",
    "sdpa_efficient": "device",
    "flex_flash": "device",
    **({} if INTERPRETED else {"triton": "device", "triton_tiles": "device"}),
}
#: Compiling flex takes half a minute per case: test_flex.py tests a few. native refuses every device.
ON_CUDA = [name for name in BACKENDS if name not in ("flex", "flex_flash", "native")]
HERE = [name for name in BACKENDS if name not in ELSEWHERE]
# Interpreted, a program of Triton's kernels takes 10 ms. So they run a few cases in all variants, and the others in
# float32, forward and backward, with one batch row, without those that another case contains. On a GPU `test_on_cuda`
# runs everything.
SLOW = ("triton", "triton_tiles")
EVERY_WAY = (
    *("dense-grouped", "dense-head-dim-not-last", "causal-both-masks", "window-key-mask", "longnet-short"),
    "neighborhood-key-mask",
)
CONTAINED = {
    "longnet": "longnet-ragged",
    "longnet-causal": "longnet-ragged-causal",
    "longnet-heads-first": "longnet-head-dim-not-last",
    "longnet-packed": "longnet-head-dim-not-last",
    "longnet-key-mask": "longnet-both-masks",
    "longnet-seq-lens": "longnet-both-masks",
    "longnet-odd-heads": "longnet-split",
    "rate-not-dividing": "rate-not-dividing-causal",
}
DIRECTIONS = ("forward", "backward")
#: Refused factors per backend, which the choice of cases need not combine with others.
REFUSED: dict[str, tuple[object, ...]] = {
    "sdpa": (Window, Neighborhood),
    "sdpa_float32": (Window, Neighborhood, torch.float32, torch.float64),
    "native": (torch.float64,),
    "triton": (Neighborhood, torch.bfloat16, torch.float64),
    "triton_tiles": (Dense, Window, torch.bfloat16, torch.float64),
}
PROGRAMS = 16  #: for a random problem


def quick(case: Case, backend: str) -> bool:
    return backend not in SLOW or case.id in EVERY_WAY


@cache
def asked_of(case: Case) -> type[Pattern]:
    return type(case.problem(torch.float32, needs_grad=False).pattern)


def refused(case: Case, dtype: torch.dtype, backend: str) -> bool:
    return backend in ELSEWHERE or not {asked_of(case), dtype}.isdisjoint(REFUSED.get(backend, ()))


def kinds_of(case: Case, dtype: torch.dtype, backend: str, direction: str) -> Factors:
    """Factors of a case: each run has each case, and each kind of pattern with each backend."""
    if refused(case, dtype, backend):
        return {"refusing": backend, "refused": kind_of(case.pattern)}
    return {**case_factors(case), "dtype": dtype, "backend": backend, "direction": direction}


def factors_of(case: Case, dtype: torch.dtype, backend: str, direction: str) -> Factors:
    """The same for `--rest`: each case with each backend, but for interpreted kernels."""
    given: dict[str, Hashable] = {**kinds_of(case, dtype, backend, direction)}
    return given if backend in SLOW or refused(case, dtype, backend) else {**given, "case": case}


def cost_of(case: Case, dtype: torch.dtype, backend: str, direction: str) -> int:
    """Cost of a case, about proportional to the interpreted programs: rows of each residue have tiles of their own."""
    if backend not in SLOW:
        return 0
    rates = case.pattern.dilation_rates if isinstance(case.pattern, Dilated) else (1,)
    return math.prod(case.shape[:3]) * math.lcm(*rates) * (4 if direction == "backward" else 1)


def programs(problem: Problem, backend: str) -> int:
    """The number of programs of the forward kernel."""
    tiles = work_list_of(problem, "queries", 64).most_tiles if backend == "triton" else -(-problem.q_len // 64)
    return tiles * problem.heads * problem.batch


def agrees(case: Case, dtype: torch.dtype, backend_name: str, needs_grad: bool, device: str = "cpu") -> None:
    if device == "cpu" and not quick(case, backend_name):
        shorter = isinstance(case.pattern, Dilated) and case.k_len is None
        case = replace(case, shape=(1, min(case.shape[1], 45) if shorter else case.shape[1], *case.shape[2:]))
    problem = case.problem(dtype, needs_grad=needs_grad, device=device)
    backend = registry.load(backend_name)
    if backend.refusals(problem):
        example = make(problem)
        masks: dict[str, Any] = dict(example.masks)
        with pytest.raises(NoBackend, match=f"{backend_name}: .{{10,}}"):
            attend(example.q, example.k, example.v, problem.pattern, backend=backend_name, scale=problem.scale, **masks)
        return
    expected = gate(problem)
    if device != "cpu":
        found, peak = peak_bytes(lambda: expected.run(backend), problem.device)
    else:
        found, peak = allocated_peak(lambda: expected.run(backend))
    assert expected.check(found).failures == (), (backend_name, dtype)
    assert set(found) == {"out", "lse"} | ({"dq", "dk", "dv"} if needs_grad else set())
    # Peak memory, including results and the gate's gradient, stays below the declared bytes; on CUDA but for the
    # caching allocator's rounding.
    announced = backend.workspace_bytes(problem) + problem.result_bytes + found["lse"].numel() * found["lse"].itemsize
    assert peak is not None
    assert peak <= announced + (CUDA_SLACK if device != "cpu" else 0)


ROWS = [
    (case, dtype, backend, direction)
    for (number, case), dtype, backend, direction in product(enumerate(CASES), DTYPES, BACKENDS, DIRECTIONS)
    # Of the types of half precision, which have most code in common, each case has one.
    if dtype != (torch.float16, torch.bfloat16)[number % 2]
    if (direction == "backward" or dtype == torch.float32)
    and (quick(case, backend) or (direction == "backward" and dtype == torch.float32 and case.id not in CONTAINED))
]
CHOSEN = covering(ROWS, kinds_of, cost_of)
PARAMETERS = parameters(ROWS, factors_of, cost_of, lambda *row: row not in CHOSEN)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(("case", "dtype", "backend", "direction"), PARAMETERS)
def test_every_backend(case: Case, dtype: torch.dtype, backend: str, direction: str) -> None:
    agrees(case, dtype, backend, direction == "backward")


def test_chosen_cases_have_every_pair() -> None:
    """Every pair among backend, pattern, dtype, kind of masks and direction is in a chosen case."""
    few = chosen(PARAMETERS)
    assert set().union(*(wanted(row, kinds_of(*row)) for row in few)) == set().union(
        *(wanted(row, kinds_of(*row)) for row in ROWS)
    )
    assert [set(values) for values in zip(*few)] == [set(CASES), set(DTYPES), set(BACKENDS), set(DIRECTIONS)]
    assert len(few) < len(ROWS) / 5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("case", CASES if torch.cuda.is_available() else CASES[:1], ids=lambda case: case.id)
@pytest.mark.parametrize("backend", ON_CUDA)
def test_on_cuda(case: Case, backend: str) -> None:
    for dtype in DTYPES:
        agrees(case, dtype, backend, True, "cuda:0")


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("backend", HERE)
def test_every_backend_supports_something(backend: str) -> None:
    """A backend that refuses everything would pass the tests above: each supports half the cases in some dtype."""
    refusals = registry.load(backend).refusals
    accepted = [sum(not refusals(case.problem(dtype, needs_grad=True)) for case in CASES) for dtype in DTYPES]
    assert max(accepted) >= len(CASES) // 2


@pytest.mark.parametrize("backend", ELSEWHERE)
def test_refuses_every_cpu(backend: str) -> None:
    for case in CASES:
        found = registry.load(backend).refusals(case.problem(torch.float16, needs_grad=True))
        assert ELSEWHERE[backend] in {refusal.code for refusal in found}


def test_gradient_through_lse_of_manual_is_the_numerical_one() -> None:
    problem = replace(Case("tiny", Dilated((4, 8), (1, 2), True), (1, 9, 2, 3)).problem(torch.float64, needs_grad=True))
    example = make(problem)

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = registry.load("manual").run(q, k, v, problem)
        assert isinstance(result, tuple)
        return result

    assert torch.autograd.gradcheck(both, (example.q, example.k, example.v))


@pytest.mark.full
@pytest.mark.hypothesis
@pytest.mark.usefixtures("uncompiled_flex")
def test_random_problems(request: pytest.FixtureRequest) -> None:
    """`--random-problems N` draws N of them."""
    seen = dict.fromkeys(HERE, 0)
    count = int(request.config.getoption("--random-problems") or settings().max_examples // 5)

    @settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(st.randoms(use_true_random=False))  # its draws are hypothesis's own, which finds the smallest that fails
    def every_backend_agrees(rng: Random) -> None:
        problem = random_problem(rng)
        expected = Oracle.of(make(problem))
        for name in HERE:
            backend = registry.load(name)
            if not refusals_of(backend, problem) and (name not in SLOW or programs(problem, name) <= PROGRAMS):
                assert expected.check(expected.run(backend)).failures == (), name
                seen[name] += 1

    every_backend_agrees()
    assert min(seen.values()) > 0
