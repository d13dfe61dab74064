"""A GPU that this torch has no code for: no backend runs on it, and `doctor` says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_dispatch.cli import machine
from attn_dispatch.decisions.unmeasured import forced_candidates
from attn_dispatch.kernels import registry
from attn_dispatch.machine.devices import missing_code
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning.candidates import Request
from tests.support.fakes import GIB, GTX1080, cuda_memory, fake_cuda, props

CUDA = torch.device("cuda", 0)
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


pytestmark = pytest.mark.usefixtures("fresh_machine")


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((6, 1), " ".join(CUDA_13), False),
        ((6, 1), "sm_50 sm_60 sm_70", True),
        ((8, 9), "sm_75 sm_80 sm_86 sm_90", True),
        ((12, 0), "sm_90 compute_90", True),
        ((12, 0), "sm_90a compute_90a", False),
        ((9, 0), "sm_90a", True),
        ((10, 3), "sm_100f", True),
        ((7, 5), "compute_80", False),
        ((6, 1), "", True),
    ],
)
def test_what_a_gpu_runs(
    capability: tuple[int, int], built_for: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda(monkeypatch, props("Some GPU", capability, 20, 0, GIB))
    monkeypatch.setattr("torch.cuda.get_arch_list", built_for.split)
    found = missing_code(torch.device("cuda"))
    assert (found == "") == runs
    if not runs:
        for part in (f"sm_{capability[0]}{capability[1]}", "Some GPU", built_for, str(torch.__version__)):
            assert part in found


@pytest.fixture
def unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, GTX1080)
    cuda_memory(monkeypatch, free=GIB)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (6, 1))
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: CUDA_13)


@pytest.mark.usefixtures("unusable")
def test_no_backend_runs_on_it() -> None:
    request = Request.of(problem_of((1, 64, 2, 16), Dense(), torch.float32, CUDA))
    reasons = {each.name: each.row.reason for each in request.candidates if each.row is not None}
    assert set(reasons) == set(registry.names())
    assert all("no code for NVIDIA GeForce GTX 1080 (sm_61)" in each for each in reasons.values())
    (forced,) = forced_candidates(request, "manual", None)
    assert forced.row is not None
    assert "no code for" in forced.row.reason


@pytest.mark.usefixtures("unusable")
def test_doctor_says_so() -> None:
    found: Any = machine._device("cuda:0")
    assert "no code for NVIDIA GeForce GTX 1080 (sm_61)" in found["unusable"]
    assert machine._device("cpu")["unusable"] == ""
    backend: Any = registry.load("manual")
    assert "no code for" in machine._unusable(backend)
