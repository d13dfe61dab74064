"""One-time work of a backend (plans, compilation): the budget, cleared tables and how the first call is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.trial_limits import passes_hard_cases, why_variant
from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Decision, Row
from attn_dispatch.testing.cases import Case
from attn_dispatch.tuning import rounds, tuner
from attn_dispatch.tuning.candidates import Request
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.gate import COMPILED_CASES
from attn_dispatch.tuning.race import Race
from attn_dispatch.tuning.rounds import Rounds
from tests.support import virtual_clock
from tests.support.flaws import Planted
from tests.support.virtual_clock import VirtualClock

PROBLEM = Case("small", Dense(), (1, 16, 2, 8)).problem(torch.float32, needs_grad=False)
CLOCK = VirtualClock()  #: all time that passes is what backends here take
CALL_S = 0.001  #: of a call of `PROBLEM`, by default
CASE_S = 1e-6  #: of a hard case


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLOCK, "now_s", 0.0)
    virtual_clock.install(CLOCK, monkeypatch)


@dataclass
class Builder(Planted):
    """The reference, whose first call of a problem is declared as `first_s` and takes `sleep_s`; each call of
    `PROBLEM` takes `call_s`.
    """

    name: str = "builder"
    first_s: float = 0.0
    sleep_s: float = 0.0
    call_s: float = CALL_S
    built: set[Problem] = field(default_factory=set[Problem])
    dropped: list[Problem] = field(default_factory=list[Problem])

    def first_call_ms(self, problem: Problem) -> float:
        return 0.0 if problem in self.built else self.first_s * 1e3

    def forget(self, problem: Problem) -> None:
        self.dropped.append(problem)
        self.built.discard(problem)

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        if problem not in self.built:
            CLOCK.sleep(self.sleep_s)
            self.built.add(problem)
        CLOCK.sleep(self.call_s if problem == PROBLEM else CASE_S)
        return super().run(q, k, v, problem, **tensors)


@pytest.mark.parametrize(("waiting", "sleep_s", "lines"), [(True, 4.0, 1), (True, 0.1, 0), (False, 4.0, 0)])
def test_a_caller_that_waits_for_seconds_is_told_once(
    waiting: bool, sleep_s: float, lines: int, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(rounds, "SAID_AFTER_S", 5.0)
    backends = [Builder(name="one", sleep_s=sleep_s), Builder(name="two", sleep_s=sleep_s)]
    monkeypatch.setattr(registry, "backends", lambda: backends)
    tuner.run_trial(Request.of(PROBLEM), 60.0, waiting=waiting)
    found = [text for text in warnings() if "measuring" in text]
    assert len(found) == lines
    assert all(str(PROBLEM) in text and "ATTN_DISPATCH_MODE=predict" in text for text in found)


@dataclass
class Worker(Builder):
    """A builder that declares its work and notes its calls in `tried`."""

    work: int = 0
    tried: list[str] = field(default_factory=list[str])

    def flops(self, problem: Problem) -> int:
        return self.work

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        self.tried.append(self.name)
        return super().run(q, k, v, problem, **tensors)


@dataclass
class Once(Builder):
    """A builder with `prepare`."""

    prepare_s: float = 0.0
    preparations: int = 0

    def prepare(self) -> None:
        self.preparations += 1
        if self.prepare_s < 0:
            raise OSError("no compiler")
        CLOCK.sleep(self.prepare_s)

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        assert self.preparations, "prepare() was not called first"
        return super().run(q, k, v, problem, **tensors)


Alone = Callable[..., None]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    """Make these the only backends, in this order."""
    return lambda *backends: monkeypatch.setattr(registry, "backends", lambda: list(backends))


def measured(budget_s: float | None) -> Decision:
    decision = tuner.run_trial(Request.of(PROBLEM), budget_s)
    assert decision is not None
    return decision


def dropped(builder: Builder) -> list[Problem]:
    """The calls of `forget` with the problem itself; those of the hard cases always occur."""
    assert len(builder.dropped) >= 5
    return [problem for problem in builder.dropped if problem == PROBLEM]


def row(decision: Decision, name: str = "builder") -> Row:
    return next(each for each in decision.candidates if each.backend == name)


# --- the budget -------------------------------------------------------------------------------------------------------


def test_what_is_compiled_once_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """No budget limits it."""
    monkeypatch.setattr(rounds, "SAID_AFTER_S", 5.0)
    monkeypatch.setattr(registry, "backends", lambda: [Once(prepare_s=9.0)])
    tuner.run_trial(Request.of(PROBLEM), 60.0, waiting=True)
    assert len(found := warnings()) == 1
    assert "9 s compiled for this machine" in found[0]
    assert "BUDGET" not in found[0]


def test_not_tried_past_the_budget(alone: Alone) -> None:
    builder = Builder(first_s=15)
    alone(Builder(name="manual", call_s=0.2), builder)
    decision = measured(1.2)
    assert builder.calls == 0
    assert decision.choice == "manual"
    found = row(decision)
    assert found.status == "not_measured"
    assert found.reason == (
        "its first calls, the checks' too, take about 45 s more than later ones, with 1 s of the budget left: "
        "`attn-dispatch profile --full` measures it"
    )


def test_the_least_work_is_tried_first(alone: Alone) -> None:
    """After the static choice, candidates run by increasing work, so that slow ones do not use up the budget."""
    tried: list[str] = []
    alone(*(Worker(name=name, work=n, tried=tried) for name, n in {"static": 1000, "heavy": 900, "light": 300}.items()))
    decision = measured(60.0)
    assert list(dict.fromkeys(tried)) == ["static", "light", "heavy"]
    assert [each.backend for each in decision.candidates] == ["static", "heavy", "light"]


@pytest.mark.parametrize(
    ("work", "budget_s", "choice"),
    [(1000, 2.0, "second"), (1999, 2.0, "second"), (2001, 2.0, "first"), (1000, 0.0, "first")],
)
def test_a_budget_that_the_first_candidate_spends(work: int, budget_s: float, choice: str, alone: Alone) -> None:
    """One more candidate is tried, unless its work says that it is slower or the budget is 0; the third is left out."""
    alone(
        Worker(name="first", work=1000, call_s=3.0),
        Worker(name="second", work=work, call_s=0.05),
        third := Worker(name="third", work=2 * work),
    )
    decision = measured(budget_s)
    assert decision.choice == choice
    assert third.calls == 0
    assert row(decision, "third").reason.endswith("s of the budget left")


@pytest.mark.parametrize("attempts", [0, 2])
def test_the_race_of_an_open_decision_gets_more_time(
    attempts: int, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that rounds were too few to tell."""
    alone(Builder(name="first"), Builder(name="second"))
    given: list[float] = []
    run = Race.run

    def noted(race: Race, example: Any, remaining_s: float, *, brief: bool) -> Any:
        given.append(remaining_s)
        return run(race, example, remaining_s, brief=brief)

    monkeypatch.setattr(Race, "run", noted)
    monkeypatch.setattr(tuner, "WAITING", tuner.WAITING._replace(fixed_s=0.0, calls=0))
    prior = msgspec.structs.replace(measured(None), attempts=attempts)
    assert tuner.run_trial(Request.of(PROBLEM), None, waiting=True, prior=prior) is not None
    assert given[1] == pytest.approx((1 + attempts) * (tuner.WAITING.race_s + tuner.WAITING.race_calls * CALL_S))


