"""The gate: admits a candidate to the race after a guarded, checked run of the problem itself, and to the choice after
the hard cases, with their expected results.

A version passes the hard cases of a class of problems once on a machine. They run last, for the candidate that is about
to be chosen. Every failure becomes data: a status, a reason and, where the version must not run again, a quarantine.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from attn_dispatch import process_state
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, forced_orders, refuse_score_terms, traces
from attn_dispatch.log import logger
from attn_dispatch.machine import memory
from attn_dispatch.machine.devices import synchronize
from attn_dispatch.settings import cache_folder, timeout_s
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import passed
from attn_dispatch.store.address import Address
from attn_dispatch.store.files import digest
from attn_dispatch.store.quarantine import Kind, crash_marker
from attn_dispatch.text import one_line
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.candidates import Candidate, ending_on_lost_device, first_call_ms, quarantine, work
from attn_dispatch.tuning.choice import Admitted, Rejected
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.hard_cases import CaseSpec, class_key, example_of, nan_memory
from attn_dispatch.tuning.oracle import PAIRS, CheckResult, FurtherCheck, Incorrect, Oracle, further_checks
from attn_dispatch.tuning.rounds import Steps

T = TypeVar("T")
Check = Callable[[], Sequence[str]]  # returns what failed
CheckedRun = tuple[dict[str, Tensor], int | None, float]

SLOWEST_RATE = 1e-8  #: seconds per floating-point operation, past which a call counts as hung
CASE_S = 0.01  #: seconds that a hard case is expected to take
LONG_LIMIT = 10.0  #: factor on the time limit of a call, for `prepare` and for checks by many calls
FIRST_CALL_FACTOR = 10.0  #: factor on the time that a backend declares for a first call, before it counts as hung
_PASSED_FORMAT = "3"  # to be changed with the hard cases, so that every version must pass the new ones
LOADING_MS, CPU_LOADING_MS = 2000.0, 5.0  #: milliseconds of a first call that may be one-time work
CACHED_CASES = 48  #: those of 8 classes of problems stay in memory, a few MiB for each class
COMPILED_CASES = 2  #: hard cases for a backend that compiles: large scores, and uneven lengths with rows without keys

# Hard cases passed in this process: (backend, order, version, class of problems).
_passed: set[tuple[str, str, str | None, object]] = set()
process_state.register(process_state.FACTS, _passed.clear)


@dataclass(frozen=True, slots=True)
class HardCase:
    """A problem with its tensors and expected results, run in memory full of NaN.

    `memory` has each tensor's whole storage, including what lies around a view, and a copy of that.
    """

    name: str
    oracle: Oracle
    memory: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, name: str, oracle: Oracle) -> HardCase:
        example = oracle.example
        tensors = {"q": example.q, "k": example.k, "v": example.v, "the gradient": oracle.grad, **example.masks}
        storages = {key: x.untyped_storage() for key, x in tensors.items() if x is not None}
        memory = {key: torch.empty(0, dtype=torch.uint8, device=x.device).set_(x) for key, x in storages.items()}
        return cls(name, oracle, {key: (x, x.clone()) for key, x in memory.items()})

    @property
    def problem(self) -> Problem:
        return self.oracle.example.problem

    def refused_by(self, backend: Backend, order: str = NATURAL) -> bool:
        """Whether the backend refuses this problem in this order, so that the case does not apply to it."""
        if refuse_score_terms(backend, self.problem) or backend.refusals(self.problem):
            return True
        return order != NATURAL and order not in forced_orders(backend, self.problem)

    def run(self, backend: Backend, order: str = NATURAL) -> dict[str, Tensor]:
        """Run the backend in memory full of NaN; its tensors by name. The backend's exceptions propagate.

        A backend of torch.compile is traced without NaN in new tensors; it gets NaN from freed memory only.

        Raises:
            Incorrect: the backend wrote into its inputs, or to memory beside them.
        """
        try:
            with nan_memory(self.problem, in_torch=not traces(backend)):
                found = self.oracle.run(backend, order)
        finally:
            # The next backend gets the same tensors, and must get them unchanged.
            changed = [name for name, (memory, copy) in self.memory.items() if not torch.equal(memory, copy)]
            for name in changed:
                self.memory[name][0].copy_(self.memory[name][1])
        if changed:
            raise Incorrect(f"{self.name}: wrote into {', '.join(changed)}, or to memory beside")
        return found

    def check(self, found: dict[str, Tensor]) -> CheckResult:
        """Compare the tensors that `run` returned; each failure starts with the case's name."""
        result = self.oracle.check(found)
        return replace(result, failures=tuple(f"{self.name}: {failure}" for failure in result.failures))


