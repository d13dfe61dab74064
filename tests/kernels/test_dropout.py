"""Dropout: which weights are dropped, and that the backends that define it alike drop the same ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_dispatch import attend
from attn_dispatch.backends import native
from attn_dispatch.calls import packing
from attn_dispatch.decisions.call import resolve
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import adapted, refusals_of
from attn_dispatch.kernels.dropout import DRAWN, gain, kept, numbers, threshold
from attn_dispatch.kernels.native import run
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import CASES, DATA_CASES, Case
from attn_dispatch.testing.checks import _OrderCheck
from attn_dispatch.tuning.example import make
from tests.support.cases import dropped_otherwise
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import thinned

P = 0.3
#: How many standard deviations a mean may lie from its expectation.
DEVIATIONS = 5.0
NAMES = ["native", *(["triton", "triton_tiles"] if INTERPRETED else [])]

pytestmark = pytest.mark.usefixtures("triton_interpreter")


def problem_of(case: Case, dtype: torch.dtype = torch.float32, p: float = P) -> Problem:
    return replace(case.problem(dtype, needs_grad=True), dropout_p=p)


def wrong(problem: Problem) -> list[str]:
    """What `conformance` would find of the native kernel, but for the hard cases, which are without dropout."""
    found = [str(each) for each in refusals_of(adapted(native), problem)]
    for order in native.orders(problem):
        check = _OrderCheck(adapted(native), order, problem, set())
        found += [*check.results(), *check.memory(native.workspace_bytes(problem))]
        found += [*check.further_calls(), *check.dropout()]
    return found


def test_the_generator_is_philox() -> None:
    """An answer that its authors publish, of 7 rounds: counter and key 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = numbers(zero, zero, zero, 1).flatten().view(4, 2) @ torch.tensor([1, 2**16])
    assert words.tolist() == [0x0D893F64, 0x5F6FB709, 0x4F730A48, 0x4F121F81]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropped_weights_are_independent(p: float) -> None:
    """Their share; and of neighbours in each direction, and of seeds that follow one another, the correlation."""
    rows, first = torch.arange(8), torch.arange(0, 256, DRAWN)
    drawn = torch.stack([kept(torch.tensor([2**31 + seed]), p, rows, first, 256) for seed in range(4)]).double()
    share, n = threshold(p) / 2**16, drawn.numel()
    assert abs(share - p) < 2**-16
    spread = (share * (1 - share)) ** 0.5
    assert abs(float(drawn.mean()) - 1 + share) < DEVIATIONS * spread / n**0.5
    off = (drawn - 1 + share) / spread
    by_row = off.mean(-1) * 256**0.5  # the sum of a query's weights
    assert abs(float(by_row.square().mean()) - 1) < DEVIATIONS * (2 / by_row.numel()) ** 0.5
    for axis, step in product(range(4), (1, 2, 8)):
        if step < off.shape[axis]:
            both = off.narrow(axis, step, off.shape[axis] - step) * off.narrow(axis, 0, off.shape[axis] - step)
            assert abs(float(both.mean())) < DEVIATIONS / both.numel() ** 0.5, (axis, step)
    diagonal = off[..., 1:, 1:] * off[..., :-1, :-1]
    assert abs(float(diagonal.mean())) < DEVIATIONS / diagonal.numel() ** 0.5


@pytest.mark.parametrize(("p", "factor"), [(0.25, 4 / 3), (1e-9, 1.0), (1 - 1e-9, 2.0**16)])
def test_any_probability(p: float, factor: float) -> None:
    assert gain(p) == factor
    q, k, v = torch.randn(3, 1, 40, 2, 16).unbind()
    for name in ("native", "manual"):
        assert bool(attend(q, k, v, dropout_p=p, backend=name).isfinite().all())


@thinned(("case", "dtype"), [*product((*CASES, *DATA_CASES), (torch.float32, torch.bfloat16))], 20)
def test_native_entry_by_entry(case: Case, dtype: torch.dtype) -> None:
    """Results and gradients are those of the weights that it keeps, whatever the tiles, branches, runs and orders."""
    problem = problem_of(case, dtype)
    assert wrong(problem) == wrong(replace(problem, needs_grad=False)) == []


