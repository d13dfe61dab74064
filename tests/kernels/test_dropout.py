"""Which weights `manual` drops: the asked share, and the same ones when a call is repeated from the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_dispatch.backends import manual
from attn_dispatch.dispatch import attend
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.allocations import allocated_peak
from attn_dispatch.testing.cases import Case
from tests.support.calls import setting


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def _default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    with setting(torch.get_default_dtype, torch.set_default_dtype, request.param):
        yield


@pytest.mark.usefixtures("_default_dtype")
def test_the_share_of_dropped_weights() -> None:
    """Whatever the default dtype: there are few random numbers in bfloat16."""
    q = torch.zeros(1, 4096, 1, 64, dtype=torch.float32)
    k, v = torch.zeros(1, 64, 1, 64, dtype=torch.float32), torch.eye(64, dtype=torch.float32)[None, :, None, :]
    torch.manual_seed(0)
    out = attend(q, k, v, dropout_p=0.001, backend="manual")
    dropped = float((out == 0).float().mean())
    assert dropped == pytest.approx(0.001, abs=0.0003)  # 5 standard deviations of 262,144 draws


@pytest.mark.parametrize("free", [(2**14, 2**30), (2**30, 2**14)], ids=["less-first", "more-first"])
def test_a_recomputed_call_drops_the_same_weights(free: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing restores the seed, not the memory that is free."""
    monkeypatch.setattr(manual, "CHUNK_BYTES", 2**16)
    x = torch.randn(1, 128, 2, 8)

    def f(q: Tensor) -> Any:
        return attend(q, x, x, dropout_p=0.5, backend="manual").square()

    def gradient(*, recompute: bool) -> Tensor:
        monkeypatch.setattr(manual, "available_bytes", lambda device: free[0])
        q = x.clone().requires_grad_()
        torch.manual_seed(0)
        out: Tensor = checkpoint(f, q, use_reentrant=False) if recompute else f(q)
        monkeypatch.setattr(manual, "available_bytes", lambda device: free[1])
        (found,) = torch.autograd.grad(out.sum(), q)
        return found

    assert torch.equal(gradient(recompute=True), gradient(recompute=False))


def test_the_memory_of_a_call_with_dropout() -> None:
    """Pieces do not depend on free memory, and stay small: 2**24 scores take 64 MiB."""
    problem = Case("long", Dense(), (1, 2048, 4, 8)).problem(torch.float32, needs_grad=True)
    problem = replace(problem, dropout_p=0.5)
    q, k, v = (torch.randn(1, 2048, 4, 8, requires_grad=True) for _ in range(3))

    def call() -> None:
        torch.autograd.grad(manual.run(q, k, v, problem)[0].sum(), (q, k, v))

    _, peak = allocated_peak(call)
    assert peak <= manual.workspace_bytes(problem) + problem.result_bytes <= 2**25
