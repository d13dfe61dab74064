"""What `profile --share` writes, and every file in profiles/."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_dispatch
from attn_dispatch import cli, settings
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.registry import BUILT_IN, LAST_RESORT
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import standard_problems
from attn_dispatch.store.address import Address
from attn_dispatch.store.bundle import Refused, read_bundle, shareable, write_bundle
from attn_dispatch.store.decision import Damaged, Decision, Drift, Row, from_elsewhere
from attn_dispatch.store.folder import Store
from tests.support.entries import decision

CPU = "cpu-amd-epyc-avx512_bf16-2c-2t"
MOST_BYTES = 2 << 20
BACKENDS = (*BUILT_IN, LAST_RESORT)
PROFILES = sorted((Path(attn_dispatch.__file__).parent / "profiles").glob("*.json"))


def faults(path: Path) -> list[str]:
    """Why a file cannot be shipped; empty if it can."""
    content = path.read_bytes()
    try:
        found = read_bundle(content)
    except Damaged as error:
        return [f"unreadable: {error}"]
    decisions = [each for each in found if isinstance(each, Decision)]
    why = [f"{each.what}: {each.reason}" for each in found if isinstance(each, Refused)]
    why += [f"{len(content)} bytes, over {MOST_BYTES}"] * (len(content) > MOST_BYTES)
    why += ["no decision"] * (not decisions)
    for each in decisions:
        why += [f"{each.key}: of {each.silicon}, not {path.stem}"] * (each.silicon != path.stem)
        why += [f"{each.key}: {reason}" for reason in shareable([each], BACKENDS).left_out]
        why += [f"{each.key}: holds more than --share writes"] * (
            shareable([each], BACKENDS).decisions not in ([], [each])
        )
        why += [f"{each.key}: not the key of its problem"] * (_address(each) != each.address)
    return why


def _address(decision: Decision) -> Address | None:
    try:
        return Address.of(Problem.from_dict(decision.problem, "cpu").to_dict() | {"device": decision.problem["device"]},
                          decision.silicon)  # fmt: skip
    except (InvalidInput, KeyError):
        return None


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_file_can_be_shipped(path: Path) -> None:
    assert faults(path) == []


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
        (measured(drift=Drift(median_ms=1.0, low_ms=1.0, high_ms=1.0, samples=9, seen="2025-01-01")), "drifted"),
        (measured(1e-6), "impossible"),
        (measured(choice="mine", candidates=(Row(backend="mine", order="natural", status="chosen"),)), "plug-in"),
    ],
)
def test_what_is_not_shared(given: Decision, why: str, tmp_path: Path) -> None:
    found, left_out = shareable([given, measured()], BACKENDS)
    assert len(found) == 1
    ((reason, count),) = left_out.items()
    assert why in reason
    assert count == 1
    path = tmp_path / f"{CPU}.json"
    path.write_bytes(write_bundle([given]))
    assert any(why in fault for fault in faults(path))


def test_faults_of_a_file(tmp_path: Path) -> None:
    good = shareable([measured()], BACKENDS).decisions[0]
    path = tmp_path / f"{CPU}.json"
    for content, fault in (
        (write_bundle([good]), None),
        (write_bundle([]), "no decision"),
        (write_bundle([good])[:-9], "unreadable"),
        (write_bundle([good]).replace(b"dense", b"dance"), "checksum"),
        (write_bundle([measured()]), "holds more"),
        (write_bundle([measured(where="cpu-other-2c-2t")]), "not cpu-amd"),
        (write_bundle([measured(key="f" * 20)]), "not the key"),
    ):
        path.write_bytes(content)
        assert (fault is None and faults(path) == []) or any(str(fault) in each for each in faults(path)), fault


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


@pytest.mark.parametrize(
    "arguments", [("--standard", "--causal"), ("--standard", "--from", "x"), ("--standard", "--thresholds")]
)
def test_standard_takes_no_problems(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *arguments]) == 2
    assert "--standard names the problems" in capsys.readouterr().err


def test_ranks_share_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["profile", "--quick", "--share", "x"]) == 2
    assert "--share" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_standard_problems(device: str) -> None:
    found = standard_problems(torch.device(device, 0) if device == "cuda" else torch.device(device))
    lengths = sorted({each.q_len for each in found})
    assert all(longer == 2 * shorter for shorter, longer in pairwise(lengths))
    assert [each.q_len for each in found] == sorted(each.q_len for each in found)
    kinds = {(type(each.pattern).__name__, each.dtype, each.needs_grad) for each in found}
    assert len(kinds) == 4 * 3 * 2
    assert len({each.key(CPU) for each in found}) == len(found) == 30 * len(lengths) - (12 if device == "cpu" else 0)
