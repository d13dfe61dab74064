"""Timing on a made-up CUDA device: a stream that works behind the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.errors import BackendFailed
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.tuning import guard, race
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.clocks import CYCLES_PER_MS, LEAD_FACTOR, MOST_WAITS, PAUSE_S, WARM_S, CudaStopwatch
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import exhausted
from tests.support import fakes
from tests.support.planted import Planted

DEVICE = torch.device("cuda", 0)
WARM_MS, HOST_MS, PRODUCT_MS = 2.0, 0.25, 0.3
PROBLEM = problem_of((1, 64, 2, 16), Dense(), torch.float32, DEVICE)


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


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """One that torch's functions act on which the stopwatch uses."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", stream.sleep)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch, "ones", lambda size, *, dtype, device: SimpleNamespace())
    monkeypatch.setattr(torch, "mm", stream.product)
    return stream


def watch(stream: Stream, *, warm: bool = True) -> CudaStopwatch:
    """A stopwatch, by default one whose device has just worked."""
    stopwatch = CudaStopwatch(DEVICE, stream.clock)
    if warm:
        stopwatch.warm()
        stream.log.clear()
    return stopwatch


def test_the_host_runs_ahead_of_the_device(stream: Stream) -> None:
    """From the second sample of a call on: then it is known how long the host needs."""
    stopwatch = watch(stream)
    assert stopwatch.mean_ms(stream.kernel, 4) == pytest.approx(WARM_MS + HOST_MS / 4)
    assert stream.log == ["synchronize", "event", *["kernel"] * 4, "event", "synchronize"]
    stream.log.clear()
    assert stopwatch.mean_ms(stream.kernel, 4) == pytest.approx(WARM_MS)
    assert stream.log == ["synchronize", "lead", "event", *["kernel"] * 4, "event", "synchronize"]