def test_native_in_blocks_and_splits(three_threads: None) -> None:
    """More keys than a block has; few tiles, whose keys are split between threads; few queries; and a bias."""
    some = [
        Case("", Dense(is_causal=True), (1, 330, 3, 32), kv_heads=1),
        Case("", Dense(), (1, 20, 2, 32), k_len=1300),
        Case("", Dense(), (2, 3, 8, 64), k_len=700, kv_heads=2, key_mask=True),
    ]
    problems = [problem_of(case, dtype) for case in some for dtype in (torch.float32, torch.bfloat16)]
    problems += [replace(problems[2], bias=(1, 2), bias_needs_grad=True), replace(problems[0], softcap=2.0)]
    assert run.work_units(problems[2], 3).splits > 1
    assert [wrong(problem) for problem in problems] == [[]] * len(problems)


#: Queries of which 8 neighbours are 8 in a row, not those of a dilated tile.
ALIGNED = [case for case in CASES if isinstance(case.pattern, Dense | Window)]
FEW = "causal-few-tokens", "window-sinks-both-masks", "longnet-short", "neighborhood-key-mask"


@pytest.mark.parametrize("name", NAMES)
def test_backends_drop_the_same_weights(name: str) -> None:
    """As the formula does, of one state of the generators; native where its tiles are queries in a row."""
    computed = 0
    few = FEW[:2] if name == "triton" else FEW  # interpreted, heads take long
    for case in ALIGNED if name == "native" else [case for case in CASES if case.id in few]:
        fewer = replace(case, shape=(*case.shape[:2], 2, 16), kv_heads=1)
        problem = problem_of(case if name == "native" else fewer)
        if refusals_of(registry.load(name), problem):
            continue
        assert dropped_otherwise(registry.load(name), problem) == []
        computed += 1
    assert computed >= 2


@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize("again", ["native", "manual"])
@pytest.mark.parametrize("pattern", [Dense(), Window(20, 0)], ids=str)
def test_a_recomputed_call_drops_the_same_weights(again: str, pattern: Pattern, monkeypatch: Any) -> None:
    """Activation checkpointing restores the generator; the choice may have changed meanwhile."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 70, 2, 16).unbind())

    def call(q: Tensor) -> Tensor:
        return attend(q, k, v, pattern, dropout_p=P).square()  # type: ignore[no-any-return]

    torch.manual_seed(3)
    once = call(q)
    expected = torch.autograd.grad(once.sum(), q)[0]
    torch.manual_seed(3)
    found: Any = checkpoint(call, q, use_reentrant=False)
    monkeypatch.setattr(packing, "resolve", lambda problem, name, order: resolve(problem, name or again, order))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), q)[0], expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(attend(q, k, v, pattern, dropout_p=P, backend="native").square(), once)


@pytest.mark.parametrize(
    "pattern", [Dense(), Dilated((16, 32), (1, 2), is_causal=True), Window(9, 0)], ids=lambda x: type(x).__name__
)
def test_documents(pattern: Pattern) -> None:
    """Each draws for itself, and both passes drop the same: out is linear in v."""
    ids = torch.tensor([0] * 33 + [1] * 33 + [2] * 24)[None]
    q, k, grad = torch.randn(3, 1, 90, 4, 16).unbind()
    q[:, 33:66], k[:, 33:66] = q[:, :33], k[:, :33]
    v = torch.randn(1, 90, 4, 16)
    v[:, 33:66] = v[:, :33]
    v.requires_grad_()
    out = attend(q, k, v, pattern, documents=ids, dropout_p=P, backend="native")
    assert not torch.allclose(out[:, :33], out[:, 33:66])
    (dv,) = torch.autograd.grad(out, v, grad)
    torch.testing.assert_close((dv * v).sum(), (grad * out).sum())


def test_rows_of_masks_made_of_data_draw_for_themselves() -> None:
    """Where each row of the batch has a pattern of its own, and so a call of its own."""
    case = next(case for case in DATA_CASES if case.id == "ranges-by-row")
    problem = problem_of(replace(case, key_mask=False))
    example = make(problem)
    q, k, v = (x[:1].expand_as(x) for x in (example.q, example.k, example.v))
    data = example.masks["pattern_data"]
    (first, second, _), _ = native.run(q, k, v, problem, pattern_data=data[:, :1].expand_as(data).contiguous())
    assert not torch.allclose(first, second)


def test_orders_of_a_neighborhood() -> None:
    problem = problem_of(Case("", Neighborhood((9, 15), (5, 7)), (1, 135, 2, 16)))
    assert set(native.orders(problem)) > {"natural"}
    assert wrong(problem) == []
