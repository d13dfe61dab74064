"""Calls on CUDA take few functions on the host, and launch what Triton would, by its own launcher on a stub."""

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
from attn_dispatch.kernels.triton.passes import TritonPasses
from attn_dispatch.kernels.triton.support import Launch
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.testing.cases import CASES, Case
from tests.support import processes
from tests.support.cases import gate
from tests.support.compiling import compiled

CODE = """
import torch
from tools.bench import host

host.as_cuda()
from attn_dispatch.backends import triton
from attn_dispatch.spec.shapes import problem_of
from triton.backends.nvidia.driver import CudaLauncher

cases = enumerate(host.CASES.items())
calls = {name: host.call_of(number, case) for number, (name, case) in cases if name.startswith(("triton", "sdpa"))}
x = torch.randn(1, 64, 4, 64, dtype=torch.bfloat16, requires_grad=True)
packed = problem_of(x.shape, host.Dense(is_causal=True), x.dtype, host.CUDA, backward=True)
for lengths in ((30, 34), (1, 63)):
    calls[f"triton, documents {lengths}, training"] = lambda lengths=lengths: torch.autograd.grad(
        triton.run_documents(x, x, x, packed, lengths)[0].sum(), x
    )

launches = []
def flat(given):
    return [y for x in given for y in (flat(x) if isinstance(x, tuple) else [getattr(x, "data_ptr", lambda: x)()])]

CudaLauncher.__call__ = lambda self, *given: launches.append((*given[:6], *given[9:]))  # without hooks
for name, call in calls.items():
    kernels = []
    for _ in range(2):
        launches.clear()
        call()
        kernels.append(list(launches))
    first, again = kernels
    assert len(first) == len(again), name
    assert bool(first) == name.startswith("triton"), name
    for one, other in zip(first, again, strict=True):
        pairs = zip(flat(one), flat(other), strict=True)
        alike = [x == y or (type(x) is type(y) is int and min(x, y) > 2**32) for x, y in pairs]
        assert all(alike), (name, alike)
    print(name, host.python_calls(call), sep=": ")
"""


def test_a_launch_is_known_for_the_same_layouts_alone() -> None:
    """Of all tensors: hooks, as of save_on_cpu, give the backward pass others than the forward pass had."""
    made, problem = list[object](), problem_of((1, 8, 2, 4), Dense(), torch.float32, torch.device("cpu"))
    x = torch.zeros(1, 8, 2, 9)
    strided, packed, odd, gradient = x[..., :4], torch.zeros(1, 8, 2, 4), x[..., 1:5], torch.zeros(1, 2, 8, 4)
    passes = TritonPasses(problem, (), (), (), known={})  # type: ignore[arg-type]

    def launch(*given: object) -> Launch:
        made.append(given)
        return Launch(None, None, 0, problem.device, (), {})

    shifted, pairs = torch.zeros(65)[1:].view_as(packed), ((strided, packed), (packed, packed), (odd, packed))
    for x, y in (*pairs, (strided, gradient.mT), (packed, shifted), (shifted, packed), (strided, packed)):
        passes.launch_as_known(launch, "kernel", (x, y), (x, y))
    assert len(made) == 6


@pytest.mark.full
@compiled
def test_few_functions_and_the_same_launches() -> None:
    counts = dict(line.rsplit(": ", 1) for line in processes.run(CODE).stdout.splitlines())
    assert len(counts) >= 8
    for name, count in counts.items():  # a token takes two launches; training three, and autograd
        most = {"sdpa, training": 44, "triton, one token": 34}.get(name, 160 if "training" in name else 20)
        assert int(count) <= most, counts


# --- what later calls neither read from a device nor copy to it -------------------------------------------------------


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
    monkeypatch.setattr("attn_dispatch.kernels.hidden._known_small", lambda x: False)  # asked on a CPU alone
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
