"""Decisions of other machines, imported or shipped: used once a few calls here have confirmed them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attn_dispatch import attend, cli, explain, profile
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import folder
from attn_dispatch.store.bundle import write_bundle
from attn_dispatch.store.decision import Decision, Row, encode
from attn_dispatch.store.folder import Store
from tests.support.calls import counted, later, qkv
from tests.support.ordered import stored
from tests.support.planted import Fault, right, wrong_out
from tests.support.timed import Machine, row


@pytest.fixture
def installed(little_time: None, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Three backends, "a" the static choice; nothing is stored."""
    return Machine(monkeypatch, a=4, b=6, c=7)


def elsewhere(installed: Machine, choice: str, length: int = 16, **times_ms: float) -> Decision:
    """What a machine of this silicon decided where these were its times; nothing of it is left here."""
    here = {name: backend.takes_s for name, backend in installed.by_name.items()}
    for name, ms in times_ms.items():
        installed.by_name[name].takes_s = ms / 1e3
    attend(*qkv(length))
    found = stored()
    assert found.choice == choice
    for name, seconds in here.items():
        installed.by_name[name].takes_s = seconds
    Store(cache_folder()).path(*found.address).unlink()
    (cache_folder() / "passed" / f"{found.silicon}.txt").unlink()
    installed.restart(knows_nothing=True)
    return found


