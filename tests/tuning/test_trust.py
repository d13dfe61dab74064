"""Wrong, crashing, hanging and greedy backends: each is reported and quarantined, and the call is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch

from attn_dispatch import attend, explain, process_state, profile, register
from attn_dispatch.backends import manual
from attn_dispatch.decisions import trial_limits
from attn_dispatch.kernels import registry
from attn_dispatch.machine import memory
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import quarantine
from attn_dispatch.store.decision import Row
from attn_dispatch.store.folder import Store
from attn_dispatch.store.quarantine import FIRST_HOLD, Entry, Quarantine
from attn_dispatch.tuning import candidates, choice, example, gate, guard, oracle, race, tuner
from attn_dispatch.tuning.candidates import Request, static_choice
from tests.support import planted, processes
from tests.support.calls import BUILT_IN, close, forget, formula, qkv, status
from tests.support.fakes import raising
from tests.support.pairwise import crossed, thinned
from tests.support.planted import Planted, right

pytestmark = pytest.mark.usefixtures("little_time")
short = pytest.mark.usefixtures("short_trials")

WRONG: dict[str, tuple[planted.Fault, dict[str, Any], str, str]] = {
    "out": (planted.wrong_out, {}, "incorrect", "out is off by"),
    "lse": (planted.wrong_lse, {"return_lse": True}, "incorrect", "lse is off by"),
    "nan-grad-q": (planted.nan_grad_q, {"grad": True}, "incorrect", "dq has NaN"),
    "mask": (planted.ignores_mask, {"key_mask": True}, "incorrect", "out is off by"),
    "partial": (planted.partial_write, {}, "incorrect", "out "),
    "hangs": (planted.hangs, {}, "hung", "did not return within 1"),
    "allocates": (planted.allocates, {}, "memory", ""),
    "undeclared": (planted.lies, {}, "memory", "workspace_bytes declared"),
}


def quarantined() -> Quarantine:
    return Quarantine(cache_folder(), silicon("cpu"))


def report(arguments: dict[str, Any]) -> Row:
    found = explain(*inputs(arguments), **plain(arguments))
    return next(row for row in found.candidates if row.backend == "planted")


def inputs(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv(arguments.get("length", 32))
    if arguments.get("grad"):
        q.requires_grad_()
    return q, k, v


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in arguments.items() if name not in ("grad", "key_mask", "length")}
    if arguments.get("key_mask"):
        found["key_mask"] = torch.arange(arguments.get("length", 32))[None] < 20
    return found


@thinned(("fault", "arguments", "kind", "message"), WRONG.values(), 2, WRONG)
def test_a_wrong_backend_is_reported_and_quarantined(
    fault: planted.Fault, arguments: dict[str, Any], kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_TIMEOUT_S", "1")
    backend = Planted(fault)
    register(backend)
    q, k, v = inputs(arguments)
    result = attend(q, k, v, **plain(arguments))
    if not arguments.get("key_mask"):
        exact = formula(q.detach(), k, v, Dense())
        assert close(result[0] if isinstance(result, tuple) else result.detach(), exact[0])
    if not quarantined().entries():  # it lost: only `profile` checks losers to the end
        profile([Problem.of(q, k, v, **plain(arguments))], budget_s=1.0, progress=False, force=True)
    row = report(arguments)
    assert row.status == ("incorrect" if kind == "incorrect" else "quarantined")
    assert message in row.reason
    (entry,) = quarantined().entries()
    assert (entry.backend, entry.version, entry.kind) == ("planted", "1", kind)
    tried = backend.calls
    forget()
    shorter = {**arguments, "length": 24}
    attend(*inputs(shorter), **plain(shorter))
    assert backend.calls == tried
    assert report(shorter).status == "quarantined"
    assert row.reason in report(shorter).reason


DYING = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
from attn_dispatch import Problem, attend, explain, profile, register
from attn_dispatch.kernels import registry
from attn_dispatch.backends import manual
from tests.support.planted import Planted, {fault}
torch.set_num_threads(1)
backend = Planted({fault})
register(backend)
q = torch.randn(1, 32, 2, 8)
attend(q, q, q)
row = next(row for row in explain(q, q, q).candidates if row.backend == "planted")
print(backend.calls, row.status, row.reason)
"""


@thinned("fault", ["aborts", "killed"], 2)
def test_two_deaths_quarantine_the_backend(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "100")
    for _ in range(2):
        assert processes.run(DYING.format(fault=fault)).returncode < 0
    second = processes.run(DYING.format(fault=fault))
    assert second.returncode == 0, second.stderr
    warning, last = second.stdout.splitlines()[0], second.stdout.splitlines()[-1]
    assert "planted" in warning
    assert "doctor --lift" in warning
    assert last.startswith("0 quarantined died")


def test_the_last_resort_is_never_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    """One backend must remain."""
    monkeypatch.setattr(registry, "backends", lambda: [registry.load("manual")])
    run: Callable[..., Any] = manual.run
    monkeypatch.setattr(
        manual, "run", lambda *args, **tensors: (run(*args, **tensors)[0] * 1.5, run(*args, **tensors)[1])
    )
    attend(*qkv(32))
    assert quarantined().entries() == []


