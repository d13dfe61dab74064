"""attn_dispatch.blocks: each function against a statement of its own, by loops or by PyTorch's FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from attn_dispatch import Blocks, Dense, Dilated, InvalidInput, Neighborhood, Ranges, Window, attend
from attn_dispatch.blocks import of_block_mask, of_bsr, recall, sliding_tiles, to_block_mask, top_k
from attn_dispatch.spec.pattern import Pattern
from tests.support.calls import drawn

ignored = "ignore:flex_attention called without torch.compile", "ignore:Sparse BSR"
pytestmark = [pytest.mark.usefixtures("no_trials"), pytest.mark.filterwarnings(*ignored)]

HEADS, KV_HEADS, LENGTH = 4, 2, 22
GRIDS = [((12,), 2, 8), ((6, 5), (2, 1), (6, 3)), ((4, 4, 6), 2, (4, 2, 6))]


def qkv(q_len: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (q_len, HEADS), (LENGTH, KV_HEADS), (LENGTH, KV_HEADS)
    q, k, v = (drawn(2, *each, 8, seed=n, dtype=torch.float64) for n, each in enumerate(sizes))
    return q, k, v


def by_flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """PyTorch's own dense reference, which reads the mask's function alone."""
    run: Any = flex.flex_attention
    return run(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("per", ["heads", "kv_heads"])
@pytest.mark.parametrize("within", [None, Dense(is_causal=True), Window(4, 0, sinks=1)], ids=str)
def test_top_k(within: Pattern | None, per: str) -> None:
    (q, k, _), (qb, kb), most = qkv(q_len=14), (3, 5), 2
    found = top_k(q, k, (qb, kb), most, within, per)
    seen, tables = found.within.multiplicity(14, LENGTH)[0], HEADS if per == "heads" else KV_HEADS
    assert (found.within, found.size, found.data.shape[1]) == (within or Dense(), (qb, kb), tables)
    for row, table, block in product(range(2), range(tables), range(5)):
        own, group = slice(block * qb, block * qb + qb), HEADS // tables
        mean = q[row, own, table * group : (table + 1) * group].mean((0, 1))
        keys = [slice(start, start + kb) for start in range(0, LENGTH, kb)]
        score = {n: float(mean @ k[row, each, table * KV_HEADS // tables].mean(0)) for n, each in enumerate(keys)}
        best = sorted((n for n in score if seen[own, keys[n]].any()), key=lambda n: -score[n])[:most]
        assert found.data[row, table, block].tolist() == sorted(best) + [-1] * (most - len(best))
    assert top_k(q, k, (qb, kb), 99).data[0, 0, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("grid", "tile", "window"), GRIDS)
def test_sliding_tiles(grid: tuple[int, ...], tile: Any, window: Any, causal: bool) -> None:
    tiles, windows = (x if isinstance(x, tuple) else (x,) * len(grid) for x in (tile, window))
    blocks, at = sliding_tiles(grid, tile, window, is_causal=causal)
    tokens = list(product(*map(range, grid)))

    def sees(query: tuple[int, ...], key: tuple[int, ...]) -> bool:
        for x, y, size, t, w in zip(query, key, grid, tiles, windows):
            low = x // t - w // t + 1 if causal else min(max(x // t - w // t // 2, 0), size // t - w // t)
            if not low <= y // t < low + w // t:
                return False
        return True

    stored = [tokens[place] for place in at.tolist()]
    assert sorted(stored) == tokens
    assert blocks.multiplicity(len(tokens))[0].tolist() == [[sees(x, y) for y in stored] for x in stored]
    if all(w // t % 2 for w, t in zip(windows, tiles)) and not causal:
        q, k, v = (drawn(1, len(tokens), 2, 8, seed=n) for n in range(3))
        out = attend(q[:, at], k[:, at], v[:, at], blocks)[:, at.argsort()]
        near = Neighborhood(grid, window, edges="shift", stride=tile)
        assert torch.allclose(out, attend(q, k, v, near), atol=1e-6)


KEEP = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]]) > 0
FUNCTIONS: list[tuple[Callable[..., Any], Pattern | None]] = [
    (lambda b, h, i, j: (j <= i) & (i - j <= 9), Window(9, 0)),
    (lambda b, h, i, j: KEEP[(i // 8 + b) % 3, (j // 8 + h) % 3], None),
]


@pytest.mark.parametrize(("mask_mod", "within"), FUNCTIONS, ids=["window", "by row and head"])
def test_of_block_mask(mask_mod: Callable[..., Any], within: Pattern | None) -> None:
    mask, inputs = flex.create_block_mask(mask_mod, 2, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=8), qkv()
    assert torch.allclose(attend(*inputs, of_block_mask(mask, within)), by_flex(*inputs, mask))
    for wrong in (None, Window(3, 0)) if within else ():
        with pytest.raises(InvalidInput, match="within must be what mask_mod of block_mask"):
            of_block_mask(mask, wrong)


@pytest.mark.parametrize("tables", [1, KV_HEADS, HEADS])
@pytest.mark.parametrize("within", [Dense(), Window(6, 2), Neighborhood((2, 11), (1, 5))], ids=str)
def test_to_block_mask(within: Pattern, tables: int) -> None:
    inputs, blocks = qkv(q_len=14), Blocks(drawn(2, tables, 4, 3, seed=5) > 0, (4, 8), within)
    mask = to_block_mask(blocks, 14, LENGTH, HEADS)
    assert torch.allclose(by_flex(*inputs, mask).nan_to_num(), attend(*inputs, blocks))
    seen = blocks.multiplicity(14, LENGTH, HEADS)
    there = [[seen[..., i : i + 4, j : j + 8].any(-1).any(-1) for j in (0, 8, 16)] for i in (0, 4, 8, 12)]
    wanted = torch.stack([torch.stack(row, -1) for row in there], -2)
    assert torch.equal(of_block_mask(mask, within).data, wanted)
    assert int(mask.full_kv_num_blocks.sum()) == (int(wanted[:, :, :3, :2].sum()) if within == Dense() else 0)


def test_of_bsr() -> None:
    dense = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]]).repeat_interleave(4, 0).repeat_interleave(8, 1)
    matrix, window = dense.float().to_sparse_bsr((4, 8)), Window(9, 9)
    blocks = of_bsr(matrix.crow_indices(), matrix.col_indices(), (4, 8), window)
    assert torch.equal(blocks.multiplicity(12, 24)[0], dense * window.multiplicity(12, 24)[0])
    twice = of_bsr(torch.tensor([0, 3, 3]), torch.tensor([1, 1, 0]), 2)
    assert twice.multiplicity(4)[0].tolist() == [[1, 1, 2, 2]] * 2 + [[0] * 4] * 2


RECALLED: list[tuple[Pattern, Pattern | None]] = [
    (Blocks(torch.tensor([[[[0, 2, 2]], [[1, -1, 0]]]]), (14, 8), Window(9, 0)), None),
    (Ranges(torch.tensor([[3] * 14]), torch.tensor([[9] * 14])), Dense(is_causal=True)),
    (Blocks(KEEP.view(1, 1, 3, 3), (5, 8)), Dilated((6, 11, 22), (1, 2, 3))),
]


@pytest.mark.parametrize(("pattern", "of"), RECALLED, ids=["blocks", "ranges", "dilated"])
def test_recall(pattern: Pattern, of: Pattern | None) -> None:
    (q, k, _), every = qkv(q_len=14), (pattern, of or getattr(pattern, "within", None))
    kept, counts = (each.multiplicity(14, LENGTH, HEADS).tolist() for each in every if each)
    for row, head in product(range(2), range(HEADS)):
        shares = []
        for i in range(14):
            scores = (0.7 * k[row, :, head // 2] @ q[row, i, head]).tolist()
            mass = [n * math.exp(score) for score, n in zip(scores, counts[head][i])]
            shares.append(sum(m for m, n in zip(mass, kept[head][i]) if n) / sum(mass) if any(mass) else 1.0)
        assert recall(q, k, pattern, of, scale=0.7)[row, head].item() == pytest.approx(sum(shares) / 14, abs=1e-12)


X, TABLE, STARTS = torch.randn(1, 8, 2, 4), torch.ones(1, 1, 2, 2) > 0, torch.tensor([0, 1, 2])
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: top_k(X, X, 4, 1, Dilated((4,), (2,))), "within must show the same keys to all heads"),
    (lambda: sliding_tiles((6, 8), 4, 4), r"tile must divide grid \(6, 8\)"),
    (lambda: to_block_mask(Blocks(torch.zeros(1, 1, 2, 2).int(), 4), 8), "blocks must have each block once"),
    (lambda: of_bsr(STARTS, STARTS, 4), "indptr must rise from 0 to the 3 entries"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        call()