@pytest.mark.parametrize(
    ("kernel_ms", "enqueue_ms", "share", "expected_ms"),
    [
        (0.3, 0.2, "", 0.3),
        (0.2, 0.3, "", 0.225),
        (0.01, 0.05, "", 0.02),
        (0.2, 0.3, "0", 0.2),
        (0.2, 0.3, "1", 0.3),
        (0.588, 1.377, "", 0.78525),
        (1.055, 1.22, "", 1.09625),
    ],
)
def test_a_sample_is_the_devices_time_and_a_share_of_the_hosts(
    kernel_ms: float, enqueue_ms: float, share: str, expected_ms: float, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two are sdpa_cudnn and sdpa on an H100, training with 4,096 tokens: the host's time alone parts them."""
    monkeypatch.setenv("ATTN_DISPATCH_HOST_SHARE", share)
    stream.kernel_ms, stream.enqueue_ms = kernel_ms, enqueue_ms
    stopwatch = watch(stream)
    samples = [stopwatch.mean_ms(stream.kernel) for _ in range(3)]
    assert samples[-1] == pytest.approx(expected_ms)
    assert stopwatch.device_ms(stream.kernel) == pytest.approx(kernel_ms)
    assert stopwatch.host_ms(stream.kernel) == pytest.approx(enqueue_ms)


def test_one_time_work_makes_no_lead_and_enters_no_median(stream: Stream) -> None:
    stopwatch = watch(stream)
    stream.enqueue_ms = 90.0
    assert stopwatch.mean_ms(stream.kernel) > 90.0
    stream.enqueue_ms = HOST_MS
    stopwatch.mean_ms(stream.kernel)
    assert "lead" not in stream.log
    ends = []
    for _ in range(3):
        assert stopwatch.mean_ms(stream.kernel) == pytest.approx(WARM_MS)
        ends.append(stream.device_ms)
    assert ends[2] - ends[1] == pytest.approx(LEAD_FACTOR * HOST_MS + WARM_MS)
    assert stopwatch.host_ms(stream.kernel) == pytest.approx(HOST_MS)


def test_a_call_that_waits_for_the_device_is_not_charged_the_lead(stream: Stream) -> None:
    stopwatch = watch(stream)
    samples = [stopwatch.mean_ms(stream.waiting_kernel) for _ in range(6)]
    assert samples == pytest.approx([HOST_MS + WARM_MS] * 6)
    assert stream.log.count("lead") == MOST_WAITS


def test_a_host_that_becomes_slower_keeps_its_lead(stream: Stream) -> None:
    stopwatch = watch(stream)
    for stream.enqueue_ms in (0.1, 0.1, 0.5, 0.5, 0.5):
        last_ms = stopwatch.mean_ms(stream.kernel)
    assert last_ms == pytest.approx(WARM_MS)
    stream.log.clear()
    stopwatch.mean_ms(stream.kernel)
    assert stream.log.count("lead") == 1


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_the_device_works_before_the_first_sample_and_after_a_pause(stream: Stream) -> None:
    stopwatch = watch(stream, warm=False)
    for pause_s, products in ((0.0, True), (0.0, False), (0.9 * PAUSE_S, False), (1.1 * PAUSE_S, True)):
        stream.host_ms += pause_s * 1e3
        before_ms = stream.host_ms
        stream.log.clear()
        stopwatch.mean_ms(stream.kernel)
        assert ("product" in stream.log) == products
        if products:
            assert stream.log.index("kernel") > max(at for at, each in enumerate(stream.log) if each == "product")
            assert stream.log.count("product") == pytest.approx(WARM_S * 1e3 / PRODUCT_MS, abs=1)
            assert stream.host_ms - before_ms > WARM_S * 1e3


def test_the_device_works_after_a_call_that_compiled(stream: Stream) -> None:
    stopwatch = watch(stream)
    stream.enqueue_ms = 1.1 * PAUSE_S * 1e3
    stopwatch.mean_ms(stream.kernel)
    assert "product" not in stream.log
    stream.enqueue_ms = HOST_MS
    stopwatch.mean_ms(stream.kernel)
    assert "product" in stream.log


# --- races ------------------------------------------------------------------------------------------------------------


def test_between_calls_of_a_program_nothing_is_warmed(stream: Stream) -> None:
    stopwatch = watch(stream, warm=False)
    stopwatch.warms = False
    before = stream.clock()
    stopwatch.warm()
    assert stream.clock() == before
    stopwatch.warms = True
    stopwatch.warm()
    assert stream.clock() > before


@pytest.fixture
def raced(fresh_machine: None, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Race]:
    """Races calls on the made-up device, each by its name, as candidates whose first call took 100 ms."""
    fakes.fake_cuda(monkeypatch, fakes.H100)
    fakes.cuda_memory(monkeypatch, free=fakes.GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: fakes.H100)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: None)
    monkeypatch.setattr(race, "stopwatch_of", lambda device, stepped: CudaStopwatch(device, stream.clock))
    monkeypatch.setattr(guard, "run_guarded", lambda call, limit_s: call())
    request = Request.of(PROBLEM)

    def run(budget_s: float = 1.0, **calls: Any) -> Race:
        admitted = Admitted(100.0, 100.0, 0, 0.0)
        runners = {name: (Candidate(Planted(name=name), NATURAL, "1"), admitted) for name in calls}
        found = Race(request, runners, next(iter(calls)), stream.clock)
        exhausted(found.run(lambda each: calls[each.name], budget_s))
        return found

    return run


class Lazy:
    """A call that plans in its first run in this thread, and then takes `kernel_ms`."""

    def __init__(self, stream: Stream, kernel_ms: float, plan_ms: float = 95.0) -> None:
        self.stream, self.kernel_ms, self.plan_ms = stream, kernel_ms, plan_ms

    def __call__(self) -> None:
        self.stream.host_ms += self.plan_ms
        self.plan_ms = 0.0
        self.stream.kernel_ms = self.kernel_ms
        self.stream.kernel()


def test_plans_of_the_racing_thread_drop_nobody(raced: Callable[..., Race], stream: Stream) -> None:
    """cuDNN keeps its plans for each thread: what the guard's thread built, the race builds again."""
    found = raced(flash=Lazy(stream, 1.5, 0.0), cudnn=Lazy(stream, 1.0))
    assert found.rounds.dropped == {}
    assert found.rounds.timings["cudnn"].median_ms == pytest.approx(1.0)
    assert found.choose() == "cudnn"


def test_a_device_lost_in_a_race_is_one_candidates_fault(
    raced: Callable[..., Race], stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, lost = [0], [False]

    def synchronize(device: object = None) -> None:
        if lost[0]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        stream.synchronize()

    def destroy() -> None:
        calls[0] += 1
        lost[0] = calls[0] >= 4
        stream.kernel()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(BackendFailed, match=r"b left cuda:0 unusable: .*illegal memory access"):
        raced(a=stream.kernel, b=destroy, c=stream.kernel)
    (entry,) = Quarantine(cache_folder(), silicon(DEVICE)).entries()
    assert (entry.backend, entry.kind) == ("b", "died")
