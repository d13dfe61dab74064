"""Protects the process from a backend under trial: a time limit, a memory limit on CUDA, a classification of failures.

A guarded call runs in a thread that can be abandoned if it hangs. On a CPU no limit of memory is set: it would be the
whole process's, whose other threads' allocations would fail, and forked programs would inherit it. There, what a
backend declares must fit the free memory, and its peak is compared with that afterwards. No torch at import.
"""

from __future__ import annotations

import contextvars
import ctypes
import errno
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from attn_dispatch import process_state
from attn_dispatch.errors import BackendFailed
from attn_dispatch.log import say_once
from attn_dispatch.machine.devices import cuda_devices, resolve
from attn_dispatch.machine.memory import available_bytes, memory_fraction
from attn_dispatch.text import gib, one_line

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

SLICE_S = 0.25  #: seconds of one wait; time in which the process gets no core counts as one slice at most
GRACE_S = 0.5  #: seconds that a call may take to end after it was interrupted
CPU_SLACK = 64 << 20  #: bytes of peak over the declared ones that are tolerated: a CPU peak is the whole process's
CUDA_SLACK = 2 << 20  #: bytes of peak over the declared ones that are tolerated: the caching allocator's rounding
#: Lower-case texts by which an exception of any kind counts as a lack of memory.
OF_SYSTEMS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
MEMORY_TEXTS = (*OF_SYSTEMS, "cudaerrormemoryallocation", "_status_alloc_failed", "std::bad_alloc")
#: Lower-case texts by which an exception reports a limit of the machine or container on threads, processes or files.
LIMIT_TEXTS = ("can't start new thread", "resource temporarily unavailable", "too many open files")
LIMIT_ERRORS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE)


class TimedOut(Exception):
    """A guarded call did not return in time; ``stopped`` is False where it still runs in an abandoned thread."""

    def __init__(self, seconds: float, stopped: bool = False) -> None:
        super().__init__(f"did not return within {seconds:g} s")
        self.stopped = stopped


class DeviceLost(BackendFailed):
    """A call under trial left its device unusable for this process: no other candidate can run."""


class NoReference(Exception):
    """The expected results cannot be evaluated for lack of memory, threads or files; not a candidate's fault."""


@contextmanager
def reference() -> Iterator[None]:
    """Turn the lack of memory, threads or files of code that evaluates or compares results into NoReference."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        raise NoReference(one_line(error)) from error


class _Stop(BaseException):
    """Raised inside a call to end it; not an Exception, so that a backend's own handlers do not catch it."""


# --- time -------------------------------------------------------------------------------------------------------------


