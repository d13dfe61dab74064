"""The gate: admits a candidate to the race after a guarded, checked run of the problem itself, and to the choice after
the hard cases.

A version passes the hard cases of a class of problems once on a machine. They run last, for the candidate that is about
to be chosen. Every failure becomes data: a status, a reason and, where the version must not run again, a quarantine.
"""

from __future__ import annotations

import math
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import torch

from attn_dispatch import process_state
from attn_dispatch.kernels import registry
from attn_dispatch.log import logger
from attn_dispatch.machine import memory
from attn_dispatch.machine.child import end_idle, run_alone
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.settings import cache_folder, timeout_s
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import passed
from attn_dispatch.store.address import Address
from attn_dispatch.store.crash_markers import CrashMarker, crash_marker, digest
from attn_dispatch.store.quarantine import Kind
from attn_dispatch.text import one_line
from attn_dispatch.tuning import candidates, guard
from attn_dispatch.tuning.candidates import Candidate, ending_on_lost_device, first_call_ms, work
from attn_dispatch.tuning.choice import Admitted, Rejected
from attn_dispatch.tuning.example import Example, make, synchronize
from attn_dispatch.tuning.hard_cases import HardCase, case_of, class_key, hard_cases
from attn_dispatch.tuning.oracle import PAIRS, FurtherCheck, NoReference, Oracle, further_checks, reference, referenced
from attn_dispatch.tuning.rounds import Steps

T = TypeVar("T")
Check = Callable[[], Sequence[str]]  # returns what failed
CheckedRun = tuple[dict[str, torch.Tensor], int | None, float]

SLOWEST_RATE = 1e-8  #: seconds per floating-point operation, past which a call counts as hung
CASE_S = 0.01  #: seconds that a hard case is expected to take
PREPARE_LIMIT = 10.0  #: factor on the time limit of a call, for a backend's `prepare`, which may compile
FIRST_CALL_FACTOR = 10.0  #: factor on the time that a backend declares for a first call, before it counts as hung
START_S = 120.0  #: seconds in which a process of its own must have loaded PyTorch and evaluated the hard cases
CONTEXT_BYTES = 2 << 30  #: free memory on a device that another process needs to use it
#: Exit codes by which a process of its own crashed; others, such as SIGKILL's, may come from outside.
CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
_PASSED_FORMAT = "2"  # to be changed with the hard cases, so that every version must pass the new ones
LOADING_MS = {"cuda": 2000.0, "cpu": 5.0}  #: milliseconds of a first call that may be one-time work, by device
COMPILED_CASES = 2  #: hard cases for a backend that compiles: large scores, and uneven lengths with rows without keys

# Hard cases passed in this process: (backend, order, version, class of problems).
_passed: set[tuple[str, str, str | None, object]] = set()
process_state.register(process_state.FACTS, _passed.clear)


