"""Who could run a problem: every backend with its refusals and its need of memory, and the static choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_dispatch import registry
from attn_dispatch.contract import Backend
from attn_dispatch.memory import available_bytes
from attn_dispatch.order import NATURAL
from attn_dispatch.problem import Problem
from attn_dispatch.store import Row
from attn_dispatch.units import gib

MEMORY_SHARE = 0.8  #: of what is free; the rest is for what the estimate cannot know


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend in an order, and either the row that rules it out or None."""

    backend: Backend
    order: str
    row: Row | None

    @property
    def name(self) -> str:
        return self.backend.name


def candidates(problem: Problem, beside: int = 0) -> list[Candidate]:
    """Every backend, the preferred first, with its refusals and its need against the memory that is free.

    Args:
        beside: bytes that will be taken besides a backend's workspace and results; q, k and v of a call are there.
    """
    free = available_bytes(problem.device)
    return [_candidate(backend, problem, free, beside) for backend in registry.backends()]


def _candidate(backend: Backend, problem: Problem, free: int, beside: int) -> Candidate:
    version = registry.version_of(backend)

    def ruled_out(status: str, reason: str) -> Candidate:
        row = Row(backend=backend.name, order=NATURAL, status=status, reason=reason, version=version)
        return Candidate(backend, NATURAL, row)

    try:
        refusals = backend.refusals(problem)
        codes, reason = {refusal.code for refusal in refusals}, "; ".join(refusal.text for refusal in refusals)
        needed = 0 if refusals else backend.workspace_bytes(problem) + problem.result_bytes + beside
    except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and must not take the call along
        return ruled_out("failed", f"refusals or workspace_bytes raised {type(error).__name__}: {error}")
    if refusals:
        status = next((code for code in ("not_installed", "over_memory") if code in codes), "unsupported")
        return ruled_out(status, reason)
    if needed > MEMORY_SHARE * free:
        reason = f"needs {gib(needed)}, over {MEMORY_SHARE:.0%} of the {gib(free)} that are free"
        return ruled_out("over_memory", reason)
    return Candidate(backend, NATURAL, None)


def heuristic(found: Sequence[Candidate]) -> Candidate | None:
    """The static choice: the first in the order of preference that can run."""
    return next((candidate for candidate in found if candidate.row is None), None)


def versions() -> dict[str, str | None]:
    """The version of every backend, None where its package is missing: what a decision was made among."""
    return {backend.name: registry.version_of(backend) for backend in registry.backends()}
