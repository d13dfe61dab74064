"""Chooses a candidate from the timings of all. Pure: no clock, no torch.

A challenger replaces the incumbent where it is surely cheaper by more than a margin, its share of the first call
included; "surely" is :func:`~attn_dispatch.tuning.intervals.faster_at_last_look`. Challengers that another one surely
beats by more than the margin are excluded. Among the rest a fixed order decides, so that noise does not: less declared
workspace memory, then the simpler candidate. Where samples do not suffice to be sure, a candidate whose estimate is
lower by more than :data:`BET` is taken all the same: the better bet.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attn_dispatch.text import gib
from attn_dispatch.tuning.intervals import (
    LAST_LOOK,
    MARGIN,
    Timing,
    faster_at_last_look,
    paired_ratios,
    ratio_interval,
    ratio_test,
    shared_rounds,
)

#: Milliseconds of a first call beyond a later one, below which they count as 0: caches and the machine warming up.
LEAST_PLAN_MS = 10.0
#: Share by which an estimate must be lower for its candidate to be taken though it is not sure to be faster; and by
#: which another candidate may be faster than the chosen one before the choice counts as open.
BET = 0.10
ONE_ROUND_BET = 0.25  #: the same after one round; with more rounds less is needed, in proportion, down to `BET`
MANY_ROUNDS = 100  #: rounds from which further ones would not tell more


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

    `quarantined` is whether the backend's version is quarantined, for other reasons than its results.
    """

    status: str
    reason: str
    first_ms: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    quarantined: bool = False


@dataclass(frozen=True)
class Entrant:
    """One candidate with its measurements.

    Args:
        workspace_bytes: the declared memory; the measured peak is partly noise.
        rank: place in the order of simplicity; less is simpler.
        plan_ms: milliseconds of the first call beyond a later one: planning, compilation.
        dropped: ratio to the fastest at which the candidate was dropped as hopeless, None if it was not. A dropped
            candidate is chosen only where all were dropped.
    """

    name: str
    timing: Timing
    workspace_bytes: int = 0
    rank: int = 0
    plan_ms: float = 0.0
    dropped: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The status of one candidate after the choice.

    Args:
        status: "chosen"; "slower" where the chosen one surely costs less by more than the margin; else "tie".
        reason: a short text; empty where the figures suffice.
        open: whether it may be faster than the chosen one by more than :data:`BET`, as far as is known.
        ratio: median of the candidate's times over the chosen one's, paired by round, without first calls; None
            without shared rounds.
        ratio_low, ratio_high: 99 % interval of the ratio, :data:`~attn_dispatch.tuning.intervals.LAST_LOOK`.
    """

    status: Literal["chosen", "slower", "tie"]
    reason: str
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    open: bool = False


def per_call_ms(plan_ms: float, calls: float) -> float:
    """Spread the first call's extra milliseconds over ``calls`` calls; 0 below :data:`LEAST_PLAN_MS`."""
    return plan_ms / calls if plan_ms >= LEAST_PLAN_MS else 0.0


def choose(entrants: Sequence[Entrant], incumbent: str | None, *, calls: float) -> tuple[str, dict[str, Outcome]]:
    """Choose a candidate; its name, and the outcome of each by name.

    Args:
        entrants: the candidates, timed against one another in the same rounds.
        incumbent: the candidate that only a cheaper one replaces. None, an unknown name or a dropped candidate: all are
            eligible.
        calls: expected number of calls, over which the cost of the first is spread.
    """
    comparison = _Comparison({each.name: each for each in entrants}, incumbent, calls)
    chosen = comparison.choose()
    return chosen, {entrant.name: comparison.outcome(entrant.name, chosen) for entrant in entrants}


