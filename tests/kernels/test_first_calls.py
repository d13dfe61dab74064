"""What backends with kernels compiled at the first call declare: time limits, budgets and hard cases depend on it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.backends import flash, manual, triton, triton_tiles
from attn_dispatch.kernels import device_cache
from attn_dispatch.kernels.branches import backend as branched
from attn_dispatch.kernels.branches import flash4 as flash4_package
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.kernels.triton.support import COMPILE_MS
from attn_dispatch.machine import environment
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning.candidates import Request
from attn_dispatch.tuning.gate import COMPILED_CASES, Gate, HardCase, case_of
from attn_dispatch.tuning.hard_cases import class_key
from tests.kernels.test_limits import installed
from tests.support import libraries
from tests.support.flaws import FILLED

LONGNET = Dilated((16, 32), (1, 2))


@pytest.fixture(autouse=True)
def _device(unknown_packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:0 is a Hopper with flash-attn 2 and 4; nothing is compiled yet."""
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(device_cache, "_compiled", set())
    libraries.flash_attn_2(monkeypatch, [])
    libraries.modules(monkeypatch, flash_attn__cute={}, flash_attn__cute__interface={})
    installed(monkeypatch, {"flash-attn-4": "4.0.0b36", "flash-attn": "2.8.3"})


def problem_of(pattern: Pattern = LONGNET, *, needs_grad: bool = True, device: str = "cuda:0") -> Problem:
    return Case("", pattern, (1, 64, 4, 64)).problem(torch.bfloat16, needs_grad=needs_grad, device=device)


def test_triton_compiles_each_kernel() -> None:
    for backend in (triton, triton_tiles):
        assert backend.first_call_ms(problem_of()) == 3 * COMPILE_MS
        assert backend.first_call_ms(problem_of(needs_grad=False)) == COMPILE_MS
        assert backend.first_call_ms(problem_of(device="cpu")) == 0  # interpreted


def test_kernels_serve_problems_of_other_sizes() -> None:
    problem = problem_of()
    larger = replace(problem, batch=3, q_len=128, k_len=128, heads=8, kv_heads=8)
    device_cache.note("triton", problem, triton._blocks(problem))
    assert triton.first_call_ms(larger) == 0
    assert triton_tiles.first_call_ms(larger) > 0
    changes: list[dict[str, Any]] = [{"head_dim": 32}, {"kv_heads": 2}, {"dtype": torch.float16}, {"needs_grad": False}]
    changes += [{"return_lse": not problem.return_lse}, {"has_key_mask": True}, {"pattern": Window(3, 0)}]
    for change in changes:
        assert triton.first_call_ms(replace(problem, **change)) > 0, change


def test_flash_4_alone_compiles() -> None:
    problem = problem_of(Dense(True))
    assert flash.first_call_ms(problem) == flash4_package.COMPILE_MS
    device_cache.note("flash", problem, False)
    assert flash.first_call_ms(problem) == 0
    assert flash.first_call_ms(problem_of(Window(3, 0))) == flash4_package.COMPILE_MS
    environment.installed.cache_clear()
    branched._prepared.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        installed(patch, {"flash-attn": "2.8.3"})
        assert flash.first_call_ms(problem_of(Window(5, 0))) == 0


def test_a_call_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    q = k = v = torch.zeros(1, 64, 4, 64)
    nothing = SimpleNamespace(around=lambda passes: SimpleNamespace(forward=lambda *tensors: tensors[:2]))
    problem = problem_of(needs_grad=False)
    for backend in (triton, triton_tiles):
        monkeypatch.setattr(backend, "Hidden", SimpleNamespace(of=lambda problem, *_, **more: nothing))
        backend.run(q, k, v, problem)
        assert backend.first_call_ms(problem) == 0
    monkeypatch.setattr("attn_dispatch.kernels.branches.run.run", lambda *args: args[:2])
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call it once before the capture"):
        flash.run(q, k, v, problem)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    flash.run(q, k, v, problem)
    assert flash.first_call_ms(problem) == 0


@pytest.mark.parametrize(("shares", "counted_ms"), [(True, 0.0), (False, 1000.0)])
def test_kernels_on_disk_do_not_count_against_the_budget(
    shares: bool, counted_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the hard cases of this class have passed on this machine, an earlier process has compiled for it."""
    backend = SimpleNamespace(first_call_ms=lambda problem: 1000.0, shares_builds=shares)
    gate, candidate = object.__new__(Gate), SimpleNamespace(backend=backend)
    monkeypatch.setattr(gate, "problem", problem_of(device="cpu"), raising=False)
    monkeypatch.setattr(Gate, "has_passed", lambda self, candidate: True)
    assert gate.builds_ms(candidate) == counted_ms  # type: ignore[arg-type]


@pytest.mark.parametrize(("shares", "filled"), [pytest.param(True, True, marks=FILLED), (False, False)])
def test_new_memory_is_nan_unless_torch_compiles(shares: bool, filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, **tensors: torch.Tensor) -> Any:
        seen.append(bool(torch.empty(4).isnan().all()))
        raise InterruptedError

    backend = adapted(SimpleNamespace(first_call_ms=lambda problem: 0.0, shares_builds=shares, run=run))
    with pytest.raises(InterruptedError):
        case_of(class_key(replace(problem_of(device="cpu"), dtype=torch.float32))[0]).run(backend)
    assert seen == [filled]


@pytest.mark.parametrize(("shares", "most"), [(True, 5), (False, COMPILED_CASES)])
def test_kernels_that_serve_others_run_all_hard_cases(shares: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token compiles other blocks: of a Dilated pattern it is the third case that does."""
    ran: list[str] = []

    def noted(self: HardCase, backend: Any, order: str = NATURAL) -> dict[str, torch.Tensor]:
        ran.append(self.name)
        return real(self, backend, order)

    real = HardCase.run
    monkeypatch.setattr(HardCase, "run", noted)
    members = {"name": "made-up", "first_call_ms": lambda problem: 1.0, "shares_builds": shares}
    backend = adapted(SimpleNamespace(**members, run=manual.run, refusals=lambda problem: []))
    problem = replace(problem_of(device="cpu"), dtype=torch.float32)
    candidate: Any = SimpleNamespace(backend=backend, backend_and_order=(backend, NATURAL))
    gate = Gate(problem, Request.of(problem).address, None)
    assert [check() for check in gate._case_checks(candidate, [*map(case_of, class_key(problem))], brief=False)]
    assert len(ran) == most