@dataclass
class Gate:
    """The gate of one trial.

    Args:
        example: of the problem; None where only the hard cases are to be run.
        pairs: query-key pairs of the example that are compared with float64, at most.
        stepped: whether other code may run between the steps; crash markers are then removed.
    """

    problem: Problem
    address: Address
    example: Example | None = None
    pairs: int = PAIRS
    stepped: bool = False
    _marker: CrashMarker | None = field(init=False, default=None)  #: that of the candidate on trial

    @cached_property
    def _oracle(self) -> Oracle:
        assert self.example is not None
        return Oracle.of(self.example, pairs=self.pairs)

    @cached_property
    def _cases(self) -> tuple[HardCase, ...]:
        with reference():
            return hard_cases(self.problem)

    @property
    def differences(self) -> list[float]:
        """By how much results of a timed call may differ; empty with dropout, which is random."""
        return [] if self.problem.dropout_p else self._oracle.differences

    def evaluate(self) -> Steps[None]:
        """Evaluate the expected results of the example in steps; else the first `admit` does. Raises NoReference."""
        assert self.example is not None
        self.__dict__["_oracle"] = yield from referenced(Oracle.evaluated(self.example, 0, self.pairs), self.problem)

    def empty(self) -> None:
        """Free the memory of the example until `refill`."""
        if self.example is not None:
            self.example.empty()
        if "_oracle" in self.__dict__:
            self._oracle.empty()

    def refill(self) -> None:
        """Draw the example again that `empty` freed."""
        if self.example is not None:
            self.example.refill()
        if "_oracle" in self.__dict__:
            self._oracle.refill()

    @property
    def case_problems(self) -> tuple[Problem, ...]:
        """The problems of the hard cases that were needed."""
        return tuple(case.problem for case in self.__dict__.get("_cases", ()))

    def builds_ms(self, candidate: Candidate) -> float:
        """Milliseconds the backend declares to build for this problem alone, and for the hard cases due."""
        here_ms = 0.0 if candidate.backend.shares_builds else first_call_ms(candidate, self.problem)
        if not here_ms or self.has_passed(candidate):
            return here_ms
        return here_ms + sum(
            first_call_ms(candidate, each.problem) for each in class_key(self.problem)[:COMPILED_CASES]
        )

    def prepare(self, candidate: Candidate) -> Rejected | None:
        """Run a backend's `prepare`, if it has one, once per machine; the rejection if that fails, else None."""
        version, where, limit_s = candidate.version, self.address.silicon, PREPARE_LIMIT * timeout_s()
        if (call := candidate.backend.prepare) is None:
            return None
        try:
            # A compiler is another program: only a crash of this process counts, as where its library is loaded.
            with crash_marker(cache_folder(), where, candidate.name, version, "its prepare()", crashes_only=True):
                guard.run_guarded(call, limit_s)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            text, hung = one_line(error), isinstance(error, guard.TimedOut)
            if hung:
                self._quarantine(candidate, "hung", f"preparing: {text}")
            return Rejected("failed", text, quarantined=hung and candidate.name != registry.LAST_RESORT)
        return None

    def admit(self, candidate: Candidate) -> Steps[Admitted | Rejected]:
        """Run the candidate on the problem itself, under guard, and check its results.

        Raises:
            DeviceLost: the device is lost, and no other candidate can run in this process.
            NoReference: there is too little memory to evaluate the expected results.
        """
        oracle = self._oracle  # outside of the candidate's trial: errors of the reference are not its own
        builds = first_call_ms(candidate, self.problem) > 0
        limit_s = self._limit_s(candidate, self.problem) + SLOWEST_RATE * work(candidate, self.problem)
        run = partial(self._checked_run, candidate, limit_s)
        held = [self._tried(candidate, run)]
        if isinstance(held[0], Rejected):
            return held[0]
        if self.stepped:  # a first call may make threads and tables
            yield CASE_S
        return self._tried(candidate, partial(self._admit, candidate, oracle, run, held, builds))

    def check_hard_cases(self, candidate: Candidate, *, waiting: bool = False) -> Steps[Rejected | None]:
        """Run the hard cases, unless this version has passed them on this machine; the rejection if it fails one.

        Where a caller waits for them on CUDA they run in this process, since to start another takes many seconds, and
        none to compile for: those are due when nobody waits. Raises as `admit`.
        """
        if self.has_passed(candidate):
            return None
        cuda, waiting = self.problem.device.type == "cuda", waiting and not self.stepped
        brief, found = cuda and waiting, (yield from self._failures_alone(candidate)) if cuda and not waiting else None
        if found is None:
            for spec in class_key(self.problem):  # outside of the candidate's trial, as in `admit`
                yield CASE_S
                yield from case_of(spec)
            found = yield from self._failures_here(candidate, self._cases, brief)
        if isinstance(found, Rejected):
            return found
        if found:
            return self.incorrect(candidate, found)
        key = *candidate.id, candidate.version, class_key(self.problem)
        _passed.add(key)
        if not brief or candidate.backend.first_call_ms is None:
            passed.note_passed(cache_folder(), self.address.silicon, _digest_of(key))
        return None

    def _tried(self, candidate: Candidate, run: Callable[[], T], *, again: bool = False) -> T | Rejected:
        """Run a check beside a crash marker, again if its memory ran out though free; a failure becomes a rejection."""
        version, where, title = candidate.version, self.address.silicon, candidate.problem_title(self.problem)
        free_before = memory.available_bytes(self.problem.device)
        try:
            with (
                crash_marker(cache_folder(), where, candidate.name, version, title) as self._marker,
                ending_on_lost_device(candidate, self.problem, self.address),
            ):
                return run()
        except (NoReference, guard.DeviceLost):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
            text = one_line(error)
            kind = self._kind_of(error, candidate.needed_bytes, free_before)
            if kind is not None and (again or kind != "memory"):
                self._quarantine(candidate, kind, text, self.address.group if kind == "memory" else "")
            traceback.clear_frames(error.__traceback__)  # the frames hold the kernel's allocations
            memory.release(self.problem.device)
            self._restored_after(candidate)
            if kind == "memory" and not again:
                return self._tried(candidate, run, again=True)
            return Rejected("failed", text, quarantined=kind is not None and candidate.name != registry.LAST_RESORT)

    def _admit(
        self, candidate: Candidate, oracle: Oracle, run: Callable[[], CheckedRun], held: list[Any], builds: bool
    ) -> Admitted | Rejected:
        """What the first run showed, which is taken out of `held`, or a second one, where the first is no measure."""
        needed = candidate.needed_bytes
        if self._marker is not None:
            self._marker.begin(math.inf)  # so that it tells a second run from the first, which had another marker
        result, peak, first_ms = held.pop() if held else run()
        call_ms = first_ms
        # Compilation belongs neither to a call's time nor to its memory on a CPU, where the process is measured. Any
        # first call on CUDA may load kernels and make plans, a short one on a CPU fills tables.
        lazy = first_ms < LOADING_MS.get(self.problem.device.type, 0.0)
        if builds or lazy or guard.memory_excess(peak, needed, self.problem.device.type) is not None:
            del result
            result, peak, call_ms = run()
        wrote = ["wrote into its inputs"] * self._restored_after(candidate)
        checked = oracle.check(result)
        error = checked.error if checked.error < float("inf") else None
        if wrote or checked.failures:
            found = self.incorrect(candidate, wrote or checked.failures)
            return replace(found, first_ms=first_ms, peak_bytes=peak, error=error)
        excess = guard.memory_excess(peak, needed, self.problem.device.type)
        if excess is not None:
            self._quarantine(candidate, "memory", excess, self.address.group)
            return Rejected("failed", excess, first_ms, peak, error, quarantined=candidate.name != registry.LAST_RESORT)
        return Admitted(first_ms, call_ms, peak, checked.error)

    def _restored_after(self, candidate: Candidate) -> bool:
        """Whether a plug-in wrote into the example, which others share; then it has its values again."""
        return not registry.is_built_in(candidate.name) and "_oracle" in self.__dict__ and self._oracle.restored()

    def has_passed(self, candidate: Candidate) -> bool:
        """Whether this version has passed the hard cases of the problem's class on this machine."""
        key = *candidate.id, candidate.version, class_key(self.problem)
        return key in _passed or passed.has_passed(cache_folder(), self.address.silicon, _digest_of(key))

    def _failures_alone(self, candidate: Candidate) -> Steps[Sequence[str] | Rejected | None]:
        """What the hard cases showed in a process of their own: a CUDA context does not survive an illegal access.

        None where that is not known: the process did not get so far, or the candidate raised, as it would here too.
        """
        only_here = {backend.name for backend in registry.registered()} | {registry.LAST_RESORT}
        if candidate.name in only_here or memory.available_bytes(self.problem.device) < CONTEXT_BYTES:
            return None
        limit_s = sum(self._limit_s(candidate, spec.problem) for spec in class_key(self.problem)) + timeout_s()
        args = self.problem, self.address, candidate.name, candidate.order, candidate.version
        try:
            with ThreadPoolExecutor(1) as pool:
                run = pool.submit(run_alone, __name__, "failures_alone", args, start_s=START_S, limit_s=limit_s)
                while self.stepped and not run.done():
                    yield CASE_S
                ended = run.result()
        except OSError:
            return None
        known, kind, reason = ended.value or (None, None, "")
        if ended.begun and ended.value is None and ended.code is None:
            kind, reason = "hung", f"did not return within {limit_s:g} s"
        elif ended.begun and ended.code in CRASHES:
            kind, reason = "died", f"ended by signal {-ended.code}"
        if kind is None:
            return known
        end_idle()  # its device is unusable
        reason = f"its hard cases, in a process of their own: {reason}"
        self._quarantine(candidate, kind, reason)
        return Rejected("failed", reason, quarantined=True)

    def _failures_here(
        self, candidate: Candidate, cases: tuple[HardCase, ...], brief: bool
    ) -> Steps[Sequence[str] | Rejected]:
        """What the hard cases showed: all at once, or in steps, each beside a crash marker of its own."""
        if not self.stepped:
            return self._tried(candidate, partial(self._case_failures, candidate, cases, brief=brief))
        checks = self._tried(candidate, partial(self._case_checks, candidate, cases, brief))
        for number, check in enumerate(() if isinstance(checks, Rejected) else checks):
            yield CASE_S
            if found := self._tried(candidate, partial(self._failures_of, check, number)):
                return found
        return checks if isinstance(checks, Rejected) else ()

    def _failures_of(self, check: Check, earlier: int) -> Sequence[str]:
        """Run a check; its marker says how many earlier ones there were, which had other markers."""
        if self._marker is not None:
            self._marker.pause()
            self._marker.calls = earlier
            self._marker.resume()
        return check()

    def _limit_s(self, candidate: Candidate, problem: Problem) -> float:
        """Seconds that a call may take, with what the backend declares of a first one."""
        return timeout_s() + FIRST_CALL_FACTOR * first_call_ms(candidate, problem) / 1e3

    def _case_failures(self, candidate: Candidate, cases: tuple[HardCase, ...], *, brief: bool = False) -> list[str]:
        """Run the checks up to the first that fails; its failures."""
        checks = self._case_checks(candidate, cases, brief)
        return next((list(failures) for check in checks if (failures := check())), [])

    def _case_checks(self, candidate: Candidate, cases: tuple[HardCase, ...], brief: bool) -> list[Check]:
        """A check of each case that the backend accepts; of those that it compiles for alone, `COMPILED_CASES`."""
        shares = candidate.backend.shares_builds
        most = len(cases) if shares else COMPILED_CASES
        accepted = [case for case in cases if not case.refused_by(*candidate.backend_and_order)]
        if brief and shares:
            accepted = [case for case in accepted if not first_call_ms(candidate, case.problem)]
        compiled: set[str] = set()

        def check(case: HardCase) -> Sequence[str]:
            if first_call_ms(candidate, case.problem) > 0:
                if len(compiled) == most:
                    return ()
                compiled.add(case.name)
            run = partial(case.run, *candidate.backend_and_order)
            return case.check(self._guarded([run], self._limit_s(candidate, case.problem))[0]).failures

        further = self._further_checks(candidate, accepted[min(1, len(accepted) - 1)].problem) if accepted else []
        return [*(partial(check, case) for case in accepted), *further]

    def _further_checks(self, candidate: Candidate, problem: Problem) -> list[Check]:
        """Checks of further calls of one problem, the last of which is in this thread: nothing could end it."""

        @cache
        def oracle() -> Oracle:
            with reference():
                return Oracle.of(make(problem))

        def run(calls: list[Callable[[], T]]) -> list[T]:
            return self._guarded(calls, self._limit_s(candidate, problem))

        def check(failures: FurtherCheck) -> Sequence[str]:
            return failures(oracle(), *candidate.backend_and_order, run)

        return [partial(check, failures) for failures in further_checks(candidate.backend)]

    def _checked_run(self, candidate: Candidate, limit_s: float) -> CheckedRun:
        """Run the candidate once; its tensors for the oracle, the peak of memory in bytes, and milliseconds."""
        device = self.problem.device

        def run() -> CheckedRun:
            synchronize(device)
            start = time.perf_counter()
            result, peak = memory.peak_bytes(lambda: self._oracle.run(*candidate.backend_and_order), device)
            synchronize(device)
            return result, peak, (time.perf_counter() - start) * 1e3

        return self._guarded([run], limit_s)[0]

    def _guarded(self, calls: list[Callable[[], T]], limit_s: float) -> list[T]:
        """Run calls at once, within limits of time (seconds) and memory."""
        marker = self._marker
        if marker is not None:
            marker.begin(limit_s)

        def run(call: Callable[[], T]) -> T:
            found = call()
            synchronize(self.problem.device)  # on CUDA the call has only been enqueued
            return found

        try:
            with guard.capped(self.problem.device):
                return guard.run_at_once([partial(run, call) for call in calls], limit_s)
        finally:
            if marker is not None:
                marker.begin(math.inf)  # what follows, such as a comparison, is not the backend's call

    def incorrect(self, candidate: Candidate, failures: Sequence[str]) -> Rejected:
        """Quarantine a candidate whose results are wrong."""
        reason = "; ".join(failures)
        logger.warning("%s gives wrong results for %s: %s", candidate.title, self.problem, reason)
        self._quarantine(candidate, "incorrect", reason, self.address.group)
        return Rejected("incorrect", reason)

    def _kind_of(self, error: BaseException, needed: int, free_before: int) -> Kind | None:
        """The kind of quarantine for an exception, or None; `free_before` is the memory free before the call."""
        if isinstance(error, guard.TimedOut):
            return "hung"
        if guard.is_limit_error(error) or not guard.is_memory_error(error):
            return None
        # The declared memory was free and is so again: another program did not take it, the backend allocated more.
        is_free = needed <= min(free_before, memory.available_bytes(self.problem.device))
        return "memory" if is_free else None

    def _quarantine(self, candidate: Candidate, kind: Kind, reason: str, scope: str = "") -> None:
        candidates.quarantine(candidate, self.problem, self.address, kind, reason, scope)


def failures_alone(
    begin: Callable[[], object], problem: Problem, address: Address, name: str, order: str, version: str | None
) -> tuple[list[str] | None, Kind | None, str]:
    """In a process of its own: run the hard cases. Their failures, or None; the kind of quarantine and the reason where
    the candidate destroyed or blocked the device.
    """
    torch.use_deterministic_algorithms(problem.deterministic)
    torch.set_float32_matmul_precision(problem.matmul_precision)
    backend = registry.load(name)
    candidate, gate = Candidate(backend, order, version), Gate(problem, address)
    cases = gate._cases
    if (registry.version_of(backend), silicon(problem.device)) != (version, address.silicon):
        return None, None, ""
    begin()
    try:
        found = gate._case_failures(candidate, cases)
        memory.release(problem.device)
        return found, None, ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises is a fact about the backend
        kind, reason = guard.device_fault(problem.device, error, timeout_s()) or (None, "")
        return None, kind, reason


def _digest_of(key: tuple[str, str, str | None, object]) -> str:
    """Twenty digits for a version of a backend in an order and the class of problems whose hard cases it passed."""
    return digest(_PASSED_FORMAT, *key[:3], repr(key[3]))
