"""Peers beside attend(): calls against the formula, refusals and predictions; no library is installed for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_dispatch.spec.pattern import Dense, Dilated, Window
from tools.bench import peers
from tools.lib import peer_calls, peer_cells
from tools.lib.peer_calls import ATTEND, Asked, Cell

SMALL = {
    "dense causal": Asked(lambda tokens: Dense(is_causal=True), 2, (32, 64), (32,)),
    "window": Asked(lambda tokens: Window(7, 0), 2, (32,), (32,)),
    "LongNet": Asked(lambda tokens: Dilated((8, 16), (1, 2)), 2, (32,), (32,)),
}
BY_PYTORCH = {"dense causal": "SDPA", "window": "SDPA + mask", "LongNet": "SDPA + mask"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_calls, "PROBLEMS", SMALL)
    monkeypatch.setattr(peers, "PROBLEMS", SMALL)
    monkeypatch.setattr(peer_cells, "PROFILED_S", 0.2)
    monkeypatch.setattr(peer_cells, "ROUNDS_S", 0.01)


def asked(cell: Cell, **left_out: str) -> tuple[dict[str, Any], list[str]]:
    names: list[str] = []
    rows = peer_cells.rows_of(cell, [BY_PYTORCH[cell.name]], left_out, names.append)
    return {row["peer"]: row for row in rows}, names


def shown(found: dict[str, Any]) -> list[object]:
    return list(peers.tables({"rows": list(found.values()), "head_dim": 64, "versions": dict.fromkeys(found, "1")}))


@pytest.mark.full
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_a_cell_is_timed_and_held_to_the_formula(name: str, backward: bool) -> None:
    peer = BY_PYTORCH[name]
    found, names = asked(Cell(name, 32, "float32", backward))
    assert names == [ATTEND, peer]
    for row in found.values():
        assert not row["wrong"]
        assert 0 < row["error"] <= row["tolerance"]
        assert row["time"]["rounds"] >= 1
    assert found[ATTEND]["choice"]
    assert found[peer]["over_attend"]["low"] <= found[peer]["over_attend"]["median"]
    assert peer in str(shown(found))


@pytest.mark.usefixtures("small")
def test_a_wrong_result_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = peer_calls.mask_of
    monkeypatch.setattr(peer_calls, "mask_of", lambda problem: torch.ones_like(whole(problem)))
    found, _ = asked(Cell("window", 32, "float32", False))
    assert found["SDPA + mask"]["error"] > 0.01
    assert "out is off by" in found["SDPA + mask"]["wrong"][0]
    assert "WRONG: out is off by" in str(shown(found))
