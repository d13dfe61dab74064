"""What stands between a backend that is tried and the process: a time limit, a memory limit, and what a failure means.

A call that hangs runs in a thread that can be left behind; one that allocates more than there is gets an exception
instead of waking the kernel's out-of-memory killer. No torch at import.
"""

from __future__ import annotations

import contextvars
import ctypes
import math
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakSet

from attn_dispatch.log import say_once
from attn_dispatch.machine.devices import cuda_devices, resolve
from attn_dispatch.machine.memory import available_bytes, host_psutil
from attn_dispatch.text import gib, one_line

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

GRACE_S = 0.5  #: seconds that a call which was told to stop may take for it
SLICE_S = 0.25  #: seconds
IDLE_S = 1.0  #: seconds after which a thread without work ends
CPU_SLACK = 64 << 20  #: bytes: the peak on a CPU is the whole process's
CUDA_SLACK = 2 << 20  #: bytes: the caching allocator's rounding
THREAD_BYTES = (8 + 64) << 20  #: of address space, not of memory, for a thread: its stack and the C library's heap
GRAIN = 32768  #: elements for which torch uses one thread more
MEMORY_TEXTS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "cudaerrormemoryallocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "std::bad_alloc",
    "can't start new thread",
)


class TimedOut(Exception):
    """A call did not come back within its time.

    ``seconds`` is the limit; ``stopped`` says whether the call could be ended or still runs in a thread left behind.
    """

    def __init__(self, seconds: float, stopped: bool = False) -> None:
        super().__init__(f"did not come back within {seconds:g} s")
        self.seconds = seconds
        self.stopped = stopped


class _Stop(BaseException):
    """Raised inside a call that is to end; no Exception, so that a backend's own handlers let it through."""


# --- time -------------------------------------------------------------------------------------------------------------


class _Job(Generic[T]):
    """One call, its state from the caller's thread, and what became of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call: Callable[[], T] | None = call
        self.context = contextvars.copy_context()
        self.state = _TorchState() if "torch" in sys.modules else None
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        call, self.call = self.call, None
        assert call is not None
        try:
            with ExitStack() as stack:
                if self.state is not None:
                    self.state.enter(stack)
                self.result = self.context.run(call)
        except BaseException as error:  # noqa: BLE001 - the caller's to deal with, in its own thread
            # Without this frame: it would hold the error, which holds it.
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)

    def outcome(self) -> T:
        result, error = cast(T, self.result), self.error
        self.result = self.error = None
        if error is None:
            return result
        try:
            raise error
        finally:
            del error


class _Worker:
    """A thread that runs jobs, one after another, until it is told to end or has none for a while."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self.ending = threading.Lock()  # held by whoever decides whether the running job is over
        self.running = False
        self.stopping = False
        self.thread = threading.Thread(target=self._loop, name="attn-dispatch-trial", daemon=True)
        _trial_threads.add(self.thread)
        self.thread.start()

    def submit(self, job: _Job[Any]) -> None:
        self.jobs.put(job)

    def stop(self) -> None:
        """Raise in the thread as soon as it runs Python code; it takes no more jobs."""
        with self.ending:
            self.stopping = True
            if self.running and self.thread.ident is not None:
                _raise_in(self.thread.ident, _Stop)
        self.jobs.put(None)

    def _loop(self) -> None:
        with suppress(_Stop):
            while (job := self._next()) is not None:
                try:
                    try:
                        if self._open():
                            job.run()
                    finally:
                        self._close()
                finally:  # `_close` may be what is stopped, and only one of them
                    job.done.set()
                del job  # while it waits, it holds nothing of the caller's
            for _ in range(100 * self.stopping):
                pass  # what it was told too late arrives here: left over, it would keep CPython looking for ever

    def _open(self) -> bool:
        """Whether there is still time: on a busy machine it may be over before this thread had its turn."""
        with self.ending:
            self.running = not self.stopping
        return self.running

    def _close(self) -> None:
        """From here on the thread is not told to stop.

        What it was told too late must not be taken back: `PyThreadState_SetAsyncExc` with NULL asks every thread to
        look for an exception that none finds, so that all go on looking, and under a profiler or debugger do no more.
        """
        with self.ending:
            self.running = False

    def _next(self) -> _Job[Any] | None:
        while True:
            with suppress(Empty):
                return self.jobs.get(timeout=IDLE_S)
            try:
                _idle.remove(self)
            except ValueError:  # just taken: a job is on its way
                continue
            return None


