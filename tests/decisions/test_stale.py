"""Only changed candidates are measured again: upgraded, new and removed backends, and those skipped for time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attn_dispatch import attend, explain, profile
from attn_dispatch.decisions import look_up
from attn_dispatch.errors import NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.decision import Drift, Row
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request
from tests.support import virtual_clock
from tests.support.calls import counted, forget, later, qkv, status
from tests.support.ordered import stored
from tests.support.planted import Planted
from tests.support.virtual_clock import VirtualClock

MS = 1e-3
BUDGET_MS = 3000.0  #: that of `little_time`


pytestmark = pytest.mark.usefixtures("little_time")


@dataclass
class TimedBackend(Planted):
    """The reference backend, whose calls take `takes_s` on a virtual clock."""

    takes_s: float = 0.0
    clock: VirtualClock = field(default_factory=VirtualClock)
    missing: str = ""

    def refusals(self, problem: Problem) -> list[Refusal]:
        return [Refusal("not_installed", self.missing)] * bool(self.missing)

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Any:
        self.clock.sleep(self.takes_s)
        return super().run(q, k, v, problem, **tensors)


class Installed:
    """A registry of planted backends that are added, removed and upgraded; `restart` simulates a new process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_name: dict[str, TimedBackend] = {}
        self.clock = VirtualClock()
        virtual_clock.install(self.clock, monkeypatch)
        monkeypatch.setattr(registry, "names", lambda: tuple(self.by_name))
        for name, takes_ms in (("a", 4), ("b", 6), ("c", 7)):
            self.add(name, takes_ms)

    def add(self, name: str, takes_ms: float, edition: str = "1") -> None:
        registry._added.pop(name, None)
        backend = TimedBackend(name=name, edition=edition, takes_s=takes_ms * MS, clock=self.clock)
        registry._added[name] = self.by_name[name] = backend

    def remove(self, name: str) -> None:
        del registry._added[name], self.by_name[name]

    def restart(self) -> None:
        forget()
        for backend in self.by_name.values():
            backend.calls = 0

    def called(self) -> set[str]:
        return {name for name, backend in self.by_name.items() if backend.calls > 1}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Three backends with a measured decision, in a new process."""
    found = Installed(monkeypatch)
    attend(*qkv())
    assert stored().choice == "a"
    assert all(row.median_ms is not None for row in stored().candidates)
    found.restart()
    return found


def row(name: str) -> Row:
    return next(row for row in stored().candidates if row.backend == name)


def test_unchanged_candidates_are_not_measured(installed: Installed) -> None:
    attend(*qkv())
    assert counted(loaded=1)
    assert installed.called() == set()


def test_a_row_of_an_earlier_trial_is_compared_anew(installed: Installed) -> None:
    before = stored()
    rows = [msgspec.structs.replace(each, open=each.backend == "c") for each in before.candidates]
    assert Store(cache_folder()).put(msgspec.structs.replace(before, candidates=tuple(rows)))
    installed.restart()
    installed.add("b", 1, "2")
    attend(*qkv())
    assert installed.called() == {"a", "b"}
    assert (row("c").status, row("c").open, row("c").ratio) == ("slower", False, None)


def test_an_upgrade_that_is_faster(installed: Installed) -> None:
    before = row("c")
    installed.add("b", 1, "2")
    attend(*qkv())
    assert counted(measured=1)
    assert installed.called() == {"a", "b"}
    assert explain(*qkv()).choice == "b"
    assert (row("b").version, row("b").status) == ("2", "chosen")
    assert (row("c").measured, row("c").median_ms, row("c").status) == (before.measured, before.median_ms, "slower")


def test_an_upgrade_that_is_slower(installed: Installed) -> None:
    """The choice is outdated: it is measured again with the best of the others."""
    installed.add("a", 30, "2")
    attend(*qkv())
    assert installed.called() == {"a", "b"}
    assert explain(*qkv()).choice == "b"
    assert (row("a").version, row("a").status) == ("2", "slower")


def test_an_upgrade_that_the_environment_does_not_show(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another package's backend, in a folder whose time stays."""
    monkeypatch.setattr(look_up, "current_environment", lambda: stored().environment)
    installed.add("a", 30, "2")
    attend(*qkv())
    assert installed.called() == {"a", "b"}


def test_a_new_backend(installed: Installed) -> None:
    installed.add("d", 1)
    attend(*qkv())
    assert installed.called() == {"a", "d"}
    assert explain(*qkv()).choice == "d"
    assert {row.backend for row in stored().candidates} == {"a", "b", "c", "d"}


def test_a_removed_choice_is_replaced_from_the_stored_rows(installed: Installed) -> None:
    installed.remove("a")
    attend(*qkv())
    assert counted(loaded=1)
    assert installed.called() == {"b"}, "it lost the trial, so that it had not run the hard cases"
    assert explain(*qkv()).choice == "b"
    installed.restart()
    attend(*qkv())
    assert installed.called() == set(), "it has passed them"
    assert row("a").status == "chosen", "a process that still has the backend finds the decision unchanged"


