"""The hard cases: what is wrong in them is found and named, what is right passes, and the tolerances mean something."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attn_dispatch.backends import manual
from attn_dispatch.kernels import formula, registry
from attn_dispatch.kernels.contract import Result
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import DTYPES, Case
from attn_dispatch.tuning.gate import HardCase, case_of
from attn_dispatch.tuning.hard_cases import EVEN, NAN_MARGIN, class_key, fitted
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_hidden import with_hidden
from tests.support.flaws import FILLED, FLAWS, Planted, all_but_the_last, changed, scored
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import by_turns, crossed, thinned

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = {
    "dense": Case("", Dense(), (2, 512, 4, 16)),
    "causal-grouped": Case("", Dense(is_causal=True), (2, 512, 8, 16), kv_heads=2),
    "decode": Case("", Dense(is_causal=True), (2, 1, 4, 16), k_len=4096),
    "both-masks": Case("", Dense(is_causal=True), (3, 512, 2, 16), seq_lens=True, key_mask=True),
    "window-key-mask": Case("", Window(256, 0), (1, 2048, 4, 9), key_mask=True),
    "longnet": Case("", Dilated((2048, 4096), (1, 2), is_causal=True), (1, 8192, 2, 16), seq_lens=True),
    "uncovered": Case("", Dilated((2048,), (4,)), (1, 8192, 2, 16), scale=-0.3),
    "neighborhood": Case(
        "", Neighborhood((32, 64), (7, 9), (1, 2)), (1, 2048, 2, 16), strides=("bhnd", "bhnd", "bndh")
    ),
}


def asked(name: str, dtype: torch.dtype = torch.float32, *, needs_grad: bool = True) -> Problem:
    return CLASSES[name].problem(dtype, needs_grad=needs_grad)


def hard_cases(problem: Problem) -> list[HardCase]:
    return [case_of(spec) for spec in class_key(problem)]


def failures(backend: Any, problem: Problem) -> list[str]:
    return [
        failure
        for case in hard_cases(problem)
        if not case.refused_by(backend)
        for failure in case.check(case.run(backend)).failures
    ]


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled_flex")
@crossed(
    too_slow=lambda name, cases: cases == "every" or name in ("flex", "sdpa_float32", "sdpa_mask"),
    name=("sdpa", "sdpa_float32", "sdpa_mask", "tiles", "native", "flex", "manual"),
    cases=("chosen", "every"),
)
def test_built_in_backends_pass(name: str, cases: str) -> None:
    """Each in the classes and dtypes that it takes; it then takes the hard cases too."""
    backend: Any = registry.load(name)
    variants = [*product(DTYPES, [True]), (torch.float32, False)]
    classes_taken = 0
    for number, kind in enumerate(CLASSES):
        problems = [asked(kind, dtype, needs_grad=needs_grad) for dtype, needs_grad in variants]
        taken = [problem for problem in problems if not backend.refusals(problem)]
        classes_taken += bool(taken)
        for problem in taken if cases == "every" else taken[number % max(len(taken), 1) :][:1]:
            assert not any(case.refused_by(backend) for case in hard_cases(problem))
            assert failures(backend, problem) == [], problem
    assert classes_taken >= len(CLASSES) // 2


@pytest.mark.skipif(not INTERPRETED, reason="there is no interpreter for Triton's kernels")
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of scores of hidden keys
@pytest.mark.parametrize(("name", "case"), [("triton", "window-key-mask"), ("triton_tiles", "neighborhood")], ids=str)
def test_triton_passes(name: str, case: str) -> None:
    backend = registry.load(name)
    problem = replace(asked(case, torch.float16, needs_grad=False), heads=1, kv_heads=1)
    assert not any(case.refused_by(backend) for case in hard_cases(problem))
    assert failures(backend, problem) == []


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flaw", "named"),
    [pytest.param(*flaw, id=name, marks=FILLED if name.startswith("partial-") else ()) for name, flaw in FLAWS.items()],
)
def test_a_flaw_is_found_and_named(name: str, flaw: Callable[..., Result], named: tuple[str, ...]) -> None:
    found = failures(Planted(flaw), asked(name))
    for text in set(named):
        assert sum(text in failure for failure in found) >= named.count(text), found


@pytest.mark.parametrize("name", CLASSES)
def test_what_the_flaws_were_planted_in_is_right(name: str) -> None:
    assert failures(Planted(scored(formula.softmax)), asked(name)) == []
    assert failures(Planted(changed(lambda out, lse, problem: (out, lse))), asked(name)) == []


def test_memory_that_torch_does_not_hand_out() -> None:
    """A kernel's own allocation, which no one sees, is what was freed before."""

    def run(out: Tensor, lse: Tensor, problem: Problem) -> Result:
        with _disable_current_modes():
            return all_but_the_last(out), lse

    case = hard_cases(asked("dense", needs_grad=False))[0]
    assert case.check(case.run(Planted(changed(run)))).failures


