"""conformance() of a backend with `partial`, `run_documents` or `specialized`: a fault there fails, and is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.backends import manual
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Result, refusals_of
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing import conformance, optional, problems
from attn_dispatch.testing.cases import CASES
from tests.support.flaws import Other
from tests.support.pairwise import thinned

pytestmark = pytest.mark.usefixtures("little_time")  # one thread

Steps = dict[str, Any]  #: functions that stand for parts of a computation, by which a fault is planted


def step(steps: Steps | None, name: str, *given: Any) -> Any:
    """What the function of this name makes of what is given; without one it stays as it is."""
    if steps is None or name not in steps:
        first, *others = given
        return given if others else first
    return steps[name](*given)


def weights_of(q: Tensor, k: Tensor, problem: Problem, lse: Tensor, key_mask: Tensor | None) -> Tensor:
    """c * exp(s - lse), [batch, heads, q_len, k_len], by the definition."""
    counts = problem.pattern.multiplicity(problem.q_len, problem.k_len, problem.heads, key_mask=key_mask)
    keys = k.repeat_interleave(problem.heads // problem.kv_heads, 2)
    return counts * (torch.einsum("bqhd,bkhd->bhqk", q * problem.scale, keys) - lse[..., None]).exp()


@dataclass
class Formula:
    """The passes of a problem by the definition, in float64."""

    problem: Problem
    key_mask: Tensor | None
    steps: Steps

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        problem = replace(self.problem, needs_grad=False, has_key_mask=self.key_mask is not None)
        masks = {} if self.key_mask is None else {"key_mask": self.key_mask}
        out, lse = manual.run(q, k, v, problem, **masks)
        return step(self.steps, "results", out, lse)

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, out, lse = (x.double() for x in saved)
        assert grad is not None
        assert grad_lse is not None
        if "saved" in self.steps:
            own = (x.double() for x in Formula(self.problem, self.key_mask, {}).forward(*saved[:3]))
            out, lse = step(self.steps, "saved", out, lse, *own)
        shared = self.problem.heads // self.problem.kv_heads
        p = weights_of(q, k, self.problem, lse, self.key_mask)
        of_values = torch.einsum("bqhd,bkhd->bhqk", grad.double(), v.repeat_interleave(shared, 2))
        of_rows = (grad * out).sum(-1).transpose(1, 2) - step(self.steps, "grad_lse", grad_lse.double())
        ds = p * (of_values - of_rows[..., None]) * self.problem.scale
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, k.repeat_interleave(shared, 2))
        dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, grad.double())
        dk, dv = (torch.unflatten(x, 2, (-1, shared)).sum(3) for x in (dk, dv))
        return tuple(x.to(self.problem.dtype) for x in (dq, dk, dv))


@dataclass
class Full(Other):
    """One that has all optional members that compute."""

    steps: Steps | None = None

    def partial(self, problem: Problem, key_mask: Tensor | None = None) -> Formula:
        return Formula(problem, step(self.steps, "mask", key_mask), self.steps or {})

    def run_documents(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: tuple[int, ...], **tensors: Tensor
    ) -> Result:
        parts: list[Any] = []
        start = 0
        for length in step(self.steps, "lengths", lengths):
            own = slice(start, start := start + length)
            masks = {name: x[:, own] if name == "key_mask" else x for name, x in tensors.items()}
            pattern = step(self.steps, "pattern", problem.pattern)
            one = replace(problem, q_len=length, k_len=length, pattern=pattern)
            parts.append(manual.run(q[:, own], k[:, own], v[:, own], one, **masks))
        outs, lses = zip(*parts)
        return step(self.steps, "joined", torch.cat(outs, 1), torch.cat(lses, 2))  # type: ignore[no-any-return]

    def takes_key_lens(self, problem: Problem) -> bool:
        return problem.pattern.lengthened(1, 2) is not None and not problem.pattern.branches

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Any) -> Any:
        if (key_lens := tensors.pop("key_lens", None)) is None:
            return super().run(q, k, v, problem, **tensors)
        shape = (problem.batch, problem.heads, problem.q_len)
        out, lse = torch.zeros(q.shape, dtype=q.dtype), torch.full(shape, -math.inf, dtype=sum_dtype(q.dtype))
        for row, end in enumerate(step(self.steps, "ends", key_lens.clamp(0, problem.k_len)).tolist()):
            if end:
                own, one = slice(row, row + 1), replace(problem, batch=1, k_len=end)
                masks = {name: x[own, :end] for name, x in tensors.items()}
                out[own], lse[own] = manual.run(q[own], k[own, :end], v[own, :end], one, **masks)
        return step(self.steps, "rows", out, lse)

    def specialized(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, heads_first: bool = False) -> Any:
        first = tuple(x.clone() for x in (q, k, v)), (q, k, v)  # values, and memory, of the first call
        axes = (1, 2) if heads_first else (1, 1)

        def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Result:
            q, k, v = step(self.steps, "tensors", (q, k, v), *first)[0]
            out, lse = manual.run(q.transpose(*axes), k.transpose(*axes), v.transpose(*axes), problem)
            return step(self.steps, "specialized", out.transpose(*axes), lse)  # type: ignore[no-any-return]

        return step(self.steps, "made", run)


def problem_of(case: str, **changes: Any) -> Problem:
    (found,) = (each.problem(torch.float32, needs_grad=True) for each in CASES if each.id == case)
    return replace(found, **changes)


@pytest.mark.full
@pytest.mark.parametrize("member", ["partial", "run_documents", "takes_key_lens", "specialized"])
def test_what_has_no_fault_passes(member: str) -> None:
    """Of every kind, and both members are asked about many problems."""
    backend, asked = Full(manual.run), set[Problem]()
    problem_of_member, failures_of = optional.CHECKS[member]
    for problem in problems():
        each = None if refusals_of(backend, problem) else problem_of_member(backend, problem)
        if each is not None and each not in asked:
            asked.add(each)
            with torch.enable_grad() if member == "run_documents" else torch.no_grad():
                assert failures_of(backend, each) == [], each
    assert len(asked) > 40
    assert {each.needs_grad if member in ("partial", "run_documents") else each.return_lse for each in asked} == {
        False,
        True,
    }


@thinned("name", ["sdpa", "native", "tiles"], 3)
def test_members_of_this_package(name: str) -> None:
    backend: Any = registry.load(name)
    some = [problem_of(case) for case in ("causal-both-masks", "longnet-grouped", "window-key-mask", "dense-cross")]
    assert len(conformance(backend, some).computed) >= 2


def lse_of(change: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    return lambda out, lse: (out, change(lse))


def out_of(change: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    return lambda out, lse: (change(out), lse)


def one_result(out: Tensor, lse: Tensor, kept: dict[Any, Tensor] = {}) -> Any:  # noqa: B006 - kept over calls
    return kept.setdefault(out.shape, out.clone()).copy_(out), lse


DENSE_WITHOUT = "window-rows-without-keys"
#: By member: the fault, the case, the step that is wrong, and what is said of it.
FAULTS: dict[str, list[tuple[str, str, str, Callable[..., Any], str]]] = {
    "partial": [
        ("its own out and lse", "dense", "saved", lambda out, lse, *own: own, "dv is off by"),
        ("its own out", "dense", "saved", lambda out, lse, own, _: (own, lse), "dk is off by"),
        ("no gradient of lse", "dense", "grad_lse", torch.zeros_like, "dq is off by"),
        ("no key mask", "causal-key-mask", "mask", lambda x: None, "out is off by"),
        ("lse in base 2", "causal", "results", lse_of(lambda x: x / math.log(2)), "lse is off by"),
        ("heads first", "dense", "results", out_of(lambda x: x.transpose(1, 2)), "forward gave out [1, 4, 64, 16]"),
        ("lse of tokens first", "dense", "results", lse_of(lambda x: x.mT), "forward gave lse [1, 64, 4]"),
        ("0 for rows without keys", DENSE_WITHOUT, "results", lse_of(lambda x: x.clamp(min=0)), "lse is off by"),
    ],
    "run_documents": [
        ("one document", "dense", "lengths", lambda lengths: (sum(lengths),), "out is off by"),
        ("one token late", "dense", "lengths", lambda x: (x[0] + 1, *x[1:-1], x[-1] - 1), "out is off by"),
        ("another pattern", "causal-key-mask", "pattern", lambda _: Dense(), "out is off by"),
        ("no lse", "dense", "joined", lambda out, lse: out, "lse was asked for and not returned"),
        ("another lse", "longnet-causal", "joined", lse_of(lambda x: x * 1.005), "lse is off by"),
        ("no gradient", "dense", "joined", out_of(lambda x: x.detach()), "dk is off by"),
    ],
    "takes_key_lens": [
        ("one key fewer", "causal", "ends", lambda ends: (ends - 1).clamp(0), "out is off by"),
        ("a key for rows without", "dense", "ends", lambda ends: ends.clamp(1), "out has NaN"),
        ("0 for rows without keys", "dense", "rows", lse_of(lambda x: x.clamp(-9)), "lse is off by"),
    ],
    "specialized": [
        ("the first call's values", "dense", "tensors", lambda x, clones, views: (clones, x), "tensors out differs"),
        ("the first call's memory", "dense", "tensors", lambda x, clones, views: (views, x), "tensors out differs"),
        ("one result for all calls", "dense", "specialized", one_result, "a second call changed the result"),
        ("other bits", "longnet-causal", "specialized", out_of(lambda x: x * 1.0001), "out differs from that of"),
        ("other axes", "dense", "specialized", out_of(lambda x: x.transpose(1, 2)), "out is [1, 4, 64, 16] of"),
        ("no lse", "dense", "specialized", lambda out, lse: out, "lse was asked for and not returned"),
        ("another lse", "causal", "specialized", lse_of(torch.neg), "heads first: lse differs from"),
        ("another dtype", "causal", "specialized", out_of(lambda x: x.double()), "torch.float64, that of run"),
    ],
}


@pytest.mark.parametrize(
    ("member", "number"), [(member, n) for member, faults in FAULTS.items() for n in range(len(faults))]
)
def test_a_fault_is_named(member: str, number: int) -> None:
    _, case, step, change, named = FAULTS[member][number]
    backend, (problem_of_member, failures_of) = Full(manual.run, steps={step: change}), optional.CHECKS[member]
    asked = problem_of_member(backend, problem_of(case, return_lse=True))
    assert asked is not None
    assert named in "; ".join(failures_of(backend, asked))


@pytest.mark.parametrize(
    ("member", "number"), [("partial", 1), ("run_documents", 3), ("takes_key_lens", 0), ("specialized", 3)]
)
def test_conformance_reports_faults_by_member(member: str, number: int) -> None:
    _, case, step, change, named = FAULTS[member][number]
    with pytest.raises(AssertionError) as raised:
        conformance(Full(manual.run, steps={step: change}), [problem_of(case, return_lse=True)])
    text = str(raised.value)
    assert re.search(f"{member}: .*{re.escape(named)}", text)
    assert not any(f"    {other}: " in text for other in optional.CHECKS if other != member)


def test_nothing_specialized_is_right() -> None:
    steps: Steps = {"made": lambda made: None}
    assert conformance(Full(manual.run, steps=steps), [problem_of("dense")]).computed