def give(decision: Decision, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(write_bundle([decision]))
    assert cli.main(["import", str(path)]) == 0


def give_b(installed: Machine, tmp_path: Path, takes_ms: float = 1, fault: Fault = right, version: str = "1") -> None:
    """A decision for "b", measured there with a version, and what it takes here."""
    given = elsewhere(installed, "b", b=1)
    installed.add("b", takes_ms, fault=fault)
    give(replace(given, candidates=tuple(replace(each, version=version) for each in given.candidates)), tmp_path)


def ship(decision: Decision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{decision.silicon}.json").write_bytes(write_bundle([decision]))
    monkeypatch.setattr(folder, "package_files", lambda name: tmp_path)
    folder.shipped.cache_clear()


def test_one_that_holds_is_used_after_a_few_calls(
    installed: Machine, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    give_b(installed, tmp_path)
    assert explain(*qkv()).source == "imported"
    assert "imported, not yet checked here" in str(explain(*qkv()))
    attend(*qkv())
    assert counted(imported=1)
    assert (explain(*qkv()).choice, explain(*qkv()).unchecked) == ("b", False)
    assert installed.by_name["c"].calls == 0
    assert installed.by_name["a"].calls <= 10
    assert warnings() == []


def test_no_later_process_checks_again(installed: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    give_b(installed, tmp_path)
    attend(*qkv())
    installed.restart(knows_nothing=True)
    caplog.set_level(logging.INFO, "attn_dispatch")
    attend(*qkv())
    assert counted(imported=1)
    assert "b in natural order (imported)" in caplog.text
    assert {name: backend.calls for name, backend in installed.by_name.items()} == {"a": 0, "b": 1, "c": 0}
    assert stored().origin == "imported"


@pytest.mark.parametrize("how", ["imported", "shipped"])
def test_a_slower_one_is_measured_instead(
    how: str, installed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    given = elsewhere(installed, "c", c=1)
    if how == "imported":
        give(given, tmp_path)
    else:
        ship(given, tmp_path, monkeypatch)
    attend(*qkv())
    assert counted(measured=1)
    assert explain(*qkv()).choice == "a"
    assert (stored().choice, stored().origin, row("c").origin) == ("a", "", "")
    assert any("not believed" in text and "1.75 times the time of a here" in text for text in warnings())
    installed.restart(knows_nothing=True)
    attend(*qkv())
    assert counted(loaded=1)
    assert installed.called() == set()


def test_within_a_tenth_it_is_believed(installed: Machine, tmp_path: Path) -> None:
    give_b(installed, tmp_path, 4.3)
    attend(*qkv())
    assert counted(imported=1)


def test_a_slow_first_call_is_not_what_counts(
    installed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_b(installed, tmp_path, 4)
    backend, run = installed.by_name["b"], installed.by_name["b"].run

    def first_slow(*tensors: Any, **masks: Any) -> Any:
        backend.takes_s = 4e-3 if backend.calls else 12e-3
        return run(*tensors, **masks)

    monkeypatch.setattr(backend, "run", first_slow)
    attend(*qkv())
    assert counted(imported=1)
    assert backend.calls > 2


def test_the_static_choice_runs_the_hard_cases_alone(installed: Machine, tmp_path: Path) -> None:
    give(elsewhere(installed, "a"), tmp_path)
    attend(*qkv())
    assert counted(imported=1)
    assert installed.called() == {"a"}
    assert sum(problem.q_len == 16 for problem in installed.by_name["a"].seen) <= 1


def test_wrong_results_are_found(installed: Machine, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    give_b(installed, tmp_path, fault=wrong_out)
    attend(*qkv())
    assert explain(*qkv()).choice == "a"
    assert row("b").status in ("incorrect", "quarantined")
    assert any("not believed" in text for text in warnings())


def test_a_shipped_one_that_holds(installed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = elsewhere(installed, "b", b=1)
    installed.add("b", 1)
    ship(given, tmp_path, monkeypatch)
    assert "shipped, not yet checked here" in str(explain(*qkv()))
    attend(*qkv())
    assert counted(shipped=1)
    installed.restart(knows_nothing=True)
    folder.shipped.cache_clear()
    attend(*qkv())
    assert counted(shipped=1)
    assert installed.called() == set()


@pytest.mark.parametrize("mode", ["locked", "predict"])
def test_modes_that_never_time_use_it_as_it_is(
    mode: str, installed: Machine, tmp_path: Path, set_mode: Callable[[str], None]
) -> None:
    give(elsewhere(installed, "c", c=1), tmp_path)
    set_mode(mode)
    attend(*qkv())
    assert counted(imported=1)
    assert explain(*qkv()).choice == "c"
    assert explain(*qkv()).unchecked
    assert installed.called() == set()


def test_no_time_for_a_check(installed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be checked is not used."""
    give(elsewhere(installed, "c", c=1), tmp_path)
    monkeypatch.setenv("ATTN_DISPATCH_TRIAL_SECONDS", "0")
    attend(*qkv())
    assert counted(heuristic=1)
    assert explain(*qkv()).choice == "a"


def test_versions_that_another_machine_measured_with(installed: Machine, tmp_path: Path) -> None:
    """They say which compiler it had, too. What a later version here does is checked again."""
    give_b(installed, tmp_path, version="0")
    attend(*qkv())
    assert counted(imported=1)
    installed.restart(knows_nothing=True)
    attend(*qkv())
    assert counted(imported=1)
    assert installed.called() == set()
    installed.restart(knows_nothing=True)
    installed.add("b", 9, "2")
    attend(*qkv())
    assert counted(measured=1)
    assert explain(*qkv()).choice == "a"


def test_what_failed_on_another_machine_is_not_tried_first(installed: Machine, tmp_path: Path) -> None:
    given = elsewhere(installed, "b", b=1)
    installed.add("b", 1)
    failed = {"status": "failed", "median_ms": None, "measured": "2020-01-01T00:00:00+00:00"}
    rows = tuple(replace(each, **failed) if each.backend == "c" else each for each in given.candidates)
    give(replace(given, candidates=rows), tmp_path)
    attend(*qkv())
    assert counted(imported=1)
    assert installed.by_name["c"].calls == 0


def test_predictions_do_not_rest_on_what_is_unconfirmed(
    installed: Machine, tmp_path: Path, set_mode: Callable[[str], None]
) -> None:
    """A forged length must not decide its neighbours."""
    give(elsewhere(installed, "c", c=1), tmp_path)
    attend(*qkv(17))
    assert counted(measured=1)
    assert explain(*qkv(17)).choice == "a"
    installed.restart(knows_nothing=True)
    set_mode("predict")
    assert explain(*qkv(18)).source == "learned"


def test_predictions_rest_on_what_is_confirmed(installed: Machine, tmp_path: Path) -> None:
    give_b(installed, tmp_path)
    attend(*qkv(300))  # reads the evidence
    attend(*qkv())
    attend(*qkv(17))
    assert counted(measured=1, imported=1, learned=1)
    assert explain(*qkv(17)).choice == "b"


def test_what_is_refuted_is_measured_though_its_neighbours_are_known(installed: Machine, tmp_path: Path) -> None:
    """A prediction would not be stored, and every process would check again."""
    given = elsewhere(installed, "c", c=1)
    attend(*qkv(17))
    give(given, tmp_path)
    installed.restart(knows_nothing=True)
    attend(*qkv())
    assert counted(measured=1)


def test_own_measurements_stay(installed: Machine, tmp_path: Path) -> None:
    given = elsewhere(installed, "c", c=1)
    attend(*qkv())
    own = encode(stored())
    rows = tuple(replace(each, measured=later()) for each in given.candidates)
    give(replace(given, created=later(), candidates=rows), tmp_path)
    assert encode(stored()) == own


def test_a_candidate_that_only_others_measured_is_measured(
    installed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of another machine in one's own decision keeps no candidate from its trial."""
    attend(*qkv())
    row_of_d = Row(backend="d", order="natural", status="slower", version="1", median_ms=99.0, measured=later())
    give(replace(stored(), candidates=(*stored().candidates, row_of_d)), tmp_path)
    assert (stored().origin, row("d").origin) == ("", "imported")
    installed.restart(knows_nothing=True)
    installed.add("d", 1)
    attend(*qkv())
    assert counted(measured=1)
    assert explain(*qkv()).choice == "d"


def test_profile_measures_it(installed: Machine, tmp_path: Path) -> None:
    give(elsewhere(installed, "c", c=1), tmp_path)
    (found,) = profile([Problem.of(*qkv())], budget_s=3.0, progress=False)
    assert (found.choice, found.source) == ("a", "measured")
    assert stored().origin == ""
