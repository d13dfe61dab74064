"""Packed documents by a backend that takes all of them at once, and decisions by classes of lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Window, attend, counters, explain, record
from attn_dispatch.backends import flex, manual, native, triton
from attn_dispatch.errors import BackendFailed
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.native import tables
from attn_dispatch.kernels.native.tables import document_tables
from attn_dispatch.kernels.triton import support
from attn_dispatch.recording import read_record
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from tests.call.test_packing import LENGTH, PATTERNS, Three, expected, tensors
from tests.support.calls import close
from tests.support.fakes import raising
from tests.support.ordered import stored
from tests.support.pairwise import crossed
from tests.support.timed import Machine, call_until_measured

pytestmark = pytest.mark.usefixtures("short_trials")
without_compilers = pytest.mark.usefixtures("triton_interpreter", "uncompiled_flex")  # in a trial they take seconds

FLOATS: Any = [x.float() for x in tensors()]
able = pytest.mark.skipif(bool(native.refusals(Problem.of(*FLOATS))), reason="no compiler")
EVERY: tuple[Pattern, ...] = (
    *PATTERNS,
    Window(7, 2),
    Window(None, 3),
    Dilated((8, 16, 64), (1, 2, 4), offsets="block"),
)
#: Of equal lengths, of others, single tokens, and a row of one document.
IDS = torch.stack([torch.arange(6).repeat_interleave(torch.tensor([10, 10, 1, 24, 1, 14])), torch.full((LENGTH,), 7)])
GROUPED = torch.repeat_interleave(torch.arange(7), torch.tensor([20, 70, 5, 1, 64, 30, 10]))[None]
ALIKE = IDS[:1].expand(2, -1)
AT_ONCE: dict[str, Any] = {"native": native, "triton": triton, "flex": flex}


def refuses(backend: str, pattern: Pattern) -> bool:
    q, k, v = FLOATS
    problem, module = Problem.of(q, k, v, pattern), adapted(AT_ONCE[backend])
    return bool(module.refusals(problem)) or not module.takes_documents(problem)


@without_compilers
@crossed(
    backend=AT_ONCE, pattern=EVERY, rows=("alike", "apart"), layout=("bnhd", "bhnd"), masked=(False, True),
    too_slow=lambda backend, pattern, *_: backend == "triton" and pattern.branches,
)  # fmt: skip
def test_all_documents_at_once(
    backend: str, pattern: Pattern, rows: str, layout: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refuses(backend, pattern):
        pytest.skip("no compiler, no Triton, or its pattern is another backend's")
    monkeypatch.setattr(AT_ONCE[backend], "run", None)
    launches: Any = []
    launch: Any = lambda *args, **more: (launches.append(args[0]), support.launch(*args, **more))[1]  # noqa: E731
    monkeypatch.setattr("attn_dispatch.kernels.triton.passes.launch", launch)
    share, length = (2, 21) if backend == "triton" else (1, LENGTH)  # interpreted, heads and tokens take seconds
    wide = (x.detach().float().double() for x in tensors())
    q, k, v = (x[:, :length, : x.shape[2] // share].clone().requires_grad_() for x in wide)
    ids = (ALIKE if rows == "alike" else IDS)[:, :length]
    key_mask = torch.arange(length).expand(2, -1) % 5 != 2 if masked and pattern == Dense() else None
    more: Any = {"documents": ids, "key_mask": key_mask, "backend": backend, "layout": layout, "return_lse": True}
    given = [x.detach().float().requires_grad_() for x in (q, k, v)]
    laid_out: Any = [x if layout == "bnhd" else x.transpose(1, 2) for x in given]
    out, lse = attend(laid_out[0], laid_out[1], laid_out[2], pattern, **more)
    out = out if layout == "bnhd" else out.transpose(1, 2)
    right, right_lse = expected(q, k, v, pattern, ids, None, key_mask)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), given)
    exact = torch.autograd.grad(right.square().sum() + right_lse.sum(), (q, k, v))
    assert all(close(x, y) for x, y in [(out, right), (lse, right_lse), *zip(grads, exact)])
    assert len(launches) == (3 if backend == "triton" else 0)  # forward, dq, dk and dv


@able
@pytest.mark.parametrize("pattern", EVERY, ids=str)
def test_documents_in_groups(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neighbours in memory: the kernel runs once for each group."""
    given: Any = [x.detach().float().requires_grad_() for x in tensors(length=200, batch=1)]
    results = []
    for most in (1, 80, 1000):
        monkeypatch.setattr(tables, "NEIGHBOURS", most)
        tables.document_tables.cache_clear()
        out, lse = attend(given[0], given[1], given[2], pattern, documents=GROUPED, backend="native", return_lse=True)
        results.append([out, lse, *torch.autograd.grad((out, lse), given, [torch.ones_like(x) for x in (out, lse)])])
    wide: Any = [x.detach().double().requires_grad_() for x in given]
    right = expected(wide[0], wide[1], wide[2], pattern, GROUPED, None, None)
    exact = [*right, *torch.autograd.grad(right, wide, [torch.ones_like(x) for x in right])]
    assert all(close(x, y) for found in results for x, y in zip(found, exact))
    assert len(document_tables(Problem.of(given[0], given[1], given[2], pattern), (20, 70, 5))) == 1
    tables.document_tables.cache_clear()


