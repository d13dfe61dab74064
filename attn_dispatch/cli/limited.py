"""One call of a backend in a process of its own, within limits of memory and time."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, refusals_of
from attn_dispatch.machine import memory
from attn_dispatch.machine.devices import cuda_devices, synchronize
from attn_dispatch.spec.problem import Problem
from attn_dispatch.text import gib, one_line
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.candidates import MEMORY_SHARE
from attn_dispatch.tuning.example import Example, example_bytes

OOM_SCORE = Path("/proc/self/oom_score_adj")
MOST_LIKELY = "1000"  #: if the machine runs out of memory all the same, Linux ends this process before any other
START_S = 600  #: seconds in which a process loads torch and compiles what its backend needs
FILL_BYTES_PER_S = 5e7  #: random numbers that a process draws at least
BEGUN = b"begun\n"
TIME_UP = b"\nTimeout ("  #: what faulthandler prints as it ends a process whose time is up, whatever that does
PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later({start_s}, exit=True, file=sys.stdout)
sys.path[:] = {path!r}
from attn_dispatch.cli.limited import serve
serve()
"""


class Attempt(NamedTuple):
    """What is run, and what it may take.

    `first` is a shorter problem, run before the limit is set: libraries and threads are not counted.
    `memory_bytes` is for q, k, v, out, gradients and workspace together, `declared_bytes` what the backend says of
    them: where the system enforces no limit, this must fit. `max_seconds` is for one call.
    """

    problem: Problem
    first: Problem | None
    backend: str
    order: str
    memory_bytes: int
    declared_bytes: int
    max_seconds: float

    @property
    def limit_s(self) -> float:
        """Seconds for drawing the tensors, two calls, and what is lost on a busy machine."""
        return 2 * self.max_seconds + START_S / 10 + example_bytes(self.problem) / FILL_BYTES_PER_S


def run_alone(attempt: Attempt) -> dict[str, Any]:
    """Run a problem once in a new process, and again if there is time.

    Returns:
        `status` "ran" with `seconds` of the last call, `peak_bytes` in all and `above_bytes`, that above q, k, v, out
        and gradients, both None where the system does not tell; else "memory", "time", "died" with its process, or
        "failed", with a `reason`.
    """
    command = [sys.executable, "-c", PROGRAM.format(start_s=START_S, path=sys.path)]
    done = subprocess.run(
        command, input=pickle.dumps(attempt), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    has_begun = BEGUN in done.stdout
    if TIME_UP in done.stdout and has_begun:
        return {"status": "time", "reason": f"killed: two calls did not end within {attempt.max_seconds:g} s each"}
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
    return {"status": "died", "reason": f"its process ended{'' if has_begun else ' before the call'}: {how}"}


def serve() -> None:
    """In the new process: read an attempt, write what becomes of it, and end without waiting for threads."""
    attempt: Attempt = pickle.load(sys.stdin.buffer)
    with suppress(OSError):
        OOM_SCORE.write_text(MOST_LIKELY)

    def begin() -> None:
        faulthandler.dump_traceback_later(attempt.limit_s, exit=True, file=sys.stdout)
        os.write(1, BEGUN)

    os.write(1, b"\n" + json.dumps(outcome(attempt, begin)).encode())
    os._exit(0)


def outcome(attempt: Attempt, begin: Callable[[], object]) -> dict[str, Any]:
    """What `run_alone` returns, of an attempt in this process; `begin` is called once it is prepared."""
    device, when = attempt.problem.device, "before the call"
    try:
        backend = registry.load(attempt.backend)
        if backend.prepare is not None:
            backend.prepare()
        if attempt.first is not None and not refusals_of(backend, attempt.first):
            _example(attempt.first).call(backend, attempt.order)()
        begin()
        room = min(attempt.memory_bytes, int(MEMORY_SHARE * memory.available_bytes(device)))
        if not _limited(device, room) and attempt.declared_bytes > room:
            declared = f"{attempt.backend} declares {gib(attempt.declared_bytes)} of {gib(room)}"
            return {"status": "memory", "reason": f"not tried: no limit can be set here, and {declared}"}
        when = f"under {gib(room)}"
        found = _measured(attempt, backend)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a backend may fail in any way, which is its row's reason
        if guard.is_memory_error(error):
            return {"status": "memory", "reason": f"out of memory {when}", "detail": one_line(error)}
        return {"status": "failed", "reason": one_line(error)}
    peak_bytes = found.get("peak_bytes")
    if peak_bytes is not None and peak_bytes > room:  # what the process had freed before the limit is taken again
        return {"status": "memory", "reason": f"took {gib(peak_bytes)} of {gib(room)}"}
    return found


def _measured(attempt: Attempt, backend: Backend) -> dict[str, Any]:
    problem, seconds = attempt.problem, list[float]()
    call = _example(problem).call(backend, attempt.order)

    def calls() -> None:
        while len(seconds) < 1 + (2 * sum(seconds) <= attempt.max_seconds):  # the first call may compile
            synchronize(problem.device)
            start = time.perf_counter()
            call()
            synchronize(problem.device)
            seconds.append(time.perf_counter() - start)

    _, above = memory.peak_bytes(calls, problem.device)
    if seconds[-1] > attempt.max_seconds:
        return {"status": "time", "reason": f"took {seconds[-1]:.3g} s of {attempt.max_seconds:g} s"}
    found: dict[str, Any] = {"status": "ran", "seconds": seconds[-1]}
    if above is not None:
        found["above_bytes"] = max(0, above - problem.result_bytes)
        found["peak_bytes"] = example_bytes(problem) + above
    return found


def _example(problem: Problem) -> Example:
    """Random tensors, drawn in place: `example.make` needs float32 copies."""

    def drawn(length: int, heads: int, grad: bool = problem.needs_grad) -> torch.Tensor:
        shape = problem.batch, length, heads, problem.head_dim
        return torch.empty(shape, dtype=problem.dtype, device=problem.device).normal_().requires_grad_(grad)

    q, k, v = (drawn(problem.q_len, problem.heads), *(drawn(problem.k_len, problem.kv_heads) for _ in range(2)))
    grad = drawn(problem.q_len, problem.heads, False) if problem.needs_grad else None
    return Example(problem, q, k, v, grad, {})


def _limited(device: torch.device, room: int) -> bool:
    """Limit what this process may take from now on. Whether the system enforces it."""
    if device.type == "cpu":
        return memory.limit_address_space(room)
    if device.type != "cuda" or memory.memory_fraction(device.index) is None:
        return False
    total = cuda_devices()[torch.cuda.current_device() if device.index is None else device.index].total_memory
    share = (torch.cuda.memory_allocated(device) + room) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    return True
