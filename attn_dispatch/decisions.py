"""How a problem comes to its decision: forced, known, stored, shipped, measured, or by the static choice."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import torch
from torch import Tensor

from attn_dispatch import order as orders
from attn_dispatch import registry
from attn_dispatch.candidates import Candidate, candidates, heuristic, versions
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend, NotDecided
from attn_dispatch.explanation import Explanation
from attn_dispatch.logging import logger
from attn_dispatch.machine import provenance, silicon
from attn_dispatch.problem import Problem
from attn_dispatch.store import Decision, Row, Store, cache_folder, note_missed, shipped

MODES = ("tune", "predict", "locked", "off")
DEFAULT_BUDGET_MS = 2000.0

lock = threading.RLock()  #: held while a decision is made: two threads that meet a new problem measure it once

# By silicon too: another number of threads makes the same processor another machine.
_decided: dict[tuple[str, Problem], Decision] = {}
_counts: Counter[str] = Counter()


def explain_problem(problem: Problem, backend: str | None = None, order: str | None = None) -> Explanation:
    """`explain` for a problem."""
    if order is not None:
        orders.check(order)
    if backend is not None:
        return Explanation.of(_forced(problem, backend))
    decision = _decided.get((silicon(problem.device), problem))
    if decision is None and mode() != "off":
        decision = stored(problem)
        decision = decision if decision is not None and _can_run(problem, decision.choice) else None
    return Explanation.of(decision or _heuristic(problem, candidates(problem)))


def counters() -> dict[str, int]:
    """How this process came by its decisions: `measured`, `loaded` from disk, `shipped`, `heuristic`, `forced`."""
    return {name: _counts[name] for name in ("measured", "loaded", "shipped", "heuristic", "forced")}


def stored(problem: Problem) -> Decision | None:
    """The decision on disk, or the shipped one, if it was made among the backends there are now."""
    where = silicon(problem.device)
    key = problem.key(where)
    now = versions()
    for decision in (Store(cache_folder()).get(where, key), shipped(where).get(key)):
        if decision is not None and decision.versions == now:
            return decision
    return None


def decide(problem: Problem) -> Decision:
    """The decision that routes a problem in this process; measured, if it must be and may be.

    Raises:
        NotDecided: locked mode, and nothing is stored. NoBackend: none can run it.
    """
    known = silicon(problem.device), problem
    decision = _decided.get(known)
    if decision is not None:
        return decision
    setting = mode()
    decision = None if setting == "off" else stored(problem)
    if decision is not None and _can_run(problem, decision.choice):
        _counts["loaded" if decision.source == "measured" else "shipped"] += 1
    elif decision is not None:
        logger.warning("%s cannot run now as was decided, by the static choice for now: %s", decision.choice, problem)
        decision = _static(problem)
    elif setting == "locked":
        raise NotDecided(
            f"ATTN_DISPATCH_MODE=locked and nothing is decided for {problem}; run 'attn-dispatch profile' "
            f"on it first, or another mode"
        )
    else:
        decision = _make(problem, setting)
    if not capturing(problem.device):  # what a capture could not measure, the next eager call can
        _decided[known] = decision
    return decision


def _make(problem: Problem, setting: str) -> Decision:
    """Measure, where that is allowed, else the static choice."""
    if setting == "tune" and capturing(problem.device):
        logger.warning("not measured inside CUDA-graph capture, by the static choice: %s", problem)
        note_missed(cache_folder(), problem.to_dict())
    elif setting == "tune":
        from attn_dispatch import tuner  # what measures is loaded when there is something to measure

        with undisturbed(problem.device):
            decision = tuner.decide(problem, budget_ms() / 1e3)
        if decision is not None:
            keep(problem, decision)
            return decision
    return _static(problem)


def _static(problem: Problem) -> Decision:
    decision = _heuristic(problem, candidates(problem))
    if not decision.choice:
        raise NoBackend(_no_backend(problem, decision.candidates, forced=False))
    _counts["heuristic"] += 1
    return decision


def force(problem: Problem, name: str) -> Decision:
    """The decision for one backend, whatever is stored.

    Raises:
        InvalidInput: there is no such backend. NoBackend: it refuses. BackendFailed: it cannot say.
    """
    decision = _forced(problem, name)
    _counts["forced"] += 1
    return decision


def keep(problem: Problem, decision: Decision) -> None:
    """Store a new measurement and go by it in this process."""
    Store(cache_folder()).put(decision)
    _decided[silicon(problem.device), problem] = decision
    _counts["measured"] += 1


def _forced(problem: Problem, name: str) -> Decision:
    if name not in registry.names():
        raise InvalidInput(f"backend must be None or one of {', '.join(registry.names())}, got {name!r}")
    backend = registry.load(name)
    try:
        refusals = backend.refusals(problem)
    except Exception as error:
        raise BackendFailed(f"{name} cannot tell whether it can run {problem}: {error!r}") from error
    if refusals:
        row = Row(backend=name, order=orders.NATURAL, status="unsupported", reason="; ".join(map(str, refusals)))
        raise NoBackend(_no_backend(problem, (row,), forced=True))
    row = Row(backend=name, order=orders.NATURAL, status="chosen", version=registry.version_of(backend))
    return _unmeasured(problem, name, "forced", (row,))


def _heuristic(problem: Problem, found: list[Candidate]) -> Decision:
    chosen = heuristic(found)
    rows = tuple(
        c.row or Row(backend=c.name, order=c.order, status="chosen" if c is chosen else "not_measured") for c in found
    )
    return _unmeasured(problem, "" if chosen is None else chosen.name, "heuristic", rows)


def _unmeasured(problem: Problem, choice: str, source: str, rows: tuple[Row, ...]) -> Decision:
    where = silicon(problem.device)
    return Decision(
        key=problem.key(where),
        silicon=where,
        title=str(problem),
        problem=problem.to_dict(),
        choice=choice,
        order=orders.NATURAL if choice else "",
        source=source,
        candidates=rows,
        versions=versions(),
        provenance=provenance(problem.device),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _can_run(problem: Problem, name: str) -> bool:
    """Refusals and free memory are of now, not of when the decision was made."""
    return any(c.name == name and c.row is None for c in candidates(problem))


def _no_backend(problem: Problem, rows: Iterable[Row], forced: bool) -> str:
    kv = f"[{problem.batch}, {problem.k_len}, {problem.kv_heads}, {problem.head_dim}]"
    lines = [
        f"no backend can run {problem.pattern} on {problem.device} in {str(problem.dtype).removeprefix('torch.')}:",
        f"  q [{problem.batch}, {problem.q_len}, {problem.heads}, {problem.head_dim}]  k, v {kv}",
        *(f"  {row.backend}: {row.reason}" for row in rows),
    ]
    return "\n".join(lines + ["Pass backend=None to let every backend be tried."] * forced)


def mode() -> str:
    """$ATTN_DISPATCH_MODE, checked."""
    mode = os.environ.get("ATTN_DISPATCH_MODE", "") or "tune"
    if mode not in MODES:
        raise InvalidInput(f"$ATTN_DISPATCH_MODE must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


def budget_ms() -> float:
    """$ATTN_DISPATCH_BUDGET_MS: milliseconds after which no further trial of one unseen problem is started."""
    text = os.environ.get("ATTN_DISPATCH_BUDGET_MS", "")
    try:
        value = float(text) if text else DEFAULT_BUDGET_MS
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise InvalidInput(f"$ATTN_DISPATCH_BUDGET_MS must be a number >= 0, got {text!r}")
    return value


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be timed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep a trial and its caller apart: autocast, inference mode, saved-tensor hooks (as checkpointing sets them) and
    the default device do not reach the trial, and the caller's random numbers go on as if there had been none.
    """

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    with (
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is),
        torch.device("cpu"),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        yield