@able
def test_rounded_gradients_of_documents_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of dk and dv are rounded once for each key, whichever group its document is in."""
    given: Any = [x.detach().bfloat16().requires_grad_() for x in tensors(length=200, batch=1)]
    found = []
    for most in (1, 80, 1000):
        monkeypatch.setattr(tables, "NEIGHBOURS", most)
        tables.document_tables.cache_clear()
        out = attend(given[0], given[1], given[2], is_causal=True, documents=GROUPED, backend="native")
        found.append(torch.autograd.grad(out, given, torch.ones_like(out)))
    tables.document_tables.cache_clear()
    for apart, some, together in zip(*found):
        assert torch.equal(apart, together)
        assert torch.equal(some, together)


@without_compilers
@pytest.mark.parametrize("backend", AT_ONCE)
def test_what_other_documents_hold_does_not_reach_one(backend: str) -> None:
    if refuses(backend, Dense()):
        pytest.skip(f"{backend} does not run here")
    q, k, v = (x.detach()[:, :24, : x.shape[2] // 2].float() for x in tensors())
    before = attend(q, k, v, documents=IDS[:, :24], backend=backend)[0, 10:20].clone()
    for x in (q, k, v):
        x[0, :10] = x[0, 20:] = torch.nan
    after: Any = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*after, documents=IDS[:, :24], backend=backend)
    assert torch.equal(out[0, 10:20], before)
    for grad in torch.autograd.grad(out[0, 10:20].sum(), after):
        assert grad[0, 10:20].isfinite().all()


@able
def test_autocast_casts_them_once() -> None:
    q, k, v = (x.detach().float() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, documents=IDS, backend="native")
    half = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), documents=IDS, backend="native")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, half)


CLASSES = 2 * 9  #: powers of two up to 256, of one document and of several that are equally long


def lists(count: int) -> list[Tensor]:
    """Starts of documents of 160 tokens in all, of other lengths in each."""
    generator = torch.Generator().manual_seed(0)
    cuts = [torch.randperm(159, generator=generator)[:5].sort().values + 1 for _ in range(count)]
    return [torch.cat([torch.tensor([0]), each, torch.tensor([160])]) for each in cuts]


def long_rows() -> Three:
    q, k, v = (x.detach().float() for x in tensors(length=160, batch=1))
    return q, k, v


def test_decisions_are_of_classes_of_lengths() -> None:
    rows = long_rows()
    for starts in lists(30):
        out = attend(*rows, cu_seqlens=starts, is_causal=True)
        right = attend(*rows, cu_seqlens=starts, is_causal=True, backend="manual")
        assert close(out, right.double())
    lengths = {int(length) for starts in lists(30) for length in starts.diff()}
    assert len(lengths) > CLASSES
    assert sum(count for name, count in counters().items() if name != "forced") <= CLASSES


def test_recorded_classes(tmp_path: Any, set_mode: Callable[[str], None]) -> None:
    set_mode("off")
    with record(tmp_path / "seen"):
        for starts in lists(10):
            attend(*long_rows(), cu_seqlens=starts)
    found = read_record(tmp_path / "seen")
    assert 0 < len(found) <= CLASSES
    assert {each.batch & (each.batch - 1) for each in found} == {0}
    assert all(each.q_len & (each.q_len - 1) == 0 for each in found)


def test_a_backend_that_fails_on_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual, "run_documents", raising(ValueError("no documents today")), raising=False)
    with pytest.raises(BackendFailed, match="no documents today"):
        attend(*tensors(), documents=IDS, backend="manual")


@pytest.mark.parametrize(("takes_ms", "expected"), [(3.9, "a"), (4.1, "b")])
def test_a_backend_that_takes_all_is_chosen_before_the_fastest(
    takes_ms: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it takes at most twice the time."""
    machine, (q, k, v), taken = Machine(monkeypatch, a=takes_ms, b=2, c=3), long_rows(), list[object]()

    def run_documents(q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: tuple[int, ...]) -> Tensor:
        taken.append((problem.q_len, lengths))
        return q.clone()

    monkeypatch.setattr(machine.by_name["a"], "run_documents", run_documents, raising=False)
    starts = torch.arange(0, 161, 16)
    attend(q, k, v, cu_seqlens=starts)
    assert explain(q, k, v, cu_seqlens=starts).choice == expected
    assert taken == ([(160, (16,) * 10)] if expected == "a" else [])


def test_a_trial_goes_on_beside_documents(monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None]) -> None:
    """Their calls pay for it in mode `online`, and from its end on they take the choice."""
    set_mode("online")
    monkeypatch.setenv("ATTN_DISPATCH_OVERHEAD", "0.5")
    Machine(monkeypatch, quick_cases=True, a=4, b=2)
    q, k, v = long_rows()
    starts = torch.arange(0, 161, 16)
    call_until_measured(lambda: attend(q, k, v, cu_seqlens=starts))
    assert (stored().choice, stored().problem["q_len"]) == ("b", 16)
