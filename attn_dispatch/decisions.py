"""How a problem comes to its decision: forced, known, stored, learned, measured, or by the static choice.

A decision that a call was routed by never changes within a process, unless it is measured anew by request: a forward
pass and its recomputation go the same way.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attn_dispatch import order as orders
from attn_dispatch import registry, settings, stored
from attn_dispatch.candidates import Candidate, candidates, environment_now, heuristic, refused
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend, NotDecided
from attn_dispatch.explanation import Explanation
from attn_dispatch.group import group_of
from attn_dispatch.logging import logger
from attn_dispatch.machine import provenance, silicon
from attn_dispatch.pace import Pace
from attn_dispatch.problem import Problem
from attn_dispatch.settings import mode
from attn_dispatch.store import Decision, Row, Store, cache_folder, note_missed
from attn_dispatch.units import one_line, printable

SURE = 0.9  #: confidence from which a neighbour of nearly the same size is believed without measuring
WAYS = ("measured", "loaded", "shipped", "learned", "heuristic", "forced")

lock = threading.RLock()  #: held while a decision is made: two threads that meet a new problem measure it once
# Another thread of the parent may hold it at a fork, and does not exist in the child.
os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]

# By silicon too: another number of threads makes the same processor another machine.
_decided: dict[tuple[str, Problem], Decision] = {}
_counts: Counter[str] = Counter()
_pace = Pace()


def explain_problem(problem: Problem, backend: str | None = None, order: str | None = None) -> Explanation:
    """`explain` for a problem."""
    if order is not None:
        orders.check(order)
    if backend is not None:
        return Explanation.of(_forced(problem, backend)[0])
    found = candidates(problem)
    decision = _decided.get((silicon(problem.device), problem))
    if decision is not None:
        decision = _with_drift(problem, decision)
    elif mode() != "off":
        kept = stored.look_up(problem, -1.0)
        if mode() == "locked" and not (kept and kept.holds_locked):
            return Explanation.of(_refused_by_lock(problem, found, _why_locked(kept)))
        if kept is not None and kept.choice is not None:
            decision = _told(kept)
        else:
            decision = _learned(problem, found, 0.0)
    return Explanation.of(_as_of_now(decision, found) if decision is not None else _heuristic(problem, found))


def counters() -> dict[str, int]:
    """How this process came by its decisions: `measured`, `loaded` from disk, `shipped`, `learned` from neighbours,
    `heuristic`, `forced`.
    """
    return {name: _counts[name] for name in WAYS}


def decide(problem: Problem) -> Decision:
    """The decision that routes a problem in this process; measured, if it must be and may be.

    Raises:
        NotDecided: locked mode, and nothing that holds is stored. NoBackend: none can run it.
    """
    known = silicon(problem.device), problem
    decision = _decided.get(known)
    if decision is not None:
        return decision
    decision = _static(problem) if mode() == "off" else _make(problem)
    if decision.source in ("learned", "heuristic"):
        _counts[decision.source] += 1
    logger.info("%s: %s in %s order (%s)", problem, decision.choice, decision.order, decision.source)
    if not unsettled(problem.device):  # what a capture could not measure, the next eager call can
        _decided[known] = decision
    return decision


def _make(problem: Problem) -> Decision:
    """From what is stored, if it holds; else by measuring, where that is allowed; else from what is known."""
    setting = mode()
    kept = stored.look_up(problem, settings.budget_ms() if setting == "tune" else -1.0)
    if kept is not None and kept.holds:
        return _taken(kept)
    if setting == "locked":
        return _locked(problem, kept)
    found = candidates(problem)
    if setting == "tune" and (kept is None or kept.changed):
        sure = _learned(problem, found, SURE) if kept is None else None
        decision = sure or _measured(problem, kept, found)
        if decision is not None:
            return decision
    if kept is not None and kept.choice is not None:
        return _taken(kept)
    return _learned(problem, found, 0.0) or _static(problem)


def _taken(kept: stored.Found) -> Decision:
    """Go by what is stored, as far as it holds."""
    decision = kept.decision
    _counts["loaded" if decision.source == "measured" else "shipped"] += 1
    if kept.choice != decision.choice:
        logger.warning(
            "%s cannot run now as was decided, %s can: %s", decision.choice, kept.choice, printable(decision.title)
        )
    elif not kept.changed and decision.environment != environment_now():
        decision = stored.refresh(decision)
    return _told(stored.Found(decision, kept.choice, kept.changed))


def _told(kept: stored.Found) -> Decision:
    """The decision with the backend that runs now, and what of it no longer holds said in its rows."""
    rows = tuple(_row_told(row, kept) for row in kept.decision.candidates)
    return msgspec.structs.replace(kept.decision, choice=kept.choice or "", candidates=rows)


def _row_told(row: Row, kept: stored.Found) -> Row:
    if row.backend == kept.choice:
        row = msgspec.structs.replace(row, status="chosen")
    elif row.status == "chosen":
        row = msgspec.structs.replace(row, status="slower")
    if row.backend in kept.changed and row.median_ms is not None:
        text = f"measured with version {row.version}, which has changed"
        row = msgspec.structs.replace(row, reason="; ".join(filter(None, (row.reason, text))))
    return row


def _with_drift(problem: Problem, decision: Decision) -> Decision:
    """What live calls took is noted on disk only, by whichever process saw it."""
    kept = stored.read(problem) if decision.source == "measured" else None
    if kept is None or kept.created != decision.created:
        return decision
    return msgspec.structs.replace(decision, drift=kept.drift)


def _as_of_now(decision: Decision, found: list[Candidate]) -> Decision:
    """With the candidates that are ruled out by now, and those that were not there then."""
    kept = {row.backend: row for row in decision.candidates}
    rows = [_row_now(each, kept.pop(each.name, None), decision.choice) for each in found]
    return msgspec.structs.replace(decision, candidates=(*rows, *kept.values()))


def _row_now(each: Candidate, kept: Row | None, choice: str) -> Row:
    if each.row is not None and each.name != choice:
        # What it was quarantined for on this very problem says more than that it is.
        told = kept is not None and kept.status in ("incorrect", "quarantined") and each.row.status == "quarantined"
        return kept if told and kept is not None else each.row
    reason = "was not there then"
    if kept is not None and kept.status in ("over_memory", "quarantined", "unsupported", "not_installed"):
        reason = f"could not run then: {kept.reason}"
        kept = None
    return kept or Row(backend=each.name, order=each.order, status="not_measured", reason=reason)


def _locked(problem: Problem, kept: stored.Found | None) -> Decision:
    """In locked mode: what was chosen must be what was measured. That others have changed does not matter, and where
    it lacks the memory for now, the best of what was measured stands in for it.
    """
    if kept is not None and kept.holds_locked:
        return _taken(kept)
    raise NotDecided(
        f"ATTN_DISPATCH_MODE=locked and {_why_locked(kept)} for {problem}; run 'attn-dispatch profile' on it first, or "
        "another mode"
    )


def _why_locked(kept: stored.Found | None) -> str:
    if kept is None:
        return "nothing is decided"
    return f"{kept.decision.choice}, as was decided, has another version now, or nothing measured can run"


def _refused_by_lock(problem: Problem, found: list[Candidate], why: str) -> Decision:
    """What attend() refuses, to be explained."""
    reason = f"locked mode, and {why}: `attn-dispatch profile` measures it"
    rows = (c.row or Row(backend=c.name, order=c.order, status="not_measured", reason=reason) for c in found)
    return _unmeasured(problem, "", "heuristic", tuple(rows))


def _measured(problem: Problem, kept: stored.Found | None, found: list[Candidate]) -> Decision | None:
    """Measure what is not known, where and when that is allowed."""
    if unsettled(problem.device):
        logger.warning("not measured while a graph is captured or traced, or inside torch.func: %s", problem)
    elif not _pace.allows(settings.trial_seconds()):
        logger.info("not measured: trials took %g s of this minute already: %s", settings.trial_seconds(), problem)
    else:
        said = stored.predict(problem, found) if kept is None else None
        start = time.perf_counter()
        decision = measure(problem, settings.budget_ms() / 1e3, kept, None if said is None else said.backend)
        _pace.spend(time.perf_counter() - start)
        if decision is not None:
            keep(problem, decision)
        return decision
    note_missed(cache_folder(), problem.to_dict())
    return None


def measure(
    problem: Problem, budget_s: float | None, kept: stored.Found | None, first: str | None = None
) -> Decision | None:
    """Measure; what changed alone, where a decision is there to start from. Arguments as for `tuner.decide`."""
    from attn_dispatch import tuner  # what measures is loaded when there is something to measure

    prior, changed = (None, None) if kept is None else (kept.decision, kept.changed or None)
    with undisturbed(problem.device), _own_randomness(problem):
        return tuner.decide(problem, budget_s, prior=prior, changed=changed, first=first)


def keep(problem: Problem, decision: Decision) -> None:
    """Store a new measurement and go by it in this process."""
    Store(cache_folder()).put(decision)
    stored.note(decision)
    _decided[silicon(problem.device), problem] = decision
    _counts["measured"] += 1


def _learned(problem: Problem, found: list[Candidate], least: float) -> Decision | None:
    """What neighbours say. With `least`, only those of nearly the same size, and only where they are that sure."""
    said = stored.predict(problem, found)
    if said is None or said.confidence < least or (least and not said.in_bucket):
        return None
    return stored.learned_decision(problem, said, found, _now())


def _static(problem: Problem) -> Decision:
    decision = _heuristic(problem, candidates(problem))
    if not decision.choice:
        raise NoBackend(_no_backend(problem, decision.candidates, forced=False))
    return decision


def force(problem: Problem, name: str) -> Decision:
    """The decision for one backend, whatever is stored.

    Raises:
        InvalidInput: there is no such backend. NoBackend: it refuses. BackendFailed: it cannot say.
    """
    decision, error = _forced(problem, name)
    if error is not None:
        raise BackendFailed(f"{name} cannot tell whether it can run {problem}: {error!r}") from error
    if not decision.choice:
        raise NoBackend(_no_backend(problem, decision.candidates, forced=True))
    _counts["forced"] += 1
    logger.info("%s: %s in %s order (forced)", problem, decision.choice, decision.order)
    return decision


def _forced(problem: Problem, name: str) -> tuple[Decision, Exception | None]:
    """A decision with one row, without a choice where that backend cannot run it; and what it raised when asked."""
    if name not in registry.names():
        raise InvalidInput(f"backend must be None or one of {', '.join(registry.names())}, got {name!r}")
    backend = registry.load(name)
    status, reason, failure = "chosen", "", None
    try:
        refusals = list(backend.refusals(problem))
        if refusals:
            status, reason = refused(refusals)
    except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way
        status, reason, failure = "failed", one_line(error), error
    row = Row(
        backend=name, order=orders.NATURAL, status=status, reason=printable(reason),
        version=registry.version_of(backend),
    )  # fmt: skip
    return _unmeasured(problem, name if status == "chosen" else "", "forced", (row,)), failure


def _heuristic(problem: Problem, found: list[Candidate]) -> Decision:
    chosen = heuristic(found)
    rows = tuple(
        c.row or Row(backend=c.name, order=c.order, status="chosen" if c is chosen else "not_measured") for c in found
    )
    return _unmeasured(problem, "" if chosen is None else chosen.name, "heuristic", rows)


def _unmeasured(problem: Problem, choice: str, source: str, rows: tuple[Row, ...]) -> Decision:
    where, plain = silicon(problem.device), problem.to_dict()
    return Decision(
        key=problem.key(where),
        silicon=where,
        group=group_of(plain),
        title=str(problem),
        problem=plain,
        choice=choice,
        order=orders.NATURAL if choice else "",
        source=source,
        candidates=rows,
        provenance=provenance(problem.device),
        created=_now(),
    )


def _no_backend(problem: Problem, rows: Iterable[Row], forced: bool) -> str:
    kv = f"[{problem.batch}, {problem.k_len}, {problem.kv_heads}, {problem.head_dim}]"
    lines = [
        f"no backend can run {problem.pattern} on {problem.device} in {str(problem.dtype).removeprefix('torch.')}:",
        f"  q [{problem.batch}, {problem.q_len}, {problem.heads}, {problem.head_dim}]  k, v {kv}",
        *(f"  {row.backend}: {row.reason}" for row in rows),
    ]
    return "\n".join(lines + ["Pass backend=None to let every backend be tried."] * forced)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be timed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _own_randomness(problem: Problem) -> AbstractContextManager[None]:
    """The caller's random numbers go on as if there had been no trial.

    Only for dropout: the generator is the whole process's, and numbers that other threads draw meanwhile come again.
    """
    if not problem.dropout_p:
        return nullcontext()
    return torch.random.fork_rng([problem.device] if problem.device.type == "cuda" else [])


def unsettled(device: torch.device) -> bool:
    """Whether calls are captured, traced or transformed, so that nothing can be timed: the next plain one decides."""
    level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)  # private
    transformed = level is not None and level() is not None
    return capturing(device) or torch.compiler.is_compiling() or transformed


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep a trial and its caller apart: autocast, inference mode, saved-tensor hooks (as checkpointing sets them) and
    the default device and torch's dispatch modes do not reach the trial.
    """

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    with (
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is),
        torch.device("cpu"),
        _disable_current_modes(),
    ):
        yield


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
