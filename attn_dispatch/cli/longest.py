"""Searches for the longest sequence that fits: upward from a length, then between the last that ran and the first that
did not. Each length is tried in a process of its own (`limited`), which can take no more memory than it may.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from attn_dispatch.cli.limited import Attempt, run_alone
from attn_dispatch.decisions.decide import explain_problem
from attn_dispatch.decisions.unmeasured import check_names
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.settings import measures
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.text import gib, one_line, titled
from attn_dispatch.tuning.candidates import Candidate, work
from attn_dispatch.tuning.example import example_bytes

RESOLUTION = 8  #: the search ends where the first length that failed is within 1 / 8 of the longest that ran
FAILURES = 2  #: failures for another reason than memory and time after which no other length is tried
WARM_TOKENS = 64  #: of the call before the limit is set


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a length. `status` is "ran", or why it did not: "refused" by the backend, "memory", "time",
    "died" with its process, or "failed".
    """

    tokens: int
    backend: str
    status: str
    reason: str = ""
    detail: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    above_bytes: int | None = None


@dataclass
class Search:
    """The search for one pattern; what it found so far is valid after an interruption too.

    Args:
        problem_at: the problem with so many tokens, or about so many on a grid.
        start: the length to begin with. most: the longest to try.
        backend: its name, or None for the one that attend() would take without measuring.
        memory_bytes: for q, k, v, out, gradients and workspace together.
        max_seconds: of one call.
        report: called with what is tried, and with the result.
    """

    problem_at: Callable[[int], Problem]
    start: int
    most: int
    backend: str | None
    memory_bytes: int
    max_seconds: float
    report: Callable[[str | Tried], None] = lambda _: None
    tried: list[Tried] = field(default_factory=list)
    complete: bool = False  #: whether `run` came to its end
    estimate: int | None = None  #: tokens whose declared bytes fit; None where not even the start's do
    guessed: bool = False  #: whether attend() would measure first, and may take another backend than was tried
    _rate: dict[str, float] = field(default_factory=dict)  # operations per second of each backend's last call

    def __post_init__(self) -> None:
        check_names(self.backend, None)
        self.problem_at(self.start)  # raises InvalidInput where there is none

    @property
    def longest(self) -> Tried | None:
        """The longest that ran."""
        return max((each for each in self.tried if each.status == "ran"), key=lambda each: each.tokens, default=None)

    @property
    def stopped_by(self) -> Tried | None:
        """The shortest above it that did not; where none ran, the first that was tried."""
        longest = self.longest
        if longest is None:
            return next(iter(self.tried), None)
        above = (each for each in self.tried if each.tokens > longest.tokens)
        return min(above, key=lambda each: each.tokens, default=None)

    @property
    def problem(self) -> Problem:
        """The problem with the longest length that ran, else with the first."""
        return self.problem_at(self.start if self.longest is None else self.longest.tokens)

    def run(self) -> None:
        """Find the longest length of `start` to `most`; below `start` only where that does not run."""
        self.estimate = find_longest(self._fits, self.start, self.most)
        find_longest(self._runs, self.start, self.most)
        self.complete = True

    def _fits(self, tokens: int) -> bool:
        planned = self._planned(tokens)
        return isinstance(planned, tuple) and planned[0].declared_bytes <= self.memory_bytes

    def _runs(self, tokens: int) -> bool:
        others = sum(each.status in ("failed", "died", "refused") for each in self.tried)
        if others >= FAILURES and self.longest is None:  # whatever the length
            return False
        found = self._tried(tokens)
        self.tried.append(found)
        self.report(found)
        return found.status == "ran"

    def _tried(self, tokens: int) -> Tried:
        planned = self._planned(tokens)
        if isinstance(planned, Tried):
            return planned
        attempt, operations = planned
        name, length = attempt.backend, attempt.problem.q_len
        expected = operations / self._rate.get(name, math.inf)
        if expected > self.max_seconds:
            text = f"by estimate, not tried: would take {expected:.3g} s, the limit is {self.max_seconds:g} s"
            return Tried(length, name, "time", text)
        self.report(f"{length:,} tokens with {titled(name, attempt.order)}")
        found = Tried(length, name, **run_alone(attempt))
        if found.seconds:
            self._rate[name] = operations / found.seconds
        return found

    def _planned(self, tokens: int) -> tuple[Attempt, float] | Tried:
        """What would run at a length, with its operations; or why nothing does."""
        try:
            problem = self.problem_at(tokens)
            needed = example_bytes(problem) + problem.result_bytes
            if needed > self.memory_bytes:  # before backends are asked, which takes long for long sequences
                what = "q, k, v, out and gradients" if problem.needs_grad else "q, k, v and out"
                text = f"by estimate, not tried: {what} take {gib(needed)}, the limit is {gib(self.memory_bytes)}"
                return Tried(problem.q_len, self.backend or "", "memory", text)
            explained = explain_problem(problem, self.backend)
        except InvalidInput as error:  # of the problem, or another package's backend cannot be loaded
            return Tried(tokens, self.backend or "", "refused", str(error))
        self.guessed = self.guessed or (explained.source == "heuristic" and measures())
        if explained.choice is None:
            status = "memory" if any(each.status == "over_memory" for each in explained.candidates) else "refused"
            every = "" if self.backend else "; ".join(f"{each.backend}: {each.reason}" for each in explained.candidates)
            reason = explained.candidates[0].reason if self.backend else "no backend can run it"
            return Tried(problem.q_len, self.backend or "", status, reason, every)
        backend, order, first = registry.load(explained.choice), explained.order or NATURAL, None
        with suppress(InvalidInput):
            first = self.problem_at(max(1, min(WARM_TOKENS, problem.q_len // 2)))
        if first is not None and first.q_len >= problem.q_len:  # no limit holds yet
            first = None
        try:
            declared = needed + operator.index(backend.workspace_bytes(problem))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may raise anything
            return Tried(problem.q_len, backend.name, "failed", f"workspace_bytes: {one_line(error)}")
        limits = self.memory_bytes, declared, self.max_seconds
        operations = work(Candidate(backend, order, None), problem)
        return Attempt(problem, first, backend.name, order, *limits), operations


def find_longest(runs: Callable[[int], bool], start: int, most: int) -> int | None:
    """The longest length that runs, to 1 / `RESOLUTION` of it; None where none does.

    Doubles from `start` to the first that does not run, then halves the distance. Where `start` does not run, first
    downward by halves. Lengths above the first that does not run are not tried.
    """
    good, bad = start, None
    while not runs(good):
        if good == 1:
            return None
        good, bad = good // 2, good
    while bad is None and good < most:
        longer = min(2 * good, most)
        good, bad = (longer, None) if runs(longer) else (good, longer)
    while bad is not None and bad - good > max(1, good // RESOLUTION):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if runs(middle) else (good, middle)
    return good
