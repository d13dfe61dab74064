"""What the figures over many ranks are made of: counts against the definition, checks and faults that can fail."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_dispatch.ring.rows import traffic
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.spec.pattern import Dense, Dilated
from tools.bench import ring, ring_reports
from tools.checks import ring_faults
from tools.docs import ring_tables
from tools.lib import ring_counts
from tools.lib.ranks import Drawn, Tokens, checked, drawn, errors

PATTERNS = (ring_counts.shrunk(ring_counts.LONGNET), ring_counts.shrunk(ring_counts.WIDE), Dilated((60, 200), (7, 9)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_needed_rows_are_those_of_the_multiplicity(pattern: Dilated) -> None:
    tokens = 500
    for (run,) in Layout(deal(tokens, 3)).chunks:
        by_pairs = ring_counts.needed_by_pairs(pattern, tokens, torch.arange(run.start, run.stop))
        assert torch.equal(ring_counts.needed(pattern, tokens, run), by_pairs)


def test_shipped_is_held_against_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ring_counts.counted(PATTERNS[1], 4, 4096)
    assert found["shipped_bytes"] == found["needed_bytes"] > 0
    real = traffic.traffic_of

    def one_row_more(*arguments: object) -> traffic.Traffic:
        whole = real(*arguments)
        more = {peer: (replace(rows[0], local=rows[0].local[:-1]), *rows[1:]) for peer, rows in whole.receives.items()}
        return replace(whole, receives=more)

    one_row_more.cache_clear = real.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setattr(traffic, "traffic_of", one_row_more)
    with pytest.raises(RuntimeError, match="rows received"):
        ring_counts.counted(PATTERNS[1], 4, 4096)


@pytest.mark.parametrize(
    "pattern", [Dense(is_causal=True), ring_counts.causal(PATTERNS[0]), ring_counts.causal(PATTERNS[1])]
)
def test_pairs_are_those_of_the_multiplicity(pattern: Dense | Dilated) -> None:
    seen = pattern.multiplicity(300, heads=ring_counts.HEADS).expand(ring_counts.HEADS, -1, -1)
    assert torch.equal(ring_counts.pairs(pattern, 300), seen.sum((0, 2)))


def test_rows_drawn_must_be_right_and_all_there() -> None:
    layout, pattern = Layout(deal(90, 3), "zigzag"), Dilated((30, 45), (2, 3))
    tokens = Tokens(layout, 2, 8, torch.float32)
    q, k, v = (x.double() for x in tokens.whole())
    counts = pattern.multiplicity(90, heads=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5 + counts.double().log()
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), v).float()
    draws = drawn(pattern, tokens, 2)
    shards = [out[:, positions_of(layout, rank)] for rank in range(3)]
    found = [errors(shard, layout, rank, draws) for rank, shard in enumerate(shards)]
    assert checked(found, draws)["rows_of_heads"] == 180
    with pytest.raises(RuntimeError, match="are not its"):
        checked(found[1:], draws)
    with pytest.raises(RuntimeError, match="out is off by"):
        checked([errors(shards[0] + 1e-3, layout, 0, draws), *found[1:]], draws)
    worse = [Drawn(one.rows, one.heads, one.value, float("nan")) for one in draws]
    with pytest.raises(RuntimeError, match="out is off by"):
        checked(found, worse)


def test_faults_are_of_every_kind_and_repeatable() -> None:
    found = ring_faults.faults(200, 0)
    assert len(found) == 200
    assert found == ring_faults.faults(200, 0) != ring_faults.faults(200, 1)
    assert {one.kind for one in found} == ring_faults.SHARES.keys() == ring_tables.FAULTS.keys()
    assert {one.what for one in found if one.kind == "mismatch"} == set(ring_faults.MISMATCHES)
    assert {one.late for one in found if one.kind in ("memory", "exception")} == {True, False}


RIGHT = ("right", "")


@pytest.mark.parametrize(
    ("kind", "answers", "what"),
    [
        ("none", [RIGHT, ("wrong", "dk off by 1"), RIGHT], "wrong"),
        ("kill", [("dead", ""), ("silent", ""), RIGHT], "hang"),
        ("kill", [("raised", "RankLost"), ("dead", ""), RIGHT], "died: rank 1"),
        ("mismatch", [("raised", "InvalidInput"), RIGHT, ("raised", "GroupMismatch")], "wrong"),
        ("pause", [RIGHT, ("raised", "RankLost"), RIGHT], "should be right"),
        ("stop", [RIGHT, ("raised", "TypeError"), RIGHT], "should be RankLost"),
        ("kill", [("dead", ""), ("raised", "RankLost"), RIGHT], ""),
        ("memory", [("raised", "BackendFailed"), ("not a number", "dk"), RIGHT], ""),
    ],
)
def test_unexpected_outcomes_are_detected(kind: str, answers: list[tuple[str, str]], what: str) -> None:
    found = ring_faults.unexpected(ring_faults.Fault(kind, 0, victim=0), answers)
    assert found.startswith(what)
    assert bool(found) == bool(what)


def test_each_part_has_its_tables() -> None:
    assert ring_tables.MADE.keys() == set(ring.PARTS)


def test_tables_of_traffic_that_needs_no_bytes() -> None:
    one = {"pattern": "P", "ranks": 8, "shipped_bytes": 0, "needed_bytes": 0, "most_received_bytes": 0}
    (found,) = ring_tables.traffic([{**one, "shipped_over_needed": None, "share_of_dense_ring": 0.0}])
    assert "nothing needed" in found[1][1]
    text = ring_tables.markdown({"overlap": {"found": {"skipped": "there is no tc"}}})
    assert text.endswith("Overlap was not measured: there is no tc.")


def test_ring_reports_without_options_measure_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As --full runs them."""
    lengths: list[tuple[int, ...]] = []

    def all_of_them(given: tuple[int, ...]) -> list[dict[str, object]]:
        lengths.append(given)
        return []

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ring_reports, "all_of_them", all_of_them)
    monkeypatch.setattr(ring_reports, "again", lambda found: [])
    monkeypatch.setattr(sys, "argv", ["ring_reports", "-o", str(tmp_path / "found.json")])
    ring_reports.main()
    assert lengths == [ring_reports.LENGTHS]
    assert json.loads((tmp_path / "found.json").read_text())["runs"] == []
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        ring_reports.main()