@pytest.mark.parametrize("where", ["q", "beside v"])
def test_what_writes_where_it_must_not(where: str) -> None:
    """By an address, as kernels do. The next backend finds the tensors as they were."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        memory = torch.empty(0).set_((q if where == "q" else v).untyped_storage())
        memory[NAN_MARGIN if where == "q" else 0] = 7.0
        return manual.run(q, k, v, problem, **tensors)

    case = hard_cases(asked("dense"))[0]
    with pytest.raises(RuntimeError, match=f"{case.name}: wrote into {where[-1]}, or to memory beside"):
        case.run(Planted(run))
    assert case.check(case.run(Planted(manual.run))).failures == ()


def test_what_the_backend_raises_is_passed_on() -> None:
    def run(q: Tensor, *rest: object, **tensors: Tensor) -> Result:
        q.detach().zero_()
        raise ValueError("out of order")

    case = hard_cases(asked("dense"))[0]
    with pytest.raises(ValueError, match="out of order"):
        case.run(Planted(run))
    assert case.check(case.run(Planted(manual.run))).failures == ()


TERMS: list[dict[str, Any]] = [{"bias": (1, 1)}, {"bias": (2, 4), "bias_needs_grad": True}, {"alibi_axes": 1}]


@by_turns(("dtype", "more"), DTYPES, TERMS, str)
def test_hugely_negative_rows(more: dict[str, Any], dtype: torch.dtype) -> None:
    """As where masks are the dtype's least number. The maximum of a row may not be looked for from some number on."""

    def run(out: Tensor, lse: Tensor, problem: Problem) -> Result:
        return out.masked_fill((lse < -3e4).mT[..., None], math.nan), lse

    problem = replace(asked("dense", dtype), head_dim=72, scale=72**-0.5, **more)
    cases = [case for case in hard_cases(problem) if "hugely negative" in case.name]
    assert len(cases) == 1 + ("bias" in more)
    for case in cases:
        for name in ("manual", "native", "sdpa_mask"):
            backend = registry.load(name)
            assert case.refused_by(backend) or case.check(case.run(backend)).failures == (), name
        assert f"{case.name}: out has NaN" in case.check(case.run(Planted(changed(run)))).failures


def small_error(name: str, tensor: Tensor, eps: float) -> Tensor:
    """The largest entry of out 2 % off, lse 0.5 %, of a gradient 3 %; more where the dtype is coarser than that."""
    if name == "lse":
        return tensor * (1 + max(0.005, 2 * eps))
    least = max(0.02, 6 * eps) if name == "out" else max(0.03, 25 * eps)
    return torch.where(tensor.abs() == tensor.abs().max(), tensor * (1 + least), tensor)


@thinned("dtype", DTYPES, 4)
def test_small_errors_are_found(dtype: torch.dtype) -> None:
    """In most cases: tolerances grow with scores and rounding errors, but stay below what would be wrong."""
    seen: dict[str, list[bool]] = {}
    for name in CLASSES:
        for case in hard_cases(asked(name, dtype)):
            exact = case.run(Planted(manual.run))
            for tensor, expected in case.oracle.expected.items():
                assert math.isfinite(expected.tolerance)
                if exact[tensor].isfinite().any() and exact[tensor].nan_to_num(neginf=0.0).any():
                    error = small_error(tensor, exact[tensor], torch.finfo(dtype).eps)
                    named = case.check({**exact, tensor: error}).failures
                    seen.setdefault(tensor, []).append(any(f"{case.name}: {tensor} is off" in each for each in named))
    assert seen.keys() == {"out", "lse", "dq", "dk", "dv"}
    for tensor, found in seen.items():
        assert sum(found) > len(found) // 2, (tensor, found)


# --- the cases --------------------------------------------------------------------------------------------------------


def test_one_class_has_one_set_of_cases() -> None:
    problem = asked("causal-grouped")
    alike = replace(problem, batch=1, q_len=8192, k_len=8192, heads=16, kv_heads=4, dropout_p=0.1)
    assert all(one is other for one, other in zip(hard_cases(alike), hard_cases(problem), strict=True))
    changes: list[dict[str, Any]] = [
        {"dtype": torch.float64},
        {"head_dim": 8, "scale": 8**-0.5},
        {"needs_grad": False},
        {"kv_heads": 8},
        {"scale": 0.3},
        {"scale": -0.3},
        {"pattern": Dense()},
        {"has_key_mask": True},
        {"return_lse": False},
        {"deterministic": True},
        {"strides": ("bnhd", "bnhd", "bhnd")},
    ]
    keys = {class_key(replace(problem, **change)) for change in changes}
    assert len(keys | {class_key(problem)}) == len(changes) + 1


def test_a_sharded_sequence_has_none() -> None:
    assert hard_cases(replace(asked("dense"), ranks=2)) == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_case_is_what_a_call_would_be(name: str) -> None:
    """Lengths, pattern and memory order as a call with these tensors would be described."""
    cases = hard_cases(asked(name))
    assert cases[0].problem.q_len == EVEN == 128 + 64
    assert any(case.problem.q_len % 2 and case.problem.q_len > 1 for case in cases)
    assert cases[2].problem.q_len == 1
    for case in cases:
        example, problem = case.oracle.example, case.problem
        q, k, v = example.q, example.k, example.v
        masks: dict[str, Any] = example.masks
        called = Problem.of(q, k, v, problem.pattern, scale=problem.scale, return_lse=True, **masks)
        assert called == problem == Problem.from_dict(problem.to_dict())
        assert masks.keys() == set(["seq_lens"] * problem.has_seq_lens + ["key_mask"] * problem.has_key_mask)


