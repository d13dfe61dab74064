"""manual, the oracle, against three nested loops over plain numbers; and the gate against backends that are wrong."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_dispatch.backends import manual
from attn_dispatch.kernels import formula, registry
from attn_dispatch.kernels.contract import Backend, adapted
from attn_dispatch.kernels.dropout import gain
from attn_dispatch.machine.openmp import openmp
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning import oracle
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tests.support.calls import threads
from tests.support.cases import gate
from tests.support.interpreted import INTERPRETED

SMALL = (
    Case("dense", Dense(), (2, 6, 2, 3)),
    Case("causal", Dense(is_causal=True), (1, 4, 4, 3), k_len=7, kv_heads=2),
    Case("rows-without-keys", Dense(is_causal=True), (1, 7, 2, 3), k_len=4),
    Case("window", Window(2, 1), (1, 9, 2, 3)),
    Case("dilated", Dilated((4, 6), (1, 3), True), (1, 15, 4, 3)),
    Case("dilated-block", Dilated((5, 9), (2, 3), offsets="block"), (1, 15, 4, 3), kv_heads=2),
    Case("dilated-split", Dilated((5, 9), (2, 3), heads="split"), (1, 15, 3, 3)),
    Case("neighborhood", Neighborhood((4, 5), (3, 3), edges="shift"), (1, 20, 1, 3)),
    Case("masks", Dilated((4, 8), (1, 2)), (3, 11, 2, 3), seq_lens=True, key_mask=True),
)


def multiplicity(problem: Problem, masks: dict[str, Tensor]) -> Tensor:
    seq_lens, key_mask = masks.get("seq_lens"), masks.get("key_mask")
    return problem.pattern.multiplicity(
        problem.q_len, problem.k_len, problem.heads, seq_lens=seq_lens, key_mask=key_mask
    )


def three_loops(problem: Problem, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The one formula, in numbers: for every head, for every query, for every key."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(counts.shape[:-1], -math.inf, dtype=torch.float64)
    group = problem.heads // problem.kv_heads
    for b in range(problem.batch):
        for h in range(problem.heads):
            for i in range(problem.q_len):
                weights = []
                for j in range(problem.k_len):
                    score = problem.scale * sum(
                        x * y for x, y in zip(q[b, i, h].tolist(), k[b, j, h // group].tolist())
                    )
                    weights.append(int(counts[b, h, i, j]) * math.exp(score))
                total = math.fsum(weights)
                if total:
                    lse[b, h, i] = math.log(total)
                    for d in range(problem.head_dim):
                        terms = [w * float(v[b, j, h // group, d]) for j, w in enumerate(weights)]
                        out[b, i, h, d] = math.fsum(terms) / total
    return out, lse


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_manual_is_three_loops(case: Case, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunked:
        monkeypatch.setattr(manual, "_piece", lambda problem: (4, 1))
    problem = case.problem(torch.float64, needs_grad=False)
    example = gate(problem).example
    counts = multiplicity(problem, example.masks)
    counts = counts.expand(problem.batch, *counts.shape[-3:])
    out, lse = three_loops(problem, example.q, example.k, example.v, counts)
    found = manual.run(example.q, example.k, example.v, problem, **example.masks)
    torch.testing.assert_close(found[0], out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found[1], lse, rtol=1e-13, atol=1e-13)
    assert bool((found[0][(lse == -math.inf).transpose(1, 2)] == 0).all())


@pytest.mark.parametrize("along", ["a-direction", pytest.param("every-axis", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_manual_gradient_is_the_numerical_one(case: Case, along: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along an axis of q, k and v after the other, or along one direction that is drawn."""
    monkeypatch.setattr(manual, "_piece", lambda problem: (5, 2))
    problem = case.problem(torch.float64, needs_grad=True)
    example = gate(problem).example

    def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return manual.run(q, k, v, problem, **example.masks)[0]

    assert torch.autograd.gradcheck(out, (example.q, example.k, example.v), fast_mode=along == "a-direction")


