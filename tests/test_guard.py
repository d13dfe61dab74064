"""What is tried can neither hang the process nor take its memory, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import contextvars
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attn_dispatch import guard, memory
from attn_dispatch.guard import TimedOut, capped, device_lost, is_memory_error, lied, retire, run_guarded
from tests import fakes
from tests.fakes import GIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    retire()
    yield
    retire()


def run(code: str) -> tuple[int, str, str]:
    """A process that loads no torch."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


# --- calls that come back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [PATIENT_S, None])
def test_the_result(timeout_s: float | None) -> None:
    result = object()
    assert run_guarded(lambda: result, timeout_s) is result


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, StopIteration])
def test_exceptions_come_back_as_they_are(kind: type[BaseException]) -> None:
    given = kind("said")
    with pytest.raises(kind) as caught:
        run_guarded(lambda: fail(given), PATIENT_S)
    assert caught.value is given
    names = [frame.name for frame in traceback.extract_tb(given.__traceback__)]
    assert names[-2:] == ["<lambda>", "fail"]
    assert "run" not in names  # the other thread's own frames say nothing to anyone
    assert run_guarded(lambda: 1, PATIENT_S) == 1


class Big:
    """What a kernel had allocated."""


def test_nothing_is_held_after_a_failure() -> None:
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


def test_nothing_is_held_after_a_success() -> None:
    """Without the garbage collector: no cycles either."""
    argument, result = Big(), Big()
    held = weakref.ref(argument), weakref.ref(result)
    box = [result]

    def call(given: Big = argument) -> Big:
        return box.pop()

    del argument, result
    got = run_guarded(call, PATIENT_S)
    del call
    assert held[1]() is got
    del got
    assert [each() for each in held] == [None, None]


def test_the_callers_context_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "IDLE_S", PATIENT_S)
    held: list[weakref.ref[Big]] = []

    def caller() -> None:
        variable: contextvars.ContextVar[Big] = contextvars.ContextVar("variable")
        variable.set(Big())
        held.append(weakref.ref(variable.get()))
        run_guarded(lambda: None, PATIENT_S)

    contextvars.copy_context().run(caller)
    end_s = time.monotonic() + 5.0
    while held[0]() is not None and time.monotonic() < end_s:
        time.sleep(0.001)  # the thread lets go just after it has said that it is done
    assert held[0]() is None


def test_an_exception_is_held_by_nobody_else() -> None:
    def call() -> None:
        raise Failure

    class Failure(Exception):
        pass

    seen = None
    try:
        run_guarded(call, PATIENT_S)
    except Failure as error:
        seen = weakref.ref(error)
    assert seen is not None
    assert seen() is None


def test_a_thread_is_kept_and_can_be_retired() -> None:
    first, second = (run_guarded(threading.current_thread, PATIENT_S) for _ in range(2))
    assert first is second
    assert first is not threading.current_thread()
    assert first.daemon
    retire()
    assert not first.is_alive()
    third = run_guarded(threading.current_thread, PATIENT_S)
    assert third is not first


def test_a_thread_without_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "IDLE_S", 0.01)
    thread = run_guarded(threading.current_thread, PATIENT_S)
    thread.join(PATIENT_S)
    assert not thread.is_alive()
    assert run_guarded(lambda: 1, PATIENT_S) == 1


def test_guarded_calls_within_guarded_calls() -> None:
    def within(depth: int) -> list[int]:
        here = threading.get_ident()
        return [here] if depth == 0 else [here, *run_guarded(lambda: within(depth - 1), PATIENT_S)]

    threads = run_guarded(lambda: within(3), PATIENT_S)
    assert len(set(threads)) == 4


def test_guarded_calls_of_many_threads() -> None:
    met = threading.Barrier(6)
    found: list[int] = []

    def caller(index: int) -> None:
        for _ in range(10):
            run_guarded(lambda: met.wait(PATIENT_S), PATIENT_S)  # all six at the same time
            found.append(run_guarded(lambda: index, PATIENT_S) - index)

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 60


# --- calls that do not ------------------------------------------------------------------------------------------------


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
    assert (caught.value.seconds, caught.value.stopped) == (0.05, True)
    threads[0].join(PATIENT_S)
    assert not threads[0].is_alive()
    assert run_guarded(threading.current_thread, PATIENT_S) is not threads[0]


