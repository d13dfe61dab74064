"""Timing on a made-up CUDA device: a stream that works behind the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.tuning.clocks import HOST_REPEATS, UNKNOWN_L2_BYTES, CudaStopwatch
from attn_dispatch.tuning.rounds import time_in_rounds

DEVICE = torch.device("cuda", 0)
L2_BYTES = 50 * 2**20
WARM_MS, COLD_MS, HOST_MS = 2.0, 3.0, 0.25


class Stream:
    """A host and a device with a clock each, in milliseconds; the device starts what is enqueued, in order."""

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.device_ms = 0.0
        self.cold = False
        self.log: list[str] = []

    def kernel(self) -> None:
        self.log.append("kernel")
        self.host_ms += HOST_MS
        self.device_ms = max(self.device_ms, self.host_ms) + (COLD_MS if self.cold else WARM_MS)
        self.cold = False

    def flush(self) -> None:
        self.log.append("flush")
        self.device_ms = max(self.device_ms, self.host_ms) + 7.0
        self.cold = True

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.host_ms = max(self.host_ms, self.device_ms)

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at_ms=0.0)

        def record() -> None:
            self.log.append("event")
            event.at_ms = max(self.device_ms, self.host_ms)

        def elapsed_time(end: Any) -> float:
            assert self.log[-1] == "synchronize", "an event that the device has not reached yet cannot be read"
            return float(end.at_ms - event.at_ms)

        event.record, event.elapsed_time = record, elapsed_time
        return event

    def clock(self) -> float:
        return self.host_ms / 1e3


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=L2_BYTES))
    monkeypatch.setattr(torch, "empty", buffers(stream, []))
    return stream


def buffers(stream: Stream, sizes: list[int]) -> Callable[..., Any]:
    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Any:
        assert (dtype, device) == (torch.uint8, DEVICE)
        sizes.append(size)
        return SimpleNamespace(zero_=stream.flush)

    return empty


def watch(stream: Stream) -> CudaStopwatch:
    return CudaStopwatch(DEVICE, stream.clock)


def test_sample_is_the_time_of_the_device(stream: Stream) -> None:
    # The host enqueues the first of four before the device can start; the others wait in the queue.
    assert watch(stream).mean_ms(stream.kernel, 4) == pytest.approx(WARM_MS + HOST_MS / 4)
    assert stream.log == ["synchronize", "event", *["kernel"] * 4, "event", "synchronize"]


def test_host_time_does_not_wait_for_the_device(stream: Stream) -> None:
    assert watch(stream).host_ms(stream.kernel) == pytest.approx(HOST_MS)
    assert stream.log == ["synchronize", *["kernel"] * HOST_REPEATS, "synchronize"]


def test_cold_sample_overwrites_the_cache_before_the_first_event(stream: Stream) -> None:
    assert watch(stream).cold_ms(stream.kernel) == pytest.approx(COLD_MS)
    assert stream.log == ["synchronize", "flush", "event", "kernel", "event", "synchronize"]


@pytest.mark.parametrize(("l2_bytes", "size"), [(L2_BYTES, 2 * L2_BYTES), (0, 2 * UNKNOWN_L2_BYTES)])
def test_buffer_is_twice_the_cache_and_made_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, l2_bytes: int, size: int
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(torch, "empty", buffers(stream, sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=l2_bytes))
    stopwatch = watch(stream)
    for _ in range(3):
        stopwatch.cold_ms(stream.kernel)
    assert sizes == [size]


def test_no_memory_for_the_buffer_is_no_cold_sample(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    assert watch(stream).cold_ms(stream.kernel) is None
    assert stream.log == []


def test_collector_is_off_while_timed(stream: Stream) -> None:
    seen: list[bool] = []
    stopwatch = watch(stream)
    for sample in (stopwatch.mean_ms, stopwatch.host_ms, stopwatch.cold_ms):
        sample(lambda: seen.append(gc.isenabled()))
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_race_measures_warm_host_and_cold_times(stream: Stream) -> None:
    turns = time_in_rounds(
        {"a": stream.kernel}, budget_s=None, clock=stream.clock, stopwatch=watch(stream), max_rounds=6
    )
    timing = turns.timings["a"]
    assert timing.median_ms == pytest.approx(WARM_MS + HOST_MS)
    assert timing.host_ms == pytest.approx(HOST_MS)
    assert timing.cold_ms == pytest.approx(COLD_MS)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_times_on_a_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    a = torch.randn(2048, 2048, device=device)
    stopwatch = CudaStopwatch(device)
    warm_ms, host_ms, cold_ms = (
        stopwatch.mean_ms(lambda: a @ a, 10),
        stopwatch.host_ms(lambda: a @ a),
        stopwatch.cold_ms(lambda: a @ a),
    )
    assert warm_ms > 0.0
    assert host_ms is not None
    assert host_ms > 0.0
    assert cold_ms is not None
    assert cold_ms > 0.0
