"""One call of a backend in a process of its own, which may take so many bytes and no more. `longest` starts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend
from attn_dispatch.machine import memory
from attn_dispatch.machine.child import end_with
from attn_dispatch.machine.devices import cuda_devices
from attn_dispatch.spec.problem import Problem
from attn_dispatch.text import gib, one_line
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.candidates import MEMORY_SHARE
from attn_dispatch.tuning.example import Example, example_bytes, synchronize

OOM_SCORE = Path("/proc/self/oom_score_adj")
MOST_LIKELY = "1000"  #: if the machine runs out of memory all the same, Linux ends this process before any other


def run_limited(
    begin: Callable[[], object],
    parent: int,
    problem: Problem,
    first: Problem | None,
    backend: str,
    order: str,
    memory_bytes: int,
    declared_bytes: int,
    max_seconds: float,
) -> dict[str, Any]:
    """Run a problem once, and again if there is time; for `machine.child.run_alone`.

    Args:
        parent: the process that this one does not outlive.
        first: a short problem, run before the limit is set: libraries and threads are not counted.
        memory_bytes: that q, k, v, out, gradients and workspace may take together; less where less is free now.
        declared_bytes: what the backend declares of them. Where the system enforces no limit, this must fit.
        max_seconds: of one call.

    Returns:
        `status` "ran" with `seconds` of the last call, `peak_bytes` in all and `above_bytes`, that above q, k, v, out
        and gradients, both None where the system does not tell; else "memory", "time" or "failed" with a `reason`.
    """
    end_with(parent)
    with suppress(OSError):
        OOM_SCORE.write_text(MOST_LIKELY)
    try:
        chosen = registry.load(backend)
        if chosen.prepare is not None:
            chosen.prepare()
        if first is not None:
            _example(first).call(chosen, order)()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as below
        status = "memory" if guard.is_memory_error(error) else "failed"
        return {"status": status, "reason": f"before the call: {one_line(error)}"}
    begin()
    room = min(memory_bytes, int(MEMORY_SHARE * memory.available_bytes(problem.device)))
    if not _limited(problem.device, room) and declared_bytes > room:
        reason = f"not tried: no limit can be set here, and {backend} declares {gib(declared_bytes)} of {gib(room)}"
        return {"status": "memory", "reason": reason}
    try:
        found = _measured(problem, chosen, order, max_seconds)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a backend may fail in any way, which is its row's reason
        if guard.is_memory_error(error):
            return {"status": "memory", "reason": f"out of memory under {gib(room)}", "detail": one_line(error)}
        return {"status": "failed", "reason": one_line(error)}
    peak_bytes = found.get("peak_bytes")
    if peak_bytes is not None and peak_bytes > room:  # what the process had freed before the limit is taken again
        return {"status": "memory", "reason": f"took {gib(peak_bytes)} of {gib(room)}"}
    return found


def _measured(problem: Problem, backend: Backend, order: str, max_seconds: float) -> dict[str, Any]:
    example, seconds = _example(problem), list[float]()
    call = example.call(backend, order)

    def timed() -> None:
        synchronize(problem.device)
        start = time.perf_counter()
        result = call()
        synchronize(problem.device)
        del result
        seconds.append(time.perf_counter() - start)

    def calls() -> None:
        timed()
        if seconds[0] <= max_seconds / 2:  # the first one may build tables, and compile
            timed()

    _, above = memory.peak_bytes(calls, problem.device)
    if seconds[-1] > max_seconds:
        return {"status": "time", "reason": f"took {seconds[-1]:.3g} s, over the limit of {max_seconds:g} s"}
    peak_bytes = None if above is None else example_bytes(problem) + above
    above_bytes = None if above is None else max(0, above - problem.result_bytes)
    return {"status": "ran", "seconds": seconds[-1], "peak_bytes": peak_bytes, "above_bytes": above_bytes}


def _example(problem: Problem) -> Example:
    """Random tensors, drawn in place: `example.make` needs float32 copies."""

    def drawn(length: int, heads: int) -> torch.Tensor:
        shape = problem.batch, length, heads, problem.head_dim
        return torch.empty(shape, dtype=problem.dtype, device=problem.device).normal_()

    q, k, v = (drawn(problem.q_len, problem.heads), *(drawn(problem.k_len, problem.kv_heads) for _ in range(2)))
    if not problem.needs_grad:
        return Example(problem, q, k, v, None, {})
    grad = drawn(problem.q_len, problem.heads)
    return Example(problem, q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad, {})


def _limited(device: torch.device, room: int) -> bool:
    """Limit what this process may take from now on. Whether the system enforces it."""
    if device.type != "cuda":
        return memory.limit_address_space(room)
    if memory.memory_fraction(device.index) is None:
        return False
    total = cuda_devices()[torch.cuda.current_device() if device.index is None else device.index].total_memory
    share = (torch.cuda.memory_allocated(device) + room) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    return True
