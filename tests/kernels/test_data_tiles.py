"""Tiles and Triton's lists of masks made of data: tables against the definition, declared bytes, results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend
from attn_dispatch.backends import tiles, triton_tiles
from attn_dispatch.kernels.tiles import estimates, tables
from attn_dispatch.kernels.tiles.tables import data_lists_of, data_tables_of
from attn_dispatch.spec.data import Blocks, DataPattern, Ranges
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.oracle import Oracle
from tests.kernels.test_tiles import Tiled, problem_of, table_multiplicity
from tests.kernels.test_triton import TERMS, interpreted
from tests.kernels.test_triton_tiles import listed_multiplicity

Q, K, HEADS, ROWS = 70, 90, 4, 2
SPLIT = Dilated((16, 32), (1, 2), heads="split")


def ranges(rows: int, branches: int, longest: int = 30) -> Ranges:
    first = torch.randint(-5, K, (rows, branches, Q))
    return Ranges(first, first + torch.randint(-3, longest, first.shape))


def blocks(tables: int, size: tuple[int, int], rows: int = 1, **more: Any) -> Blocks:
    shape = rows, tables, -(-Q // size[0]), -(-K // size[1])
    return Blocks(torch.rand(shape) < 0.4, size, **more)


def listed(tables: int, size: tuple[int, int], most: int, rows: int = 1) -> Blocks:
    shape = rows, tables, -(-Q // size[0]), most
    return Blocks(torch.randint(-1, -(-K // size[1]), shape), size)


def patterns() -> dict[str, DataPattern]:
    torch.manual_seed(5)
    return {
        "intervals": ranges(1, 1),
        "intervals-twice-by-row": ranges(ROWS, 2),
        "no-intervals": ranges(1, 1, longest=-2),
        "aligned": blocks(1, (16, 32)),
        "aligned-by-head": blocks(HEADS, (32, 16), within=Window(20, 5, 3)),
        "odd-by-key-head-and-row": blocks(2, (7, 5), rows=ROWS),
        "larger-than-tiles": blocks(1, (48, 100), within=Dense(is_causal=True)),
        "within-differs-by-head": blocks(2, (8, 24), within=SPLIT),
        "no-blocks": Blocks(torch.zeros(1, 1, 5, 6, dtype=torch.bool), 16),
        "listed-twice": listed(HEADS, (16, 16), 9, rows=ROWS),
        "listed-often": Blocks(torch.full((1, 1, 10, 300), 2), (7, 5)),
    }


PATTERNS = patterns()
both = pytest.mark.usefixtures("_kept_masks")


def every(test: Any) -> Any:
    """A test of each pattern, with masks and without."""
    return both(pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)(test))


@pytest.fixture(params=[True, False], ids=["masks", "computed"])
def _kept_masks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tables, "MASK_BYTES", tables.MASK_BYTES if request.param else 0)
    monkeypatch.setattr("attn_dispatch.spec.data._kept", None)  # of the other masks
    yield
    monkeypatch.setattr("attn_dispatch.spec.data._kept", None)


def problem(pattern: DataPattern, kv_heads: int = 2) -> Problem:
    found = replace(problem_of(Dense(), Q, K, HEADS), kv_heads=kv_heads, batch=ROWS, needs_grad=True, return_lse=True)
    return replace(found, pattern=pattern.form(K, HEADS, kv_heads))


def multiplicity(pattern: DataPattern) -> Tensor:
    found = pattern.multiplicity(Q, K, HEADS)
    return found if found.ndim == 4 else found[None]


@every
def test_tables_match_the_multiplicity(pattern: DataPattern) -> None:
    for tile in (4, 8, 16):
        for row, expected in zip(
            data_tables_of(problem(pattern), pattern.data, tile), multiplicity(pattern), strict=True
        ):
            assert sorted(head for table in row for head in table.heads) == list(range(HEADS))
            for table in row:
                found = table_multiplicity(table, Q, K)
                assert all(torch.equal(found, expected[head]) for head in table.heads)


@every
def test_lists_match_the_multiplicity(pattern: DataPattern) -> None:
    lists, expected = data_lists_of(problem(pattern), pattern.data, 16), multiplicity(pattern)
    for kind_of, row in zip(lists.kind_of.view(-1, HEADS), expected, strict=True):
        for by in ("queries", "keys"):
            found = listed_multiplicity(replace(lists, kind_of=kind_of), problem(pattern), 16, by)
            assert torch.equal(found, row)


@every
def test_declared_bytes_and_pairs(pattern: DataPattern) -> None:
    asked = problem(pattern)
    for tile in (16, 64):
        rows, lists = data_tables_of(asked, pattern.data, tile), data_lists_of(asked, pattern.data, tile)
        made = [table for row in rows for table in row]
        assert sum(table.pairs for table in made) <= estimates.outline(asked, "natural", tile).pairs
        names = "keys", "mask", "masks", "bias", "first"
        taken = sum(x.nbytes for table in made for name in names if (x := getattr(table, name)) is not None)
        assert taken <= estimates.tile_table_bytes(asked, "natural", tile)
        assert lists.keys is not None
        sides = [x for side in (lists.queries, lists.keys) for x in (side.spans, side.pairs)]
        rest = [lists.q_pos, lists.k_pos, lists.kind_of, lists.masks, lists.reach, lists.counts, lists.block_at]
        taken = sum(x.nbytes for x in (*sides, *rest) if x is not None)
        assert taken <= estimates.tile_lists_bytes(asked, "natural", tile)


# --- results ----------------------------------------------------------------------------------------------------------


def failures(module: Any, pattern: DataPattern, tile: int, **terms: Any) -> tuple[str, ...]:
    """Of a call in which keys that no query sees hold NaN."""
    asked = replace(problem(pattern), **terms)
    example = make(asked)
    seen = (
        (multiplicity(pattern) > 0).any(2).view(-1, asked.kv_heads, HEADS // asked.kv_heads, K).any(2).transpose(1, 2)
    )
    with torch.no_grad():
        for x in (example.k, example.v):
            x[~seen.expand(ROWS, -1, -1)] = math.nan
    expected = Oracle.of(replace(example, masks=example.masks | {"pattern_data": pattern.data}))
    return expected.check(expected.run(Tiled("natural", tile, module))).failures


@every
def test_results_of_tiles(pattern: DataPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_dispatch.kernels.tiles.run.CHUNK_BYTES", 2**14)
    assert failures(tiles, pattern, 16) == ()
    assert failures(tiles, pattern, 32, has_key_mask=True, dtype=torch.bfloat16) == ()


@both
@interpreted
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "odd-by-key-head-and-row" else pytest.mark.full) for name in PATTERNS],
)
@pytest.mark.parametrize("_kept_masks", [pytest.param(True, marks=pytest.mark.full), False], indirect=True)
def test_results_of_triton(name: str) -> None:
    terms = TERMS["bias" if "listed" in name else "softcap"]
    assert failures(triton_tiles, PATTERNS[name], 64, has_key_mask="by" in name, **terms) == ()


def _of_padding(backend: str) -> list[Tensor]:
    """Results where padding alone sees a key that holds NaN."""
    query = torch.arange(40)[None]
    padding = query >= 35
    pattern = Ranges(torch.where(padding, 0, query), torch.where(padding, 39, (query + 3).clamp(max=29)))
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 40, 2, 8).requires_grad_() for _ in range(3))
    with torch.no_grad():
        k[:, 32] = math.nan
    found = attend(q, k, v, pattern, backend=backend, seq_lens=torch.tensor([35, 33]))
    return [found.detach(), *torch.autograd.grad(found.sum(), (q, k, v))]


@pytest.mark.parametrize("backend", ["tiles", "triton_tiles"])
@interpreted
def test_keys_that_only_padding_sees(backend: str) -> None:
    for found, expected in zip(_of_padding(backend), _of_padding("manual"), strict=True):
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected)


@interpreted
@pytest.mark.usefixtures("no_trials")
def test_threads_take_turns_in_the_interpreter() -> None:
    """It has one grid for all of them: calls of different sizes at once were wrong."""
    places = [torch.arange(size)[None] for size in (150, 40)]
    patterns = [Ranges(at // 7 * 7, at + 11) for at in places]
    inputs = [tuple(torch.randn(1, at.numel(), 2, 8) for _ in range(3)) for at in places]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(_of, "triton_tiles"), inputs * 2, patterns * 2))
    for each, of in zip(found, zip(inputs * 2, patterns * 2), strict=True):
        torch.testing.assert_close(each, _of("manual", *of))


def _of(backend: str, qkv: tuple[torch.Tensor, ...], pattern: Ranges) -> torch.Tensor:
    q, k, v = qkv
    found: torch.Tensor = attend(q, k, v, pattern, backend=backend)
    return found


def test_refusals() -> None:
    many = Ranges(torch.zeros(1, 256, Q, dtype=torch.int64), torch.zeros(1, 256, Q, dtype=torch.int64))
    for backend in (tiles, triton_tiles):
        assert "takes 255 branches, not 256" in [refusal.text for refusal in backend.refusals(problem(many))]
