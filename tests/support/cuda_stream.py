"""A made-up CUDA device: a stream that works behind the host."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.tuning.clocks import CYCLES_PER_MS

DEVICE = torch.device("cuda", 0)
WARM_MS, HOST_MS, PRODUCT_MS = 2.0, 0.25, 0.3


class Stream:
    """A host and a device with a clock each, in milliseconds; the device starts what is enqueued, in order."""

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.device_ms = 0.0
        self.log: list[str] = []
        self.kernel_ms, self.enqueue_ms = WARM_MS, HOST_MS

    def kernel(self) -> None:
        self.log.append("kernel")
        self.host_ms += self.enqueue_ms
        self.device_ms = max(self.device_ms, self.host_ms) + self.kernel_ms

    def waiting_kernel(self) -> None:
        """A call that waits for its own result, as one does that reads a tensor on the host."""
        self.kernel()
        self.host_ms = max(self.host_ms, self.device_ms)

    def sleep(self, cycles: int) -> None:
        self.log.append("lead")
        self.device_ms = max(self.device_ms, self.host_ms) + cycles / CYCLES_PER_MS

    def product(self, a: object, b: object, out: object) -> None:
        self.log.append("product")
        self.device_ms = max(self.device_ms, self.host_ms) + PRODUCT_MS

    def synchronize(self, device: object = None) -> None:
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


def install(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's functions that the stopwatch uses act on this stream."""
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", stream.sleep)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch, "ones", lambda size, *, dtype, device: SimpleNamespace())
    monkeypatch.setattr(torch, "mm", stream.product)
