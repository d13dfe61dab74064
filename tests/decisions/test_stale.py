"""Only changed candidates are measured again: upgraded, new and removed backends, and those skipped for time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from attn_dispatch import attend, explain, profile
from attn_dispatch.decisions import look_up
from attn_dispatch.errors import NotDecided
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.decision import Row
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request
from tests.support.calls import counted, forget, later, qkv, status
from tests.support.ordered import stored
from tests.support.timed import Machine, row

BUDGET_MS = 3000.0  #: that of `little_time`

pytestmark = pytest.mark.usefixtures("little_time")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Three backends with a measured decision, in a new process."""
    found = Machine(monkeypatch, a=4, b=6, c=7)
    attend(*qkv())
    assert stored().choice == "a"
    assert all(row.median_ms is not None for row in stored().candidates)
    found.restart()
    return found


def test_unchanged_candidates_are_not_measured(installed: Machine) -> None:
    attend(*qkv())
    assert counted(loaded=1)
    assert installed.called() == set()


def test_a_row_of_an_earlier_trial_is_compared_anew(installed: Machine) -> None:
    before = stored()
    rows = [replace(each, open=each.backend == "c") for each in before.candidates]
    assert Store(cache_folder()).put(replace(before, candidates=tuple(rows)))
    installed.restart()
    installed.add("b", 1, "2")
    attend(*qkv())
    assert installed.called() == {"a", "b"}
    assert (row("c").status, row("c").open, row("c").ratio) == ("slower", False, None)


def test_an_upgrade_that_is_faster(installed: Machine) -> None:
    before = row("c")
    installed.add("b", 1, "2")
    attend(*qkv())
    assert counted(measured=1)
    assert installed.called() == {"a", "b"}
    assert explain(*qkv()).choice == "b"
    assert (row("b").version, row("b").status) == ("2", "chosen")
    assert (row("c").measured, row("c").median_ms, row("c").status) == (before.measured, before.median_ms, "slower")


def test_an_upgrade_that_is_slower(installed: Machine) -> None:
    """The choice is outdated: it is measured again with the best of the others."""
    installed.add("a", 30, "2")
    attend(*qkv())
    assert installed.called() == {"a", "b"}
    assert explain(*qkv()).choice == "b"
    assert (row("a").version, row("a").status) == ("2", "slower")


def test_an_upgrade_that_the_environment_does_not_show(installed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another package's backend, in a folder whose time stays."""
    monkeypatch.setattr(look_up, "current_environment", lambda: stored().environment)
    installed.add("a", 30, "2")
    attend(*qkv())
    assert installed.called() == {"a", "b"}


def test_a_new_backend(installed: Machine) -> None:
    installed.add("d", 1)
    attend(*qkv())
    assert installed.called() == {"a", "d"}
    assert explain(*qkv()).choice == "d"
    assert {row.backend for row in stored().candidates} == {"a", "b", "c", "d"}


def test_a_removed_choice_is_replaced_from_the_stored_rows(installed: Machine) -> None:
    installed.remove("a")
    attend(*qkv())
    assert counted(loaded=1)
    assert installed.called() == {"b"}, "it lost the trial, so that it had not run the hard cases"
    assert explain(*qkv()).choice == "b"
    installed.restart()
    attend(*qkv())
    assert installed.called() == set(), "it has passed them"
    assert row("a").status == "chosen", "a process that still has the backend finds the decision unchanged"


def test_programs_with_different_plug_ins_measure_once_each(installed: Machine) -> None:
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


def test_stale_rows_are_priors_in_predict_mode(installed: Machine, set_mode: Callable[[str], None]) -> None:
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


def test_locked_with_another_version(installed: Machine, set_mode: Callable[[str], None]) -> None:
    set_mode("locked")
    installed.add("c", 7, "2")
    attend(*qkv())
    assert counted(loaded=1)
    forget()
    installed.add("a", 4, "2")
    with pytest.raises(NotDecided, match=r"the stored choice a cannot run now \(its version has changed\)"):
        attend(*qkv())


def test_locked_with_what_cannot_run(
    installed: Machine, set_mode: Callable[[str], None], warnings: Callable[[], list[str]]
) -> None:
    """What is missing is named, whether something else was measured or not."""
    set_mode("locked")
    installed.by_name["a"].missing = "needs a compass"
    attend(*qkv())
    assert "the stored choice a cannot run now (needs a compass), b runs instead: " in warnings()[-1]
    installed.restart()
    installed.by_name["b"].missing = installed.by_name["c"].missing = "lacks a map"
    with pytest.raises(NotDecided, match=r"the stored choice a cannot run now \(needs a compass\)"):
        attend(*qkv())


@pytest.mark.parametrize(
    ("need_ms", "budget_ms", "tried"),
    [(BUDGET_MS - 1, 1.0, True), (BUDGET_MS + 1, 1.0, False), (1.0, BUDGET_MS, False)],
)
def test_a_candidate_skipped_for_time(need_ms: float, budget_ms: float, tried: bool, installed: Machine) -> None:
    """It is measured as soon as the budget suffices, and not again in the same time."""
    skipped = Row(backend="b", order="natural", status="not_measured", version="1", need_ms=need_ms, measured=later())
    rows = tuple(skipped if row.backend == "b" else row for row in stored().candidates)
    Store(cache_folder()).put(replace(stored(), candidates=rows, created=later(), budget_ms=budget_ms))
    installed.add("b", 1)
    attend(*qkv())
    assert ("b" in installed.called()) == tried


def test_profile_measures_again_if_forced(installed: Machine) -> None:
    profile([Problem.of(*qkv())], budget_s=3.0, progress=False)
    assert installed.called() == set()
    profile([Problem.of(*qkv())], budget_s=3.0, progress=False, force=True)
    assert installed.called() == {"a", "b", "c"}


def test_another_environment_with_the_same_versions(installed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_within_a_process_only_profile_changes_a_decision(installed: Machine) -> None:
    attend(*qkv())
    installed.add("b", 1, "2")
    attend(*qkv())
    attend(*qkv()[:2], qkv()[2].clone().transpose(1, 2).contiguous().transpose(1, 2))  # another problem
    assert status(explain(*qkv()), "a") == "chosen"
    profile([Problem.of(*qkv())], budget_s=3.0, progress=False)
    assert explain(*qkv()).choice == "b"
