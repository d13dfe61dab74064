"""Runs pieces of work in parallel, each in one thread in which torch's operations use a single thread.

An operation split over threads ends with its slowest thread, which may wait for a core that another process uses. For
work that consists of many small operations one thread per piece avoids these waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache

import torch

from attn_dispatch import process_state
from attn_dispatch.system import in_forked_child

POLL_S = 0.05  #: returns to Python this often, so that an exception raised in this thread is noticed
PIECES_PER_THREAD = 2  #: with fewer pieces, splitting each operation over threads uses more threads


class _Stopped(Exception):
    """Another piece of work failed, or the caller stopped waiting."""


class WorkQueue:
    """Hands out the numbers of pieces of work in ascending order, and runs one section of each piece in that order."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.numbers = iter(range(count))
        self.passed = 0
        self.stopped = False

    def take(self) -> Iterator[int]:
        """Numbers for the calling thread, until none are left."""
        while True:
            with self.changed:
                number = None if self.stopped else next(self.numbers, None)
            if number is None:
                return
            yield number

    @contextmanager
    def in_order(self, number: int) -> Iterator[None]:
        """A section that pieces enter one at a time, in order. Every piece must enter it once, or none may."""
        with self.changed:
            self.changed.wait_for(lambda: self.passed == number or self.stopped)
            if self.stopped:
                raise _Stopped
            yield
            self.passed += 1
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


def run_in_threads(count: int, work: Callable[[WorkQueue], None]) -> None:
    """Call `work` in as many threads as torch uses, without autograd; each takes numbers of pieces from the queue.

    Uses the calling thread alone if torch uses one thread, or if there are few pieces.

    Raises:
        The first exception of `work`.
    """
    queue, threads = WorkQueue(count), torch.get_num_threads()
    if threads == 1 or count < PIECES_PER_THREAD * threads:
        with torch.no_grad():
            work(queue)
        return
    inference = torch.is_inference_mode_enabled()

    def run_pieces() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                work(queue)
        except BaseException:
            queue.stop()
            raise

    _wait([_pool(threads).submit(run_pieces) for _ in range(threads)], queue)


def _wait(futures: list[Future[None]], queue: WorkQueue) -> None:
    try:
        while wait(futures, POLL_S, FIRST_EXCEPTION).not_done and not queue.stopped:
            pass
    finally:
        queue.stop()  # no effect if all work is done
        wait(futures)
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, _Stopped)):
        raise error


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    started = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # initializes this thread's number from the process; otherwise a later call would
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="attn-dispatch-tiles", initializer=begin)
    try:
        for _ in range(threads):
            with process_state.starting:
                pool.submit(started.wait)
        started.wait()
    except BaseException:
        started.abort()  # else the threads that have started wait for ever, and the interpreter's end for them
        pool.shutdown()
        raise
    finally:
        torch.set_num_threads(threads)  # set_num_threads(1) above also became the default of new threads
    return pool


in_forked_child(_pool.cache_clear)  # a child process has no threads of its parent