_trial_threads: WeakSet[threading.Thread] = WeakSet()
_waiting: list[threading.Thread] = []  # for a guarded call; once for each that they wait for
_idle: list[_Worker] = []  # the last to finish is the next to work: its pools are warm
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_waiting.clear)


def run_guarded(call: Callable[[], T], timeout_s: float | None) -> T:
    """Run ``call`` in a thread of its own and wait; its result, or its exception as it is.

    The caller's grad and inference mode, autocast, default device, number of threads, CUDA device and stream and
    context variables hold inside; torch's function and dispatch modes do not. Any thread may call this, also inside a
    guarded call. Ctrl-C in the waiting thread passes on at once, and the call is told to stop.

    The thread is kept for the next call, with the pool of threads that OpenMP makes for each thread: while there are
    two such pools, GNU's OpenMP lets them sleep instead of spin, which makes small kernels several times slower in
    both. So nothing should be timed in here, nor before `retire`.

    Raises:
        TimedOut: it did not come back within ``timeout_s`` seconds. If it runs Python code, it is ended; a thread that
            is inside C code for good is left behind, with what it holds. One that does not let go of the interpreter's
            lock cannot be left: nothing else runs.
    """
    try:
        worker = _idle.pop() if _idle else _Worker()
    except (IndexError, RuntimeError) as error:
        if isinstance(error, IndexError):  # another thread took it
            return run_guarded(call, timeout_s)
        say_once(f"a backend is tried without a time limit: {error}")  # the interpreter ends, or no thread is to be had
        return call()
    job = _Job(call)
    del call
    _waiting.append(threading.current_thread())
    try:
        worker.submit(job)
        in_time = _wait(job.done, timeout_s)
    except BaseException:
        worker.stop()
        raise
    finally:
        _waiting.remove(threading.current_thread())
    if not in_time:
        assert timeout_s is not None
        worker.stop()
        raise TimedOut(timeout_s, stopped=job.done.wait(GRACE_S))
    _idle.append(worker)
    return job.outcome()


def _wait(done: threading.Event, timeout_s: float | None) -> bool:
    """Wait in slices: time in which the process is stopped counts as one of them."""
    left = math.inf if timeout_s is None else timeout_s
    while left > 0:
        if done.wait(min(left, SLICE_S)):
            return True
        left -= SLICE_S
    return done.is_set()


def retire() -> None:
    """End the threads that are kept, and with them their OpenMP pools: what is timed next is alone on its cores."""
    while _idle:
        with suppress(IndexError):
            worker = _idle.pop()
            worker.jobs.put(None)
            worker.thread.join()


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class _TorchState:
    """What torch keeps for each thread, as it is in the thread that makes this."""

    def __init__(self) -> None:
        import torch

        cuda: Any = torch.cuda
        kinds = ("cpu", "cuda") if cuda.is_initialized() else ("cpu",)
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self.cached = torch.is_autocast_cache_enabled()
        self.device = torch.get_default_device()
        self.threads = torch.get_num_threads()
        self.stream = cuda.current_stream() if cuda.is_initialized() else None

    def enter(self, stack: ExitStack) -> None:
        import torch

        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.cached))
        if self.device != torch.get_default_device():
            stack.enter_context(self.device)
        if self.threads != torch.get_num_threads():  # a thread that has run kernels does not follow the others'
            torch.set_num_threads(self.threads)
        if self.stream is not None:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))


# --- memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def capped(device: torch.device, held: list[int] | None = None) -> Iterator[None]:
    """Let no more be allocated than `memory.available_bytes` says there is; past that, allocations raise.

    On a CPU the process's address space is bounded (RLIMIT_AS): what is mapped and never touched counts too, and
    programs that are started meanwhile inherit it. GNU's OpenMP ends the process if it cannot start a thread, so the
    pool of the calling thread is started first, and others are given room: enter this in the thread that is to run the
    kernel, inside the call of `run_guarded`. On CUDA it is torch's allocator that is bounded. A tighter limit that is
    there already stays; where none can be set, there is none. `held` is filled with what `lift` takes.

    The limit is the whole process's, and another thread's allocation would fail for what a trial takes: there is none
    where `threading` lists others when the trial begins, and `workspace_bytes` alone is held to what is free. Threads
    that C code started (OpenMP's, torch's) are not seen: most work for the trial, and nothing tells the rest from them.
    """
    with _capped_allocator(device) if device.type == "cuda" else _capped_address_space(device, held):
        yield


