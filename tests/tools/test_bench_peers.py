"""Peers beside attend(): calls against the formula, refusals and predictions; no library is installed for it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_dispatch.spec.pattern import Dense, Dilated, Window
from tests.support import processes
from tools.bench import peers
from tools.lib import peer_calls
from tools.lib.peer_calls import ATTEND, PEERS, Asked, Cell

SMALL = {
    "dense causal": Asked(lambda tokens: Dense(is_causal=True), 2, (32, 64), (32,)),
    "window": Asked(lambda tokens: Window(7, 0), 2, (32,), (32,)),
    "LongNet": Asked(lambda tokens: Dilated((8, 16), (1, 2)), 2, (32,), (32,)),
}
BY_PYTORCH = {"dense causal": "SDPA", "window": "SDPA + mask", "LongNet": "SDPA + mask"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_calls, "PROBLEMS", SMALL)
    monkeypatch.setattr(peers, "PROFILED_S", 0.2)
    monkeypatch.setattr(peers, "ROUNDS_S", 0.01)


def asked(cell: Cell) -> tuple[dict[str, Any], list[str]]:
    names: list[str] = []
    others = {peer.name for peer in PEERS} - {ATTEND, BY_PYTORCH[cell.name]}
    rows = peers.rows_of(cell, dict.fromkeys(others, "not asked"), names.append)
    return {row["peer"]: row for row in rows if row.get("reason") != "not asked"}, names


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


def end(cell: Cell, reasons: dict[str, str], send: Any) -> None:
    """As a peer whose call ends the process, and one whose call does not end."""
    for name in ("SDPA", "FlexAttention"):
        if name not in reasons:
            send(name)
            os._exit(3) if name == "SDPA" else time.sleep(600)
    send([{"reasons": reasons}])


@pytest.mark.full
def test_a_peer_that_ends_the_process_or_does_not_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "answer", end)
    monkeypatch.setattr(peers, "get_context", lambda _: processes.context())
    # When the process begins, and whenever its next message is awaited.
    awaited = [0, 0, 0, 0, 0, peers.CELL_S, 0, 0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=iter(awaited).__next__))
    (found,) = peers.measured(Cell("window", 32, "float32", False), {})
    ended = {"SDPA": "the process ended with 3", "FlexAttention": "the process ended after 150 s"}
    assert found == {"reasons": ended}
