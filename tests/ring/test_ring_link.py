"""Process groups that were destroyed are not referenced any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes

ONE_AFTER_ANOTHER = """
import sys, weakref
import pytest
import torch
import torch.distributed as dist
from attn_dispatch import shard

groups = []
for number in range(3):
    dist.init_process_group("gloo", f"file://{sys.argv[1]}/{number}", rank=0, world_size=1)
    shard(torch.zeros(1, 4), "world")
    groups.append(weakref.ref(dist.group.WORLD))
    dist.destroy_process_group()
    print(*(int(group() is not None) for group in groups))
"""


def test_a_group_that_was_destroyed_is_dropped_with_the_next(tmp_path: Path) -> None:
    """Otherwise its threads and connections would stay."""
    found = processes.run(ONE_AFTER_ANOTHER, str(tmp_path))
    assert found.stdout.splitlines() == ["1", "0 1", "0 0 1"]


AT_THE_END = """
import atexit, sys, weakref
import torch
import torch.distributed as dist

atexit.register(lambda: print(int(group() is not None)))  # called last: functions run in reverse order of registration
from attn_dispatch import shard

dist.init_process_group("gloo", f"file://{sys.argv[1]}/0", rank=0, world_size=1)
shard(torch.zeros(1, 4), "world")
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_no_group_is_referenced_when_a_process_ends(tmp_path: Path) -> None:
    """Threads of a group that return to Python after its end abort the process (SIGABRT)."""
    command = [sys.executable, "-c", AT_THE_END, str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout == "0\n"


WAITING_AT_THE_END = """
import atexit, os, sys, threading
import torch
import torch.distributed as dist
from attn_dispatch import shard

dist.init_process_group("gloo", f"file://{sys.argv[1]}/0", rank=0, world_size=1)
shard(torch.zeros(1, 4), "world")
ended = threading.Lock()
ended.acquire()
threading.Thread(target=lambda: ended.acquire() and os.write(1, b"released"), daemon=True).start()
atexit.register(ended.release)  # called first
sys.setswitchinterval(1000)  # the main thread gives the interpreter's lock away only where it waits
"""


@pytest.mark.full
def test_a_thread_that_waits_for_the_interpreters_lock_gets_it_before_a_process_ends(tmp_path: Path) -> None:
    """As gloo's do, to release the tensors of the last collective: waiting on, they abort the process (SIGABRT)."""
    command = [sys.executable, "-c", WAITING_AT_THE_END, str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout == "released"
