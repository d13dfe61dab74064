"""The rate of a rank, from decisions measured on this machine or shipped with the package."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attn_dispatch.errors import InvalidInput
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.ring.plan.schedule import BOTH, FORWARD
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.groups import group_of
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import pair_count
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store, shipped

LEAST_OPERATIONS, LEAST_MS = 1e8, 0.1  #: of a call whose time shows the device's rate, not the overhead of a call


@dataclass(frozen=True, slots=True)
class Rate:
    """Operations per second on the pattern's query-key pairs, and the origin of the number."""

    operations_per_s: float
    source: str
    key: str | None = None


def rate_near(problem: Problem, tokens: int) -> Rate | None:
    """The rate of the fastest backend in the decision nearest to a problem of `tokens` tokens on one device; None if
    there is no decision in this dtype for a call that is large enough.
    """
    problem = replace(problem, q_len=tokens, k_len=tokens, ranks=1)
    near = sorted(_decisions(problem), key=lambda pair: _distance(problem, pair[1]))
    for decision, measured in near:
        chosen = next((row for row in decision.candidates if row.id == decision.chosen), None)
        large = operations(measured) >= LEAST_OPERATIONS
        if large and chosen is not None and chosen.median_ms and chosen.median_ms >= LEAST_MS:
            source = f"{decision.choice}, {chosen.median_ms:.3g} ms for {' '.join(decision.title.split())}"
            return Rate(operations(measured) / chosen.median_ms * 1e3, source, decision.key)
    return None


def operations(problem: Problem) -> float:
    """Operations of one call on one device."""
    pairs = pair_count(problem.pattern, problem.q_len, problem.k_len, problem.heads)
    return float(pairs * problem.batch * problem.head_dim * (BOTH if problem.needs_grad else FORWARD))


def _decisions(problem: Problem) -> Iterator[tuple[Decision, Problem]]:
    """Decisions of this machine in the problem's dtype, with their problems; the user's own precede shipped ones."""
    here = silicon(problem.device)
    found = dict(shipped(here)) | {each.key: each for _, each in Store(cache_folder()).all() if each.silicon == here}
    for decision in found.values():
        try:
            measured = Problem.from_dict(decision.problem, problem.device)
        except InvalidInput:
            continue
        alike = measured.dtype == problem.dtype and measured.ranks == 1 and measured.q_len == measured.k_len
        if alike and measured.pattern is measured.pattern.natural:
            yield decision, measured


def _distance(problem: Problem, measured: Problem) -> tuple[bool, bool, bool, bool, float]:
    """Sort key: same group first, then same kind of pattern, then same passes, then similar tokens and heads."""
    sizes = [(p.q_len, p.batch * p.heads) for p in (problem, measured)]
    return (
        group_of(problem.to_dict()) != group_of(measured.to_dict()),
        type(problem.pattern) is not type(measured.pattern),
        problem.needs_grad != measured.needs_grad,
        problem.head_dim != measured.head_dim,
        math.dist(*([math.log2(size) for size in each] for each in sizes)),
    )