def test_programs_with_different_plug_ins_measure_once_each(installed: Installed) -> None:
    """Each program adds its row to the decision once."""
    installed.remove("c")
    installed.add("d", 16)
    attend(*qkv())
    assert counted(measured=1)
    for gone, there in (("d", "c"), ("c", "d")):
        installed.restart()
        installed.remove(gone)
        installed.add(there, 7)
        attend(*qkv())
        assert counted(loaded=1)


def test_stale_rows_are_priors_in_predict_mode(installed: Installed, set_mode: Callable[[str], None]) -> None:
    set_mode("predict")
    installed.add("a", 4, "2")
    installed.add("c", 7, "2")
    attend(*qkv())
    assert installed.called() == {"b"}, "for the hard cases"
    found = explain(*qkv())
    assert found.choice == "b", "the best of the rows that are valid now"
    reasons = {candidate.backend: candidate.reason for candidate in found.candidates}
    assert "measured with version 1, which has changed" in reasons["a"]
    assert "measured with version 1, which has changed" in reasons["c"]
    assert reasons["b"] == ""


def test_locked_with_another_version(installed: Installed, set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    installed.add("c", 7, "2")
    attend(*qkv())
    assert counted(loaded=1)
    forget()
    installed.add("a", 4, "2")
    with pytest.raises(NotDecided, match="the stored choice a has another version now: 2, not 1 for"):
        attend(*qkv())


def test_locked_with_what_cannot_run(
    installed: Installed, set_mode: Callable[[str], None], warnings: Callable[[], list[str]]
) -> None:
    """What is missing is named, whether something else was measured or not."""
    set_mode("locked")
    installed.by_name["a"].missing = "needs a compass"
    attend(*qkv())
    assert "the stored choice a cannot run now (needs a compass), b runs instead: " in warnings()[-1]
    installed.restart()
    installed.by_name["b"].missing = installed.by_name["c"].missing = "lacks a map"
    with pytest.raises(NotDecided, match=r"the stored choice a cannot run now \(needs a compass\), nor can another"):
        attend(*qkv())


@pytest.mark.parametrize(("need_ms", "tried"), [(BUDGET_MS - 1, True), (BUDGET_MS + 1, False)])
def test_a_candidate_skipped_for_time(need_ms: float, tried: bool, installed: Installed) -> None:
    """It is measured as soon as the budget suffices."""
    rows = tuple(
        Row(backend="b", order="natural", status="not_measured", version="1", need_ms=need_ms, measured=later())
        if row.backend == "b"
        else row
        for row in stored().candidates
    )
    Store(cache_folder()).put(msgspec.structs.replace(stored(), candidates=rows, created=later(), budget_ms=1.0))
    installed.add("b", 1)
    attend(*qkv())
    assert ("b" in installed.called()) == tried


def test_a_candidate_skipped_for_time_is_not_tried_again_in_the_same_time(installed: Installed) -> None:
    rows = tuple(
        Row(backend="b", order="natural", status="not_measured", version="1", need_ms=1.0, measured=later())
        if row.backend == "b"
        else row
        for row in stored().candidates
    )
    Store(cache_folder()).put(msgspec.structs.replace(stored(), candidates=rows, created=later(), budget_ms=BUDGET_MS))
    installed.add("b", 1)
    attend(*qkv())
    assert installed.called() == set()


def problem() -> Problem:
    return problem_of((1, 16, 2, 8), Dense(), torch.float32, torch.device("cpu"))


def test_profile_measures_drifted_and_forced_decisions(installed: Installed) -> None:
    profile([problem()], budget_s=3.0, progress=False)
    assert installed.called() == set()
    drift = Drift(median_ms=1.0, low_ms=0.9, high_ms=1.1, samples=25, seen=later())
    Store(cache_folder()).amend(stored(), drift=drift)
    installed.restart()
    profile([problem()], budget_s=3.0, progress=False)
    assert installed.called() == {"a", "b", "c"}
    assert stored().drift is None
    installed.restart()
    profile([problem()], budget_s=3.0, progress=False, force=True)
    assert installed.called() == {"a", "b", "c"}


def test_another_environment_with_the_same_versions(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates are compared once; then the decision is valid in the new environment."""
    monkeypatch.setenv("CUDA_HOME", "/elsewhere")
    before = stored().environment
    attend(*qkv())
    assert counted(loaded=1)
    assert stored().environment != before
    compared: list[object] = []
    monkeypatch.setattr(Request, "candidates", property(compared.append))
    installed.restart()
    attend(*qkv())
    assert counted(loaded=1)
    assert compared == []


def test_within_a_process_only_profile_changes_a_decision(installed: Installed) -> None:
    attend(*qkv())
    installed.add("b", 1, "2")
    attend(*qkv())
    attend(*qkv()[:2], qkv()[2].clone().transpose(1, 2).contiguous().transpose(1, 2))  # another problem
    assert status(explain(*qkv()), "a") == "chosen"
    profile([problem()], budget_s=3.0, progress=False)
    assert explain(*qkv()).choice == "b"
