"""Calls after the first neither read from a device nor copy lists to it: both wait, and no CUDA graph takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.branches.backend import Branched, Variant
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.kernels.dense import CPU_FLASH, CpuFlash
from attn_dispatch.testing.cases import CASES, Case
from tests.support.cases import gate

IDS = (
    *("dense-grouped", "dense-key-mask", "longnet-grouped", "longnet-grouped-uneven", "longnet-odd-heads"),
    *("longnet-both-masks", "uncovered-rows", "window-causal", "causal-rows-without-keys"),
)
CHOSEN = [case for case in CASES if case.id in IDS]
WAITS = ("lift_fresh", "_local_scalar_dense", "_unique", "nonzero", "masked_select")


class Ungrouped(CpuFlash):
    grouped = False


# As sdpa_efficient: a kernel without grouping.
BRANCHED = Branched("ungrouped", (Variant(CPU_FLASH, lambda problem: Ungrouped()),))


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations that wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(op) for word in WAITS):
            self.found.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)
@pytest.mark.parametrize(
    "backend", [BRANCHED, *map(registry.load, ("sdpa_mask", "tiles"))], ids=lambda backend: backend.name
)
@pytest.mark.usefixtures("streams")
def test_later_calls_do_not_wait(backend: Backend, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_dispatch.kernels.tiles.run.run_in_threads", in_order)
    for needs_grad in (False, True):
        problem = case.problem(torch.float32, needs_grad=needs_grad)
        if backend.refusals(problem):
            continue
        checked = gate(problem)
        expected = checked.run(backend)
        with pytest.MonkeyPatch.context() as patch, Waits() as mode:
            for name in ("to", "tolist", "item", "cpu"):
                patch.setattr(torch.Tensor, name, noted(mode, name))
            found = checked.run(backend)
        assert mode.found == []
        assert all(torch.equal(x, expected[name]) for name, x in found.items())
        assert checked.check(found).failures == ()


def in_order(count: int, work: Callable[[Any], None]) -> None:
    """As on a GPU: threads would not be seen by the mode."""
    from attn_dispatch.kernels.tiles.threads import WorkQueue

    work(WorkQueue(count))


def noted(mode: Waits, name: str) -> Callable[..., Any]:
    real: Callable[..., Any] = getattr(torch.Tensor, name)

    def method(x: torch.Tensor, *args: Any, **more: Any) -> Any:
        if name != "to" or any(isinstance(each, torch.device | str) for each in (*args, *more.values())):
            mode.found.append(name)
        return real(x, *args, **more)

    return method
