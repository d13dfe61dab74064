"""Tokens that no query sees, and padding queries, reach no result and no gradient, even if NaN or infinite."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from attn_dispatch.dispatch import attend
from attn_dispatch.kernels import hidden, registry
from attn_dispatch.kernels.hidden import copied_bytes, unseen_keys
from attn_dispatch.spec.data import Ranges
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import Example, make
from tests.support.cases import factors_of, kind_of
from tests.support.definition import problems
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import crossed

GRID = Neighborhood((6, 10), (3, 5), (1, 2))
PATTERNS = {
    "causal": Dense(is_causal=True),
    "window": Window(7, 0),
    "dilated": Dilated((15, 60), (1, 2), is_causal=True),
    "neighborhood": GRID,
    "reordered": Reordered(GRID, "hilbert"),
}
MASKED = [
    Case(f"{name}-{'-'.join(masks)}", pattern, (2, 60, 4, 8), None, 2, "seq_lens" in masks, "key_mask" in masks)
    for (name, pattern), masks in product(PATTERNS.items(), [("key_mask",), ("seq_lens",), ("key_mask", "seq_lens")])
]
#: Keys that no query sees by the pattern.
UNSEEN = [
    Case("uncovered", Dilated((30,), (3,)), (2, 60, 2, 8)),
    Case("uncovered-grouped", Dilated((8, 24), (4, 6), is_causal=True), (2, 24, 4, 8), kv_heads=2),
    Case("split", Dilated((15, 60), (2, 3), heads="split"), (2, 60, 4, 8)),
    Case("uncovered-lengths", Dilated((30,), (3,)), (2, 60, 2, 8), seq_lens=True),
    Case("uncovered-reordered", Reordered(Dilated((30,), (3,)), "residue"), (2, 60, 2, 8)),
    Case("longer-keys", Window(7, 0), (2, 20, 4, 8), k_len=90, kv_heads=2),
    Case("longer-keys-masked", Window(7, 2), (2, 20, 2, 8), k_len=90, key_mask=True),
    Case("one-query", Window(7, 0), (2, 1, 2, 8), k_len=90),
    Case("longer-keys-sinks", Window(7, 0, 3), (2, 20, 4, 8), k_len=90, kv_heads=2),
    Case(
        "longer-keys-stride",
        Neighborhood((10, 9), (3, 4), (1, 2), (True, False), "shift", (3, 2)),
        (2, 20, 4, 8),
        k_len=90,
        kv_heads=2,
    ),
    Case("negative-scale", Window(7, 0), (2, 20, 2, 8), k_len=90, scale=-0.3),
]
BACKENDS = ("manual", "sdpa", "sdpa_mask", "sdpa_float32", "native", "tiles", "flex")
BITS = (math.nan, math.inf, -math.inf, 3e38)


def hidden_parts(example: Example) -> dict[str, Tensor]:
    """By the definition: the keys and values that no query sees, and the padding queries."""
    problem = example.problem
    masks: dict[str, Any] = example.masks
    counts = problem.pattern.multiplicity(problem.q_len, problem.k_len, problem.heads, **masks)
    counts = counts.expand(problem.batch, *counts.shape[-3:])
    seen = counts.sum(2).view(problem.batch, problem.kv_heads, -1, problem.k_len).sum(2).transpose(1, 2) > 0
    lens = example.masks.get("seq_lens", torch.tensor(problem.q_len))
    padding = torch.arange(problem.q_len) >= lens.reshape(-1, 1)
    return {"keys": ~seen, "queries": padding.expand(problem.batch, -1)}


def with_hidden(example: Example, bits: float) -> Example:
    """The same tensors with hidden tokens, and the gradient of padding, set to this value."""
    hidden = hidden_parts(example)
    q, k, v = (x.detach().clone() for x in (example.q, example.k, example.v))
    for x in (k, v):
        x[hidden["keys"]] = bits
    q[hidden["queries"]] = bits
    grad = None if example.grad is None else example.grad.masked_fill(hidden["queries"][:, :, None, None], bits)
    q, k, v = (x.requires_grad_(example.problem.needs_grad) for x in (q, k, v))
    return replace(example, q=q, k=k, v=v, grad=grad)


def computed(backend: str, example: Example) -> dict[str, Tensor]:
    out, lse = registry.load(backend).run(example.q, example.k, example.v, example.problem, **example.masks)
    found = {"out": out, "lse": lse}
    if example.grad is not None:
        # NaN in the gradient of padding's lse, too.
        padding = hidden_parts(example)["queries"][:, None, :]
        grad_lse = torch.linspace(-1, 1, lse.numel()).view(lse.shape).to(lse.dtype)
        grad_lse = torch.where(padding, example.grad[0, -1, 0, 0] * 0 + 1, grad_lse).to(lse.dtype)
        inputs = (example.q, example.k, example.v)
        found |= zip(("dq", "dk", "dv"), torch.autograd.grad((out, lse), inputs, (example.grad, grad_lse)))
    return {name: x.detach() for name, x in found.items()}


def check(backend: str, case: Case, dtype: torch.dtype, *, needs_grad: bool = True) -> None:
    problem = case.problem(dtype, needs_grad=needs_grad)
    if registry.load(backend).refusals(problem):
        pytest.skip(f"{backend} refuses it")
    example = make(problem)
    hidden = hidden_parts(example)
    assert any(part.any() for part in hidden.values())
    expected = computed(backend, with_hidden(example, 0.0))
    assert all(not x.isnan().any() for x in expected.values())
    for bits in BITS:
        found = computed(backend, with_hidden(example, bits))
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, bits)
        for name in ("dk", "dv") if needs_grad else ():
            assert not found[name][hidden["keys"]].any(), (name, bits)
        for name in ("out", "dq") if needs_grad else ("out",):
            assert not found[name][hidden["queries"]].any(), (name, bits)
        assert (found["lse"].transpose(1, 2)[hidden["queries"]] == -math.inf).all()


@pytest.mark.usefixtures("uncompiled_flex")
@crossed(
    lambda backend, case: {**factors_of(case), "backend": backend},
    lambda backend, case: backend == "flex" and case not in (*MASKED[::5], *UNSEEN[::3]),
    backend=BACKENDS,
    case=MASKED + UNSEEN,
)
def test_hidden_tokens_never_matter(backend: str, case: Case) -> None:
    check(backend, case, torch.bfloat16 if backend == "sdpa_float32" else torch.float32)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("backend", ["manual", "sdpa", "sdpa_mask", "native", "tiles", "flex"])
def test_without_gradients(backend: str) -> None:
    check(backend, MASKED[2], torch.float16, needs_grad=False)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["manual", "sdpa_mask", "native", "tiles", "flex"])
def test_keys_that_intervals_leave_out(backend: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked for once for a pattern, whatever hides others."""
    first = torch.arange(20) // 5 * 5
    pattern, searched = Ranges(first[None], first[None] + 3), list[Any]()  # all but every fifth
    search = hidden._hidden_together

    def counted(*given: Any) -> Tensor:
        searched.append(given)
        return search(*given)

    monkeypatch.setattr(hidden, "_hidden_together", counted)
    q, k, v = (torch.randn(2, 20, 4, 8) for _ in range(3))
    key_mask = torch.ones(2, 20, dtype=torch.bool).index_fill_(1, torch.tensor([1]), not masked)
    expected = attend(q, k, v, pattern, key_mask=key_mask, backend="manual")
    k[:, 4::5] = v[:, 4::5] = math.nan
    k[:, 1], v[:, 1] = (x[:, 1].masked_fill(~key_mask[:, 1, None, None], math.nan) for x in (k, v))
    for _ in range(2):
        out = attend(q, k, v, pattern, key_mask=key_mask, backend=backend)
        assert (out - expected).abs().max() < 1e-5
    assert len(searched) <= 1


