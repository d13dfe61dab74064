"""Leave-one-out regret: how much slower learned choices are than the fastest candidate, by group. No torch here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from attn_dispatch.learning.features import features
from attn_dispatch.learning.predict import NEAR_BEST, Evidence, is_timed, predict
from attn_dispatch.spec.groups import title
from attn_dispatch.store.address import PROBLEM_ERRORS
from attn_dispatch.store.decision import Decision


class HeldOutChoice(NamedTuple):
    """The choice predicted for a decision from the others. `regret` is its time / the fastest's, less 1."""

    key: str
    backend: str
    order: str
    regret: float
    confidence: float


class GroupRegret(NamedTuple):
    """Held-out choices of one group on one silicon; `unpredicted` counts the decisions without a prediction."""

    silicon: str
    group: str
    title: str
    choices: tuple[HeldOutChoice, ...]
    unpredicted: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; regrets as shares, None without choices.

        `hits` are the choices within 2 % of the fastest, `p95` is the least regret that 95 % of the choices do not
        exceed, `confidence` the predictions' mean one: calibrated if near hits / count.
        """
        count, regrets = len(self.choices), sorted(choice.regret for choice in self.choices)
        worst = max(self.choices, key=lambda choice: choice.regret, default=None)
        return {
            **{name: getattr(self, name) for name in ("silicon", "group", "title")},
            "count": count,
            "mean": sum(regrets) / count if count else None,
            "p95": regrets[math.ceil(0.95 * count) - 1] if count else None,
            "hits": sum(regret <= NEAR_BEST - 1 for regret in regrets),
            "confidence": sum(choice.confidence for choice in self.choices) / count if count else None,
            "alone": self.unpredicted,
            "worst": None if worst is None else worst.regret,
            "worst_key": None if worst is None else worst.key,
        }


def leave_one_out(decisions: Iterable[Decision], advance: Callable[[], object] = lambda: None) -> list[GroupRegret]:
    """The regret of every group with a decision that timed two candidates, sorted by silicon and title.

    Args:
        advance: called after each prediction.
    """
    groups: defaultdict[tuple[str, str], list[Decision]] = defaultdict(list)
    for decision in decisions:
        try:
            features(decision.problem)
            groups[decision.silicon, decision.group].append(decision)
        except PROBLEM_ERRORS:
            continue
    every = (_group_regret(silicon, group, members, advance) for (silicon, group), members in groups.items())
    found = [each for each in every if each.choices or each.unpredicted]
    return sorted(found, key=lambda each: (each.silicon, each.title))


def total(groups: Sequence[GroupRegret]) -> GroupRegret:
    """All groups combined."""
    choices = tuple(choice for group in groups for choice in group.choices)
    return GroupRegret("", "", "all", choices, sum(group.unpredicted for group in groups))


def _group_regret(
    silicon: str, group: str, decisions: Sequence[Decision], advance: Callable[[], object]
) -> GroupRegret:
    evidence = Evidence(decisions)
    compared = [decision for decision in decisions if sum(map(is_timed, decision.candidates)) > 1]
    found = []
    for decision in compared:
        found.append(_predicted_by_others(decision, evidence))
        advance()
    choices = tuple(choice for choice in found if choice is not None)
    return GroupRegret(silicon, group, title(decisions[0].problem), choices, len(found) - len(choices))


def _predicted_by_others(decision: Decision, evidence: Evidence) -> HeldOutChoice | None:
    times = {row.id: float(row.median_ms or 0) for row in decision.candidates if is_timed(row)}
    found = predict(decision.problem, evidence, times, exclude=decision.key)
    if found is None:
        return None
    regret = times[found.backend, found.order] / min(times.values()) - 1
    return HeldOutChoice(decision.key, found.backend, found.order, regret, found.confidence)