def test_what_sleeps_is_left_behind(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In C code it cannot be ended; its thread ends as soon as it comes back, and nobody hears of what it found."""
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
def test_what_is_left_behind_does_not_keep_the_process(sleep: str) -> None:
    code = f"""
import ctypes, threading, time
from attn_dispatch import guard
guard.GRACE_S = 0.01
lock = threading.Lock()
lock.acquire()
try:
    guard.run_guarded(lambda: {sleep}, 0.05)
except guard.TimedOut as error:
    print(error, guard.run_guarded(lambda: 7, 60))
"""
    assert run(code) == (0, "did not come back within 0.05 s 7\n", "")


def test_a_call_whose_time_is_over_before_it_began() -> None:
    called: list[int] = []
    worker = guard._Worker()
    worker.stopping = True  # as `stop` leaves it
    job = guard._Job(lambda: called.append(1))
    worker.submit(job)
    worker.stop()
    assert job.done.wait(PATIENT_S)
    worker.thread.join(PATIENT_S)
    assert not worker.thread.is_alive()
    assert called == []


def test_ctrl_c_passes_on_at_once() -> None:
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
@pytest.mark.parametrize("late_s", [0.0, 0.0005, 0.001, 0.002])
def test_a_call_that_ends_as_its_time_does(late_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    """The exception that is to end it must not hit whatever its thread does next."""

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


def test_in_a_forked_child() -> None:
    code = """
import os
from attn_dispatch.guard import run_guarded
run_guarded(os.getpid, 60)
child = os.fork()
if child == 0:
    os._exit(run_guarded(lambda: 7, 60))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    code_, out, _ = run(code)
    assert (code_, out) == (0, "7\n")


def test_while_the_interpreter_ends() -> None:
    code = """
import atexit
from attn_dispatch.guard import run_guarded
run_guarded(int, 60)
atexit.register(lambda: print(run_guarded(lambda: 7, 60)))
"""
    assert run(code)[:2] == (0, "7\n")


def test_without_threads_a_call_is_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert run_guarded(threading.current_thread, PATIENT_S) is threading.current_thread()
    assert "tried without a time limit: can't start new thread" in caplog.text


# --- the caller's state -----------------------------------------------------------------------------------------------


def surroundings() -> dict[str, object]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "device of a tensor": torch.empty(1).device,
        "threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


STATES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "device": lambda: torch.device("meta"),
    "threads": lambda: threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_callers_state_holds(state: Callable[[], Any]) -> None:
    """In a thread that has run kernels before, which does not follow the others' number of threads any more."""
    plain = run_guarded(surroundings, PATIENT_S)
    assert plain == surroundings()
    with state():
        wanted = surroundings()
        assert (wanted != plain) is (state is not contextlib.nullcontext)
        assert run_guarded(surroundings, PATIENT_S) == wanted
        assert run_guarded(lambda: run_guarded(surroundings, PATIENT_S), PATIENT_S) == wanted
    assert run_guarded(surroundings, PATIENT_S) == plain


def test_what_a_call_changes_ends_with_it() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
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


# --- memory -----------------------------------------------------------------------------------------------------------

LITTLE = 256 * MIB


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "available_bytes", lambda device: LITTLE)


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_AS)[0]


