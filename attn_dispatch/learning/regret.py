"""How far learned choices are from the best: every decision predicted from the others of its group. No torch here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_dispatch.learning.features import features
from attn_dispatch.learning.predict import FOREIGN, MARGIN, Evidence, group_for, is_timed, predict
from attn_dispatch.spec.groups import title
from attn_dispatch.store.decision import Decision


@dataclass(frozen=True, slots=True)
class Miss:
    """One decision, predicted without itself. `regret` is what the choice takes beyond the fastest, as a share."""

    key: str
    backend: str
    order: str
    regret: float
    confidence: float


@dataclass(frozen=True, slots=True)
class GroupRegret:
    """Of one group on one silicon. `alone` counts the decisions that no other evidence speaks of: no regret, not 0."""

    silicon: str
    group: str
    title: str
    misses: tuple[Miss, ...]
    alone: int

    @property
    def count(self) -> int:
        return len(self.misses)

    @property
    def hits(self) -> int:
        """Choices within 2 % of the fastest."""
        return sum(miss.regret <= MARGIN - 1 for miss in self.misses)

    @property
    def mean(self) -> float | None:
        return sum(miss.regret for miss in self.misses) / self.count if self.misses else None

    @property
    def p95(self) -> float | None:
        """The least regret that 95 % of all do not exceed."""
        ordered = sorted(miss.regret for miss in self.misses)
        return ordered[math.ceil(0.95 * self.count) - 1] if ordered else None

    @property
    def worst(self) -> Miss | None:
        return max(self.misses, key=lambda miss: miss.regret, default=None)

    @property
    def confidence(self) -> float | None:
        """The mean of what was claimed, to be held against hits / count."""
        return sum(miss.confidence for miss in self.misses) / self.count if self.misses else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; regrets as shares."""
        worst = self.worst
        return {
            "silicon": self.silicon,
            "group": self.group,
            "title": self.title,
            "count": self.count,
            "alone": self.alone,
            "mean": self.mean,
            "p95": self.p95,
            "worst": None if worst is None else worst.regret,
            "worst_key": None if worst is None else worst.key,
            "hits": self.hits,
            "confidence": self.confidence,
        }


def regret(decisions: Iterable[Decision]) -> list[GroupRegret]:
    """Leave one out, for every group with a decision that timed two candidates; by silicon and title."""
    groups: defaultdict[tuple[str, str], list[Decision]] = defaultdict(list)
    for decision in decisions:
        try:
            features(decision.problem)
            groups[decision.silicon, group_for(decision)].append(decision)
        except FOREIGN:
            continue
    found = (_of_group(silicon, group, members) for (silicon, group), members in groups.items())
    return sorted((each for each in found if each.count or each.alone), key=lambda each: (each.silicon, each.title))


def total(groups: Sequence[GroupRegret]) -> GroupRegret:
    """All of them as one."""
    misses = tuple(miss for group in groups for miss in group.misses)
    return GroupRegret("", "", "all", misses, sum(group.alone for group in groups))


def _of_group(silicon: str, group: str, decisions: Sequence[Decision]) -> GroupRegret:
    evidence = Evidence(decisions)
    contests = [decision for decision in decisions if sum(map(is_timed, decision.candidates)) > 1]
    found = [_leave_out(decision, evidence) for decision in contests]
    misses = tuple(miss for miss in found if miss is not None)
    return GroupRegret(silicon, group, title(decisions[0].problem), misses, len(found) - len(misses))


def _leave_out(decision: Decision, evidence: Evidence) -> Miss | None:
    times = {(row.backend, row.order): float(row.median_ms or 0) for row in decision.candidates if is_timed(row)}
    found = predict(decision.problem, evidence, times, without=decision.key)
    if found is None:
        return None
    regret = times[found.backend, found.order] / min(times.values()) - 1
    return Miss(decision.key, found.backend, found.order, regret, found.confidence)
