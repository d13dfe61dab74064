"""Guarded calls have a memory limit; out-of-memory errors, lost devices and other errors are distinguished."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from attn_dispatch.machine import memory
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.guard import capped, device_lost, is_memory_error, memory_excess
from tests.support import fakes, processes
from tests.support.fakes import GIB, MIB
from tests.support.guarded import PATIENT_S

pytestmark = pytest.mark.usefixtures("no_threads_are_left", "_threads_of_other_tests")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LITTLE = 256 * MIB


@pytest.fixture
def _threads_of_other_tests(no_threads_are_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests in this process have left threads, such as torch's compiler's: beside them there is no cap."""
    before, listed = set(threading.enumerate()) - {threading.current_thread()}, threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [each for each in listed() if each not in before])


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
from attn_dispatch.tuning import guard
guard.available_bytes = lambda device: 1 << 20
torch.set_num_threads(24)
def call():
    with guard.capped(torch.device("cpu")):
        barrier = threading.Barrier(13)
        for _ in range(12):  # another library's
            threading.Thread(target=barrier.wait, daemon=True).start()
        barrier.wait()
        return float((torch.ones(2000, 1000) + 1).sum())
print(guard.run_guarded(call, 60))
"""
    done = processes.run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4000000.0\n", "")


@pytest.fixture
def another_thread(_threads_of_other_tests: None) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("little_memory", "another_thread")
def test_other_threads_are_not_limited() -> None:
    before = limit()

    def inside() -> int:
        with capped(CPU):
            return limit()

    assert inside() == before
    assert guard.run_guarded(inside, PATIENT_S) == before


@pytest.mark.usefixtures("little_memory")
def test_threads_of_trials_do_not_prevent_the_limit() -> None:
    """Threads that run a trial, that wait for one, nested ones too, and idle ones."""
    before = limit()

    def inside() -> int:
        with capped(CPU):
            return limit()

    def nested() -> int:
        return guard.run_guarded(inside, PATIENT_S)

    assert inside() != before
    for _ in range(2):
        assert guard.run_guarded(nested, PATIENT_S) != before
    assert inside() != before
    assert guard._waiting == []


def test_the_limit_follows_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_calls_run_without_a_limit_if_none_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    before = limit()
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with capped(CPU):
        assert limit() == before


def test_a_forked_child_is_not_capped() -> None:
    code = """
import os, resource, torch
from attn_dispatch.tuning import guard
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
    done = processes.run(code)
    assert (done.returncode, done.stdout) == (0, "True 42\n")


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
def test_out_of_memory_errors(error: BaseException) -> None:
    assert is_memory_error(error)


@pytest.mark.parametrize("error", OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_other_errors(error: BaseException) -> None:
    assert not is_memory_error(error)


def test_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized: list[object] = []
    monkeypatch.setattr("torch.cuda.synchronize", synchronized.append)
    assert not device_lost(CPU)
    assert not device_lost(CUDA)

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", fail)
    assert not device_lost(CPU)
    assert device_lost(CUDA)
    assert synchronized == [CUDA]
