"""What a made-up device cannot show: trials on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from attn_dispatch import attend, explain
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning.clocks import CYCLES_PER_MS, CudaStopwatch
from attn_dispatch.tuning.example import make

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
SHAPE = (2, 4096, 8, 64)
#: An index beyond a tensor on CUDA ends the context.
LOSES = """
import os, torch
from attn_dispatch.tuning import guard
device = torch.device("cuda", torch.cuda.current_device())
try:
    torch.ones(3, device=device)[torch.tensor([99], device=device)].sum().item()
except RuntimeError as error:
    print(guard.device_fault(device, error, 30.0), flush=True)
os._exit(0)
"""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_lead_lasts_about_as_long_as_asked(device: torch.device) -> None:
    cuda: Any = torch.cuda
    CudaStopwatch(device).warm()
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    start.record()
    cuda._sleep(int(5 * CYCLES_PER_MS))
    end.record()
    cuda.synchronize()
    assert 3.0 < start.elapsed_time(end) < 20.0


def test_a_short_kernel_is_timed_without_the_host(device: torch.device) -> None:
    """A kernel of some microseconds, whose launch takes as long."""
    x = torch.zeros(1024, device=device)

    def call() -> object:
        return x.add_(1)

    stopwatch = CudaStopwatch(device)
    samples = [stopwatch.mean_ms(call) for _ in range(20)]
    device_ms, host_ms = stopwatch.device_ms(call), stopwatch.host_ms(call)
    assert device_ms is not None
    assert host_ms is not None
    assert device_ms < 0.05
    assert host_ms < 0.5
    assert min(samples) >= min(device_ms, host_ms) / 2


def test_a_call_that_waits_is_not_charged_a_lead(device: torch.device) -> None:
    x = torch.zeros(1024, device=device)
    stopwatch = CudaStopwatch(device)
    samples = sorted(stopwatch.mean_ms(lambda: x.sum().item()) for _ in range(20))
    assert samples[10] < 1.0


def test_an_example_is_drawn_on_the_device(device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        problem = problem_of(SHAPE, Dense(), dtype, device, backward=True)
        one, two = (make(problem, on_device=True) for _ in range(2))
        for name in ("q", "k", "v", "grad"):
            a, b = getattr(one, name), getattr(two, name)
            assert torch.equal(a, b)
            assert abs(float(a.detach().float().std()) - 1) < 0.01
        assert not torch.equal(one.q, one.k)


def test_a_context_lost_in_another_process_is_not_lost_here(device: torch.device) -> None:
    done = subprocess.run([sys.executable, "-c", LOSES], capture_output=True, text=True, timeout=180)
    assert done.stdout.startswith("('died', ")
    assert "lost" in done.stdout
    assert float(torch.ones(3, device=device).sum()) == 3.0


@pytest.mark.parametrize("backward", [False, True])
def test_a_first_call_decides(backward: bool, device: torch.device) -> None:
    q, k, v = (torch.randn(SHAPE, device=device, dtype=torch.bfloat16, requires_grad=backward) for _ in range(3))
    out: Any = attend(q, k, v, is_causal=True)
    found = explain(q, k, v, is_causal=True)
    assert out.shape == q.shape
    assert found.source == "measured"
    timed = [each for each in found.candidates if each.median_ms is not None]
    assert len(timed) >= 2
    chosen = next(each for each in timed if each.status == "chosen")
    assert chosen.median_ms is not None
    assert chosen.rounds is not None
    assert chosen.median_ms < 100.0
    assert not [each for each in found.candidates if each.status in ("failed", "incorrect", "quarantined")]


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_a_graphed_layer_trains(backend: str, device: torch.device) -> None:
    """What `torch.cuda.make_graphed_callables` replays, with other values, has the gradients of plain calls."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = attend(x, x, x, is_causal=True, backend=backend)
        return found

    first, other = (
        torch.randn(1, 128, 2, 64, dtype=torch.float16, device=device, requires_grad=True) for _ in range(2)
    )
    graphed: Any = torch.cuda.make_graphed_callables(layer, (first,))
    (replayed,), (plain,) = (torch.autograd.grad(call(other).square().sum(), other) for call in (graphed, layer))
    assert torch.allclose(replayed, plain)