def test_manual_dropout() -> None:
    """Dropout is random: its mean is the result without it, a share p of the weights is gone, and the backward drops
    what the forward dropped."""
    problem = replace(Case("dropout", Dense(), (1, 32, 4, 32)).problem(torch.float64, needs_grad=True), dropout_p=0.3)
    q, k = (torch.zeros(1, 32, 4, 32, dtype=torch.float64) for _ in range(2))
    v = torch.eye(32, dtype=torch.float64)[None, :, None, :].expand(1, 32, 4, 32).contiguous().requires_grad_()
    torch.manual_seed(0)
    runs = [manual.run(q, k, v, problem)[0] for _ in range(60)]
    weights = torch.stack(runs).detach()  # v is the identity, so that out is the matrix of weights
    share = float((weights == 0).double().mean())
    entries = weights.numel()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / entries)
    kept = weights[weights != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, gain(0.3) / 32))
    assert float(weights.mean(0).sub(1 / 32).abs().max()) < 6 / 32 * math.sqrt(0.3 / 0.7 / 60)
    (dv,) = torch.autograd.grad(runs[0].sum(), v)
    torch.testing.assert_close(dv[0, :, :, 0], runs[0].detach()[0].sum(0).transpose(0, 1), rtol=1e-12, atol=1e-12)


def wrong(run: Callable[..., object]) -> Backend:
    return adapted(types.SimpleNamespace(name="wrong", refusals=lambda problem: [], run=run))


def failures(case: Case, run: Callable[..., object], dtype: torch.dtype = torch.float32) -> str:
    expected = gate(case.problem(dtype, needs_grad=True))
    return "; ".join(expected.check(expected.run(wrong(run))).failures)


