"""The candidates of a problem: every backend in every order that it offers, with refusals, needed memory and declared
work; the static choice among them, and the order in which they are tried.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

import torch

from attn_dispatch import process_state
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, Refusal, orders_of, refusals_of
from attn_dispatch.machine.environment import environment
from attn_dispatch.machine.hardware import provenance, silicon
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.settings import cache_folder, mode, timeout_s
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.torch_settings import current_flash
from attn_dispatch.store.address import Address
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.store.quarantine import STRIKES, Entry, Kind, Quarantine, crash_marker, until
from attn_dispatch.text import gib, one_line, printable, titled
from attn_dispatch.tuning import guard

T = TypeVar("T")

MEMORY_SHARE = 0.8  #: share of the free memory that a candidate may need; the rest covers errors of the estimate
LESS_WORK_FACTOR = 4  #: ratio of work from which a candidate with less work runs before the static choice
UNCHECKED_BYTES = 16 << 20  #: up to this no free memory is asked for: reading it would dominate a look-up

_stalled: dict[str, str] = {}  # plug-ins that did not answer in this process, with the reason
process_state.register(process_state.FACTS, _stalled.clear)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend in an order; `row` rules it out unless None. `needed_bytes` is workspace plus results."""

    backend: Backend
    order: str
    version: str | None
    row: Row | None = None
    workspace_bytes: int = 0
    needed_bytes: int = 0

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def id(self) -> CandidateId:
        return self.name, self.order

    @property
    def title(self) -> str:
        """Its name in messages, and its key in the tables of a trial."""
        return titled(*self.id)

    @property
    def backend_and_order(self) -> tuple[Backend, str]:
        """The arguments of `runner`."""
        return self.backend, self.order

    def measured_row(self, status: str, reason: str, **values: float | bool | None) -> Row:
        """A row of this candidate, measured now; `values` are further fields of `Row`, without infinite ones."""
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        return self.made_row(status, reason, workspace_bytes=self.workspace_bytes, measured=utc_now(), **known)

    def made_row(self, status: str, reason: str, **values: Any) -> Row:
        about: dict[str, Any] = {"backend": self.name, "order": self.order, "version": self.version}
        return Row(**about, status=status, reason=printable(reason), **values)

    def problem_title(self, problem: Problem) -> str:
        """The problem as text, with the order unless it is natural."""
        return f"{problem}   {self.order} order" if self.order != NATURAL else str(problem)


