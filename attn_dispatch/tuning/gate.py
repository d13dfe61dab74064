"""The gate: admits a candidate to the race after a guarded, checked run of the problem itself, and to the choice after
the hard cases.

A version passes the hard cases of a class of problems once on a machine. They run last, for the candidate that is about
to be chosen: before any result of it is used. Every failure becomes data: a status and a reason and, where the version
must not run again, a quarantine.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
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
from attn_dispatch.store import passed
from attn_dispatch.store.address import Address
from attn_dispatch.store.crash_markers import CrashMarker, crash_marker, digest
from attn_dispatch.store.decision import CandidateId
from attn_dispatch.store.quarantine import Entry, Kind, Quarantine
from attn_dispatch.text import one_line
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.candidates import Candidate, Request, first_call_ms, work
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.hard_cases import HardCase, case_of, class_key, hard_cases
from attn_dispatch.tuning.oracle import PAIRS, NoReference, Oracle, reference, referenced
from attn_dispatch.tuning.rounds import Steps, exhausted

T = TypeVar("T")
Check = Callable[[], Sequence[str]]  # returns what failed

SLOWEST_RATE = 1e-8  #: seconds per floating-point operation, past which a call counts as hung
CASE_S = 0.01  #: seconds that a hard case is expected to take
PREPARE_LIMIT = 10.0  #: factor on the time limit of a call, for a backend's `prepare`, which may compile
_PASSED_FORMAT = "1"  # to be changed with the hard cases, so that every version must pass the new ones
COMPILED_CASES = 2  #: hard cases for a backend that compiles: large scores, and uneven lengths with rows without keys

# Hard cases passed in this process: (backend, order, version, class of problems).
_passed: set[tuple[str, str, str | None, object]] = set()
process_state.register(process_state.FACTS, _passed.clear)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The candidate may race.

    `first_ms` is its first call, `call_ms` the call that was checked, `error` the largest absolute error of out.
    """

    first_ms: float
    call_ms: float
    peak_bytes: int | None
    error: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """The candidate may not race: its status (`failed` or `incorrect`) and the reason.

    `quarantined` is whether the backend's version is quarantined for all problems.
    """

    status: str
    reason: str
    first_ms: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    quarantined: bool = False