def test_prepare_is_not_in_the_budget(alone: Alone) -> None:
    first, last = Once(name="first", prepare_s=0.5), Once(name="last")
    alone(first, last)
    decision = measured(0.4)
    assert (first.preparations, last.preparations) == (1, 1)
    assert row(decision, "last").status in ("chosen", "slower", "tie")
    assert row(decision, "first").first_ms == pytest.approx(CALL_S * 1e3)


def test_checks_without_a_trial_prepare_first(alone: Alone) -> None:
    """Else compiling would be in the time of a call, and a slow compiler would be taken for a hang."""
    once, again = Once(name="once"), Once(name="again")
    alone(once, again)
    request = Request.of(PROBLEM)
    first, second = request.able
    assert passes_hard_cases(request, first.id, run=True)
    assert "prepare()" not in why_variant(request, second)
    assert (once.preparations, again.preparations) == (1, 1)


def test_a_failed_prepare_is_a_failure(alone: Alone) -> None:
    broken = Once(prepare_s=-1)
    alone(Builder(name="manual"), broken)
    decision = measured(None)
    assert decision.choice == "manual"
    assert (row(decision).status, row(decision).reason) == ("failed", "OSError: no compiler")
    assert broken.calls == 0


@pytest.mark.parametrize("budget_s", [None, 60.0])
def test_measured_if_the_budget_suffices(budget_s: float | None, alone: Alone) -> None:
    builder = Builder(first_s=15)
    alone(Builder(name="manual"), builder)
    assert row(measured(budget_s)).status in ("chosen", "slower", "tie")
    assert builder.calls > 2


# --- cleared tables ---------------------------------------------------------------------------------------------------


def test_only_tables_of_slower_candidates_are_cleared(alone: Alone) -> None:
    winner, loser = Builder(name="winner"), Builder(name="loser", sleep_s=0.02, call_s=0.01)
    alone(winner, loser)
    assert measured(None).choice == "winner"
    assert (dropped(winner), dropped(loser)) == ([], [PROBLEM])