# --- strikes, quarantines, and failures that are tried again ----------------------------------------------------------

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


class Clock:
    now = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock(short_trials: None, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Where few backends are to be tried: those that are planted, and the last resort."""
    found, backends = Clock(), registry.backends
    monkeypatch.setattr(registry, "backends", lambda: [x for x in backends() if x.name not in BUILT_IN[:-1]])
    monkeypatch.setattr(quarantine, "clock", lambda: found.now)
    monkeypatch.setattr(candidates, "utc_now", lambda: found.now.isoformat())
    return found


def is_tried(backend: Planted) -> bool:
    """Whether a later process tries the backend."""
    forget()
    before = backend.calls
    attend(*qkv(32))
    return backend.calls > before


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        *(pytest.param(each, marks=pytest.mark.full) for each in (OSError(24, ""), SystemExit(3), ValueError("no"))),
    ],
    ids=["threads", "files", "exit", "other"],
)
def test_failures_quarantine_nobody_and_are_tried_again(error: BaseException, clock: Clock) -> None:
    """After an hour, then after two, and so on up to a day."""
    backend = Planted(raising(error))
    register(backend)
    assert is_tried(backend)
    assert status(explain(*qkv(32)), "planted") == "failed"
    assert quarantined().entries() == []
    for hours in (1, 2, 4, 8, 16, 24, 24):
        clock.now += hours * HOUR - MINUTE
        assert not is_tried(backend)
        clock.now += MINUTE
        assert is_tried(backend)
    backend.compute = right
    clock.now += 24 * HOUR
    assert is_tried(backend)
    found = explain(*qkv(32))
    assert status(found, "planted") != "failed"
    assert found.choice == "planted" or not is_tried(backend)  # on a busy machine it may win


@short
@pytest.mark.full
@pytest.mark.parametrize(
    ("free", "lies"),
    [((1, 1, 1, 1), True), ((1, 0), False), ((0, 1), False), ((1, 1, 1, 0), False), ((1, 1, 0, 1), False)],
    ids=str,
)
def test_memory_that_others_took(free: tuple[int, ...], lies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The declared bytes must be free before and after two calls that fail."""
    readings: Iterator[int] = iter(free)
    backend = Planted(raising(MemoryError()))
    monkeypatch.setattr(registry, "backends", lambda: [backend, registry.load("manual")])
    monkeypatch.setattr("attn_dispatch.machine.memory.available_bytes", lambda device: next(readings, 1) << 30)
    attend(*qkv(32))
    assert [entry.kind for entry in quarantined().entries()] == ["memory"] * lies
    assert status(explain(*qkv(32)), "planted") == ("quarantined" if lies else "failed")


def strike(kind: quarantine.Kind) -> None:
    where, text = silicon("cpu"), "a fault"
    quarantined().add(Entry(backend="planted", version="1", silicon=where, kind=kind, reason=text, title="x"))


@pytest.mark.parametrize("kind", ["died", "hung"])
def test_a_success_clears_strikes(kind: quarantine.Kind, clock: Clock) -> None:
    backend = Planted()
    register(backend)
    strike(kind)
    assert not is_tried(backend)
    clock.now += FIRST_HOLD
    assert len(quarantined().strikes()) == 1
    assert is_tried(backend)
    assert quarantined().strikes() == []


def test_a_failure_clears_none(clock: Clock) -> None:
    backend = Planted(raising(ValueError("no")))
    register(backend)
    strike("died")
    clock.now += FIRST_HOLD
    assert is_tried(backend)
    assert len(quarantined().strikes()) == 1


def test_a_hang_excludes_at_once_and_a_second_for_an_hour(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    register(Planted(name="b"))
    backend = Planted()
    register(backend)
    for hold in (FIRST_HOLD, HOUR):
        with monkeypatch.context() as patch:
            patch.setattr(guard, "run_at_once", lambda calls, limit_s: backend_hangs(calls, limit_s, backend))
            forget()
            attend(*qkv(32))
        (entry,) = quarantined().entries()
        assert (entry.backend, entry.until) == ("planted", clock.now + hold)
        clock.now += hold
        assert quarantined().entries() == []


def backend_hangs(calls: list[Callable[[], Any]], limit_s: float, backend: Planted) -> list[Any]:
    """Run calls; where they ran the backend, as if they did not return."""
    before = backend.calls
    results = [call() for call in calls]
    if backend.calls > before:
        raise guard.TimedOut(limit_s)
    return results


# --- where there is no memory for a trial -----------------------------------------------------------------------------

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


@short
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
    assert quarantined().entries() == []
    assert list(Store(cache_folder()).all()) == []
    (text,) = warnings()
    assert text.startswith("not measured, too little memory")


@short
def test_other_errors_of_the_reference_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_from(monkeypatch, oracle._Sample, "evaluate", 1, RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        attend(*qkv(32))


@short
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
