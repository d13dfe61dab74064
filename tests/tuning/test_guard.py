"""A guarded call cannot hang the process, and none of its objects stays referenced."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch

from attn_dispatch.tuning import guard
from attn_dispatch.tuning.guard import (
    DeviceLost,
    TimedOut,
    capped,
    is_limit_error,
    is_memory_error,
    is_shortage,
    memory_excess,
    run_at_once,
    run_guarded,
)
from tests.support import fakes
from tests.support.calls import threads
from tests.support.fakes import GIB, MIB, raising
from tests.support.guarded import PATIENT_S, run

# --- calls that return ------------------------------------------------------------------------------------------------


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("kind", [ValueError, SystemExit, StopIteration])
def test_exceptions_are_raised_unchanged(kind: type[BaseException]) -> None:
    given = kind("text")
    with pytest.raises(kind) as caught:
        run_guarded(lambda: fail(given), PATIENT_S)
    assert caught.value is given
    names = [frame.name for frame in traceback.extract_tb(given.__traceback__)]
    assert names[-2:] == ["<lambda>", "fail"]
    assert "run" not in names  # frames of the other thread's own code are left out
    assert run_guarded(lambda: 1, PATIENT_S) == 1


class Big:
    """Memory that a kernel has allocated."""


def test_no_object_is_referenced_after_a_failure() -> None:
    seen: list[weakref.ref[Big]] = []

    def call() -> None:
        local = Big()
        seen.append(weakref.ref(local))
        raise ValueError

    try:
        run_guarded(call, PATIENT_S)
    except ValueError as error:
        traceback.clear_frames(error.__traceback__)
    assert seen[0]() is None


def test_guarded_calls_of_many_threads() -> None:
    barrier = threading.Barrier(6)
    found: list[int] = []

    def caller(index: int) -> None:
        for _ in range(10):
            run_guarded(lambda: barrier.wait(PATIENT_S), PATIENT_S)  # all six at the same time
            found.append(run_guarded(lambda: index, PATIENT_S) - index)

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 60


# --- calls that do not return -----------------------------------------------------------------------------------------


def loop() -> None:
    while True:
        pass


def stubborn_loop() -> None:
    while True:
        with contextlib.suppress(Exception):
            while True:
                pass


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy, a thread may wait for its turn."""
    monkeypatch.setattr(guard, "GRACE_S", PATIENT_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", [loop, stubborn_loop])
def test_a_loop_is_ended(call: Callable[[], None]) -> None:
    threads: list[threading.Thread] = []

    def hang() -> None:
        threads.append(threading.current_thread())
        call()

    with pytest.raises(TimedOut, match=r"within 0\.05 s") as caught:
        run_guarded(hang, 0.05)
    assert caught.value.stopped
    assert str(caught.value) == "did not return within 0.05 s"
    threads[0].join(PATIENT_S)
    assert not threads[0].is_alive()
    assert run_guarded(threading.current_thread, PATIENT_S) is not threads[0]


def test_a_sleeping_call_is_abandoned(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A call in C code cannot be ended; its thread ends as soon as it returns, and its result is dropped."""
    monkeypatch.setattr(guard, "GRACE_S", 0.01)
    threads: list[threading.Thread] = []
    awake, done = threading.Lock(), []
    awake.acquire()

    def hang() -> None:
        threads.append(threading.current_thread())
        awake.acquire()
        done.append(1)

    with pytest.raises(TimedOut) as caught:
        run_guarded(hang, 0.05)
    assert not caught.value.stopped
    assert threads[0].is_alive()
    assert run_guarded(threading.current_thread, PATIENT_S) is not threads[0]
    awake.release()
    threads[0].join(PATIENT_S)
    assert not threads[0].is_alive()
    assert done == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("sleep", ["time.sleep(60)", "ctypes.CDLL(None).sleep(60)", "lock.acquire()"])
def test_an_abandoned_call_does_not_delay_the_end_of_the_process(sleep: str) -> None:
    code = f"""
import ctypes, threading, time
from attn_dispatch.tuning import guard
guard.GRACE_S = 0.01
lock = threading.Lock()
lock.acquire()
try:
    guard.run_guarded(lambda: {sleep}, 0.05)
except guard.TimedOut as error:
    print(error, guard.run_guarded(lambda: 7, 60))
"""
    assert run(code) == (0, "did not return within 0.05 s 7\n", "")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_what_would_end_the_program_becomes_an_error(kind: type[BaseException]) -> None:
    """In the guarded thread it is not the user's Ctrl-C."""
    with pytest.raises(RuntimeError, match=f"raised {kind.__name__}: text"):
        run_guarded(lambda: fail(kind("text")), PATIENT_S)


def test_ctrl_c_is_raised_at_once() -> None:
    ended = threading.Event()

    def hang() -> None:
        try:
            loop()
        finally:
            ended.set()

    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_guarded(hang, PATIENT_S)
    assert ended.wait(PATIENT_S)
    assert run_guarded(lambda: 1, PATIENT_S) == 1


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("late_s", [0.0, 0.001])
def test_a_call_that_returns_at_its_time_out(late_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    """The exception that is to end the call must not reach its thread's next call."""

    def call() -> int:
        time.sleep(late_s)
        return 7

    ends: list[object] = []
    for _ in range(20):
        try:
            ends.append(run_guarded(call, 0.001))
        except TimedOut as error:
            ends.append(error.stopped)
        ends.append(run_guarded(lambda: 8, PATIENT_S))
    assert set(ends) <= {7, True, 8}
    assert capfd.readouterr().err == ""


def test_guarded_calls_in_a_forked_child() -> None:
    code = """
import os
from attn_dispatch.tuning.guard import run_guarded
run_guarded(os.getpid, 60)
child = os.fork()
if child == 0:
    os._exit(run_guarded(lambda: 7, 60))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code)[:2] == (0, "7\n")


@pytest.mark.full
def test_a_call_that_is_ended_while_it_starts_a_thread() -> None:
    """That thread must not get the exception for its parent, which would wait for it for ever, and hold locks."""
    code = """
import sys
from attn_dispatch.spec.tracing import in_new_thread
from attn_dispatch.tuning.guard import TimedOut, run_guarded
sys.setswitchinterval(1e-6)
def start_threads():
    while True:
        in_new_thread(int)
for _ in range(100):
    try:
        run_guarded(start_threads, 0.003)
    except TimedOut:
        pass
print(in_new_thread(lambda: 7))
"""
    assert run(code)[:2] == (0, "7\n")


def test_without_threads_a_call_runs_unguarded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        assert run_guarded(threading.current_thread, PATIENT_S) is threading.current_thread()
    assert "tried without a time limit: can't start new thread" in caplog.text


def test_calls_at_once() -> None:
    meeting = threading.Barrier(2)
    assert sorted(run_at_once([lambda: meeting.wait(PATIENT_S)] * 2, PATIENT_S)) == [0, 1]
    threads = run_at_once([threading.current_thread] * 2, PATIENT_S)
    assert len({*threads, threading.current_thread()}) == 3
    with pytest.raises(KeyError):
        run_at_once([lambda: 1, lambda: fail(KeyError("no"))], PATIENT_S)
    release = threading.Event()
    with pytest.raises(TimedOut):
        run_at_once([lambda: True, release.wait], 0.05)
    release.set()
    assert run_at_once([lambda: 1, lambda: 2], PATIENT_S) == [1, 2]


# --- the state of the caller ------------------------------------------------------------------------------------------


def test_a_call_runs_with_the_callers_number_of_threads() -> None:
    """In a thread that has run kernels before, which does not follow the others' number of threads any more."""
    before = run_guarded(torch.get_num_threads, PATIENT_S)
    assert before == torch.get_num_threads()
    with threads(before + 1):
        assert run_guarded(torch.get_num_threads, PATIENT_S) == before + 1
        assert run_guarded(lambda: run_guarded(torch.get_num_threads, PATIENT_S), PATIENT_S) == before + 1
    assert run_guarded(torch.get_num_threads, PATIENT_S) == before


def test_changes_of_a_call_end_with_it() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="default")
    name.set("caller")

    def call() -> str:
        torch.set_grad_enabled(False)
        found = name.get()
        name.set("call")
        return found

    assert run_guarded(call, PATIENT_S) == "caller"
    assert torch.is_grad_enabled()
    assert run_guarded(torch.is_grad_enabled, PATIENT_S)
    assert name.get() == "caller"


def test_gradients_pass_through() -> None:
    x = torch.ones(3, requires_grad=True)
    y = run_guarded(lambda: (2 * x).sum(), PATIENT_S)
    run_guarded(y.backward, PATIENT_S)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


# --- memory, and errors of other kinds --------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_machine")
@pytest.mark.parametrize(("before", "free", "expected"), [(1.0, 20, 0.75), (0.5, 20, 0.5), (1.0, 100, 1.0)])
def test_the_cap_on_cuda(before: float, free: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB, 30 are used by this process's tensors, 10 more are cached."""
    fakes.fake_cuda(monkeypatch, fakes.props("made up", (9, 0), 132, 0, 80 * GIB))
    fakes.cuda_memory(monkeypatch, free=free * GIB, reserved=40 * GIB, allocated=30 * GIB, fraction=before)
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: set_to.append(given))
    with capped(torch.device("cuda")):
        assert set_to == [(expected, 0)]
    assert set_to[1:] == [(before, 0)]


@pytest.mark.parametrize(
    ("peak", "declared", "kind", "expected"),
    [
        (1288490189, 10 * MIB, "cpu", "allocated 1.2 GiB, its workspace_bytes declared 10.0 MiB"),
        (74 * MIB, 8 * MIB, "cpu", None),
        (74 * MIB + 1, 8 * MIB, "cpu", "allocated 74.0 MiB, its workspace_bytes declared 8.0 MiB"),
        (10 * MIB, 8 * MIB, "cuda", None),
        (10 * MIB + 1, 8 * MIB, "cuda", "allocated 10.0 MiB, its workspace_bytes declared 8.0 MiB"),
        (0, 0, "cuda", None),
        (None, 0, "cpu", None),
    ],
)
def test_memory_over_the_declared_workspace_is_an_excess(
    peak: int | None, declared: int, kind: str, expected: str | None
) -> None:
    assert memory_excess(peak, declared, kind) == expected


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    return caught.value


def chained(outer: Exception, inner: Exception, hidden: bool = False) -> Exception:
    outer.__context__ = inner
    outer.__suppress_context__ = hidden
    return outer


MEMORY_ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "python": MemoryError(),
    "torch-cpu": raised(lambda: torch.empty(1 << 60, dtype=torch.uint8)),
    "numpy": raised(lambda: bytearray(1 << 60)),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "system": OSError(12, "Cannot allocate memory"),
    "wrapped": chained(RuntimeError("the kernel failed"), MemoryError()),
}
LIMIT_ERRORS = {
    "thread": RuntimeError("can't start new thread"),
    "fork": BlockingIOError(11, "Resource temporarily unavailable"),
    "openmp": RuntimeError("libgomp: Thread creation failed: Resource temporarily unavailable"),
    "files": OSError(24, "Too many open files"),
    "files of the machine": OSError(23, "Too many open files in system"),
    "wrapped": chained(RuntimeError("the kernel failed"), OSError(24, "Too many open files")),
}
OTHER_ERRORS = {
    "wrong": RuntimeError("expected scalar type Float but found Half"),
    "illegal": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "registers": RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 101376"),
    "hidden": chained(RuntimeError("the kernel failed"), MemoryError(), hidden=True),
    "itself": chained(one := RuntimeError("x"), chained(RuntimeError("y"), one)),
}


@pytest.mark.parametrize("error", MEMORY_ERRORS.values(), ids=MEMORY_ERRORS)
def test_out_of_memory_errors(error: BaseException) -> None:
    assert (is_memory_error(error), is_limit_error(error), is_shortage(error)) == (True, False, True)


@pytest.mark.parametrize("error", LIMIT_ERRORS.values(), ids=LIMIT_ERRORS)
def test_limits_of_the_machine(error: BaseException) -> None:
    assert (is_memory_error(error), is_limit_error(error), is_shortage(error)) == (False, True, True)


@pytest.mark.parametrize("error", OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_other_errors(error: BaseException) -> None:
    assert not is_shortage(error)


def test_a_lost_device_lacks_no_memory() -> None:
    """After it nothing may be freed, and no other candidate tried."""
    lost = DeviceLost("left cuda:0 unusable")
    lost.__cause__ = MEMORY_ERRORS["torch"]
    assert not is_shortage(lost)
