"""Pieces of work in threads: every piece once, sections in order, and no state left."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from attn_dispatch.kernels.tiles.threads import PIECES_PER_THREAD, WorkQueue, run_in_threads
from tests.support import processes

pytestmark = pytest.mark.usefixtures("three_threads")

THREADS = 3
MANY = 50


def test_every_piece_runs_once_and_in_order() -> None:
    """The first piece waits while other threads run theirs: without the order it would not come first."""
    taken, passed, ahead = [], [], threading.Barrier(THREADS)

    def work(queue: WorkQueue) -> None:
        for number in queue.take():
            taken.append(number)
            if number < THREADS:
                ahead.wait(10)
            if number == 0:
                time.sleep(0.05)
            with queue.in_order(number):
                passed.append(number)

    run_in_threads(MANY, work)
    assert sorted(taken) == list(range(MANY))
    assert passed == list(range(MANY))


def test_operations_in_threads_are_single_threaded() -> None:
    found = set()

    def work(queue: WorkQueue) -> None:
        for _ in queue.take():
            found.add(
                (threading.current_thread().name.rsplit("_", 1)[0], torch.get_num_threads(), torch.is_grad_enabled())
            )

    run_in_threads(MANY, work)
    assert found == {("attn-dispatch-tiles", 1, False)}
    assert torch.get_num_threads() == THREADS
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [THREADS]


@pytest.mark.parametrize(("threads", "count"), [(1, MANY), (THREADS, PIECES_PER_THREAD * THREADS - 1), (THREADS, 0)])
def test_few_pieces_run_in_the_calling_thread(threads: int, count: int) -> None:
    torch.set_num_threads(threads)
    found = []

    def work(queue: WorkQueue) -> None:
        for number in queue.take():
            with queue.in_order(number):
                found.append(threading.current_thread())

    run_in_threads(count, work)
    assert found == [threading.current_thread()] * count


def test_exceptions_reach_the_caller() -> None:
    """The other threads, which wait for their section, end too; the next call works."""

    def work(queue: WorkQueue) -> None:
        for number in queue.take():
            if number == 1:
                raise ZeroDivisionError(number)
            with queue.in_order(number):
                pass

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            run_in_threads(MANY, work)


WITHOUT_THREADS = """
import threading
import torch
from attn_dispatch.kernels.tiles.threads import run_in_threads

start, started = threading.Thread.start, []

def limited(thread):
    if thread.name.startswith("attn-dispatch-tiles"):
        started.append(thread)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = limited
torch.set_num_threads(4)
numbers = []
try:
    run_in_threads(50, lambda queue: numbers.extend(queue.take()))
except RuntimeError as error:
    print(error, numbers, torch.get_num_threads())
later = []
thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
thread.start()
thread.join()
threading.Thread.start = start
run_in_threads(50, lambda queue: numbers.extend(queue.take()))
print(later, sorted(numbers) == list(range(50)))
"""


def test_a_process_ends_where_not_all_threads_could_be_started() -> None:
    """Those that were started do not wait for the others; the next call starts all of them anew."""
    done = processes.run(WITHOUT_THREADS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["can't start new thread [] 4", "[4] True"]


def test_inference_tensors_can_be_written() -> None:
    with torch.inference_mode():
        x = torch.zeros(MANY)

        def work(queue: WorkQueue) -> None:
            for number in queue.take():
                x[number] += 1

        run_in_threads(MANY, work)
    assert x.tolist() == [1.0] * MANY


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads() -> None:
    def work(queue: WorkQueue) -> None:
        for _ in queue.take():
            pass

    run_in_threads(MANY, work)
    child = os.fork()
    if not child:
        threading.Timer(10, os._exit, (1,)).start()
        run_in_threads(MANY, work)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
