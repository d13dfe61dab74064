"""Whether a candidate may race: first contact under guard, hard cases, the problem itself, and what it took.

Whatever goes wrong is data: a status and a reason, and for what must not be met again a quarantine of this version.
"""

from __future__ import annotations

import importlib
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from attn_dispatch import process_state
from attn_dispatch.errors import BackendFailed
from attn_dispatch.kernels import registry
from attn_dispatch.log import logger
from attn_dispatch.machine import memory
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.settings import cache_folder, timeout_s
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.address import Address
from attn_dispatch.store.crash_markers import contact
from attn_dispatch.store.quarantine import Entry, Kind, Quarantine
from attn_dispatch.text import one_line
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.candidates import Candidate
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.hard_cases import HardCase, class_key, hard_cases
from attn_dispatch.tuning.oracle import Gate, NoReference, reference

T = TypeVar("T")

PATIENCE = 20.0  #: how many times slower than in its hard cases a backend may be before it counts as hung
PREPARE_PATIENCE = 10.0  #: times the time limit of a call, for what a backend compiles once
COMPILED_CASES = 2  #: large scores, and uneven lengths with rows without keys

# Seconds per operation in the hard cases of a class that a version has passed in this process.
_passed: dict[tuple[str, str, str | None, object], float] = {}
process_state.register(process_state.FACTS, _passed.clear)


@dataclass(frozen=True, slots=True)
class Admitted:
    """It may race. Milliseconds of the first call, and of the call that was checked; bytes; largest error of out."""

    first_ms: float
    call_ms: float
    peak_bytes: int | None
    error: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """It may not: `failed` or `incorrect`, and why. `kept_out`: whether its version is quarantined as a whole."""

    status: str
    reason: str
    first_ms: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    kept_out: bool = False