@pytest.mark.parametrize(
    ("name", "empty"),
    [("dense", 0), ("causal-grouped", 1), ("both-masks", 6), ("window-key-mask", 3), ("longnet", 6), ("uncovered", 6)],
)
def test_rows_without_keys(name: str, empty: int) -> None:
    cases = hard_cases(asked(name))
    without = [case for case in cases if (case.oracle.expected["lse"].value == -math.inf).any()]
    assert [case for case in cases if "rows without keys" in case.name] == without
    assert len(without) == empty


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("dense", ""),
        ("neighborhood", ""),
        ("both-masks", "qkv"),
        ("window-key-mask", "kv"),
        ("longnet", "qkv"),
        ("uncovered", "kv"),
    ],
)
def test_nan_is_hidden_where_something_is(name: str, hidden: str) -> None:
    """And the results are those of the same tensors without it."""
    cases = [case for case in hard_cases(asked(name)) if "NaN that is hidden" in case.name]
    assert len(cases) == bool(hidden)
    for case in cases:
        example = case.oracle.example
        tensors = {"q": example.q, "k": example.k, "v": example.v}
        assert {each for each, x in tensors.items() if not x.isfinite().all()} == set(hidden)
        expected = Oracle.of(with_hidden(example, 0.0)).expected
        for each, (value, tolerance) in {n: (e.value, e.tolerance) for n, e in case.oracle.expected.items()}.items():
            assert torch.equal(value, expected[each].value)
            assert tolerance == expected[each].tolerance
            assert math.isfinite(tolerance)


PATTERNS: list[tuple[Pattern, int, Pattern]] = [
    (Window(4096, 0), 192, Window(48, 0)),
    (Dilated((2048, 65536), (1, 64)), 192, Dilated((47, 1472), (1, 64))),
    (Dilated((10, 35), (3, 4)), 77, Dilated((10, 35), (3, 4))),
    (Neighborhood((64, 64), (13, 3), (1, 4)), 192, Neighborhood((16, 12), (13, 3), (1, 2))),
    (Neighborhood((30, 8, 8), (7, 3, 3), edges="shift"), 77, Neighborhood((5, 5, 3), (5, 3, 3), edges="shift")),
    (
        Neighborhood((30, 9, 8), (8, 2, 3), edges="shift", stride=(6, 2, 3)),
        77,
        Neighborhood((5, 5, 3), (4, 2, 3), edges="shift", stride=(4, 2, 3)),
    ),
    (Reordered(Neighborhood((64, 64), (13, 3)), "hilbert"), 77, Reordered(Neighborhood((11, 7), (11, 3)), "hilbert")),
]


@pytest.mark.parametrize(("pattern", "length", "expected"), PATTERNS, ids=lambda value: str(value))
def test_small_patterns(pattern: Pattern, length: int, expected: Pattern) -> None:
    assert fitted(pattern, length) == expected


# --- poison -----------------------------------------------------------------------------------------------------------


@FILLED
def test_what_compiles_is_not_traced() -> None:
    modes: list[int] = []

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Result:
        modes.append(torch._C._len_torch_dispatch_stack())
        return manual.run(q, k, v, problem, **tensors)

    @dataclass
    class Compiling(Planted):
        def first_call_ms(self, problem: Problem) -> float:
            return 0.0

    for kind in (Planted, Compiling):
        hard_cases(asked("dense"))[0].run(kind(run))
    assert modes == [1, 0]


@pytest.mark.parametrize(
    ("axis", "pattern", "masks"),
    [
        (0, Dense(is_causal=True), ("key_mask",)),
        (0, Dense(is_causal=True), ("seq_lens",)),
        (0, Dense(is_causal=True), ("key_mask", "seq_lens")),
        (2, Dilated((16,), (2,)), ()),
    ],
)
def test_no_backend_is_blamed_for_nan_that_an_expanded_tensor_repeats(
    axis: int, pattern: Pattern, masks: tuple[str, ...]
) -> None:
    """A token that is hidden in one batch row, or from one head, is visible in another: both are the same memory."""
    q = torch.zeros(2, 64, 4, 16)
    k = torch.zeros([1 if each == axis else size for each, size in enumerate(q.shape)]).expand(q.shape)
    given: dict[str, Any] = {"key_mask": torch.ones(2, 64, dtype=torch.bool), "seq_lens": torch.tensor([40, 64])}
    problem = Problem.of(q, k, k, pattern, **{name: given[name] for name in masks})
    for case in hard_cases(problem):
        for name in ("manual", "native", "sdpa"):
            assert case.check(case.run(registry.load(name))).failures == ()
