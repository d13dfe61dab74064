"""Who could run a problem: every backend in every order that it offers, with its refusals and its need of memory, and
the static choice among them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Backend, Refusal, orders_of
from attn_dispatch.machine.environment import environment
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.machine.memory import available_bytes
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.groups import group_of
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Row
from attn_dispatch.store.quarantine import Quarantine, until
from attn_dispatch.text import gib, one_line, printable, titled

MEMORY_SHARE = 0.8  #: of what is free; the rest is for what the estimate cannot know
LITTLE = 16 << 20  #: bytes that are not worth asking what is free, which takes longer than all else of a look-up


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend in an order, and either the row that rules it out or None. `needed_bytes`: workspace and results."""

    backend: Backend
    order: str
    row: Row | None
    workspace_bytes: int = 0
    needed_bytes: int = 0

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def id(self) -> tuple[str, str]:
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


def candidates(problem: Problem, beside: int = 0) -> list[Candidate]:
    """Every backend in its orders, the preferred first, with refusals, quarantine and its need against the memory that
    is free.

    Args:
        beside: bytes that will be taken besides a backend's workspace and results; q, k and v of a call are there.
    """
    free = available_bytes(problem.device)
    return [each for backend in registry.backends() for each in _candidates(backend, problem, free, beside)]


def can_run(problem: Problem, name: str, order: str) -> bool:
    """Whether this is a candidate that can run now; the other backends are not loaded.

    Raises:
        InvalidInput: there is no such backend.
    """
    found = _candidates(registry.load(name), problem, None, 0)
    return any(each.order == order and each.row is None for each in found)


def ruled_out(backend: Backend, order: str, status: str, reason: str) -> Candidate:
    """A candidate that cannot run, and why."""
    version = registry.version_of(backend)
    row = Row(backend=backend.name, order=order, status=status, reason=printable(reason), version=version)
    return Candidate(backend, order, row)


def _candidates(backend: Backend, problem: Problem, free: int | None, beside: int) -> list[Candidate]:
    """One for each order; one alone of a backend that refuses, and does not know its orders then."""
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
    needed = workspace + problem.result_bytes
    out = _kept_out(backend, problem, needed + beside, free)
    if out is not None:
        return [ruled_out(backend, order, *out) for order in orders]
    return [Candidate(backend, order, None, workspace, needed) for order in orders]


def _kept_out(backend: Backend, problem: Problem, needed: int, free: int | None) -> tuple[str, str] | None:
    """The status and the reason of a backend that could run the problem, and must not now."""
    held = _quarantined(backend, problem)
    if held is not None:
        return "quarantined", held
    if free is None:
        free = available_bytes(problem.device) if needed > LITTLE else sys.maxsize
    if needed <= MEMORY_SHARE * free:
        return None
    return "over_memory", f"needs {gib(needed)}, over {MEMORY_SHARE:.0%} of the {gib(free)} that are free"


def refused(refusals: Sequence[Refusal]) -> tuple[str, str]:
    """A row's status and reason."""
    codes = {refusal.code for refusal in refusals}
    status = next((code for code in ("not_installed", "over_memory") if code in codes), "unsupported")
    return status, "; ".join(refusal.text for refusal in refusals)


def _quarantined(backend: Backend, problem: Problem) -> str | None:
    """Why this version is kept out, or None. The last resort never is: there is nothing else to fall back on."""
    if backend.name == registry.LAST_RESORT:
        return None
    kept = Quarantine(cache_folder(), silicon(problem.device))
    if not kept.entries():
        return None
    entry = kept.find(backend.name, registry.version_of(backend), group_of(problem.to_dict()))
    if entry is None:
        return None
    what = f"{entry.kind} on {entry.created[:10]} with {entry.title}: {entry.reason}{until(entry)}"
    return f"{what}; `attn-dispatch doctor` lifts it"


def heuristic(found: Sequence[Candidate]) -> Candidate | None:
    """The static choice: the first in the order of preference that can run, in natural order if any can."""
    able = [candidate for candidate in found if candidate.row is None]
    return min(able, key=lambda candidate: candidate.order != NATURAL, default=None)


def versions() -> dict[str, str | None]:
    """The version of every backend, None where its package is missing."""
    return {backend.name: registry.version_of(backend) for backend in registry.backends()}


def environment_now() -> str:
    """The fingerprint of what is installed and registered now."""
    return environment({backend.name: registry.version_of(backend) for backend in registry.registered()})
