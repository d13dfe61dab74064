"""What `profile --share` writes, and every file in profiles/."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import attn_dispatch
from attn_dispatch import cli, settings
from attn_dispatch.kernels.registry import BUILT_IN, LAST_RESORT
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import standard_problems
from attn_dispatch.store import folder
from attn_dispatch.store.address import Address
from attn_dispatch.store.bundle import read_bundle, shareable, write_bundle
from attn_dispatch.store.decision import Decision, Row, from_elsewhere
from attn_dispatch.store.folder import Store
from tests.support.entries import KEY, OTHER, WHOLE, decision
from tests.support.fakes import SILICON

CPU = "cpu-amd-epyc-avx512_bf16-2c-2t"
MOST_BYTES = 2 << 20
BACKENDS = (*BUILT_IN, LAST_RESORT)
PROFILES = sorted((Path(attn_dispatch.__file__).parent / "profiles").glob("*.json"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_file_can_be_shipped(path: Path) -> None:
    """Its decisions are readable, of its silicon and of their problems, and hold no more than `--share` writes."""
    content = path.read_bytes()
    assert len(content) <= MOST_BYTES
    found = read_bundle(content)
    assert found
    for each in found:
        assert isinstance(each, Decision), each
        assert each.silicon == path.stem
        assert shareable([each], BACKENDS)[0] == [each]
        problem = Problem.from_dict(each.problem, "cpu").to_dict() | {"device": each.problem["device"]}
        assert Address.of(problem, each.silicon) == each.address


def measured(median_ms: float = 1e3, where: str = CPU, **changes: Any) -> Decision:
    problem = standard_problems(torch.device("cpu"))[0].to_dict()
    row = Row(backend="sdpa", order="natural", status="chosen", version="1", median_ms=median_ms)
    other = Row(backend="flash", order="natural", status="failed", reason="no /home/someone/lib.so")
    plugged = Row(backend="mine", order="natural", status="slower", median_ms=2 * median_ms)
    values = {**Address.of(problem, where)._asdict(), "problem": problem, "title": "dense"}
    provenance = {"torch": "2", "name": "CPU", "platform": "Linux-6-someone", "host": "there"}
    rows = {"candidates": (row, other, plugged), "provenance": provenance}
    return decision(**{**rows, **values, **changes})


def test_what_is_shared_holds_nothing_personal() -> None:
    (found,), left_out = shareable([measured()], BACKENDS)
    assert left_out == {}
    text = write_bundle([found]).decode()
    assert not [word for word in ("someone", "host", "mine", "platform") if word in text]
    assert found.provenance == {"torch": "2", "name": "CPU"}
    assert [row.median_ms for row in found.candidates] == [1e3, None]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (measured(provisional="other programs took the cores"), "provisional"),
        (from_elsewhere(measured(), "imported"), "another machine"),
        (measured(source="shipped"), "another machine"),
        (measured(choice="mine", candidates=(Row(backend="mine", order="natural", status="chosen"),)), "plug-in"),
    ],
)
def test_what_is_not_shared(given: Decision, why: str) -> None:
    found, left_out = shareable([given, measured()], BACKENDS)
    assert len(found) == 1
    ((reason, count),) = left_out.items()
    assert why in reason
    assert count == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It measures nothing: what is stored is written, the rest counted."""
    here, path = silicon("cpu"), tmp_path / "shared.json"
    store = Store(settings.cache_folder())
    store.put(measured(where=here))
    store.put(measured(where="cpu-other-2c-2t"))
    assert cli.main(["profile", "--share", str(path), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shared"]["decisions"] == 1
    (found,) = read_bundle(path.read_bytes())
    assert isinstance(found, Decision)
    assert found.silicon == here
    store.put(measured(where=here, provisional="busy", created="2026-01-01T00:00:00+00:00"))
    path.unlink()
    assert cli.main(["profile", "--share", str(path), "--device", "cpu"]) == 1
    assert "can be shared: 1 provisional" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_standard_problems(device: str) -> None:
    found = standard_problems(torch.device(device, 0) if device == "cuda" else torch.device(device))
    lengths = sorted({each.q_len for each in found})
    assert all(longer == 2 * shorter for shorter, longer in pairwise(lengths))
    assert [each.q_len for each in found] == sorted(each.q_len for each in found)
    kinds = {(type(each.pattern).__name__, each.dtype, each.needs_grad) for each in found}
    assert len(kinds) == 4 * 3 * 2
    assert len({each.key(CPU) for each in found}) == len(found) == 30 * len(lengths) - (12 if device == "cpu" else 0)


# --- what the package ships -----------------------------------------------------------------------------------------


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


def test_a_shipped_decision_that_is_damaged(package: Path, warnings: Callable[[], list[str]]) -> None:
    content = write_bundle([decision(), decision(key=OTHER)]).replace(b"dense", b"dance", 1)
    (package / f"{SILICON}.json").write_bytes(content)
    assert list(folder.shipped(SILICON)) == [OTHER]
    (text,) = warnings()
    assert f"decision 1, key {KEY!r}" in text
    assert "checksum" in text
    (package / f"{SILICON}.json").write_bytes(WHOLE[:50])
    folder.shipped.cache_clear()
    assert folder.shipped(SILICON) == {}
    assert "ignored the shipped profile" in warnings()[-1]


def test_files_outside_the_package_are_not_read(package: Path) -> None:
    (package.parent / "secret.json").write_bytes(write_bundle([decision()]))
    assert folder.shipped("../secret") == {}
