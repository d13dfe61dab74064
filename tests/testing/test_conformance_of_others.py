"""conformance(): a backend with a fault fails, and the fault is named; without one it passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import register
from attn_dispatch.backends import manual
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import SCORE_TERMS, Refusal, Result
from attn_dispatch.spec.data import BlocksForm, RangesForm
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing import conformance, problems, random_problems
from attn_dispatch.testing.cases import CASES
from tests.support.flaws import Other, Planted, buffer, changed, ignoring, scratch, where, wrong_lse
from tests.support.pairwise import thinned

pytestmark = pytest.mark.usefixtures("little_time")  # one thread

SOME = ("dense", "dense-grouped", "causal-key-mask", "window-causal", "longnet-seq-lens", "neighborhood-2d")
PROBLEMS = [case.problem(torch.float32, needs_grad=True) for case in CASES if case.id in SOME]
MORE = [each for each in problems() if each.dropout_p or each.deterministic or each.score_terms or each.ranks > 1]


def failing(backend: Any, some: list[Problem]) -> str:
    with pytest.raises(AssertionError) as raised:
        conformance(backend, some)
    return str(raised.value)


def with_problem(**changes: Any) -> Callable[..., Result]:
    """Computes another problem than it was asked for."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        return manual.run(q, k, v, replace(problem, **changes), **tensors)

    return run