@dataclass
class Gate:
    """The gate of one trial.

    Args:
        example: of the problem; None where only the hard cases are to be run.
        pairs: query-key pairs of the example that are compared with float64, at most.
        stepped: whether other code may run between the steps of `check_hard_cases`; crash markers are then removed.
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
        """Milliseconds the backend declares to build before its first results, here and for the hard cases due."""
        here_ms = first_call_ms(candidate, self.problem)
        if not here_ms or self.has_passed(candidate):
            return here_ms
        return here_ms + sum(
            first_call_ms(candidate, each.problem) for each in class_key(self.problem)[:COMPILED_CASES]
        )

    def prepare(self, candidate: Candidate, call: Callable[[], object]) -> Rejected | None:
        """Run a backend's `prepare`, which it needs once per machine; the rejection if that fails, else None."""
        version, where = candidate.version, self.address.silicon
        limit_s = PREPARE_LIMIT * timeout_s()
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

    def admit(self, candidate: Candidate) -> Admitted | Rejected:
        """Run the candidate on the problem itself, under guard, and check its results.

        Raises:
            BackendFailed: the device is lost, and no other candidate can run in this process.
            NoReference: there is too little memory to evaluate the expected results.
        """
        oracle = self._oracle  # outside of the candidate's trial: errors of the reference are not its own
        return self._tried(candidate, partial(self._admit, candidate, oracle))

    def check_hard_cases(self, candidate: Candidate) -> Steps[Rejected | None]:
        """Run the hard cases, unless this version has passed them on this machine; the rejection if it fails one.

        Raises as `admit`.
        """
        if self.has_passed(candidate):
            return None
        for spec in class_key(self.problem):
            yield CASE_S
            yield from case_of(spec)
        checks = partial(self._case_checks, candidate, self._cases)
        steps: list[Check] | Rejected = [partial(_first_failures, checks)]
        if self.stepped:
            steps = self._tried(candidate, checks)
        if isinstance(steps, Rejected):
            return steps
        for number, check in enumerate(steps):
            yield CASE_S
            failures = self._tried(candidate, partial(self._failures_of, check, number))
            if isinstance(failures, Rejected):
                return failures
            if failures:
                return self._incorrect(candidate, failures)
        key = *candidate.id, candidate.version, class_key(self.problem)
        _passed.add(key)
        passed.note_passed(cache_folder(), self.address.silicon, _digest_of(key))
        return None

    def _tried(self, candidate: Candidate, run: Callable[[], T], *, again: bool = False) -> T | Rejected:
        """Run a check of the candidate beside a crash marker; any failure becomes a rejection.

        It is run once more if its memory ran out though it was free.
        """
        version, where, title = candidate.version, self.address.silicon, candidate.problem_title(self.problem)
        free_before = available_bytes(self.problem.device)
        try:
            with crash_marker(cache_folder(), where, candidate.name, version, title) as self._marker:
                return run()
        except NoReference:
            raise
        except (Exception, SystemExit) as error:
            text = one_line(error)
            kind = self._kind_of(error, candidate.needed_bytes, free_before)
            traceback.clear_frames(error.__traceback__)  # the frames hold the kernel's allocations
            memory.release(self.problem.device)
            if kind != "hung" and guard.device_lost(self.problem.device):
                self._quarantine(candidate, "died", f"the device was lost: {text}")
                raise BackendFailed(f"{candidate.title} left {self.problem.device} unusable: {text}") from error
            if kind == "memory" and not again:
                return self._tried(candidate, run, again=True)
            if kind is not None:
                self._quarantine(candidate, kind, text)
            return Rejected("failed", text, quarantined=kind is not None and candidate.name != registry.LAST_RESORT)

    def _admit(self, candidate: Candidate, oracle: Oracle) -> Admitted | Rejected:
        needed = candidate.needed_bytes
        limit_s = timeout_s() + 10 * first_call_ms(candidate, self.problem) / 1e3
        limit_s += SLOWEST_RATE * work(candidate, self.problem)
        builds = first_call_ms(candidate, self.problem) > 0
        result, peak, first_ms = self._checked_run(candidate, limit_s)
        call_ms = first_ms
        # Compilation belongs neither to a call's time nor to its memory on a CPU, where the process is measured.
        if builds or guard.memory_excess(peak, needed, self.problem.device.type) is not None:
            del result
            result, peak, call_ms = self._checked_run(candidate, limit_s)
        checked = oracle.check(result)
        error = checked.error if checked.error < float("inf") else None
        if checked.failures:
            return self._incorrect(candidate, checked.failures, first_ms, peak, error)
        excess = guard.memory_excess(peak, needed, self.problem.device.type)
        if excess is not None:
            self._quarantine(candidate, "memory", excess)
            return Rejected("failed", excess, first_ms, peak, error, quarantined=candidate.name != registry.LAST_RESORT)
        return Admitted(first_ms, call_ms, peak, checked.error)

    def has_passed(self, candidate: Candidate) -> bool:
        """Whether this version has passed the hard cases of the problem's class on this machine."""
        key = *candidate.id, candidate.version, class_key(self.problem)
        return key in _passed or passed.has_passed(cache_folder(), self.address.silicon, _digest_of(key))

    def _case_checks(self, candidate: Candidate, cases: tuple[HardCase, ...]) -> list[Check]:
        """A check of each case that the backend accepts; of one that compiles for every problem, `COMPILED_CASES`."""
        accepted = [case for case in cases if not case.refused_by(*candidate.backend_and_order)]
        due = accepted[:COMPILED_CASES] if hasattr(candidate.backend, "first_call_ms") else accepted
        checks: list[Check] = [partial(self._case_failures, candidate, each) for each in due]
        return [*checks, partial(self._second_call_failures, candidate, accepted)]

    def _failures_of(self, check: Check, earlier: int) -> Sequence[str]:
        """Run a check; in steps, its marker says how many earlier ones there were, which had other markers."""
        if self.stepped and self._marker is not None:
            self._marker.pause()
            self._marker.calls = earlier
            self._marker.resume()
        return check()

    def _case_failures(self, candidate: Candidate, case: HardCase) -> Sequence[str]:
        limit_s = timeout_s() + 10 * first_call_ms(candidate, case.problem) / 1e3
        found = self._guarded(partial(case.run, *candidate.backend_and_order), limit_s)
        return case.check(found).failures

    def _second_call_failures(self, candidate: Candidate, cases: list[HardCase]) -> Sequence[str]:
        """Call again on the same tensors with other values; failures where the first result changed or was returned."""
        if not cases:
            return []
        with reference():
            oracle = Oracle.of(make(cases[min(1, len(cases) - 1)].problem))
        limit_s = timeout_s() + 10 * first_call_ms(candidate, oracle.example.problem) / 1e3
        first = self._guarded(partial(oracle.run, *candidate.backend_and_order), limit_s)["out"]
        known = first.clone()
        with torch.no_grad():
            oracle.example.v.neg_()
        second = self._guarded(partial(oracle.run, *candidate.backend_and_order), limit_s)["out"]
        if not torch.equal(first, known):
            return ["a second call changed the result of the first"]
        found = oracle.check({"out": -second})  # attention is linear in v
        return [
            f"a second call on the same tensors: {failure}" for failure in found.failures if failure.startswith("out")
        ]

    def _checked_run(self, candidate: Candidate, limit_s: float) -> tuple[dict[str, torch.Tensor], int | None, float]:
        """Run the candidate once; its tensors for the oracle, the peak of memory in bytes, and milliseconds."""
        device = self.problem.device

        def run() -> tuple[dict[str, torch.Tensor], int | None, float]:
            synchronize(device)
            start = time.perf_counter()
            result, peak = memory.peak_bytes(lambda: self._oracle.run(*candidate.backend_and_order), device)
            synchronize(device)
            return result, peak, (time.perf_counter() - start) * 1e3

        return self._guarded(run, limit_s)

    def _guarded(self, call: Callable[[], T], limit_s: float) -> T:
        """Run a call within limits of time (seconds) and memory."""
        marker = self._marker
        if marker is not None:
            marker.begin(limit_s)
        try:
            with guard.capped(self.problem.device):
                return guard.run_guarded(call, limit_s)
        finally:
            if marker is not None:
                marker.begin(math.inf)  # what follows, such as a comparison, is not the backend's call

    def _incorrect(
        self,
        candidate: Candidate,
        failures: Sequence[str],
        first_ms: float | None = None,
        peak: int | None = None,
        error: float | None = None,
    ) -> Rejected:
        reason = "; ".join(failures)
        logger.warning("%s gives wrong results for %s: %s", candidate.title, self.problem, reason)
        self._quarantine(candidate, "incorrect", reason, self.address.group)
        return Rejected("incorrect", reason, first_ms, peak, error)

    def _kind_of(self, error: BaseException, needed: int, free_before: int) -> Kind | None:
        """The kind of quarantine for an exception, or None; `free_before` is the memory free before the call."""
        if isinstance(error, guard.TimedOut):
            return "hung"
        if guard.is_limit_error(error) or not guard.is_memory_error(error):
            return None
        # The declared memory was free and is so again: another program did not take it, the backend allocated more.
        is_free = needed <= min(free_before, available_bytes(self.problem.device))
        return "memory" if is_free else None

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
            title=candidate.problem_title(self.problem),
        )
        Quarantine(cache_folder(), self.address.silicon).add(entry)


def _first_failures(checks: Callable[[], list[Check]]) -> Sequence[str]:
    """Run the checks up to the first that fails; its failures."""
    return next((failures for check in checks() if (failures := check())), ())


def passes_hard_cases(request: Request, name: CandidateId, *, run: bool = True) -> bool:
    """Whether a candidate that no trial of this problem has chosen passed the hard cases, or passes them now if `run`.

    Raises:
        BackendFailed: it left the device unusable.
    """
    candidate = next((each for each in request.able if each.id == name), None)
    gate = Gate(request.problem, request.address)
    if candidate is None or not run:
        return candidate is not None and gate.has_passed(candidate)
    try:
        return exhausted(gate.check_hard_cases(candidate)) is None
    except Exception as error:
        if not isinstance(error, NoReference) and not guard.is_shortage(error):
            raise
        return False


def _digest_of(key: tuple[str, str, str | None, object]) -> str:
    """Twenty digits for a version of a backend in an order and the class of problems whose hard cases it passed."""
    *names, specs = key
    return digest(_PASSED_FORMAT, *names, repr(specs))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
