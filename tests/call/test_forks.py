"""Processes forked while another thread holds a lock: that thread is not in the child, which must not wait for it.

And the child does not hold a lock of files that its parent has given back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch import recording
from attn_dispatch.backends import sdpa_mask
from attn_dispatch.compat import sdpa
from attn_dispatch.decisions import decide
from attn_dispatch.ring import link
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import files
from tests.support.calls import qkv

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def ends_in_a_child(lock: Any, function: Callable[[], object]) -> bool:
    """Whether the function returns in a child that is forked while another thread holds the lock."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    child = os.fork()
    if not child:
        threading.Timer(5, os._exit, (1,)).start()
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    over.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def replace_sdpa() -> None:
    with sdpa.replacing_sdpa():
        pass


@pytest.mark.parametrize(
    ("lock", "function"),
    [
        (sdpa_mask._biases._lock, sdpa_mask._biases.cache_clear),
        (sdpa._changing, replace_sdpa),
        (link._lock, link.forget),
        (decide.lock, lambda: decide.lock.acquire(timeout=5)),
    ],
    ids=["kept tables", "replacing_sdpa", "link", "decisions"],
)
def test_a_child_takes_a_lock_that_another_thread_held(lock: Any, function: Callable[[], object]) -> None:
    assert ends_in_a_child(lock, function)
    assert lock.acquire(timeout=5)
    lock.release()


def test_a_child_calls_what_is_recorded(tmp_path: Path) -> None:
    with (tmp_path / "met.jsonl").open("a") as file:
        recorder = recording._Recorder(file)
        assert ends_in_a_child(recorder.lock, lambda: recorder.note(Problem.of(*qkv())))


def test_a_child_holds_no_lock_of_a_folder(tmp_path: Path) -> None:
    """It lives on with a copy of the descriptor, while another writer waits."""
    with files.locked(tmp_path, tmp_path):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        start = time.monotonic()
        with files.locked(tmp_path, tmp_path):
            waited_s = time.monotonic() - start
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert waited_s < files.LOCK_S / 2
