"""Where there is no memory for a trial, it ends, the call runs, and no backend is quarantined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_dispatch import attend, explain, process_state
from attn_dispatch.decisions import trial_limits
from attn_dispatch.machine import memory
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import Quarantine
from attn_dispatch.tuning import choice, example, gate, oracle, race, tuner
from attn_dispatch.tuning.candidates import Request, static_choice
from tests.support.calls import close, formula, qkv
from tests.support.pairwise import crossed

pytestmark = pytest.mark.usefixtures("short_trials")

ERRORS = {
    "python": MemoryError(),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
    "threads": RuntimeError("can't start new thread"),
    "files": OSError(24, "Too many open files"),
}
PLACES = {
    "example": (example, "randn", 1),
    "reference": (oracle._Sample, "evaluate", 1),
    "tolerance": (oracle._Sample, "_terms", 3),
    "hard cases": (gate, "case_of", 1),
    "comparison": (oracle, "_error", 12),
    "another call": (oracle._Sample, "of", 2),
    "race": (race.Race, "run", 1),
    "choice": (choice, "choose", 1),
    "decision": (tuner.Trial, "_decision", 1),
    "random state": (trial_limits, "preserved_rng", 1),
}


def fail_from(monkeypatch: pytest.MonkeyPatch, where: object, name: str, first: int, error: Exception) -> list[int]:
    """Let the calls of a function from the `first` on raise."""
    real, calls = getattr(where, name), [0]

    def failing(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] >= first:
            raise error
        return real(*given, **named)

    monkeypatch.setattr(where, name, failing)
    return calls


@pytest.mark.full
@crossed(lambda place, error: {"error": error}, place=tuple(PLACES), error=tuple(ERRORS))
def test_a_call_runs_without_memory_for_a_trial(
    place: str, error: str, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    where, name, first = PLACES[place]
    gate.case_of.cache_clear()
    gate._passed.clear()
    calls = fail_from(monkeypatch, where, name, first, ERRORS[error])
    q, k, v = qkv(32)
    for _ in range(2):
        assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
    assert calls[0] == first
    found = explain(q, k, v)
    static = static_choice(Request.of(Problem.of(q, k, v, Dense())).candidates)
    assert static is not None
    assert (found.source, found.choice) == ("heuristic", static.name)
    assert Quarantine(cache_folder(), silicon("cpu")).entries() == []
    assert list(Store(cache_folder()).all()) == []
    (text,) = warnings()
    assert text.startswith("not measured, too little memory")


def test_other_errors_of_the_reference_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_from(monkeypatch, oracle._Sample, "evaluate", 1, RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        attend(*qkv(32))


def test_no_trial_where_a_limit_leaves_little_address_space(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """Threads and arenas of a trial map far more than its tensors, and what cannot be mapped may end the process."""
    monkeypatch.setattr(memory, "address_space_left", lambda *proc: trial_limits.TRIAL_SPACE - 1)
    for length in (32, 48):
        q, k, v = qkv(length)
        assert close(attend(q, k, v), formula(q, k, v, Dense())[0])
        assert explain(q, k, v).source == "heuristic"
    (text,) = warnings()
    assert text == "not measured: the limit of address space (RLIMIT_AS) leaves less than 400.0 MiB"
    monkeypatch.setattr(memory, "address_space_left", lambda *proc: trial_limits.TRIAL_SPACE)
    process_state.forget_all()
    attend(q, k, v)
    assert explain(q, k, v).source == "measured"