def one_key_more(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    pattern = problem.pattern
    if isinstance(pattern, Window) and pattern.left is not None:
        problem = replace(problem, pattern=replace(pattern, left=pattern.left + 1))
    return manual.run(q, k, v, problem, **tensors)


def scaling_in_place(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    q.detach().mul_(problem.scale)
    return manual.run(q, k, v, replace(problem, scale=1.0), **tensors)


def writing_by_address(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    result = manual.run(q, k, v, problem, **tensors)
    torch.empty(0, dtype=k.dtype).set_(k.untyped_storage()).add_(1.0)  # no version counter sees it
    return result


def without_gradient(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
    return manual.run(q, k.detach(), v, problem, **tensors)


FAULTS: dict[str, tuple[Callable[..., Result], str, str]] = {
    "drops the key mask": (ignoring("key_mask"), "causal-key-mask", "out is off by"),
    "drops seq_lens": (ignoring("seq_lens"), "longnet-seq-lens", "out is off by"),
    "another scale": (with_problem(scale=0.3), "dense", "out is off by"),
    "window off by one": (one_key_more, "window-causal", "out is off by"),
    "scales q in place": (scaling_in_place, "dense", "wrote into"),
    "writes into k by its address": (writing_by_address, "dense", "wrote into k"),
    "another lse": (changed(wrong_lse), "dense", "lse is off by"),
    "lse in base 2": (changed(lambda out, lse, _: (out, lse / math.log(2))), "dense", "lse is off by"),
    "no lse": (changed(lambda out, lse, _: out), "dense", "lse was asked for and not returned"),
    "no gradient of k": (without_gradient, "dense", "appears to not have been used in the graph"),
    "another dtype of lse": (changed(lambda out, lse, _: (out, lse.double())), "dense", "lse is torch.float64, not"),
}


@pytest.mark.parametrize(("run", "case", "named"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_and_named(run: Callable[..., Result], case: str, named: str) -> None:
    (problem,) = (each.problem(torch.float32, needs_grad=True) for each in CASES if each.id == case)
    text = failing(Other(run), [problem])
    assert text.startswith("planted fails 1 of 1 problems:\n")
    assert str(problem) in text
    assert named in text


@thinned("first", (1, 0, 2), 3)
def test_what_has_no_fault_passes(first: int) -> None:
    some = [*PROBLEMS, *MORE[first::3]]
    found = conformance(Other(manual.run), some)
    assert found.refused.keys() == {each for each in some if each.ranks > 1}
    assert {*found.computed} == {*some} - found.refused.keys()


def test_dropout() -> None:
    some = [each for each in MORE if each.dropout_p]
    none, unscaled = (
        with_problem(dropout_p=0.0),
        changed(lambda out, lse, problem: (out * (1 - problem.dropout_p), lse)),
    )
    assert "keeps 100.0% of the weights, not 70.0%" in failing(Other(none), some)
    assert "with the weights that it keeps, out is off by" in failing(Other(unscaled), some)


def test_another_mask_in_the_backward_pass() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        (out, _), (again, _) = (manual.run(q, k, v, problem, **tensors) for _ in range(2))
        return out.detach() + again - again.detach()

    some = [replace(each, return_lse=False) for each in MORE if each.dropout_p and each.needs_grad]
    assert "with the weights that it keeps, dv is off by" in failing(Other(run), some)


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (buffer(), "a second call changed the result of the first"),
        (scratch(), "two calls at once: out is off by"),
        (where(lambda **_: torch.is_inference_mode_enabled()), "in inference mode: out is off by"),
    ],
    ids=["one buffer", "one scratch", "inference mode"],
)
def test_further_calls(run: Callable[..., Result], named: str) -> None:
    assert named in failing(Other(run), [replace(PROBLEMS[0], needs_grad=False)])


def test_more_memory_than_declared() -> None:
    text = failing(Planted(manual.run), PROBLEMS[:1])
    assert "besides its results, workspace_bytes is 0 B" in text


def test_results_that_differ_from_call_to_call() -> None:
    calls = iter(range(10**6))

    def run(out: Tensor, lse: Tensor, problem: Problem) -> Result:
        return out * (1 + 1e-7 * (next(calls) % 2)), lse

    some = [each for each in MORE if each.deterministic]
    assert "other bits, though the problem is deterministic" in failing(Other(changed(run)), some)
    conformance(Other(changed(run)), [replace(each, deterministic=False) for each in some])


# --- members and refusals ---------------------------------------------------------------------------------------------


def test_refusals_give_reasons() -> None:
    reasons: Any
    for reasons in ([Refusal("pattern", " ")], ["no"]):
        text = failing(Other(manual.run, reasons=reasons), PROBLEMS[:1])
        assert "TypeError: refusals must be Refusals with a code and a text" in text


def test_refusals_that_raise() -> None:
    class Raising(Other):
        def refusals(self, problem: Problem) -> list[Refusal]:
            raise KeyError(problem.q_len)

    with pytest.raises(AssertionError, match="KeyError") as raised:
        conformance(Raising(manual.run), PROBLEMS)
    assert isinstance(raised.value.__cause__, KeyError)
    assert f"fails {len(PROBLEMS)} of {len(PROBLEMS)} problems" in str(raised.value)


@pytest.mark.full
def test_one_rank_of_several() -> None:
    alone = Other(manual.run)
    alone.refusals = lambda problem: []  # type: ignore[method-assign]
    assert "run() has the tensors of one rank of 2" in failing(alone, MORE)


def test_a_backend_that_refuses_everything() -> None:
    nothing = Other(manual.run, reasons=[Refusal("device", "runs on the moon")])
    with pytest.raises(AssertionError, match="a backend that accepts none is never chosen\n    runs on the moon"):
        conformance(nothing)
    assert conformance(nothing, PROBLEMS).refused.keys() == set(PROBLEMS)


def test_members() -> None:
    backend: Any = object()
    with pytest.raises(AssertionError, match="lacks name, version, refusals, workspace_bytes, run"):
        conformance(backend)
    assert "name must be an identifier, got 'two words'" in failing(Other(manual.run, name="two words"), [])
    names: list[Any] = ["x"]
    with pytest.raises(InvalidInput, match="problems must be Problems, got 'x'"):
        conformance(Other(manual.run), names)


def test_by_name() -> None:
    register(Other(manual.run))
    assert conformance("planted", PROBLEMS[:1]).computed == tuple(PROBLEMS[:1])
    with pytest.raises(InvalidInput, match="backend must be one of"):
        conformance("nowhere", [])


@pytest.mark.full
def test_a_backend_of_this_package() -> None:
    """The one that takes least time: the same checks of all are in tests/backends."""
    found = conformance(registry.load("sdpa_float32"))
    assert len(found.computed) >= 20


# --- problems ---------------------------------------------------------------------------------------------------------


def test_problems_of_all_kinds() -> None:
    found = problems()
    assert len(set(found)) == len(found) > 200
    for field in ("needs_grad", "return_lse", "has_seq_lens", "has_key_mask", "deterministic", "bias_needs_grad"):
        assert {getattr(each, field) for each in found} == {False, True}
    assert {type(each.pattern) for each in found} == {Dense, Window, Dilated, Neighborhood, RangesForm, BlocksForm}
    assert {each.dtype for each in found} == {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    assert {name for each in found for name in each.score_terms} == set(SCORE_TERMS)
    assert all(Problem.from_dict(each.to_dict()) == each for each in found)


def test_random_problems_are_those_of_their_seed() -> None:
    assert random_problems(3, 50) == random_problems(3, 60)[:50] != random_problems(4, 50)
    assert {each.dtype for each in random_problems(0, 30, dtypes=(torch.float16,))} == {torch.float16}
    assert all(Problem.from_dict(each.to_dict()) == each for each in random_problems(5, 200))
