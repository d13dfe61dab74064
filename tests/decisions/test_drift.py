"""The drift check compares live calls with the stored times, on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attn_dispatch import attend, explain
from attn_dispatch.decisions import drift as sentinel
from attn_dispatch.kernels.device_cache import capturing
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store
from tests.support.calls import forget, later, qkv
from tests.support.cuda_stream import DEVICE, Stream, install

LOW, MEDIAN, HIGH = 9.0, 10.0, 11.0


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Decision:
    """The decision of one call, with the times LOW, MEDIAN, HIGH."""
    import msgspec

    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "3000")
    attend(*qkv())
    ((_, decision),) = Store(cache_folder()).all()
    rows = tuple(
        msgspec.structs.replace(row, median_ms=MEDIAN, low_ms=LOW, high_ms=HIGH)
        if row.backend == decision.choice
        else row
        for row in decision.candidates
    )
    return msgspec.structs.replace(decision, candidates=rows)


class Calls:
    """A run function that takes `call_ms()` on the simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_ms: Callable[[], float]) -> None:
        self.now, self.count, self.call_ms = 0.0, 0, call_ms
        monkeypatch.setattr("attn_dispatch.decisions.drift.time.perf_counter", lambda: self.now)

    def run(self, *args: Any, **tensors: Any) -> str:
        self.count += 1
        self.now += self.call_ms() / 1e3
        return "result"


def watch(
    monkeypatch: pytest.MonkeyPatch, decision: Decision, call_ms: Callable[[], float], share: str = "1", **more: bool
) -> tuple[Calls, sentinel.Run]:
    monkeypatch.setenv("ATTN_DISPATCH_SENTINEL", share)
    calls = Calls(monkeypatch, call_ms)
    problem = problem_of((1, 16, 2, 8), Dense(), torch.float32, torch.device("cpu"), **more)
    return calls, sentinel.sampled(calls.run, problem, decision)


def drift() -> Any:
    ((_, decision),) = Store(cache_folder()).all()
    return decision.drift


@pytest.mark.parametrize("call_ms", [MEDIAN, LOW * 0.95, HIGH * 1.05])
def test_no_drift_near_the_measured_time(call_ms: float, decided: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(0)
    _, run = watch(monkeypatch, decided, lambda: call_ms * noise.gauss(1, 0.02))
    for _ in range(200):
        assert run() == "result"
    assert drift() is None


@pytest.mark.parametrize("call_ms", [LOW * 0.8, HIGH * 1.2])
def test_drift_is_marked_and_shown(call_ms: float, decided: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(0)
    calls, run = watch(monkeypatch, decided, lambda: call_ms * noise.gauss(1, 0.02))
    for _ in range(sentinel.WARMUP_CALLS + sentinel.SAMPLES - 1):
        run()
    assert drift() is None
    run()
    found = drift()
    assert found.samples == sentinel.SAMPLES
    assert found.low_ms <= found.median_ms <= found.high_ms
    assert found.median_ms == pytest.approx(call_ms, rel=0.05)
    assert calls.count == sentinel.WARMUP_CALLS + sentinel.SAMPLES
    forget()
    assert "drift     live calls take" in str(explain(*qkv()))
    assert explain(*qkv()).drift is not None


def test_first_calls_and_single_outliers_are_ignored(decided: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5000.0] * sentinel.WARMUP_CALLS + [MEDIAN, MEDIAN, MEDIAN, 500.0] * 100)
    _, run = watch(monkeypatch, decided, lambda: next(times))
    for _ in range(300):
        run()
    assert drift() is None


def test_a_share_of_the_calls_is_timed(decided: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "SAMPLES", 10**6)
    _, run = watch(monkeypatch, decided, lambda: MEDIAN, share="0.1")
    for _ in range(2000):
        run()
    assert 120 <= len(run._samples_ms) + sentinel.WARMUP_CALLS <= 280  # type: ignore[attr-defined]


def test_off_by_default_and_without_a_measurement(decided: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    calls, run = watch(monkeypatch, decided, lambda: MEDIAN, share="0")
    assert run == calls.run
    calls, run = watch(monkeypatch, decided, lambda: MEDIAN, backward=True)
    assert run == calls.run
    calls, run = watch(monkeypatch, msgspec.structs.replace(decided, source="shipped"), lambda: MEDIAN)
    assert run == calls.run


def test_attend_samples_calls(decided: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    """attend() calls much slower than the stored times mark the decision."""
    import msgspec

    rows = tuple(
        msgspec.structs.replace(row, median_ms=1e-6, low_ms=1e-6, high_ms=1e-6) if row.median_ms is not None else row
        for row in decided.candidates
    )
    path = Store(cache_folder()).put(msgspec.structs.replace(decided, candidates=rows, created=later()))
    assert path is not None
    monkeypatch.setenv("ATTN_DISPATCH_SENTINEL", "1")
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "locked")  # a busy machine would measure more candidates
    forget()
    for _ in range(sentinel.WARMUP_CALLS + sentinel.SAMPLES + 1):
        attend(*qkv())
    assert drift() is not None
    assert explain(*qkv()).drift is not None, "also in the process that detected it"


class Device(Stream):
    """A device whose host's clock is the one that calls are timed by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel_ms: float, enqueue_ms: float) -> None:
        super().__init__()
        self.capturing = False
        install(self, monkeypatch)
        monkeypatch.setattr("attn_dispatch.decisions.drift.time.perf_counter", self.clock)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.kernel_ms, self.enqueue_ms = kernel_ms, enqueue_ms

    def run(self, *args: Any, **tensors: Any) -> str:
        self.kernel()
        return "result"


ON_CUDA = problem_of((1, 16, 2, 8), Dense(), torch.float32, DEVICE)


@pytest.mark.parametrize(
    ("kernel_ms", "enqueue_ms", "drifts"),
    [(10.0, 4.0, False), (4.0, 10.0, False), (13.0, 4.0, True), (4.0, 13.0, True)],
)
def test_calls_on_cuda_are_sampled_as_in_a_trial(
    kernel_ms: float, enqueue_ms: float, drifts: bool, decided: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By events behind a lead: the host's clock alone has the sum of both times, and would drift."""
    monkeypatch.setenv("ATTN_DISPATCH_SENTINEL", "1")
    device = Device(monkeypatch, kernel_ms, enqueue_ms)
    run = sentinel.sampled(device.run, ON_CUDA, decided)
    for _ in range(sentinel.WARMUP_CALLS + sentinel.SAMPLES + 1):
        assert run() == "result"
    assert (drift() is not None) == drifts
    assert device.log.count("kernel") == sentinel.WARMUP_CALLS + sentinel.SAMPLES + 1
    assert "product" not in device.log


def test_nothing_waits_while_a_graph_is_captured(decided: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_SENTINEL", "1")
    device = Device(monkeypatch, 10.0, 4.0)
    device.capturing = True
    run = sentinel.sampled(device.run, ON_CUDA, decided)
    run()
    assert device.log == ["kernel"]


def test_a_capture_on_another_device_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        before, current[0] = current[0], where.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    for captured in (0, 1):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: current[0] == captured)
        assert capturing(torch.device("cuda", 1))
    assert not capturing(torch.device("cuda", 2))
    assert not capturing(torch.device("cpu"))
