"""Decisions that come with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from attn_dispatch import settings
from attn_dispatch.decisions import look_up
from attn_dispatch.kernels import registry
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.spec.groups import group_of
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store import folder
from attn_dispatch.store.bundle import write_bundle
from attn_dispatch.store.decision import Decision, Row, from_elsewhere
from attn_dispatch.store.folder import Store
from attn_dispatch.tuning.candidates import Request
from tests.support.entries import KEY, OTHER, WHOLE, decision
from tests.support.fakes import SILICON


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which shipped profiles are looked for."""
    package = tmp_path / "profiles"
    package.mkdir()
    monkeypatch.setattr(folder, "package_files", lambda name: package)
    return package


def ship(package: Path, *decisions: Decision, silicon: str = SILICON) -> None:
    (package / f"{silicon}.json").write_bytes(write_bundle(decisions))


def test_shipped_decisions(package: Path) -> None:
    given = from_elsewhere(decision(source="shipped"), "shipped")
    ship(package, decision(), decision(key=OTHER), decision(silicon="cpu-other"))
    assert folder.shipped(SILICON) == {KEY: given, OTHER: replace(given, key=OTHER)}


def test_most_machines_have_no_shipped_profile(package: Path, warnings: Callable[[], list[str]]) -> None:
    assert folder.shipped(SILICON) == {}
    assert warnings() == []


def test_a_shipped_profile_of_a_later_schema(package: Path, warnings: Callable[[], list[str]]) -> None:
    content = write_bundle([decision()]).replace(b'{"schema":2,', b'{"schema":3,', 1)
    (package / f"{SILICON}.json").write_bytes(content)
    assert folder.shipped(SILICON) == {}
    (text,) = warnings()
    assert "schema 3" in text


def test_a_shipped_decision_that_is_damaged(package: Path, warnings: Callable[[], list[str]]) -> None:
    content = write_bundle([decision(), decision(key=OTHER)]).replace(b"dense", b"dance", 1)
    (package / f"{SILICON}.json").write_bytes(content)
    assert list(folder.shipped(SILICON)) == [OTHER]
    (text,) = warnings()
    assert f"decision 1, key {KEY!r}" in text
    assert "checksum" in text


def test_a_shipped_profile_that_is_damaged(package: Path, warnings: Callable[[], list[str]]) -> None:
    (package / f"{SILICON}.json").write_bytes(WHOLE[:50])
    for _ in range(2):
        assert folder.shipped(SILICON) == {}
        folder.shipped.cache_clear()
    (text,) = warnings()
    assert "ignored the shipped profile" in text


def test_files_outside_the_package_are_not_read(package: Path) -> None:
    (package.parent / "secret.json").write_bytes(write_bundle([decision()]))
    assert folder.shipped("../secret") == {}


def test_the_installed_package_is_searched() -> None:
    assert folder.shipped(SILICON) == {}


def rows(choice: str) -> tuple[Row, ...]:
    """Of every backend that there is now."""
    status = {choice: "chosen"}
    versions = {name: registry.version_of(registry.load(name)) for name in registry.names()}
    return tuple(
        Row(backend=name, order="natural", status=status.get(name, "not_measured"), version=versions[name])
        for name in versions
    )


def test_stored_decisions_take_precedence_over_shipped_ones(package: Path) -> None:
    x = torch.zeros(1, 8, 1, 4)
    problem = Problem.of(x, x, x)
    where = silicon(problem.device)
    common = {
        "key": problem.key(where),
        "silicon": where,
        "group": group_of(problem.to_dict()),
        "problem": problem.to_dict(),
    }
    ship(package, decision(choice="manual", candidates=rows("manual"), **common), silicon=where)
    found = look_up.read_stored(Request.of(problem))
    assert found is not None
    assert (found.choice, found.source) == ("manual", "shipped")
    Store(settings.cache_folder()).put(decision(choice="sdpa_mask", candidates=rows("sdpa_mask"), **common))
    found = look_up.read_stored(Request.of(problem))
    assert found is not None
    assert (found.choice, found.source) == ("sdpa_mask", "measured")