def lift(held: list[int]) -> None:
    """End caps from outside: a thread that is left behind does not come to it. `held` is what `capped` was given."""
    with _capping:
        for cap in held:
            if cap in _caps:
                _caps.remove(cap)
                _apply_caps()


_caps: list[int] = []  # bytes of address space, of every trial that runs now
_uncapped: tuple[int, int] | None = None  # the limits that were there before the first of them
_capping = threading.Lock()


@contextmanager
def _capped_address_space(device: torch.device, held: list[int] | None) -> Iterator[None]:
    global _uncapped
    if not {threading.current_thread(), *_trial_threads, *_waiting}.issuperset(threading.enumerate()):
        yield
        return
    threads = _started_threads()
    cap = available_bytes(device) + threads * THREAD_BYTES + host_psutil().Process().memory_info().vms
    try:
        with _capping:
            if not _caps:
                _uncapped = resource.getrlimit(resource.RLIMIT_AS)
            _caps.append(cap)
            if held is not None:
                held.append(cap)
            _apply_caps()
        yield
    finally:
        with _capping:
            if cap in _caps:  # not so in a forked child
                _caps.remove(cap)
                _apply_caps()


def _started_threads() -> int:
    """How many threads a kernel uses, once they are there."""
    import torch

    threads = torch.get_num_threads()
    torch.zeros(threads * GRAIN, dtype=torch.uint8, device="cpu").add_(1)
    return threads


def _apply_caps() -> None:
    """Trials may overlap and end in any order: the tightest of the caps that are left, or what was there before."""
    assert _uncapped is not None
    soft, hard = _uncapped
    limits = [each for each in (soft, *_caps) if each != resource.RLIM_INFINITY]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (min(limits, default=resource.RLIM_INFINITY), hard))


def _uncap() -> None:
    """In a forked child, which runs no trial."""
    global _capping
    _capping = threading.Lock()
    if _caps:
        _caps.clear()
        _apply_caps()


os.register_at_fork(after_in_child=_uncap)


@contextmanager
def _capped_allocator(device: torch.device) -> Iterator[None]:
    import torch

    cuda: Any = torch.cuda
    index = resolve(device).index
    before = cuda.get_per_process_memory_fraction(index)
    room = cuda.memory_allocated(index) + available_bytes(device)
    try:
        cuda.set_per_process_memory_fraction(min(before, room / cuda_devices()[index].total_memory), index)
        yield
    finally:
        with suppress(RuntimeError):  # a device that was lost takes no settings
            cuda.set_per_process_memory_fraction(before, index)


def lied(peak_bytes: int | None, declared_bytes: int, kind: str) -> str | None:
    """How a measured peak breaks the bound that a backend declared, or None.

    Args:
        peak_bytes: as `measure.peak_bytes` gives it; None where it could not be measured.
        kind: the type of device. On a CPU, where the peak is of the whole process, 64 MiB and a quarter are let pass.
    """
    slack = CUDA_SLACK if kind == "cuda" else CPU_SLACK + declared_bytes // 4
    if peak_bytes is None or peak_bytes <= declared_bytes + slack:
        return None
    return f"took {gib(peak_bytes)}, its workspace_bytes said {gib(declared_bytes)}"


def is_memory_error(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that memory was lacking: no fault of the kernel."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError, *((torch.OutOfMemoryError,) if torch else ()))
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        text = one_line(link).lower()
        if isinstance(link, kinds) or any(each in text for each in MEMORY_TEXTS):
            return True
        seen.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def device_lost(device: torch.device) -> bool:
    """Whether a CUDA device takes no more work, as after an illegal access: every later call in the process fails.

    It waits for what the device is doing: not to be asked about a kernel that hangs.
    """
    if device.type != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
