"""A guarded call cannot hang the process, and none of its objects stays referenced."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest

from attn_dispatch.tuning import guard
from attn_dispatch.tuning.guard import TimedOut, run_at_once, run_guarded
from tests.support.fakes import raising
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
