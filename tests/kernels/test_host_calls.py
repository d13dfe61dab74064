"""Calls on CUDA take few functions on the host, and launch what Triton would, by its own launcher on a stub."""

from __future__ import annotations

import pytest
import torch

from attn_dispatch.kernels.triton.passes import TritonPasses
from attn_dispatch.kernels.triton.support import Launch
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from tests.support import processes
from tests.support.compiling import compiled

CODE = """
import torch
from tools.bench import host

host.as_cuda()
from triton.backends.nvidia.driver import CudaLauncher

launches = []
CudaLauncher.__call__ = lambda self, *given: launches.append([
    x.data_ptr() if isinstance(x, torch.Tensor) else x for x in (*given[:6], *given[9:])  # without hooks
])
for number, (name, case) in enumerate(host.CASES.items()):
    if not name.startswith(("triton", "sdpa")):
        continue
    call, kernels = host.call_of(number, case), []
    for _ in range(2):
        launches.clear()
        call()
        kernels.append(list(launches))
    first, again = kernels
    assert len(first) == len(again), name
    assert bool(first) == name.startswith("triton"), name
    for one, other in zip(first, again, strict=True):
        alike = [x == y or (type(x) is type(y) is int and min(x, y) > 2**32) for x, y in zip(one, other, strict=True)]
        assert all(alike), (name, alike)
    print(name, host.python_calls(call), sep=": ")
"""


def test_a_launch_is_known_for_the_same_layouts_alone() -> None:
    """Of all tensors: hooks, as of save_on_cpu, give the backward pass others than the forward pass had."""
    made, problem = list[object](), problem_of((1, 8, 2, 4), Dense(), torch.float32, torch.device("cpu"))
    x = torch.zeros(1, 8, 2, 9)
    strided, packed, odd, gradient = x[..., :4], torch.zeros(1, 8, 2, 4), x[..., 1:5], torch.zeros(1, 2, 8, 4)
    passes = TritonPasses(problem, (), (), (), known={})  # type: ignore[arg-type]

    def launch(*given: object) -> Launch:
        made.append(given)
        return Launch(None, None, 0, problem.device, 0, (), {})

    for x, y in ((strided, packed), (packed, packed), (odd, packed), (strided, gradient.mT), (strided, packed)):
        passes.launch_as_known(launch, "kernel", (x, y), (x, y))
    assert len(made) == 4


@pytest.mark.full
@compiled
def test_few_functions_and_the_same_launches() -> None:
    counts = dict(line.rsplit(": ", 1) for line in processes.run(CODE).stdout.splitlines())
    assert len(counts) >= 6
    for name, count in counts.items():  # a token takes two launches; training three, and autograd
        most = {
            "triton, training": 105,
            "triton, LongNet, training": 105,
            "triton, one token": 34,
            "sdpa, training": 36,
        }
        assert int(count) <= most.get(name, 20), counts
