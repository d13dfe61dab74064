"""A candidate that hangs on a CUDA device, or destroys its context, is remembered before anything else is done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.errors import BackendFailed
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.registry import register
from attn_dispatch.machine import memory
from attn_dispatch.machine.child import Outcome, reused, run_alone
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store import passed
from attn_dispatch.store.quarantine import Entry, Quarantine
from attn_dispatch.tuning import gate, guard
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.choice import Rejected
from attn_dispatch.tuning.gate import Gate
from attn_dispatch.tuning.rounds import exhausted
from tests.support.fakes import GIB, H100, cuda_memory, fake_cuda, forget
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
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    forget()
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
    yield found
    forget()


def request() -> Request:
    return Request.of(problem_of((1, 64, 2, 16), Dense(), torch.float32, CUDA))


def quarantined() -> list[Entry]:
    return Quarantine(cache_folder(), request().silicon).entries()


def tried(error: BaseException) -> Any:
    """What the gate makes of a candidate whose run raises."""

    def run() -> None:
        raise error

    here = request()
    return Gate(here.problem, here.address)._tried(Candidate(Planted(), NATURAL, "1"), run)


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


def test_a_device_that_cannot_even_be_selected_is_lost(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: object, limit_s: float) -> None:
        raise ILLEGAL

    monkeypatch.setattr(guard, "run_guarded", fail)
    with pytest.raises(BackendFailed):
        tried(ILLEGAL)
    assert [entry.kind for entry in quarantined()] == ["died"]


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


@pytest.mark.parametrize(("error", "settings"), [(None, 2), (ILLEGAL, 2), (guard.TimedOut(1.0, stopped=True), 2)])
def test_the_cap_is_lifted_after_a_call(
    error: BaseException | None, settings: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(caps(error, monkeypatch)) == settings


def test_the_cap_is_left_where_a_call_was_abandoned(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the allocator's lock."""
    assert len(caps(guard.TimedOut(1.0), monkeypatch)) == 1


def caps(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: found.append(given))
    with nullcontext() if error is None else pytest.raises(type(error)), guard.capped(CUDA):
        if error is not None:
            raise error
    return found


# --- hard cases in a process of their own -----------------------------------------------------------------------------


class Alone:
    """What `run_alone` was asked and what it tells, and how often the cases ran in this process after all."""

    def __init__(self, outcome: Outcome | OSError) -> None:
        self.outcome, self.asked, self.ended, self.ran_here = outcome, 0, 0, 0

    def run_alone(
        self, module: str, function: str, args: tuple[Any, ...], *, start_s: float, limit_s: float
    ) -> Outcome:
        self.asked += 1
        assert getattr(gate, function) is gate.failures_alone
        assert args[2:] == ("planted", NATURAL, "1")
        assert limit_s > 30 * 5
        if isinstance(self.outcome, OSError):
            raise self.outcome
        return self.outcome


@pytest.fixture
def checked(device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Alone, Rejected | None]]:
    """The gate's verdict where the process of its own ends so."""

    def check(outcome: Outcome | OSError, free: int = 8 * GIB) -> tuple[Alone, Rejected | None]:
        cuda_memory(monkeypatch, free=free)
        alone, here = Alone(outcome), request()

        def tried(self: Gate, candidate: Candidate, run: object) -> list[str]:
            alone.ran_here += 1
            return []

        monkeypatch.setattr(gate, "run_alone", alone.run_alone)
        monkeypatch.setattr(gate, "end_idle", lambda: setattr(alone, "ended", alone.ended + 1))
        monkeypatch.setattr(gate, "hard_cases", lambda problem: ())
        monkeypatch.setattr(gate, "case_of", lambda spec: iter(()))
        monkeypatch.setattr(Gate, "_tried", tried)
        candidate = Candidate(Planted(), NATURAL, "1")
        found = exhausted(Gate(here.problem, here.address).check_hard_cases(candidate))
        if found is None:
            asked = alone.asked
            assert exhausted(Gate(here.problem, here.address).check_hard_cases(candidate)) is None
            assert alone.asked == asked, "passed once"
        return alone, found

    return check


def test_what_passed_alone_has_passed(checked: Callable[..., tuple[Alone, Rejected | None]], device: Device) -> None:
    alone, found = checked(Outcome(True, [[], None, ""]))
    assert found is None
    assert (alone.asked, alone.ran_here, alone.ended) == (1, 0, 0)
    assert device.asked == []


def test_what_is_wrong_alone_is_wrong(checked: Callable[..., tuple[Alone, Rejected | None]]) -> None:
    alone, found = checked(Outcome(True, [["77 tokens: out is off by 1"], None, ""]))
    assert found is not None
    assert (found.status, found.reason, alone.ran_here) == ("incorrect", "77 tokens: out is off by 1", 0)
    assert [(entry.kind, bool(entry.scope)) for entry in quarantined()] == [("incorrect", True)]


@pytest.mark.parametrize(
    ("outcome", "kind", "text"),
    [
        (Outcome(True, code=-signal.SIGSEGV), "died", "ended by signal 11"),
        (Outcome(True), "hung", "did not return within"),
        (Outcome(True, [None, "died", "the device was lost: x"]), "died", "the device was lost: x"),
        (Outcome(True, [None, "hung", "did not return within 30 s"]), "hung", "did not return within 30 s"),
    ],
)
def test_what_ends_that_process_ends_no_other(
    outcome: Outcome, kind: str, text: str, checked: Callable[..., tuple[Alone, Rejected | None]], device: Device
) -> None:
    """The candidate is rejected; the device of this process is as it was."""
    alone, found = checked(outcome)
    assert found is not None
    assert (found.status, found.quarantined) == ("failed", True)
    assert text in found.reason
    assert (alone.ran_here, alone.ended, device.asked) == (0, 1, [])
    assert [(entry.kind, entry.scope) for entry in quarantined()] == [(kind, "")]


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(False),
        Outcome(False, code=1),
        Outcome(False, code=-signal.SIGSEGV),
        Outcome(True, code=1),
        Outcome(True, code=-signal.SIGKILL),
        Outcome(True, [None, None, ""]),
        OSError(12, "no memory"),
    ],
    ids=str,
)
def test_what_is_not_known_is_run_here(
    outcome: Outcome | OSError, checked: Callable[..., tuple[Alone, Rejected | None]]
) -> None:
    """No process could be started, another program killed it, or it said no more than this one will."""
    alone, found = checked(outcome)
    assert found is None
    assert (alone.asked, alone.ran_here) == (1, 1)
    assert quarantined() == []


def test_another_process_needs_memory_and_the_backend(
    checked: Callable[..., tuple[Alone, Rejected | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Outcome(False)
    assert checked(never, free=GIB)[0].asked == 0
    gate._passed.clear()
    passed._known.cache_clear()
    monkeypatch.setattr(passed, "has_passed", lambda *given: False)
    register(Planted())
    assert checked(never)[0].asked == 0


@pytest.mark.full
def test_a_real_process_runs_the_cases() -> None:
    """On a CPU, since there they run as well."""
    problem = problem_of((1, 64, 2, 16), Dense(is_causal=True), torch.float32, torch.device("cpu"))
    here = Request.of(problem)
    version = registry.version_of(registry.load("sdpa"))
    with reused():
        for asked, expected in ((version, [[], None, ""]), ("another", [None, None, ""])):
            args = problem, here.address, "sdpa", NATURAL, asked
            found = run_alone(gate.__name__, "failures_alone", args, start_s=120.0, limit_s=120.0)
            assert found.value == expected
