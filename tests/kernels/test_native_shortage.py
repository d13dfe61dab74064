"""The native kernel where no memory is left for its threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.native import library
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.example import make
from tests.support import processes

SHORT_OF_MEMORY = """
import ctypes, resource
import torch
from attn_dispatch.kernels.native import library, run
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.testing.cases import Case
problem = Case("", Dense(), (1, 40, 2, 8)).problem(torch.float32, needs_grad=False)
made = library.Args.from_buffer_copy(run.forward_arguments(problem, 2).args)
made.head_dim, kernels = 2**30, library.load()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30,) * 2)
print(kernels.attention_forward(ctypes.byref(made)), kernels.attention_backward(ctypes.byref(made)))
"""


def test_a_thread_without_memory_computes_nothing() -> None:
    assert processes.run(SHORT_OF_MEMORY).stdout.split() == ["1", "1"]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_no_memory_for_the_kernel_is_an_error(needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Case("", Dense(), (1, 40, 2, 8)).problem(torch.float32, needs_grad=needs_grad)
    example = make(problem)

    class Short:
        def attention_forward(self, given: Any) -> int:
            return 0 if needs_grad else 1

        def attention_backward(self, given: Any) -> int:
            return 1

        class attention_forward_on:  # noqa: N801 - as ctypes' functions, which have attributes
            def __new__(cls, *given: Any) -> Any:
                return 1

    monkeypatch.setattr(library, "load", Short)
    call = example.call(registry.load("native"))
    with pytest.raises(MemoryError, match="no memory is left"):
        call()