@dataclass(frozen=True, eq=False)
class Request:
    """A problem that needs a decision; derived values are computed on first use.

    Args:
        silicon: fingerprint of the machine that runs it, or of all ranks' machines.
    """

    problem: Problem
    silicon: str

    @classmethod
    def of(cls, problem: Problem) -> Request:
        """A request for the machine of the problem's device."""
        return cls(problem, silicon(problem.device))

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The problem as `Problem.to_dict` returns it."""
        return self.problem.to_dict()

    @cached_property
    def address(self) -> Address:
        return Address.of(self.plain, self.silicon)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Every backend in its orders, by preference; ruled out by refusals, quarantine or too little free memory."""
        free = available_bytes(self.problem.device)
        place = {name: place for place, name in enumerate(registry.preference(self.silicon, self.plain))}
        found = sorted(registry.backends(), key=lambda each: place.get(each.name, len(place)))
        return [each for backend in found for each in self.candidates_of(backend, free)]

    @property
    def able(self) -> list[Candidate]:
        """The candidates that can run."""
        return [each for each in self.candidates if each.row is None]

    def candidates_with(self, reserved_bytes: int) -> list[Candidate]:
        """The candidates, where `reserved_bytes` must fit in addition to a candidate's own bytes."""
        free = available_bytes(self.problem.device)
        return [_checked_memory(each, each.needed_bytes + reserved_bytes, free) for each in self.candidates]

    def can_run(self, name: str, order: str) -> bool:
        """Whether this candidate exists and can run now; other backends are not loaded.

        Raises:
            InvalidInput: there is no such backend.
        """
        return any(each.order == order and each.row is None for each in self.candidates_of(registry.load(name), None))

    def decision(self, chosen: CandidateId | None, source: str, rows: Iterable[Row], **more: Any) -> Decision:
        """Make a decision, created now; `more` are further fields of `Decision`."""
        given: dict[str, Any] = {"title": str(self.problem), "problem": self.plain, "source": source}
        given["choice"], given["order"] = chosen or ("", "")
        given |= {"provenance": provenance(self.problem.device), "created": utc_now(), **more}
        return Decision(**self.address._asdict(), candidates=tuple(rows), **given)

    def candidates_of(self, backend: Backend, free: int | None) -> list[Candidate]:
        """One candidate per order; a single one, in natural order, of a backend that refuses."""
        problem, version = self.problem, version_of(backend)
        plain = Candidate(backend, NATURAL, version)
        if backend.name in _stalled:
            return [ruled_out(plain, "failed", _stalled[backend.name])]
        excluded = self._why_excluded(backend, version)
        if excluded.startswith("hung"):  # it is not even asked
            return [ruled_out(plain, "quarantined", excluded)]
        try:
            why, workspace, orders = _asked(backend, partial(self._answers, backend))
        except guard.TimedOut as error:
            reason = _stalled[backend.name] = f"refusals, workspace_bytes or orders: {one_line(error)}"
            if mode() != "off":
                _exclude(self.silicon, backend.name, version, "hung", reason, str(problem))
            return [ruled_out(plain, "failed", reason)]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not fail the call
            return [ruled_out(plain, "failed", f"refusals, workspace_bytes or orders: {one_line(error)}")]
        if why is not None:
            return [ruled_out(plain, *why)]
        if excluded:
            return [ruled_out(Candidate(backend, order, version), "quarantined", excluded) for order in orders]
        needed = workspace + problem.result_bytes
        if free is None:
            free = available_bytes(problem.device) if needed > UNCHECKED_BYTES else sys.maxsize
        able = (Candidate(backend, order, version, None, workspace, needed) for order in orders)
        return [_checked_memory(each, needed, free) for each in able]

    def _answers(self, backend: Backend) -> tuple[tuple[str, str] | None, int, tuple[str, ...]]:
        """The status and reason of a backend's refusal or None, its workspace in bytes, and its orders."""
        refusals = refusals_of(backend, self.problem)
        why = status_and_reason(refusals)
        if refusals:
            return why, 0, ()
        workspace = operator.index(backend.workspace_bytes(self.problem))
        if workspace < 0:
            raise ValueError(f"{workspace} bytes")
        orders = orders_of(backend, self.problem)
        return None if orders else ("unsupported", "offers no order"), workspace, orders

    def _why_excluded(self, backend: Backend, version: str | None) -> str:
        """Why this version is quarantined, if it is. The last resort never is: a fallback must remain."""
        if backend.name == registry.LAST_RESORT or mode() == "off":
            return ""
        entry = Quarantine(cache_folder(), self.silicon).find(backend.name, version, self.address.group)
        if entry is None:
            return ""
        what = f"{entry.kind} on {entry.created:%Y-%m-%d} with {entry.title}: {entry.reason}{until(entry)}"
        return f"{what}; `attn-dispatch doctor` lifts it"


def _asked(backend: Backend, question: Callable[[], T]) -> T:
    """A backend's answer; a plug-in's within the time limit. Raises TimedOut, and what the backend raises."""
    return question() if registry.is_built_in(backend.name) else guard.run_guarded(question, timeout_s())


def version_of(backend: Backend) -> str | None:
    """`registry.version_of`, within the time limit; None for a plug-in that did not answer in this process."""
    if backend.name in _stalled:
        return None
    try:
        return _asked(backend, partial(registry.version_of, backend))
    except guard.TimedOut as error:
        _stalled[backend.name] = f"version: {one_line(error)}"
    except RuntimeError:  # no Exception, in the guarded thread
        pass
    return None


