"""Decisions that come with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attn_dispatch import candidates, store, stored
from attn_dispatch.bundle import write_bundle
from attn_dispatch.group import group_of
from attn_dispatch.machine import silicon
from attn_dispatch.problem import Problem
from attn_dispatch.store import Decision, Row, Store
from tests.entries import KEY, OTHER, WHOLE, decision
from tests.fakes import SILICON


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which shipped profiles are looked for."""
    package = tmp_path / "profiles"
    package.mkdir()
    monkeypatch.setattr(store, "package_files", lambda name: package)
    return package


def ship(package: Path, *decisions: Decision, silicon: str = SILICON) -> None:
    (package / f"{silicon}.json").write_bytes(write_bundle(decisions))


def test_shipped_decisions(package: Path) -> None:
    given = decision(source="shipped")
    ship(package, given, decision(key=OTHER), decision(silicon="cpu-other"))
    assert store.shipped(SILICON) == {KEY: given, OTHER: decision(key=OTHER, source="shipped")}


def test_nothing_is_shipped_for_most(package: Path, warnings: Callable[[], list[str]]) -> None:
    assert store.shipped(SILICON) == {}
    assert warnings() == []


def test_a_shipped_profile_of_a_later_schema(package: Path, warnings: Callable[[], list[str]]) -> None:
    content = write_bundle([decision()]).replace(b'{"schema":2,', b'{"schema":3,', 1)
    (package / f"{SILICON}.json").write_bytes(content)
    assert store.shipped(SILICON) == {}
    (text,) = warnings()
    assert "schema 3" in text


def test_a_shipped_decision_that_is_damaged(package: Path, warnings: Callable[[], list[str]]) -> None:
    content = write_bundle([decision(), decision(key=OTHER)]).replace(b"dense", b"dance", 1)
    (package / f"{SILICON}.json").write_bytes(content)
    assert list(store.shipped(SILICON)) == [OTHER]
    (text,) = warnings()
    assert f"decision 1, key {KEY!r}" in text
    assert "checksum" in text


def test_a_shipped_profile_that_is_damaged(package: Path, warnings: Callable[[], list[str]]) -> None:
    (package / f"{SILICON}.json").write_bytes(WHOLE[:50])
    for _ in range(2):
        assert store.shipped(SILICON) == {}
        store.shipped.cache_clear()
    (text,) = warnings()
    assert "ignored the shipped profile" in text


def test_only_profiles_are_shipped(package: Path) -> None:
    (package.parent / "secret.json").write_bytes(write_bundle([decision()]))
    assert store.shipped("../secret") == {}


def test_the_real_package_is_looked_into() -> None:
    assert store.shipped(SILICON) == {}


def rows(choice: str) -> tuple[Row, ...]:
    """Of every backend that there is now."""
    versions = candidates.versions().items()
    status = {choice: "chosen"}
    return tuple(
        Row(backend=name, order="natural", status=status.get(name, "not_measured"), version=version)
        for name, version in versions
    )


def test_shipped_decisions_lie_beneath_the_users(package: Path) -> None:
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
    found = stored.read(problem)
    assert found is not None
    assert (found.choice, found.source) == ("manual", "shipped")
    Store(store.cache_folder()).put(decision(choice="sdpa_mask", candidates=rows("sdpa_mask"), **common))
    found = stored.read(problem)
    assert found is not None
    assert (found.choice, found.source) == ("sdpa_mask", "measured")