@dataclass
class Gatekeeper:
    """The gate of one trial. `outside_s` are the seconds that are no part of the problem's budget: working out what
    results should be, and hard cases, which a version passes once for a class of problems.
    """

    example: Example
    address: Address
    outside_s: float = field(init=False)
    _gate: Gate = field(init=False)
    _cases: tuple[HardCase, ...] = field(init=False)

    def __post_init__(self) -> None:
        start = time.perf_counter()
        # Loaded by the first kernel that keeps out of compiled graphs: a second or more, which is no backend's time.
        importlib.import_module("torch._dynamo")
        self._gate = Gate.of(self.example)
        with reference():
            self._cases = hard_cases(self.problem)
        self.outside_s = time.perf_counter() - start

    @property
    def problem(self) -> Problem:
        return self.example.problem

    @property
    def case_problems(self) -> tuple[Problem, ...]:
        return tuple(case.problem for case in self._cases)

    def builds_ms(self, candidate: Candidate) -> float:
        """What it says it takes to build before its first results, here and for the hard cases still to be passed."""
        asked = [self.problem, *(case.problem for case in self._cases_for(candidate))]
        return sum(first_call_ms(candidate, problem) for problem in asked)

    def prepare(self, candidate: Candidate, call: Callable[[], object]) -> Rejected | None:
        """What a backend does once on a machine; why it cannot be tried, if that fails."""
        version, where = candidate.version, self.address.silicon
        limit_s = PREPARE_PATIENCE * timeout_s()
        try:
            with contact(cache_folder(), where, candidate.name, version, "what it prepares", patience_s=limit_s):
                guard.run_guarded(call, limit_s)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            text, hung = one_line(error), isinstance(error, guard.TimedOut)
            if hung:
                self._quarantine(candidate, "hung", f"preparing: {text}")
            return Rejected("failed", text, kept_out=hung and candidate.name != registry.LAST_RESORT)
        return None

    def admit(self, candidate: Candidate) -> Admitted | Rejected:
        """Run and compare.

        Raises:
            BackendFailed: the device is lost, and no other candidate can run in this process.
            NoReference: there is no memory to work out what results should be.
        """
        version, where, title = candidate.version, self.address.silicon, candidate.described(self.problem)
        needed = candidate.needed_bytes
        try:
            with contact(cache_folder(), where, candidate.name, version, title, patience_s=timeout_s()):
                return self._admit(candidate, needed)
        except NoReference:
            raise
        except Exception as error:
            text = one_line(error)
            kind = self._kind_of(error, needed)
            traceback.clear_frames(error.__traceback__)  # they hold what the kernel had allocated
            memory.release(self.problem.device)
            if kind != "hung" and guard.device_lost(self.problem.device):
                self._quarantine(candidate, "died", f"the device was lost: {text}")
                raise BackendFailed(f"{candidate.title} left {self.problem.device} unusable: {text}") from error
            if kind is not None:
                self._quarantine(candidate, kind, text)
            return Rejected("failed", text, kept_out=kind is not None and candidate.name != registry.LAST_RESORT)

    def _admit(self, candidate: Candidate, needed: int) -> Admitted | Rejected:
        failures, rate = self._hard_cases(candidate)
        if failures:
            return self._incorrect(candidate, failures)
        limit_s = timeout_s() + 10 * first_call_ms(candidate, self.problem) / 1e3
        limit_s += PATIENCE * rate * work(candidate, self.problem)
        builds = first_call_ms(candidate, self.problem) > 0
        result, peak, first_ms = self._checked_run(candidate, limit_s)
        call_ms = first_ms
        # What a compiler takes is no part of a call, nor of its memory on a CPU, where the process is measured.
        if builds or guard.lied(peak, needed, self.problem.device.type) is not None:
            del result
            result, peak, call_ms = self._checked_run(candidate, limit_s)
        verdict = self._gate.check(result)
        error = verdict.error if verdict.error < float("inf") else None
        if verdict.failures:
            return self._incorrect(candidate, verdict.failures, first_ms, peak, error)
        lie = guard.lied(peak, needed, self.problem.device.type)
        if lie is not None:
            self._quarantine(candidate, "memory", lie)
            return Rejected("failed", lie, first_ms, peak, error, kept_out=candidate.name != registry.LAST_RESORT)
        return Admitted(first_ms, call_ms, peak, verdict.error)

    def _cases_for(self, candidate: Candidate) -> list[HardCase]:
        """The hard cases that this version has not passed in this process, but for those that it refuses. What compiles
        for every problem is held to fewer of them.
        """
        key = *candidate.id, candidate.version, class_key(self.problem)
        if key in _passed:
            return []
        cases = self._taken_by(candidate)
        return cases[:COMPILED_CASES] if hasattr(candidate.backend, "first_call_ms") else cases

    def _taken_by(self, candidate: Candidate) -> list[HardCase]:
        return [case for case in self._cases if not case.refused_by(*candidate.run_by)]

    def _hard_cases(self, candidate: Candidate) -> tuple[list[str], float]:
        """What is wrong, and the seconds that an operation takes in the slowest of them."""
        key = *candidate.id, candidate.version, class_key(self.problem)
        if key in _passed:
            return [], _passed[key]
        rate = 0.0
        for case in self._cases_for(candidate):
            limit_s = timeout_s() + 10 * first_call_ms(candidate, case.problem) / 1e3
            start = time.perf_counter()
            found = self._guarded(partial(case.run, *candidate.run_by), limit_s)
            took_s = time.perf_counter() - start
            rate = max(rate, took_s / work(candidate, case.problem))
            # What is compiled for them takes as long as what is compiled for the problem itself.
            self.outside_s += 0.0 if hasattr(candidate.backend, "first_call_ms") else took_s
            failures = list(case.check(found).failures)
            if failures:
                return failures, rate
        failures = self._again(candidate)
        if not failures:
            _passed[key] = rate
        return failures, rate

    def _again(self, candidate: Candidate) -> list[str]:
        """A second call on the same tensors with other values: what the first gave must stay, and not come again."""
        cases = self._taken_by(candidate)
        if not cases:
            return []
        with reference():
            gate = Gate.of(make(cases[min(1, len(cases) - 1)].problem))
        limit_s = timeout_s() + 10 * first_call_ms(candidate, gate.example.problem) / 1e3
        first = self._guarded(partial(gate.run, *candidate.run_by), limit_s)["out"]
        known = first.clone()
        with torch.no_grad():
            gate.example.v.neg_()
        second = self._guarded(partial(gate.run, *candidate.run_by), limit_s)["out"]
        if not torch.equal(first, known):
            return ["another call: what the first one returned has changed"]
        found = gate.check({"out": -second})  # attention is linear in v
        return [
            f"another call on the same tensors: {failure}" for failure in found.failures if failure.startswith("out")
        ]

    def _checked_run(self, candidate: Candidate, limit_s: float) -> tuple[dict[str, torch.Tensor], int | None, float]:
        """What the gate compares, the peak of memory in bytes, and milliseconds."""
        device = self.problem.device

        def run() -> tuple[dict[str, torch.Tensor], int | None, float]:
            synchronize(device)
            start = time.perf_counter()
            result, peak = memory.peak_bytes(lambda: self._gate.run(*candidate.run_by), device)
            synchronize(device)
            return result, peak, (time.perf_counter() - start) * 1e3

        return self._guarded(run, limit_s)

    def _guarded(self, call: Callable[[], T], limit_s: float) -> T:
        """Within limits of time and memory."""

        held: list[int] = []

        def capped() -> T:
            with guard.capped(self.problem.device, held):
                return call()

        try:
            return guard.run_guarded(capped, limit_s)
        except guard.TimedOut:
            guard.lift(held)
            raise

    def _incorrect(
        self,
        candidate: Candidate,
        failures: list[str] | tuple[str, ...],
        first_ms: float | None = None,
        peak: int | None = None,
        error: float | None = None,
    ) -> Rejected:
        reason = "; ".join(failures)
        logger.warning("%s gives wrong results for %s: %s", candidate.title, self.problem, reason)
        self._quarantine(candidate, "incorrect", reason, self.address.group)
        return Rejected("incorrect", reason, first_ms, peak, error)

    def _kind_of(self, error: Exception, needed: int) -> Kind | None:
        """The kind of quarantine that an exception asks for, or None."""
        if isinstance(error, guard.TimedOut):
            return "hung"
        # There was room for what it announced, and there is: it must have asked for more.
        if guard.is_memory_error(error) and needed <= available_bytes(self.problem.device):
            return "memory"
        return None

    def _quarantine(self, candidate: Candidate, kind: Kind, reason: str, scope: str = "") -> None:
        if candidate.name == registry.LAST_RESORT:
            return  # there is nothing else to fall back on
        entry = Entry(
            backend=candidate.name,
            version=candidate.version,
            silicon=self.address.silicon,
            kind=kind,
            scope=scope,
            reason=reason,
            title=candidate.described(self.problem),
        )
        Quarantine(cache_folder(), self.address.silicon).add(entry)


def work(candidate: Candidate, problem: Problem) -> float:
    """Operations, at least 1: as the backend counts them, else those of all pairs of queries and keys."""
    count = flops(candidate, problem)
    pairs = problem.batch * problem.heads * problem.q_len * problem.k_len
    return max(1.0, float(count if count is not None else 4 * pairs * problem.head_dim))


def flops(candidate: Candidate, problem: Problem) -> float | None:
    """The backend's own count of operations, or None where it gives none that is a number."""
    return _number(getattr(candidate.backend, "flops", None), problem)


def first_call_ms(candidate: Candidate, problem: Problem) -> float:
    """What the backend says its first call takes beyond a later one; 0 where it says nothing that is a number."""
    return _number(getattr(candidate.backend, "first_call_ms", None), problem) or 0.0


def _number(estimate: Callable[[Problem], object] | None, problem: Problem) -> float | None:
    """A plug-in's estimate, if it is a number >= 0."""
    if estimate is None:
        return None
    try:
        value = float(estimate(problem))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a plug-in may fail in any way, and must not take the call along
        return None
    return value if math.isfinite(value) and value >= 0 else None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