def _exclude(at: str, name: str, version: str | None, kind: Kind, why: str, title: str, scope: str = "") -> None:
    entry = Entry(backend=name, version=version, silicon=at, kind=kind, scope=scope, reason=why, title=title)
    Quarantine(cache_folder(), at).add(entry)


def quarantine(candidate: Candidate, problem: Problem, address: Address, kind: Kind, why: str) -> None:
    """Exclude the candidate's version, for the group alone if its fault is proven; never the last resort's."""
    if candidate.name != registry.LAST_RESORT:
        title, scope = candidate.problem_title(problem), "" if kind in STRIKES else address.group
        _exclude(address.silicon, candidate.name, candidate.version, kind, why, title, scope)


@contextmanager
def ending_on_lost_device(candidate: Candidate, problem: Problem, address: Address) -> Iterator[None]:
    """Quarantine a candidate that hangs on a CUDA device or destroys its context, before anything else is done.

    Raises:
        DeviceLost: so it was.
    """
    try:
        yield
    except Exception as error:
        fault = guard.device_fault(problem.device, error, timeout_s())
        if fault is None:
            raise
        quarantine(candidate, problem, address, *fault)
        raise guard.DeviceLost(f"{candidate.title} left {problem.device} unusable: {one_line(error)}") from error


def _guarded_import(point: EntryPoint, load: registry.Import) -> object:
    """Import a plug-in within the time limit and under a crash marker; one that died or hung before is left out.

    Raises:
        TimedOut: the import did not end. ImportError: it is in quarantine. What the import raises.
    """
    limit_s = timeout_s()
    if mode() == "off":  # no file is read or written
        return guard.run_guarded(load, limit_s)
    name, version, where = f"import of {point.name}", registry.distribution(point), silicon("cpu")
    quarantine = Quarantine(cache_folder(), where)
    entry = quarantine.find(name, version)
    if entry is not None:
        raise ImportError(f"{entry.reason}{until(entry)}; `attn-dispatch doctor --lift '{name}'` lifts it")
    title = f"the entry point {point.value}"
    try:
        with crash_marker(cache_folder(), where, name, version, title):
            backend = guard.run_guarded(load, limit_s)
    except guard.TimedOut as error:
        _exclude(where, name, version, "hung", f"the {name} {one_line(error)}", title)
        raise
    quarantine.clear_strikes(name, version)
    return backend


registry.guard_imports(_guarded_import)


def ruled_out(each: Candidate, status: str, reason: str) -> Candidate:
    """The candidate, which cannot run, with its status and reason."""
    return Candidate(each.backend, each.order, each.version, each.made_row(status, reason))


def _checked_memory(each: Candidate, needed: int, free: int) -> Candidate:
    """The candidate, ruled out if it needs more than `MEMORY_SHARE` of the free bytes, and more than a few."""
    if each.row is not None or needed <= max(UNCHECKED_BYTES, MEMORY_SHARE * free):
        return each
    reason = f"needs {gib(needed)}, over {MEMORY_SHARE:.0%} of the {gib(free)} that are free"
    return ruled_out(each, "over_memory", reason)


def status_and_reason(refusals: Sequence[Refusal]) -> tuple[str, str]:
    """The status and reason of a row for these refusals."""
    codes = {refusal.code for refusal in refusals}
    status = next((code for code in ("not_installed", "over_memory") if code in codes), "unsupported")
    return status, "; ".join(refusal.text for refusal in refusals)