@lru_cache(CACHED_CASES)
@guard.reference()
def case_of(spec: CaseSpec) -> HardCase:
    """The hard case of a recipe, evaluated once. Raises NoReference."""
    example, problem = example_of(spec), spec.problem
    oracle = Oracle.of(example)
    if oracle.grad is not None and len(oracle.rows) * len(oracle.heads) == problem.q_len * problem.heads:
        oracle = replace(oracle, grad=example.grad)  # the same values in the unusual memory order
    if problem.q_len == problem.k_len:
        lengths = "one token" if problem.q_len == 1 else f"{problem.q_len} tokens"
    else:
        lengths = "one query" if problem.q_len == 1 else f"{problem.q_len} queries, {problem.k_len} keys"
    empty = bool((oracle.expected["lse"].value == -math.inf).any())
    name = ", ".join(filter(None, [lengths, spec.hazard, "rows without keys" if empty else ""]))
    return HardCase.of(name, oracle)


@dataclass
class Gate:
    """The gate of one trial.

    Args:
        example: of the problem; None where only the hard cases are to be run.
        pairs: query-key pairs of the example that are compared with float64, at most.
    """

    problem: Problem
    address: Address
    example: Example | None = None
    pairs: int = PAIRS
    case_problems: tuple[Problem, ...] = ()  #: of the hard cases that were needed
    prepared: dict[str, Rejected | None] = field(default_factory=dict[str, Rejected | None])  #: keyed by backend

    @cached_property
    def oracle(self) -> Oracle:
        """The expected results of the example. Raises NoReference."""
        assert self.example is not None
        return Oracle.of(self.example, pairs=self.pairs)

    @property
    def differences(self) -> list[float]:
        """By how much results of a timed call may differ; empty with dropout, which is random."""
        return [] if self.problem.dropout_p else self.oracle.differences

    def builds_ms(self, candidate: Candidate) -> float:
        """Milliseconds the backend declares to build for this problem alone, and for the hard cases due."""
        here_ms = 0.0 if candidate.backend.shares_builds else first_call_ms(candidate, self.problem)
        due = class_key(self.problem)[:COMPILED_CASES] if here_ms and not self.has_passed(candidate) else ()
        return here_ms + sum(first_call_ms(candidate, each.problem) for each in due)

    def prepare(self, candidate: Candidate) -> Rejected | None:
        """Run a backend's `prepare`, if it has one, once; the rejection if that fails, else None."""
        if candidate.name not in self.prepared:
            self.prepared[candidate.name] = self._prepare(candidate)
        return self.prepared[candidate.name]

    def _prepare(self, candidate: Candidate) -> Rejected | None:
        version, where, limit_s = candidate.version, self.address.silicon, LONG_LIMIT * timeout_s()
        if (call := candidate.backend.prepare) is None:
            return None
        try:
            with crash_marker(cache_folder(), where, candidate.name, version, "its prepare()"):
                guard.run_guarded(call, limit_s)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            text, hung = one_line(error), isinstance(error, guard.TimedOut)
            if hung:
                quarantine(candidate, self.problem, self.address, "hung", f"preparing: {text}")
            return Rejected("failed", text, quarantined=hung and candidate.name != registry.LAST_RESORT)
        return None

    def admit(self, candidate: Candidate) -> Admitted | Rejected:
        """Run the candidate on the problem itself, under guard, and check its results.

        Raises:
            DeviceLost: the device is lost, and no other candidate can run in this process.
            NoReference: there is too little memory to evaluate the expected results.
        """
        oracle = self.oracle  # outside of the candidate's trial: errors of the reference are not its own
        return self._tried(candidate, partial(self._admit, candidate, oracle))

    def check_hard_cases(self, candidate: Candidate, *, brief: bool = False) -> Steps[Rejected | None]:
        """Run the hard cases, unless this version has passed them on this machine; the rejection if it fails one. Each
        is beside a crash marker of its own. Raises as `admit`.

        Args:
            brief: run none, on CUDA, that a backend compiles for: those are due when nobody waits.
        """
        if self.has_passed(candidate):
            return None
        if (rejected := self.prepare(candidate)) is not None:  # compiling is not in the time of a case
            return rejected
        brief = brief and self.problem.device.type == "cuda"
        cases = list[HardCase]()
        for spec in class_key(self.problem):  # outside of the candidate's trial, as in `admit`
            yield CASE_S
            cases.append(case_of(spec))
        self.case_problems = tuple(case.problem for case in cases)
        checks = self._tried(candidate, partial(self._case_checks, candidate, cases, brief))
        if isinstance(checks, Rejected):
            return checks
        for check in checks:
            yield CASE_S
            found = self._tried(candidate, check)
            if found:
                return found if isinstance(found, Rejected) else self.incorrect(candidate, found)
        key = *candidate.id, candidate.version, class_key(self.problem)
        _passed.add(key)
        if not brief or candidate.backend.first_call_ms is None:
            passed.note_passed(cache_folder(), self.address.silicon, _digest_of(key))
        return None

    def why_not(self, candidate: Candidate, check: Callable[[Backend, Problem], str]) -> str:
        """Why a check of the problem rejects a candidate; empty where this version passes, now or before on this
        machine. Raises as `admit`.
        """
        name = digest(_PASSED_FORMAT, check.__name__, *candidate.id, candidate.version, repr(self.problem))
        if passed.has_passed(cache_folder(), self.address.silicon, name):
            return ""
        run = partial(check, candidate.backend, self.problem)
        limit_s = LONG_LIMIT * self._limit_s(candidate, self.problem)
        if (rejected := self.prepare(candidate)) is not None:
            return rejected.reason
        found = self._tried(candidate, lambda: self._guarded([run], limit_s)[0])
        if isinstance(found, Rejected):
            return found.reason
        if not found:
            passed.note_passed(cache_folder(), self.address.silicon, name)
        return found

    def _tried(self, candidate: Candidate, run: Callable[[], T], *, again: bool = False) -> T | Rejected:
        """Run a check beside a crash marker, again if its memory ran out though free; a failure becomes a rejection."""
        version, where, title = candidate.version, self.address.silicon, candidate.problem_title(self.problem)
        free_before = memory.available_bytes(self.problem.device)
        try:
            with (
                crash_marker(cache_folder(), where, candidate.name, version, title),
                ending_on_lost_device(candidate, self.problem, self.address),
            ):
                return run()
        except (guard.NoReference, guard.DeviceLost):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            text = one_line(error)
            kind = self._kind_of(error, candidate.needed_bytes, free_before)
            if kind is not None and (again or kind != "memory"):
                quarantine(candidate, self.problem, self.address, kind, text)
            traceback.clear_frames(error.__traceback__)  # the frames hold the kernel's allocations
            memory.release(self.problem.device)
            self._restored_after(candidate)
            if isinstance(error, Incorrect):
                return self.incorrect(candidate, [str(error)])
            if kind == "memory" and not again:
                return self._tried(candidate, run, again=True)
            return Rejected("failed", text, quarantined=kind is not None and candidate.name != registry.LAST_RESORT)

    def _admit(self, candidate: Candidate, oracle: Oracle) -> Admitted | Rejected:
        """What a run of the candidate shows, or a second one, where the first is no measure."""
        needed, builds = candidate.needed_bytes, first_call_ms(candidate, self.problem) > 0
        limit_s = self._limit_s(candidate, self.problem) + SLOWEST_RATE * work(candidate, self.problem)
        result, peak, first_ms = self._checked_run(candidate, limit_s)
        call_ms = first_ms
        # Compilation belongs neither to a call's time nor to its memory on a CPU, where the process is measured. Any
        # first call on a GPU may load kernels and make plans, a short one on a CPU fills tables.
        lazy = first_ms < (CPU_LOADING_MS if self.problem.device.type == "cpu" else LOADING_MS)
        if builds or lazy or guard.memory_excess(peak, needed, self.problem.device.type) is not None:
            del result
            result, peak, call_ms = self._checked_run(candidate, limit_s)
        wrote, checked = self._restored_after(candidate), oracle.check(result)
        error = checked.error if checked.error < float("inf") else None
        if failures := ("wrote into its inputs",) if wrote else checked.failures:
            found = self.incorrect(candidate, failures)
            return replace(found, first_ms=first_ms, peak_bytes=peak, error=error)
        if (excess := guard.memory_excess(peak, needed, self.problem.device.type)) is not None:
            quarantine(candidate, self.problem, self.address, "memory", excess)
            return Rejected("failed", excess, first_ms, peak, error, quarantined=candidate.name != registry.LAST_RESORT)
        return Admitted(first_ms, call_ms, peak, checked.error)

    def _restored_after(self, candidate: Candidate) -> bool:
        """Whether a plug-in wrote into the example, which others share; then it has its values again."""
        return not registry.is_built_in(candidate.name) and "oracle" in self.__dict__ and self.oracle.restored()

    def has_passed(self, candidate: Candidate) -> bool:
        """Whether this version has passed the hard cases of the problem's class on this machine."""
        key = *candidate.id, candidate.version, class_key(self.problem)
        return key in _passed or passed.has_passed(cache_folder(), self.address.silicon, _digest_of(key))

    def _limit_s(self, candidate: Candidate, problem: Problem) -> float:
        """Seconds that a call may take, with what the backend declares of a first one."""
        return timeout_s() + FIRST_CALL_FACTOR * first_call_ms(candidate, problem) / 1e3

    def _case_checks(self, candidate: Candidate, cases: Sequence[HardCase], brief: bool) -> list[Check]:
        """A check of each case that the backend accepts; of those that it compiles for alone, `COMPILED_CASES`."""
        shares, due = candidate.backend.shares_builds, list[HardCase]()
        left = COMPILED_CASES if not shares else 0 if brief else len(cases)
        for case in cases:
            builds = first_call_ms(candidate, case.problem) > 0
            if (left or not builds) and not case.refused_by(*candidate.backend_and_order):
                due.append(case)
                left -= builds

        def check(case: HardCase) -> Sequence[str]:
            run = partial(case.run, *candidate.backend_and_order)
            return case.check(self._guarded([run], self._limit_s(candidate, case.problem))[0]).failures

        further = self._further_checks(candidate, due[min(1, len(due) - 1)].problem) if due else []
        return [*(partial(check, case) for case in due), *further]

    def _further_checks(self, candidate: Candidate, problem: Problem) -> list[Check]:
        """Checks of further calls of one problem, the last of which is in this thread: nothing could end it."""

        @cache
        def oracle() -> Oracle:
            with guard.reference():
                return Oracle.of(make(problem))

        def check(failures: FurtherCheck) -> Sequence[str]:
            run = partial(self._guarded, limit_s=self._limit_s(candidate, problem))
            return failures(oracle(), *candidate.backend_and_order, run)

        return [partial(check, failures) for failures in further_checks(candidate.backend)]

    def _checked_run(self, candidate: Candidate, limit_s: float) -> CheckedRun:
        """Run the candidate once; its tensors for the oracle, the peak of memory in bytes, and milliseconds."""
        device = self.problem.device

        def run() -> CheckedRun:
            synchronize(device)
            start = time.perf_counter()
            result, peak = memory.peak_bytes(lambda: self.oracle.run(*candidate.backend_and_order), device)
            synchronize(device)
            return result, peak, (time.perf_counter() - start) * 1e3

        return self._guarded([run], limit_s)[0]

    def _guarded(self, calls: list[Callable[[], T]], limit_s: float) -> list[T]:
        """Run calls at once, within limits of time (seconds) and memory."""

        def run(call: Callable[[], T]) -> T:
            found = call()
            synchronize(self.problem.device)  # on a GPU the call has only been enqueued
            return found

        with guard.capped(self.problem.device):
            return guard.run_at_once([partial(run, call) for call in calls], limit_s)

    def incorrect(self, candidate: Candidate, failures: Sequence[str]) -> Rejected:
        """Quarantine a candidate whose results are wrong."""
        reason = "; ".join(failures)
        logger.warning("%s gives wrong results for %s: %s", candidate.title, self.problem, reason)
        quarantine(candidate, self.problem, self.address, "incorrect", reason)
        return Rejected("incorrect", reason)

    def _kind_of(self, error: BaseException, needed: int, free_before: int) -> Kind | None:
        """The kind of quarantine for an exception, or None; `free_before` is the memory free before the call."""
        if isinstance(error, guard.TimedOut):
            return "hung"
        if guard.is_limit_error(error) or not guard.is_memory_error(error) or free_before == memory.UNKNOWN:
            return None
        # The declared memory was free and is so again: another program did not take it, the backend allocated more.
        is_free = needed <= min(free_before, memory.available_bytes(self.problem.device))
        return "memory" if is_free else None


def _digest_of(key: tuple[str, str, str | None, object]) -> str:
    """Twenty digits for a version of a backend in an order and the class of problems whose hard cases it passed."""
    return digest(_PASSED_FORMAT, *key[:3], repr(key[3]))
