"""Calls on CUDA take few functions on the host, and launch what Triton would, by its own launcher on a stub."""

from __future__ import annotations

import pytest

from tests.support import processes
from tests.support.compiling import compiled

CODE = """
import torch
from tools.bench import host

host.as_cuda()
from triton.backends.nvidia.driver import CudaLauncher

launches = []
CudaLauncher.__call__ = lambda self, *given: launches.append([
    x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given
])
for number, name in enumerate(host.CASES):
    if not name.startswith("triton"):
        continue
    call, kernels = host.call_of(0.1 + number / 1000, *host.CASES[name]), []
    for _ in range(2):
        launches.clear()
        results = call()
        kernels.append(list(launches))
    first, again = kernels
    fresh = {x.data_ptr() for x in results} if isinstance(results, tuple) else {results.data_ptr()}
    assert len(first) == len(again) > 0, name
    for one, other in zip(first, again, strict=True):
        alike = [x == y or (type(x) is type(y) is int and min(x, y) > 2**32) for x, y in zip(one, other, strict=True)]
        assert all(alike), (name, alike)
    print(name, host.python_calls(call), sep=": ")
"""


@pytest.mark.full
@compiled
def test_few_functions_and_the_same_launches() -> None:
    counts = dict(line.rsplit(": ", 1) for line in processes.run(CODE).stdout.splitlines())
    assert len(counts) >= 6
    assert all(int(count) <= 20 * (1 + name.endswith("training")) for name, count in counts.items()), counts
