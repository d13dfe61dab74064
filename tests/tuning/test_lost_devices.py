"""A candidate that hangs on a CUDA device, or destroys its context, is remembered before anything else is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.errors import BackendFailed
from attn_dispatch.machine import memory
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.quarantine import Entry, Quarantine
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.choice import Rejected
from attn_dispatch.tuning.gate import Gate
from tests.support.fakes import GIB, H100, cuda_memory, fake_cuda, raising
from tests.support.planted import Planted

CUDA = torch.device("cuda", 0)
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")


class Device:
    """What is asked of a made-up device, each with whether an entry was in quarantine by then."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.lost = self.hangs = self.busy = False

    def note(self, what: str) -> None:
        self.asked.append((what, bool(quarantined())))

    def synchronize(self, device: object = None) -> None:
        self.note("synchronize")
        if self.lost:
            raise ILLEGAL

    def release(self, device: object) -> None:
        self.note("release")

    def stream(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: not self.busy, device=CUDA)


@pytest.fixture
def device(fresh_machine: None, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    fake_cuda(monkeypatch, H100)
    cuda_memory(monkeypatch, free=GIB)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", found.stream)
    monkeypatch.setattr(torch.cuda, "default_stream", found.stream)
    monkeypatch.setattr(memory, "release", found.release)

    def run_at_once(calls: list[Callable[[], Any]], limit_s: float | None) -> list[Any]:
        if found.hangs:
            raise guard.TimedOut(limit_s or 0.0)
        return [call() for call in calls]

    monkeypatch.setattr(guard, "run_at_once", run_at_once)
    return found


def request() -> Request:
    return Request.of(problem_of((1, 64, 2, 16), Dense(), torch.float32, CUDA))


def quarantined() -> list[Entry]:
    return Quarantine(cache_folder(), request().silicon).entries()


def tried(error: BaseException) -> Any:
    """What the gate makes of a candidate whose run raises."""
    here = request()
    return Gate(here.problem, here.address)._tried(Candidate(Planted(), NATURAL, "1"), raising(error))


def test_after_a_hang_nothing_touches_the_device(device: Device) -> None:
    """Freeing memory, too, would wait for it for ever."""
    with pytest.raises(BackendFailed, match=r"left cuda:0 unusable: .*did not return within 30 s"):
        tried(guard.TimedOut(30.0))
    assert device.asked == []
    (entry,) = quarantined()
    assert (entry.backend, entry.version, entry.kind, entry.scope, entry.strikes) == ("planted", "1", "hung", "", 1)


@pytest.mark.parametrize("busy", [True, False])
def test_a_call_that_was_stopped_may_have_left_the_device_idle(busy: bool, device: Device) -> None:
    device.busy = busy
    error = guard.TimedOut(30.0, stopped=True)
    if busy:
        with pytest.raises(BackendFailed):
            tried(error)
        assert device.asked == []
    else:
        assert isinstance(tried(error), Rejected)
        assert device.asked == [("release", True)]
    assert [entry.kind for entry in quarantined()] == ["hung"]


def test_a_lost_context_is_remembered_first(device: Device) -> None:
    device.lost = True
    with pytest.raises(BackendFailed, match="illegal memory access"):
        tried(ILLEGAL)
    assert device.asked == [("synchronize", False)]
    (entry,) = quarantined()
    assert (entry.kind, entry.scope) == ("died", "")
    assert "the device was lost" in entry.reason


def test_a_device_that_works_on_after_an_error_hangs(device: Device) -> None:
    device.hangs = True
    with pytest.raises(BackendFailed):
        tried(ValueError("no"))
    assert device.asked == []
    assert [entry.kind for entry in quarantined()] == ["hung"]


def test_other_errors_end_the_candidate_alone(device: Device) -> None:
    found = tried(ValueError("no"))
    assert isinstance(found, Rejected)
    assert (found.status, found.reason) == ("failed", "ValueError: no")
    assert [what for what, _ in device.asked] == ["synchronize", "release"]
    assert quarantined() == []


def test_the_marker_stays_until_the_quarantine_is_written(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed meanwhile leaves one or the other."""
    seen: list[bool] = []
    add = Quarantine.add

    def adding(self: Quarantine, entry: Entry) -> None:
        seen.append(any((cache_folder() / "quarantine").rglob("*.mark")))
        add(self, entry)

    monkeypatch.setattr(Quarantine, "add", adding)
    with pytest.raises(BackendFailed):
        tried(guard.TimedOut(30.0))
    assert seen == [True]


def test_undeclared_memory_excludes_a_version_from_the_group_alone(device: Device) -> None:
    """One pattern's estimate was too low."""
    assert isinstance(tried(torch.OutOfMemoryError("CUDA out of memory")), Rejected)
    (entry,) = quarantined()
    assert (entry.kind, entry.scope) == ("memory", request().address.group)


@pytest.mark.parametrize(
    ("error", "settings"), [(None, 2), (ILLEGAL, 2), (guard.TimedOut(1.0, stopped=True), 2), (guard.TimedOut(1.0), 1)]
)
def test_the_cap_is_lifted_after_a_call_that_was_not_abandoned(
    error: BaseException | None, settings: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was may hold the allocator's lock."""
    found: list[object] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: found.append(given))
    with nullcontext() if error is None else pytest.raises(type(error)), guard.capped(CUDA):
        if error is not None:
            raise error
    assert len(found) == settings
