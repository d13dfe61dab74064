"""Who could run a problem: every backend in every order that it offers, with its refusals and its need of memory, and
the static choice among them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, Refusal, orders_of
from attn_dispatch.machine.environment import environment
from attn_dispatch.machine.hardware import provenance, silicon
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.address import Address
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.store.quarantine import Quarantine, until
from attn_dispatch.text import gib, one_line, printable, titled

Name = tuple[str, str]  #: of a candidate: backend and order

MEMORY_SHARE = 0.8  #: of what is free; the rest is for what the estimate cannot know
LITTLE = 16 << 20  #: bytes that are not worth asking what is free, which takes longer than all else of a look-up


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend in an order, and either the row that rules it out or None. `needed_bytes`: workspace and results."""

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
    def id(self) -> Name:
        return self.name, self.order

    @property
    def title(self) -> str:
        """What it is called, and known by in a trial."""
        return titled(*self.id)

    @property
    def run_by(self) -> tuple[Backend, str]:
        """What runs it: the backend, and the order that it is handed."""
        return self.backend, self.order

    def described(self, problem: Problem) -> str:
        """The problem, and the order where it is not the natural one."""
        return f"{problem}   {self.order} order" if self.order != NATURAL else str(problem)


@dataclass(frozen=True, eq=False)
class Request:
    """A problem that needs a decision. What is asked of it is asked once, where it is first needed.

    Args:
        silicon: the fingerprint of the machine that runs it, or of all ranks' machines.
    """

    problem: Problem
    silicon: str

    @classmethod
    def of(cls, problem: Problem) -> Request:
        """For the machine that the problem's device is in."""
        return cls(problem, silicon(problem.device))

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The problem in plain values."""
        return self.problem.to_dict()

    @cached_property
    def address(self) -> Address:
        return Address.of(self.plain, self.silicon)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Every backend in its orders, the preferred first, with refusals, quarantine and its need against the memory
        that is free.
        """
        free = available_bytes(self.problem.device)
        return [each for backend in registry.backends() for each in self._of(backend, free)]

    @property
    def able(self) -> list[Candidate]:
        """Those that can run it."""
        return [each for each in self.candidates if each.row is None]

    def beside(self, taken: int) -> list[Candidate]:
        """The candidates where so many bytes are taken besides a backend's workspace and results."""
        free = available_bytes(self.problem.device)
        return [_within(each, each.needed_bytes + taken, free) for each in self.candidates]

    def can_run(self, name: str, order: str) -> bool:
        """Whether this is a candidate that can run now; the other backends are not loaded.

        Raises:
            InvalidInput: there is no such backend.
        """
        return any(each.order == order and each.row is None for each in self._of(registry.load(name), None))

    def decision(self, chosen: Name | None, source: str, rows: Iterable[Row], **more: Any) -> Decision:
        """A decision that is made now, the only place where one is; `more` are fields of `Decision`."""
        backend, order = chosen or ("", "")
        given = {"provenance": provenance(self.problem.device), "created": now(), **more}
        return Decision(
            **self.address._asdict(),
            title=str(self.problem),
            problem=self.plain,
            choice=backend,
            order=order,
            source=source,
            candidates=tuple(rows),
            **given,
        )

    def _of(self, backend: Backend, free: int | None) -> list[Candidate]:
        """One for each order; one alone of a backend that refuses, and does not know its orders then."""
        problem = self.problem
        try:
            refusals = list(backend.refusals(problem))
            why = refused(refusals)
            workspace = 0 if refusals else operator.index(backend.workspace_bytes(problem))
            if workspace < 0:
                raise ValueError(f"{workspace} bytes")
            orders = () if refusals else orders_of(backend, problem)
        except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not take the call along
            reason = f"refusals, workspace_bytes or orders: {one_line(error)}"
            return [ruled_out(backend, NATURAL, "failed", reason)]
        if not orders:
            why = why if refusals else ("unsupported", "offers itself in no order")
            return [ruled_out(backend, NATURAL, *why)]
        version = registry.version_of(backend)
        held, needed = self._quarantined(backend, version), workspace + problem.result_bytes
        if held is not None:
            return [ruled_out(backend, order, "quarantined", held) for order in orders]
        if free is None:
            free = available_bytes(problem.device) if needed > LITTLE else sys.maxsize
        found = (Candidate(backend, order, version, None, workspace, needed) for order in orders)
        return [_within(each, needed, free) for each in found]

    def _quarantined(self, backend: Backend, version: str | None) -> str | None:
        """Why this version is kept out, or None. The last resort never is: there is nothing else to fall back on."""
        if backend.name == registry.LAST_RESORT:
            return None
        kept = Quarantine(cache_folder(), self.silicon)
        if not kept.entries():
            return None
        entry = kept.find(backend.name, version, self.address.group)
        if entry is None:
            return None
        what = f"{entry.kind} on {entry.created[:10]} with {entry.title}: {entry.reason}{until(entry)}"
        return f"{what}; `attn-dispatch doctor` lifts it"


def ruled_out(backend: Backend, order: str, status: str, reason: str) -> Candidate:
    """A candidate that cannot run, and why."""
    return _without(Candidate(backend, order, registry.version_of(backend)), status, reason)


def _without(each: Candidate, status: str, reason: str) -> Candidate:
    row = Row(backend=each.name, order=each.order, status=status, reason=printable(reason), version=each.version)
    return Candidate(each.backend, each.order, each.version, row)


def _within(each: Candidate, needed: int, free: int) -> Candidate:
    """Ruled out, where it needs more bytes than it may take of those that are free."""
    if each.row is not None or needed <= MEMORY_SHARE * free:
        return each
    reason = f"needs {gib(needed)}, over {MEMORY_SHARE:.0%} of the {gib(free)} that are free"
    return _without(each, "over_memory", reason)


def refused(refusals: Sequence[Refusal]) -> tuple[str, str]:
    """A row's status and reason."""
    codes = {refusal.code for refusal in refusals}
    status = next((code for code in ("not_installed", "over_memory") if code in codes), "unsupported")
    return status, "; ".join(refusal.text for refusal in refusals)


def heuristic(found: Sequence[Candidate]) -> Candidate | None:
    """The static choice: the first in the order of preference that can run, in natural order if any can."""
    able = [candidate for candidate in found if candidate.row is None]
    return min(able, key=lambda candidate: candidate.order != NATURAL, default=None)


def environment_now() -> str:
    """The fingerprint of what is installed and registered now."""
    return environment({backend.name: registry.version_of(backend) for backend in registry.registered()})


def now() -> str:
    """The time in UTC, as decisions and rows note it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
