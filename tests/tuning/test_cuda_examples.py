"""Examples of trials on CUDA are drawn on the device, outside of the budget; and what else a trial does not count."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch import process_state
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning import example, guard, tuner
from attn_dispatch.tuning.candidates import Candidate, Request
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.gate import COMPILED_CASES, Gate
from attn_dispatch.tuning.oracle import CheckResult
from attn_dispatch.tuning.rounds import exhausted
from tests.support.planted import Planted
from tests.support.virtual_clock import VirtualClock

CUDA = torch.device("cuda", 0)
SHAPE = (1, 24, 2, 8)
ON_CUDA = problem_of(SHAPE, Dense(), torch.bfloat16, CUDA, backward=True)
ON_CPU = problem_of(SHAPE, Dense(), torch.bfloat16, torch.device("cpu"), backward=True)


class Generator:
    """A generator of a made-up device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seed: int | None = None

    def manual_seed(self, seed: int) -> Generator:
        self.seed = seed
        return self


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, str, int | None]]:
    """The shape, device and seed of every draw in place, which leaves zeros; any other draw fails."""
    found: list[tuple[torch.Size, str, int | None]] = []

    def normal_(self: torch.Tensor, *, generator: Generator) -> torch.Tensor:
        found.append((self.shape, str(generator.device), generator.seed))
        return self.zero_()

    empty = torch.empty
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    monkeypatch.setattr(torch.Tensor, "normal_", normal_)
    monkeypatch.setattr(torch, "randn", lambda *given, **more: pytest.fail("drawn on the CPU"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def test_examples_of_trials_are_drawn_on_the_device(drawn: list[object]) -> None:
    found = example.make(ON_CUDA, on_device=True)
    assert drawn == [(torch.Size(SHAPE), "cuda:0", 0)] * 4
    assert found.q.dtype == torch.bfloat16
    assert found.q.requires_grad


def test_a_cpu_draws_what_it_always_drew() -> None:
    """Other machines, and the ranks of a group, draw the same."""
    found, generator = example.make(ON_CPU, on_device=True), torch.Generator().manual_seed(0)
    for tensor in (found.q, found.k, found.v, found.grad):
        assert tensor is not None
        assert torch.equal(tensor.detach(), torch.randn(SHAPE, generator=generator).bfloat16())


@pytest.mark.parametrize(("problem", "left_s"), [(ON_CUDA, 1.0), (ON_CPU, -4.0)], ids=["cuda", "cpu"])
def test_drawing_on_a_device_takes_nothing_from_the_budget(
    problem: Problem, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()

    def drawn(problem: Problem, on_device: bool) -> example.Example:
        clock.sleep(5.0)
        return example.make(ON_CPU)

    monkeypatch.setattr(tuner, "make", drawn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    trial = tuner.Trial(Request(problem, "a silicon"), [], [], 1.0, None, clock=clock)
    exhausted(trial._measure())
    assert trial._remaining_s() == left_s


class Compiling(Planted):
    """Declares four seconds for the first call of each of `most` problems."""

    most = 100

    def first_call_ms(self, problem: Problem) -> float:
        return 0.0 if problem in self.seen or len(set(self.seen)) >= self.most else 4000.0


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits in seconds of guarded calls."""
    found: list[float] = []
    run = guard.run_at_once

    def guarded(calls: Any, limit_s: float) -> Any:
        found.append(limit_s)
        return run(calls, limit_s)

    monkeypatch.setattr(guard, "run_at_once", guarded)
    monkeypatch.setenv("ATTN_DISPATCH_TIMEOUT_S", "30")
    return found


def gate_and_candidate(backend: Planted) -> tuple[Gate, Candidate]:
    here = Request.of(ON_CPU)
    return Gate(ON_CPU, here.address, example.make(ON_CPU)), Candidate(backend, NATURAL, "1")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"needs_grad": True, "dtype": torch.bfloat16},
        {"kv_heads": 1, "has_seq_lens": True},
        {"has_key_mask": True},
        {"has_key_mask": True, "has_seq_lens": True, "bias": (2, 1)},
        {"bias": (1, 4), "dtype": torch.float16},
    ],
    ids=str,
)
def test_bytes_of_an_example(changes: dict[str, Any]) -> None:
    problem = replace(problem_of((2, 24, 4, 8), Dense(), torch.float32, torch.device("cpu")), **changes)
    made = example.make(problem)
    tensors = [each for each in (made.q, made.k, made.v, made.grad, *made.masks.values()) if each is not None]
    assert example.example_bytes(problem) == sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("brief", [False, True])
def test_a_declared_first_call_is_waited_for(limits: list[float], brief: bool) -> None:
    """On the problem and on the hard cases, ten times as long as declared; on a CPU also where a caller waits."""
    gate, candidate = gate_and_candidate(Compiling())
    assert isinstance(gate.admit(candidate), Admitted)
    assert len(limits) == 2
    assert all(limit_s >= 30 + 10 * 4 for limit_s in limits)
    limits.clear()
    assert exhausted(gate.check_hard_cases(candidate, brief=brief)) is None
    assert [limit_s >= 30 + 10 * 4 for limit_s in limits] == [True] * COMPILED_CASES + [False] * 2
    process_state.forget(process_state.FACTS)
    assert gate.has_passed(candidate)  # as the next process finds it


@pytest.mark.parametrize(("kind", "first_ms", "calls"), [("cuda", 100.0, 2), ("cuda", 5000.0, 1), ("cpu", 100.0, 1)])
def test_a_first_call_on_cuda_is_no_measure(
    kind: str, first_ms: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may load kernels and make plans."""
    here, candidate = gate_and_candidate(Planted())
    problem = ON_CUDA if kind == "cuda" else ON_CPU
    gate = Gate(problem, here.address)
    times = [first_ms, 1.5]
    monkeypatch.setattr(gate, "_checked_run", lambda candidate, limit_s: ({}, 0, times.pop(0)))
    monkeypatch.setattr(gate, "_tried", lambda candidate, run: run())  # there is no such device
    oracle = SimpleNamespace(check=lambda result: CheckResult(0.0, ()), restored=lambda: False)
    monkeypatch.setitem(gate.__dict__, "oracle", oracle)
    found = gate.admit(candidate)
    assert isinstance(found, Admitted)
    assert (found.first_ms, found.call_ms) == (first_ms, 1.5 if calls == 2 else first_ms)