def static_choice(found: Sequence[Candidate]) -> Candidate | None:
    """The static choice: the first candidate by preference that can run, in natural order if possible.

    One that takes a mask of all pairs gives way to `OFTEN_FASTEST` where that is there at once.
    """
    able = [candidate for candidate in found if candidate.row is None]
    first = min(able, key=lambda candidate: candidate.order != NATURAL, default=None)
    if first is None or first.name != registry.MASKED:
        return first
    sooner = (each for each in able if each.id == (registry.OFTEN_FASTEST, NATURAL) and each.backend.prepared())
    return next(sooner, first)


def incumbent_of(admitted: Sequence[Candidate]) -> Candidate | None:
    """The candidate that a race keeps unless another one is surely cheaper: `OFTEN_FASTEST`, else the static choice."""
    return static_choice([each for each in admitted if each.name == registry.OFTEN_FASTEST]) or static_choice(admitted)


def to_measure(
    problem: Problem,
    found: list[Candidate],
    prior: Decision | None = None,
    changed: Collection[CandidateId] | None = None,
    first: CandidateId | None = None,
) -> list[Candidate]:
    """The candidates to measure, in order: the first, then by `_effort`."""
    able = {candidate.id: candidate for candidate in found if candidate.row is None}
    names = set(able)
    if prior is not None and changed is not None:
        unchanged, choice = able.keys() - set(changed), prior.chosen
        timed = [row for row in prior.candidates if row.id in unchanged and row.median_ms is not None]
        # The fastest of them is measured again, so that ratios to it are paired.
        best = sorted(timed, key=lambda row: (row.id != choice, row.median_ms))[:1]
        names &= {*changed, choice, *(row.id for row in best)}
    measurable = [able[name] for name in able if name in names]
    leading = next((each for each in measurable if each.id == first), None) or static_choice(measurable)
    rest = sorted((each for each in measurable if each is not leading), key=lambda each: _effort(each, problem))
    if prior is None and first is None and leading is not None and rest:
        least, whole = flops(rest[0], problem), flops(leading, problem)
        if least and whole and least * LESS_WORK_FACTOR <= whole:
            leading, *rest = sorted([leading, *rest], key=lambda each: _effort(each, problem))
    return rest if leading is None else [leading, *rest]


def _effort(candidate: Candidate, problem: Problem) -> tuple[int, bool, int, float]:
    """Octaves of declared work, who wins most often, memory, work itself; 0 where the work is unknown."""
    declared, seldom = flops(candidate, problem) or 0.0, candidate.name != registry.OFTEN_FASTEST
    return round(math.log2(declared)) if declared >= 1 else 0, seldom, candidate.workspace_bytes, declared


def work(candidate: Candidate, problem: Problem) -> float:
    """Floating-point operations, at least 1: the backend's count, else that of all query-key pairs."""
    count = flops(candidate, problem)
    pairs = problem.batch * problem.heads * problem.q_len * problem.k_len
    return max(1.0, float(count if count is not None else 4 * pairs * problem.head_dim))


def flops(candidate: Candidate, problem: Problem) -> float | None:
    """The backend's own count of floating-point operations, or None where it gives no number >= 0."""
    return _number(candidate.backend.flops, problem)


def first_call_ms(candidate: Candidate, problem: Problem) -> float:
    """Milliseconds of the first call beyond a later one as the backend declares them; 0 without a number >= 0."""
    return _number(candidate.backend.first_call_ms, problem) or 0.0


def _number(estimate: Callable[[Problem], object] | None, problem: Problem) -> float | None:
    """A plug-in's estimate for a problem, or None where it is not a finite number >= 0."""
    if estimate is None:
        return None
    try:
        value = float(estimate(problem))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a plug-in may fail in any way, which must not fail the call
        return None
    return value if math.isfinite(value) and value >= 0 else None


def current_environment() -> str:
    """The fingerprint of the installed and registered backends and their environment."""
    versions = {backend.name: version_of(backend) for backend in registry.registered()}
    return environment({**versions, "torch ": str(torch.__version__), "its flash kernel": current_flash()})


def utc_now() -> str:
    """The current UTC time in the format of decisions and rows."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
