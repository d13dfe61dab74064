"""What the early reports' experiments are made of: counts against the definition, checks that can fail, tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from attn_dispatch.kernels.tiles import tables
from attn_dispatch.spec.orders import HILBERT, NATURAL, permutation
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from tools.bench import reports
from tools.docs import report_tables
from tools.lib import cold, paired
from tools.lib.common import RESULTS

FOUND = json.loads((RESULTS / "reports.json").read_text())
PATTERNS: tuple[tuple[Pattern, int], ...] = (
    (Dilated((16, 32), (1, 2)), 61),
    (Dilated((16,), (4,)), 64),
    (Neighborhood((9, 7), (3,)), 63),
)


def counted(pattern: Pattern, tokens: int, order: str, tile: int) -> tuple[float, float]:
    """Key tiles, and keys, that a tile of queries sees, from the whole multiplicity."""
    at = permutation(order, pattern, tokens)
    at = torch.arange(tokens) if at is None else at
    seen = pattern.multiplicity(tokens, heads=paired.HEADS)[..., at, :][..., at] > 0
    rows = [some.any(-2) for some in torch.split(seen.expand(paired.HEADS, -1, -1), tile, dim=-2)]
    met = sum(int(part.any(-1).sum()) for row in rows for part in torch.split(row, tile, dim=-1))
    queries = len(rows) * paired.HEADS
    return met / queries, sum(int(row.sum()) for row in rows) / queries


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("order", [NATURAL, HILBERT])
@pytest.mark.parametrize(("pattern", "tokens"), PATTERNS)
def test_what_a_tile_meets(
    pattern: Pattern, tokens: int, order: str, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not masks:
        monkeypatch.setattr(tables, "MASK_BYTES", 0)
    tables.tables_of.cache_clear()
    found = paired.read_by_tile(paired.problem_of(pattern, tokens), order, tile=8)
    tables.tables_of.cache_clear()
    met, keys = counted(pattern, tokens, order, 8)
    assert found["key_tiles"] == pytest.approx(met)
    # A row of 64 floats takes 4 lines of 64 bytes, of K and of V.
    assert found["cache_lines"] == pytest.approx(8 * keys)


def test_rounds_fill_the_time_within_bounds() -> None:
    assert [paired.rounds_for(seconds) for seconds in (0.01, paired.ENOUGH_S / 3.1, 100.0)] == [5, 3, 2]


def test_a_comparison_is_checked() -> None:
    entry = paired.compared(Dilated((32, 64), (1, 2)), 128, backward=True)
    check = entry["check"]
    assert check["tolerance"].keys() == check["hilbert_off_natural"].keys() == {"out", "dq", "dk", "dv"}
    assert check["error_of_out"].keys() == entry["times"].keys() >= {"tiles natural", "tiles hilbert"}
    assert entry["gain"]["low"] <= entry["gain"]["median"] <= entry["gain"]["high"]


def test_an_order_that_changes_results_is_an_error() -> None:
    one, other = {"out": torch.zeros(3)}, {"out": torch.tensor([0.0, 0.0, 3e-6])}
    assert paired.differences(one, other, {"out": 2e-6})["out"] == pytest.approx(3e-6)
    with pytest.raises(RuntimeError, match=r"out differs by 3\.00e-06"):
        paired.differences(one, other, {"out": 1e-6})
    with pytest.raises(RuntimeError, match="out differs by nan"):
        paired.differences(one, {"out": torch.full((3,), torch.nan)}, {"out": 1.0})


def test_each_experiment_has_its_tables() -> None:
    assert report_tables.MADE.keys() == reports.EXPERIMENTS.keys()


def whole(found: dict[str, Any]) -> dict[str, list[str]]:
    """The texts of each experiment's tables, all rows of which have the cells of their head."""
    texts: dict[str, list[str]] = {}
    for text, rows in report_tables.sections(found):
        assert len({len(row) for row in rows}) == 1
        assert len(rows) > 1
        texts.setdefault(text[:3], []).append(text)
    return texts


def test_every_experiment_has_its_table() -> None:
    assert whole(FOUND).keys() == reports.EXPERIMENTS.keys() & FOUND.keys()


@pytest.mark.full
def test_tables_of_a_small_run() -> None:
    orders, rows = reports.forward_and_backward(32), [cold.measured(32, 16, 2)]
    assert whole({"000": orders, "002": {"rows": rows, "reported_ratio": 39.4}}).keys() == {"000", "002"}
    text = report_tables.plain({"000": orders})
    assert "83 / 72 ms: 1.15x" in text
    assert text.count("out of memory") == 2