@given(problems())
def test_unseen_keys_match_the_multiplicity(problem: Problem) -> None:
    counts = problem.pattern.multiplicity(problem.q_len, problem.k_len, problem.heads)
    expected = counts.sum(1).view(problem.kv_heads, -1, problem.k_len).sum(1).T == 0
    found = unseen_keys(problem)
    assert (found is None) == (not expected.any())
    if found is not None:
        assert torch.equal(found[0, :, :, 0].expand_as(expected), expected)
        assert copied_bytes(problem) > 0


@pytest.mark.parametrize(("rates", "copies"), [((1, 32), False), ((2, 32), True)])
def test_copied_bytes_need_no_table_of_all_tokens(rates: tuple[int, int], copies: bool) -> None:
    """`plan` estimates clusters: a table of such a long sequence would not fit into memory."""
    pattern = Dilated((2048, 65_536), rates)
    problem = problem_of((1, 1 << 44, 8, 64), pattern, torch.bfloat16, torch.device("cpu"))
    assert (copied_bytes(problem) > 0) == copies


@pytest.mark.full
@pytest.mark.skipif(not INTERPRETED, reason="there is no interpreter for Triton's kernels")
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@crossed(
    lambda backend, case: {"pattern": kind_of(case.pattern), "backend": backend},
    # In the interpreter, programs run one after the other.
    lambda backend, case: case not in (*MASKED[5::9], *UNSEEN[::5]),
    backend=("triton", "triton_tiles"),
    case=[*MASKED[2::3], *UNSEEN],
)
def test_triton(backend: str, case: Case) -> None:
    check(backend, replace(case, shape=(1, *case.shape[1:])), torch.float32)
