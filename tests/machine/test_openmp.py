"""The OpenMP library of PyTorch, also where PyTorch has loaded it for itself alone."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from attn_dispatch.machine import openmp as module
from attn_dispatch.machine.openmp import openmp
from tests.support.processes import printed

#: As builds for aarch64 do: what PyTorch makes visible to everyone lacks the OpenMP library.
ALONE = """
import ctypes
real = ctypes.CDLL
ctypes.CDLL = lambda name, mode=0, **more: real(name, **more)
import torch
ctypes.CDLL = real
print(hasattr(real(None), "GOMP_parallel"))
from attn_dispatch import attend
from attn_dispatch.machine.openmp import openmp
x = torch.ones(1, 2, 1, 4)
print(attend(x, x, x, backend="native").sum().item())
torch.set_num_threads(2)
print(openmp().omp_get_max_threads(), hasattr(real(None), "GOMP_parallel"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere its names are visible")
def test_native_runs_where_pytorch_loaded_it_for_itself_alone() -> None:
    assert printed("-c", ALONE).splitlines() == ["False", "8.0", "2 True"]


def test_no_other_library_is_loaded_where_pytorch_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEEDED", "omp_in_no_library")
    monkeypatch.setattr(module, "SHARED", (*module.SHARED, "no-such-library"))
    openmp.cache_clear()
    assert openmp() is None
    openmp.cache_clear()
    monkeypatch.undo()
    assert isinstance(openmp(), ctypes.CDLL)