def test_peak_memory_excludes_compilation(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU peak memory is that of the process, so that of the second call counts, which short calls have too."""
    peaks = iter([999, 1000, 777_777, 2000])
    monkeypatch.setattr("attn_dispatch.machine.memory.peak_bytes", lambda call, device: (call(), next(peaks)))
    alone(Builder(name="manual"), Builder(first_s=0.001))
    decision = measured(None)
    assert (row(decision, "manual").peak_bytes, row(decision).peak_bytes) == (1000, 2000)


def test_one_time_work_does_not_count_for_the_rate(alone: Alone) -> None:
    """The next candidate is compared with later calls of the previous one: forty of those fit the budget."""
    first, other = Builder(name="first", first_s=15, sleep_s=0.3), Builder(name="other")
    first.flops, other.flops = lambda problem: 1000, lambda problem: 40_000
    alone(first, other)
    decision = measured(3.0)
    assert row(decision, "first").first_ms == pytest.approx(301)
    assert row(decision, "other").median_ms is not None


@pytest.mark.parametrize(("work", "first"), [(8_000, "short"), (2_000, "long")])
def test_a_candidate_with_far_less_work_runs_before_the_static_choice(work: int, first: str, alone: Alone) -> None:
    tried: list[str] = []
    alone(Worker(name="long", work=work, tried=tried), Worker(name="short", work=1000, tried=tried))
    measured(0.5)
    assert tried[0] == first


def test_who_wins_most_often_is_tried_second(alone: Alone) -> None:
    """Whatever memory and work, where they are about the same: there may be no time for a third."""
    tried: list[str] = []
    work = {"sdpa": 1000, "other": 1000, "native": 1100}
    alone(*(Worker(name=name, work=each, tried=tried) for name, each in work.items()))
    measured(0.5)
    assert list(dict.fromkeys(tried)) == ["sdpa", "native", "other"]


@pytest.mark.parametrize(("name", "work"), [("other", 4000), ("tiles", 1000)])
def test_what_is_surely_slower_is_not_tried_while_others_are_to_be_compared(name: str, work: int, alone: Alone) -> None:
    """By far more work, or as much by the products of PyTorch one by one."""
    alone(
        *(Worker(name=name, work=1000, call_s=0.05) for name in ("sdpa", "native")),
        far := Worker(name=name, work=work),
    )
    decision = measured(0.4)
    assert far.calls == 0
    assert row(decision, name).reason.endswith("s left of the budget are needed to compare the others")
    measured(15.0)
    assert far.calls, "with a budget for all, it is"


@pytest.mark.parametrize(("place", "call_s"), [(0, 0.2), (2, 0.4)])
def test_the_slowest_are_skipped_if_the_budget_is_short(place: int, call_s: float, alone: Alone) -> None:
    """The close candidates get the rounds; those far slower in the checked call get none."""
    fast, close, far = (
        Builder(name="fast", call_s=0.02),
        Builder(name="close", call_s=0.03),
        Builder(name="far", call_s=call_s),
    )
    alone(*(order := [close, fast])[:place], far, *order[place:])
    decision = measured(2.5)
    assert decision.choice == "fast"
    assert (row(decision, "far").status, row(decision, "far").median_ms) == ("not_measured", None)
    assert "times as long as the fastest's, and the budget was short" in row(decision, "far").reason
    assert far.calls <= 2 + COMPILED_CASES + 2
    assert min(row(decision, name).rounds or 0 for name in ("fast", "close")) >= 5


# --- how it is shown --------------------------------------------------------------------------------------------------


def test_a_slow_first_call_is_shown(alone: Alone) -> None:
    alone(Builder(sleep_s=0.3))
    decision = measured(None)
    explanation = Explanation.of(decision)
    (report,) = explanation.candidates
    assert report.first_ms == row(decision).first_ms == pytest.approx(301)
    assert str(explanation).splitlines()[-1].split("   ")[-1].startswith("chosen: first call ")
    assert explanation.to_dict()["candidates"][0]["first_ms"] == report.first_ms


@pytest.mark.parametrize(
    ("call_ms", "ratio", "is_open"), [(2.0, 1.7, True), (2.0, 3.1, False), (80.0, 1.7, False), (80.0, 1.4, True)]
)
def test_one_time_work_of_short_calls_settles_nothing(call_ms: float, ratio: float, is_open: bool) -> None:
    called: Any = (None, Admitted(call_ms, call_ms, None, 0.0))
    race = Race(Request.of(PROBLEM), {"a": called, "b": called}, "a")
    race.rounds = Rounds({}, {}, {"b": ratio, "wrong": 1.2}, 1)
    assert race.why_provisional() == ("too few rounds to compare it with b" if is_open else "")