def allocate(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


@pytest.mark.usefixtures("little_memory")
def test_too_much_memory_is_an_exception() -> None:
    too_much = LITTLE + (torch.get_num_threads() + 1) * guard.THREAD_BYTES
    before = limit()
    with capped(CPU):
        allocate(LITTLE // 2)
        for call in (lambda: allocate(too_much), lambda: bytearray(too_much)):
            with pytest.raises((RuntimeError, MemoryError)) as caught:
                call()
            assert is_memory_error(caught.value)
        allocate(LITTLE // 2)
    allocate(too_much)
    assert limit() == before


def test_threads_can_start_under_the_cap() -> None:
    """GNU's OpenMP ends the process where it cannot start one."""
    code = """
import threading, torch
from attn_dispatch import guard
guard.available_bytes = lambda device: 1 << 20
torch.set_num_threads(24)
def call():
    with guard.capped(torch.device("cpu")):
        met = threading.Barrier(13)
        for _ in range(12):  # another library's
            threading.Thread(target=met.wait, daemon=True).start()
        met.wait()
        return float((torch.ones(2000, 1000) + 1).sum())
print(guard.run_guarded(call, 60))
"""
    assert run(code) == (0, "4000000.0\n", "")


def test_what_is_free_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    for room in (GIB, 3 * GIB):
        monkeypatch.setattr(guard, "available_bytes", lambda device, room=room: room)
        with capped(CPU):
            limits.append(limit())
    assert GIB < limits[1] - limits[0] < 3 * GIB


@pytest.mark.usefixtures("little_memory")
def test_a_tighter_limit_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    tight = memory.host_psutil().Process().memory_info().vms + 128 * MIB
    try:
        resource.setrlimit(resource.RLIMIT_AS, (tight, hard))
        with capped(CPU):
            assert limit() == tight
        assert limit() == tight
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_caps_may_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of two threads do, which end in any order."""
    before, rooms = limit(), iter([4 * GIB, GIB, 8 * GIB])
    monkeypatch.setattr(guard, "available_bytes", lambda device: next(rooms))
    first, second, third = capped(CPU), capped(CPU), capped(CPU)
    first.__enter__()
    wide = limit()
    second.__enter__()
    tight = limit()
    third.__enter__()
    assert tight < wide
    assert limit() == tight
    second.__exit__(None, None, None)
    assert limit() == wide
    first.__exit__(None, None, None)
    assert limit() > wide
    third.__exit__(None, None, None)
    assert limit() == before


@pytest.mark.usefixtures("little_memory")
def test_where_no_limit_can_be_set_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    before = limit()
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with capped(CPU):
        assert limit() == before


def test_a_forked_child_is_not_capped() -> None:
    code = """
import os, resource, torch
from attn_dispatch import guard
guard.available_bytes = lambda device: 1 << 28
before = resource.getrlimit(resource.RLIMIT_AS)
with guard.capped(torch.device("cpu")):
    capped = resource.getrlimit(resource.RLIMIT_AS) != before
    child = os.fork()
    if child == 0:
        inside = resource.getrlimit(resource.RLIMIT_AS) == before
if child == 0:
    os._exit(40 + inside + (resource.getrlimit(resource.RLIMIT_AS) == before))
print(capped, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code)[:2] == (0, "True 42\n")


@pytest.mark.parametrize(("before", "free", "expected"), [(1.0, 20, 0.75), (0.5, 20, 0.5), (1.0, 100, 1.0)])
def test_the_cap_on_cuda(before: float, free: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB, 30 are used by this process's tensors, 10 more are cached."""
    total = 80 * GIB
    fakes.forget()
    fakes.fake_cuda(monkeypatch, fakes.props("made up", (9, 0), 132, 0, total))
    fakes.cuda_memory(monkeypatch, free=free * GIB, reserved=40 * GIB, allocated=30 * GIB, fraction=before)
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: set_to.append(given))
    with capped(torch.device("cuda")):
        assert set_to == [(expected, 0)]
    assert set_to[1:] == [(before, 0)]
    fakes.forget()


@pytest.mark.parametrize(
    ("peak", "declared", "kind", "said"),
    [
        (1288490189, 10 * MIB, "cpu", "took 1.2 GiB, its workspace_bytes said 10.0 MiB"),
        (74 * MIB, 8 * MIB, "cpu", None),
        (74 * MIB + 1, 8 * MIB, "cpu", "took 74.0 MiB, its workspace_bytes said 8.0 MiB"),
        (10 * MIB, 8 * MIB, "cuda", None),
        (10 * MIB + 1, 8 * MIB, "cuda", "took 10.0 MiB, its workspace_bytes said 8.0 MiB"),
        (0, 0, "cuda", None),
        (None, 0, "cpu", None),
    ],
)
def test_lies(peak: int | None, declared: int, kind: str, said: str | None) -> None:
    assert lied(peak, declared, kind) == said


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any
        return error
    raise AssertionError


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
OTHER_ERRORS = {
    "wrong": RuntimeError("expected scalar type Float but found Half"),
    "illegal": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "registers": RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 101376"),
    "hidden": chained(RuntimeError("the kernel failed"), MemoryError(), hidden=True),
    "itself": chained(one := RuntimeError("x"), chained(RuntimeError("y"), one)),
}


@pytest.mark.parametrize("error", MEMORY_ERRORS.values(), ids=MEMORY_ERRORS)
def test_errors_for_want_of_memory(error: BaseException) -> None:
    assert is_memory_error(error)


@pytest.mark.parametrize("error", OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_other_errors(error: BaseException) -> None:
    assert not is_memory_error(error)


def test_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("torch.cuda.synchronize", asked.append)
    assert not device_lost(CPU)
    assert not device_lost(CUDA)

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", fail)
    assert not device_lost(CPU)
    assert device_lost(CUDA)
    assert asked == [CUDA]


# --- profilers and debuggers ------------------------------------------------------------------------------------------

PROFILED = """
import cProfile, time
from attn_dispatch import guard


def work():
    return sum(abs(i) for i in range(1000))


def forever():
    while True:
        pass


profile = cProfile.Profile()
profile.enable()
for _ in range(3):
    assert guard.run_guarded(work, 5) == work()
for endless in (forever, lambda: time.sleep(0.3)):
    try:
        guard.run_guarded(endless, 0.1)
    except guard.TimedOut:
        pass
    work()
time.sleep(0.5)
work()
profile.disable()
print("done")
"""


def test_profiled_code_goes_on() -> None:
    """A request to look for an exception that nobody takes makes a traced interpreter look for ever."""
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")