class _GuardedThread(threading.Thread, Generic[T]):
    """A thread for one call with the caller's state, and its result or exception."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(name="attn-dispatch-trial", daemon=True)
        self.call: Callable[[], T] | None = call
        self.context = contextvars.copy_context()
        self.state = _TorchState() if "torch" in sys.modules else None
        self.ending = threading.Lock()  # guards `running` and `stopping`
        self.running = self.stopping = False
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        with suppress(_Stop):
            try:
                self._call()
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                # Without these frames: they and the error would reference each other.
                frames = error.__traceback__ and error.__traceback__.tb_next
                self.error = error.with_traceback(frames and frames.tb_next)
            finally:
                self.done.set()
            for _ in range(100 * self.stopping):
                pass  # a late `_Stop` is raised here: left pending, CPython would check for it for ever

    def _call(self) -> None:
        call, self.call = self.call, None
        with self.ending:  # its time may have run out before this thread was scheduled
            self.running = not self.stopping
        try:
            with ExitStack() as stack:
                if self.state is not None:
                    self.state.enter(stack)
                if self.running and call is not None:
                    self.result = self.context.run(call)
        finally:
            # From here on `stop` raises nothing in the thread. What it has raised must not be revoked: every
            # thread would check for an exception that none finds, and make no progress under a profiler.
            with self.ending:
                self.running = False

    def stop(self) -> None:
        """Raise `_Stop` in the thread as soon as it runs Python code."""
        held = process_state.starting.acquire(timeout=GRACE_S)  # else a thread that it starts would get it
        with self.ending:
            self.stopping = True
            if self.running and self.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_Stop))
        if held:
            process_state.starting.release()

    def outcome(self) -> T:
        result, error = cast(T, self.result), self.error
        self.result = self.error = None
        if error is None:
            return result
        if not isinstance(error, Exception | SystemExit | _Stop):  # in this thread it is not the user's Ctrl-C
            error = RuntimeError(f"raised {one_line(error)}")
        try:
            raise error
        finally:
            del error


def run_guarded(call: Callable[[], T], timeout_s: float) -> T:
    """Run ``call`` in a separate thread and wait; return its result or raise its exception. One such as
    KeyboardInterrupt, which would end the program, becomes a RuntimeError.

    The caller's grad mode, number of threads, CUDA device and stream and context variables hold inside; torch's
    other modes and its default device do not. Any thread may call this, also inside a guarded call. Ctrl-C in the
    waiting thread is raised at once, and the call is interrupted. Time nothing inside: the thread has an OpenMP
    pool of its own, and while two pools exist, GNU's OpenMP lets their threads sleep instead of spin.

    Raises:
        TimedOut: the call did not return within ``timeout_s`` seconds. Python code is interrupted; a thread that never
            leaves C code is abandoned, with its memory. A call that never releases the interpreter's lock cannot be
            abandoned: nothing else runs.
    """
    calls = [call]
    del call
    return run_at_once(calls, timeout_s)[0]


def run_at_once(calls: list[Callable[[], T]], timeout_s: float) -> list[T]:
    """Run calls at once, each in a thread as `run_guarded` does; their results, or the exception of the first that
    raised one. Empties the list.
    """
    threads = [_GuardedThread(call) for call in calls]
    calls.clear()  # only the threads hold them, until they have run
    try:
        for thread in threads:
            try:
                with process_state.starting:
                    thread.start()
            except RuntimeError as error:  # at interpreter exit, or out of threads
                say_once(f"a backend is tried without a time limit: {error}")
                thread.run()
        slices = math.ceil(timeout_s / SLICE_S)
        if not any(all(thread.done.wait(timeout_s / slices) for thread in threads) for _ in range(slices)):
            raise TimedOut(timeout_s)
    except BaseException as error:
        for thread in threads:
            thread.stop()
        if isinstance(error, TimedOut):
            error.stopped = all(thread.done.wait(GRACE_S) for thread in threads)
        raise
    return [thread.outcome() for thread in threads]


class _TorchState:
    """Grad mode, number of threads, and CUDA device and stream, of the thread that creates this."""

    def __init__(self) -> None:
        import torch

        self.grad, self.threads = torch.is_grad_enabled(), torch.get_num_threads()
        cuda: Any = torch.cuda
        self.stream = cuda.current_stream() if cuda.is_initialized() else None

    def enter(self, stack: ExitStack) -> None:
        import torch

        stack.enter_context(torch.set_grad_enabled(self.grad))
        if self.threads != torch.get_num_threads():  # a thread that has run kernels ignores later global settings
            torch.set_num_threads(self.threads)
        if self.stream is not None:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))


# --- memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def capped(device: torch.device) -> Iterator[None]:
    """Cap the allocations of torch's CUDA allocator at `memory.available_bytes`; others and a CPU have no cap.

    Enter this outside of `run_guarded`: an abandoned thread never leaves a block.
    """
    index = resolve(device).index if device.type == "cuda" else None
    before = None if index is None else memory_fraction(index)
    if index is None or before is None:
        yield
        return
    import torch

    cuda: Any = torch.cuda
    room = cuda.memory_allocated(index) + available_bytes(device)
    abandoned = False
    try:
        cuda.set_per_process_memory_fraction(min(before, room / cuda_devices()[index].total_memory), index)
        yield
    except TimedOut as error:
        abandoned = not error.stopped  # that call may hold the allocator's lock for ever
        raise
    finally:
        if not abandoned:
            with suppress(RuntimeError):  # a lost device accepts no settings
                cuda.set_per_process_memory_fraction(before, index)


def memory_excess(peak_bytes: int | None, declared_bytes: int, kind: str) -> str | None:
    """Describe how a measured peak exceeds the bytes that a backend declared; None where it does not.

    Args:
        peak_bytes: as `memory.peak_bytes` returns it; None where it could not be measured.
        kind: the type of device. On a CPU, whose peak is the whole process's, 64 MiB and a quarter are tolerated.
    """
    slack = CUDA_SLACK if kind == "cuda" else CPU_SLACK + declared_bytes // 4
    if peak_bytes is None or peak_bytes <= declared_bytes + slack:
        return None
    return f"allocated {gib(peak_bytes)}, its workspace_bytes declared {gib(declared_bytes)}"


def is_memory_error(error: BaseException) -> bool:
    """Whether an exception, or one in its chain, reports a lack of memory."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError, *((torch.OutOfMemoryError,) if torch else ()))
    return any(isinstance(each, kinds) or _says(each, MEMORY_TEXTS) for each in _chain(error))


def is_limit_error(error: BaseException) -> bool:
    """Whether an exception, or one in its chain, reports a limit on threads, processes or open files.

    Such limits are the machine's or the container's, and mostly pass: no backend is to blame.
    """
    errors = _chain(error)
    return any(getattr(each, "errno", None) in LIMIT_ERRORS or _says(each, LIMIT_TEXTS) for each in errors)


def is_shortage(error: BaseException) -> bool:
    """Whether an exception reports a lack of memory, threads, processes or open files, and the device still works."""
    lacking = isinstance(error, NoReference) or is_memory_error(error) or is_limit_error(error)
    return lacking and not isinstance(error, DeviceLost)


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    text = one_line(error).lower()
    return any(each in text for each in texts)


def _chain(error: BaseException) -> list[BaseException]:
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return seen


def device_fault(
    device: torch.device, error: BaseException, limit_s: float
) -> tuple[Literal["hung", "died"], str] | None:
    """What a call that ended with ``error`` did to a CUDA device that nothing can use now, as a kind of quarantine and
    a reason; None where the device works.

    After a hang nothing of the device is touched that waits for it: even freeing memory does. Otherwise its queue may
    take ``limit_s`` seconds to end.
    """
    if device.type != "cuda" or isinstance(error, NoReference):
        return None
    text = one_line(error)
    if isinstance(error, TimedOut):
        return None if error.stopped and _is_idle(device) else ("hung", text)
    try:
        import torch

        run_guarded(lambda: torch.cuda.synchronize(device), limit_s)
    except TimedOut:
        return "hung", f"the device is still at work {limit_s:g} s after: {text}"
    except RuntimeError:  # as after an illegal access: every later call in the process fails
        return "died", f"the device was lost: {text}"
    return None


def _is_idle(device: torch.device) -> bool:
    """Whether a call's streams have no work left; does not wait. Streams that a kernel made itself are not seen."""
    import torch

    try:
        return all(get(device).query() for get in (torch.cuda.current_stream, torch.cuda.default_stream))
    except RuntimeError:
        return False
