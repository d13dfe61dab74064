"""A backend's workspace_bytes against the resident memory of a new process, and memory that grows with the length."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.allocations import allocated_peak

# Thread stacks, the heap's metadata, and freed blocks too small to be returned to the system.
HEAP_MIB = 8.0

SCRIPT = """
import json, sys
from itertools import product
import torch
from attn_dispatch import Dense, Dilated, Window
from attn_dispatch.kernels import registry
from attn_dispatch.tuning.example import make
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.testing.cases import Case

device = torch.device("cpu")
longnet = Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True)
cases = [Case("longnet", longnet, (1, 4095, 4, 64)), Case("dense", Dense(), (2, 1024, 6, 80), kv_heads=2)]
cases += [Case("window", Window(300, 0), (1, 2048, 4, 64)), Case("masks", longnet, (2, 3000, 4, 64), key_mask=True)]
every = list(product(sys.argv[1:], cases, (torch.float32, torch.bfloat16), (False, True)))
problem_of = lambda name, case, dtype, needs_grad: case.problem(dtype, needs_grad=needs_grad)
every = [row for row in every if not registry.load(row[0]).refusals(problem_of(*row))]
for name, case, dtype, needs_grad in every:
    backend, problem = registry.load(name), case.problem(dtype, needs_grad=needs_grad)
    example = make(problem)
    gate = Oracle(example, torch.arange(0), torch.arange(0), example.grad, None, {}, [])
    gate.run(backend)
    found, peak = peak_bytes(lambda: gate.run(backend), device)
    announced = backend.workspace_bytes(problem) + problem.result_bytes + found["lse"].nbytes
    del found
    print(json.dumps([name, str(problem), announced / 2**20, peak / 2**20]))
"""
BACKENDS = ("sdpa", "sdpa_float32", "tiles", "native")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no high-water mark to reset")
@pytest.mark.full
def test_resident_memory_stays_below_workspace_bytes() -> None:
    # Blocks from 1 MiB on are returned to the system when freed, so that the next peak counts them again.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", SCRIPT, *BACKENDS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, *_ in rows} == set(BACKENDS)
    for name, problem, announced, peak in rows:
        assert peak <= announced + HEAP_MIB, (name, problem)
        print(f"{name} {problem}: announced {announced:.0f} MiB, peak {peak:.0f} MiB")


def test_a_mask_of_dilated_keys_takes_memory_linear_in_the_length() -> None:
    """PyTorch's kernel for CPUs copies a mask with gaps for every query."""

    def peak(length: int) -> int:
        q, mask = torch.ones(1, length, 1, 8), torch.ones(1, length, dtype=torch.bool)
        problem = Problem.of(q, q, q, Dilated((length,), (2,)), key_mask=mask)
        found = allocated_peak(lambda: registry.load("sdpa").run(q, q, q, problem, key_mask=mask))[1]
        assert found is not None
        return found

    assert peak(8192) < 3 * peak(4096)  # four times as much if quadratic