class _Comparison:
    def __init__(self, entrants: dict[str, Entrant], incumbent: str | None, calls: float) -> None:
        self._entrants = entrants
        self._able = [name for name, entrant in entrants.items() if entrant.dropped is None] or list(entrants)
        self._incumbent = incumbent if incumbent in self._able else None
        self._calls = calls
        self._costs = {name: each.timing.plus(per_call_ms(each.plan_ms, calls)) for name, each in entrants.items()}

    def eligible(self) -> list[str]:
        """Candidates that may be chosen: those that surely beat the incumbent, else it alone; all without one."""
        incumbent = self._incumbent
        if incumbent is None:
            return self._able
        return [name for name in self._able if self._beats(name, incumbent)] or [incumbent]

    def choose(self) -> str:
        proven = self._proven()
        best = min(self._able, key=lambda name: self._ratio(name, proven))
        bet = max(BET, ONE_ROUND_BET / max(1, self._rounds(best, proven)))
        known = self._beats(proven, best) or self._beats(best, proven)
        return best if self._ratio(best, proven) < 1.0 - bet and not known else proven

    def _proven(self) -> str:
        eligible = self.eligible()
        unbeaten = [name for name in eligible if not any(self._beats(rival, name) for rival in eligible)]
        if not unbeaten:  # "surely faster" need not be transitive
            return min(eligible, key=lambda name: self._costs[name].median_ms)
        return min(unbeaten, key=lambda name: (self._entrants[name].workspace_bytes, self._entrants[name].rank))

    def outcome(self, name: str, chosen: str) -> Outcome:
        timing, best = self._entrants[name].timing, self._entrants[chosen].timing
        ratios, interval = paired_ratios(timing, best), ratio_interval(timing, best, LAST_LOOK)
        slower = self._entrants[name].dropped is not None or self._beats(chosen, name)
        status: Literal["chosen", "slower", "tie"] = "chosen" if name == chosen else "slower" if slower else "tie"
        return Outcome(
            status=status,
            reason=self._reason(name, chosen, status),
            ratio=statistics.median(ratios) if ratios else None,
            ratio_low=interval.low,
            ratio_high=interval.high,
            open=self._is_open(name, chosen),
        )

    def _ratio(self, name: str, other: str) -> float:
        """Estimated cost of a candidate over that of another."""
        return statistics.median(paired_ratios(self._costs[name], self._costs[other]))

    def _rounds(self, name: str, other: str) -> int:
        return shared_rounds(self._costs[name], self._costs[other])

    def _is_open(self, name: str, chosen: str) -> bool:
        rivals, rounds = {chosen, self._incumbent or chosen} - {name}, self._rounds(name, chosen)
        if name == chosen or name not in self._able or self._beats(chosen, name) or rounds >= MANY_ROUNDS:
            return False
        if any(ratio_test(self._costs[name], self._costs[each], MARGIN) == "not" for each in rivals):
            return False
        # The interval of few rounds is narrower than what is known: their samples follow one another.
        doubt = ONE_ROUND_BET / max(1, rounds)
        return ratio_interval(self._costs[name], self._costs[chosen], LAST_LOOK).low * (1.0 - doubt) < 1.0 - BET

    def _beats(self, name: str, rival: str) -> bool:
        return name != rival and faster_at_last_look(self._costs[name], self._costs[rival], MARGIN)

    def _reason(self, name: str, chosen: str, status: str) -> str:
        if status == "chosen" and chosen not in self.eligible():
            return f"the better bet: {_too_few(self._rounds(name, self._proven()))} to prove it"
        dropped = self._entrants[name].dropped
        if dropped is not None:
            return f"{dropped:.1f} times the fastest in first calls, not tried again"
        if status != "chosen" and faster_at_last_look(self._entrants[name].timing, self._entrants[chosen].timing):
            return f"its dearer first call does not surely pay within {self._calls:,.0f} calls"
        return self._tie(name, chosen) if status == "tie" else ""

    def _tie(self, name: str, chosen: str) -> str:
        """The reason why a candidate that is not surely slower was not chosen."""
        if not 1.0 - MARGIN <= self._ratio(name, chosen) <= 1.0 / (1.0 - MARGIN):
            return f"{_too_few(self._rounds(name, chosen))} to tell"
        if chosen == self._incumbent:
            return f"a tie goes to the incumbent, {chosen}"
        if name not in self.eligible():
            return f"not surely {MARGIN:.0%} faster than {self._incumbent}"
        more = self._entrants[name].workspace_bytes - self._entrants[chosen].workspace_bytes
        if more > 0:
            return f"a tie goes to less workspace: {gib(more)} less"
        return "a tie goes to the simpler candidate" if more == 0 else ""


def _too_few(rounds: int) -> str:
    return f"{rounds} round{'s are' if rounds > 1 else ' is'} too few"
