"""Threads that each run torch's operations alone: pieces of work side by side, where each is of many small operations.

An operation that is split among threads ends when the last of them does, and waits for it whenever another process has
that core. A piece of work that runs in one thread waits for nobody.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache

import torch

POLL_S = 0.05  #: a thread that is told to stop hears of it only while it runs Python code
PIECES_PER_THREAD = 2  #: with fewer, operations split among threads keep more of them busy


class _Stopped(Exception):
    """Another piece of work failed, or nobody waits for this one any more."""


class Turns:
    """Pieces of work, given out by number in ascending order, and a place that they pass one by one in that order."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.numbers = iter(range(count))
        self.passed = 0
        self.stopped = False

    def taken(self) -> Iterator[int]:
        """The numbers that fall to the thread that asks."""
        while True:
            with self.changed:
                number = None if self.stopped else next(self.numbers, None)
            if number is None:
                return
            yield number

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Held by one piece at a time, after all before it. Every piece must come here once, or none."""
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


def share(count: int, work: Callable[[Turns], None]) -> None:
    """Call `work` on as many threads as torch uses; each takes the numbers of pieces until there are none.

    On this thread alone where torch uses one, or the pieces are few. Nothing is recorded for gradients.

    Raises:
        What `work` raised first.
    """
    turns, threads = Turns(count), torch.get_num_threads()
    if threads == 1 or count < PIECES_PER_THREAD * threads:
        with torch.no_grad():
            work(turns)
        return
    inference = torch.is_inference_mode_enabled()

    def alone() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                work(turns)
        except BaseException:
            turns.stop()
            raise

    _wait([_pool(threads).submit(alone) for _ in range(threads)], turns)


def _wait(futures: list[Future[None]], turns: Turns) -> None:
    try:
        while wait(futures, POLL_S, FIRST_EXCEPTION).not_done and not turns.stopped:
            pass
    finally:
        turns.stop()  # of no matter where all is done
        wait(futures)
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, _Stopped)):
        raise error


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    started = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # takes the process's number for this thread, and would do so later
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="attn-dispatch-tiles", initializer=begin)
    for _ in range(threads):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(threads)  # what a thread sets is also what later threads begin with
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # the threads are the parent's
