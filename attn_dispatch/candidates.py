"""Who could run a problem: every backend with its refusals and its need of memory, and the static choice among them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from attn_dispatch import registry
from attn_dispatch.contract import Backend, Refusal
from attn_dispatch.environment import environment
from attn_dispatch.group import group_of
from attn_dispatch.machine import silicon
from attn_dispatch.memory import available_bytes
from attn_dispatch.order import NATURAL
from attn_dispatch.problem import Problem
from attn_dispatch.quarantine import Quarantine
from attn_dispatch.store import Row, cache_folder
from attn_dispatch.units import gib, one_line, printable

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


def candidates(problem: Problem, beside: int = 0) -> list[Candidate]:
    """Every backend, the preferred first, with refusals, quarantine and its need against the memory that is free.

    Args:
        beside: bytes that will be taken besides a backend's workspace and results; q, k and v of a call are there.
    """
    free = available_bytes(problem.device)
    return [_candidate(backend, problem, free, beside) for backend in registry.backends()]


def candidate(problem: Problem, name: str) -> Candidate:
    """One of them, without loading the others.

    Raises:
        InvalidInput: there is no such backend.
    """
    return _candidate(registry.load(name), problem, None, 0)


def _candidate(backend: Backend, problem: Problem, free: int | None, beside: int) -> Candidate:
    def ruled_out(status: str, reason: str) -> Candidate:
        version = registry.version_of(backend)
        row = Row(backend=backend.name, order=NATURAL, status=status, reason=printable(reason), version=version)
        return Candidate(backend, NATURAL, row)

    try:
        refusals = list(backend.refusals(problem))
        why = refused(refusals)
        workspace = 0 if refusals else operator.index(backend.workspace_bytes(problem))
        if workspace < 0:
            raise ValueError(f"{workspace} bytes")
    except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not take the call along
        return ruled_out("failed", f"refusals or workspace_bytes: {one_line(error)}")
    if refusals:
        return ruled_out(*why)
    held = _quarantined(backend, problem)
    if held is not None:
        return ruled_out("quarantined", held)
    needed = workspace + problem.result_bytes
    if free is None:
        free = available_bytes(problem.device) if needed + beside > LITTLE else sys.maxsize
    if needed + beside > MEMORY_SHARE * free:
        reason = f"needs {gib(needed + beside)}, over {MEMORY_SHARE:.0%} of the {gib(free)} that are free"
        return ruled_out("over_memory", reason)
    return Candidate(backend, NATURAL, None, workspace, needed)


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
    return f"{entry.kind} on {entry.created[:10]} with {entry.title}: {entry.reason}; `attn-dispatch doctor` lifts it"


def heuristic(found: Sequence[Candidate]) -> Candidate | None:
    """The static choice: the first in the order of preference that can run."""
    return next((candidate for candidate in found if candidate.row is None), None)


def versions() -> dict[str, str | None]:
    """The version of every backend, None where its package is missing."""
    return {backend.name: registry.version_of(backend) for backend in registry.backends()}


def environment_now() -> str:
    """The fingerprint of what is installed and registered now."""
    return environment({backend.name: registry.version_of(backend) for backend in registry.registered()})