def through_counts(change: Callable[[Tensor, Problem], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The formula with another multiplicity."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **masks: Tensor) -> tuple[Tensor, Tensor]:
        counts = multiplicity(problem, masks)
        out, lse = formula.formula(q, k, v, change(counts, problem), problem.scale)
        return out.to(q.dtype), lse

    return run


CAUSAL_CROSS = Case("cross", Dense(is_causal=True), (1, 20, 2, 8), k_len=33)
DILATED = Case("dilated", Dilated((8, 16), (1, 2), True), (1, 48, 4, 8))
UNEVEN = Case("uneven", Dilated((10,), (3,)), (1, 47, 3, 8))
MASKED = Case("masked", Dense(), (2, 40, 2, 8), key_mask=True)


def first_lines_up(counts: Tensor, problem: Problem) -> Tensor:
    return torch.ones_like(counts).tril()


def branches_count_once(counts: Tensor, problem: Problem) -> Tensor:
    return counts.clamp(max=1)


def dilation_from_the_start(counts: Tensor, problem: Problem) -> Tensor:
    """Selection by `t % r` instead of `(t % w) % r`: the same wherever r divides w."""
    assert isinstance(problem.pattern, Dilated)
    (w,), (r,) = problem.pattern.segment_lengths, problem.pattern.dilation_rates
    t, head = torch.arange(problem.q_len), torch.arange(problem.heads)[:, None]
    chosen = t % r == head % r
    return (chosen[:, :, None] & chosen[:, None, :] & (t[:, None] // w == t // w)).int()


def mask_dropped(counts: Tensor, problem: Problem) -> Tensor:
    return torch.ones_like(counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("case", "change"),
    [
        (CAUSAL_CROSS, first_lines_up),
        (DILATED, branches_count_once),
        (UNEVEN, dilation_from_the_start),
        (MASKED, mask_dropped),
    ],
    ids=["causal-alignment", "branches-count-once", "dilation-from-the-start", "mask-dropped"],
)
def test_gate_catches_other_functions(
    case: Case, change: Callable[[Tensor, Problem], Tensor], dtype: torch.dtype
) -> None:
    assert failures(case, through_counts(lambda counts, problem: counts), dtype) == ""
    found = failures(case, through_counts(change), dtype)
    assert "out is off by" in found
    assert "dv is off by" in found


@pytest.mark.parametrize("result", [None, [1, 2], (None, None)], ids=str)
def test_gate_refuses_other_results(result: object) -> None:
    with pytest.raises(TypeError, match=r"not out or \(out, lse\)"):
        failures(DILATED, lambda *arguments, **masks: result)


def test_detached_merge_weights_give_another_gradient() -> None:
    """Each branch's backward with its own out and lse, weighed by constants, as torchscale does."""

    def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **masks: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(problem.pattern, Dilated)
        parts = []
        for w, r in problem.pattern.branches:
            one = replace(problem, pattern=Dilated((w,), (r,), True).simplify(problem.q_len, problem.k_len, 4))
            counts = one.pattern.multiplicity(problem.q_len, problem.k_len, problem.heads)
            parts.append(formula.formula(q, k, v, counts, problem.scale))
        lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
        weights = [torch.exp(part - lse).detach().transpose(1, 2).unsqueeze(-1) for _, part in parts]
        return sum((w * out for w, (out, _) in zip(weights, parts)), torch.zeros(())), lse

    found = failures(DILATED, run)
    assert "out" not in found.replace("dq is not zero where the gradient of out is", "")
    assert "dq is off by" in found


@pytest.mark.usefixtures("uncompiled_flex", "triton_interpreter")
@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "name",
    [
        "sdpa",
        "native",
        *(pytest.param(name, marks=pytest.mark.full) for name in ["sdpa_mask", "manual"]),
        *(pytest.param(name, marks=pytest.mark.full) for name in ["triton", "triton_tiles"] if INTERPRETED),
    ],
)
def test_sampled_gate(name: str, needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows and heads drawn, a right backend passes and one that is wrong in a single place is seen."""
    monkeypatch.setattr("attn_dispatch.tuning.oracle.PAIRS", 4096)
    monkeypatch.setattr("attn_dispatch.tuning.oracle.KEY_BYTES", 2 * 300 * 16 * 8)
    case = Case("sampled", Dilated((64, 128), (1, 2), True), (1, 300, 8, 16), kv_heads=4)
    problem = case.problem(torch.float32, needs_grad=needs_grad)
    expected = Oracle.of(gate(problem).example)
    assert len(expected.rows) < 20
    assert len(expected.heads) == 2
    found = expected.run(registry.load(name))
    assert expected.check(found).failures == ()
    found["out"][0, int(expected.rows[1]), int(expected.heads[0]), 3] += 1e-4
    assert expected.check(found).failures[0].startswith("out is off by 1.0")
    if needs_grad:
        missed = next(i for i in range(300) if i not in expected.rows.tolist())
        found["dq"][0, missed, 0, 0] += 1e-9
        assert "dq is not zero where the gradient of out is" in expected.check(found).failures


@pytest.mark.parametrize("pairs", [4096, 10**9], ids=["sampled", "whole"])
def test_gradient_of_a_bias(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is wrong in a place that was drawn is found."""
    monkeypatch.setattr("attn_dispatch.tuning.oracle.PAIRS", pairs)
    problem = Case("biased", Dense(), (2, 70, 4, 16)).problem(torch.float32, needs_grad=True)
    expected = Oracle.of(make(replace(problem, bias=(1, 4), bias_needs_grad=True)))
    assert (len(expected.rows) < 70) == (pairs < 10**9)
    found = expected.run(registry.load("manual"))
    assert found["dbias"].shape == (1, 4, 70, 70)
    assert expected.check(found).failures == ()
    found["dbias"][0, int(expected.heads[0]), int(expected.rows[-1]), 3] += 1e-3
    assert expected.check(found).failures[0].startswith("dbias is off by 1.0")


def test_the_callers_threads_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    within, evaluate, library = list[int](), oracle._Sample.evaluate, openmp()
    assert library is not None

    def noted(self: oracle._Sample, dtype: torch.dtype) -> dict[str, Tensor]:
        within.append(library.omp_get_max_threads())
        return evaluate(self, dtype)

    monkeypatch.setattr(oracle._Sample, "evaluate", noted)
    example = make(Case("small", Dense(), (1, 16, 2, 8)).problem(torch.float32, needs_grad=False))
    with threads(2):
        Oracle.of(example)
        assert library.omp_get_max_threads() == 2
    assert within == [1, 1]
