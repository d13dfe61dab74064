"""Makes `Blocks` from scores, grids and other libraries' formats, and says how much of attention a pattern keeps.

A table is `data` of a Blocks, `block_counts(k_len) > 0` its bools. InvalidInput names an argument that is wrong.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.flex.mask import multiplicity_function
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.spec.checks import choice, integer, integers, per_axis
from attn_dispatch.spec.data import Blocks
from attn_dispatch.spec.pattern import Dense, Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tracing import make_plain

__all__ = ["of_block_mask", "of_bsr", "recall", "sliding_tiles", "to_block_mask", "top_k"]

Size = int | tuple[int, int]
Axes = int | tuple[int, ...]


def top_k(q: Tensor, k: Tensor, size: Size, blocks: int, within: Pattern | None = None, per: str = "heads") -> Blocks:
    """The blocks of keys whose mean key has the largest products with the mean query, for each block of queries.

    Args:
        q, k: as of `attend`. size, within: as of `Blocks`; what `within` hides from a block is not taken.
        blocks: how many. The table is lists [batch, heads or kv_heads, q blocks, blocks]: ascending, then -1.
        per: "heads" for a list by query head; "kv_heads": by key head, from the mean of its query heads.

    Source: Zhang et al. 2025, VSA: its coarse stage; for single queries, Lu et al. 2025, MoBA.
    """
    (qb, kb), within = _checked(size, within)
    problem, most = Problem.of(q, k, k, within), integer("blocks", blocks, 1)
    choice("per", per, ("heads", "kv_heads"))
    group, q, k = problem.heads // problem.kv_heads, _block_means(q, qb), _block_means(k, kb)
    q, k = (q, k.repeat_interleave(group, 1)) if per == "heads" else (torch.unflatten(q, 1, (-1, group)).mean(2), k)
    seen = _blocks_seen(within, (qb, kb), problem.q_len, problem.k_len).to(q.device)
    columns, scores = seen.shape[1], (q @ k.mT).masked_fill(~seen, -inf)
    best = scores.topk(min(most, columns)).indices
    found = best.masked_fill(~seen.expand_as(scores).gather(3, best), columns).sort().values
    return Blocks(found.masked_fill(found == columns, -1).int(), (qb, kb), within)


def sliding_tiles(
    grid: Axes, tile: Axes, window: Axes, *, is_causal: Any = False, device: torch.device | str | None = None
) -> tuple[Blocks, Tensor]:
    """A window of cubes around the query's own, as blocks; and `at`, int64 [tokens], the position at each place.

    It takes `q[:, at]`, `k[:, at]` and `v[:, at]`; `out[:, at.argsort()]` is in the row-major grid's order again.
    At borders the window moves inside. With an odd number of cubes on each axis, not causal, it is
    `Neighborhood(grid, window, edges="shift", stride=tile)` in another order.

    Args:
        grid, tile, window: tokens per axis of 1 to 3, or one for all axes; tile divides the others.
        is_causal: whether the window ends with the query's own cube, whose tokens all see each other.

    Source: Zhang et al. 2025, Fast Video Generation with Sliding Tile Attention.
    """
    sizes = integers("grid", grid)
    tiles = per_axis("tile", integers("tile", tile), len(sizes))
    widths = per_axis("window", integers("window", window), len(sizes))
    if any(size % t or w % t or w > size for size, t, w in zip(sizes, tiles, widths)):
        raise InvalidInput(f"tile must divide grid {sizes} and window, which is smaller, got {tiles} and {widths}")
    cubes, near = (tuple(n // t for n, t in zip(each, tiles)) for each in (sizes, widths))
    by_cube = Neighborhood(cubes, near, (1,), is_causal, "shift")
    split = torch.arange(prod(sizes), device=device).view([n for pair in zip(cubes, tiles) for n in pair])
    at = split.permute(*range(0, split.ndim, 2), *range(1, split.ndim, 2)).flatten()
    return Blocks(by_cube.multiplicity(prod(cubes), device=device)[None] > 0, prod(tiles)), at


def of_block_mask(block_mask: Any, within: Pattern | None = None) -> Blocks:
    """The pattern of FlexAttention's BlockMask. `within` names what its `mask_mod` computes inside of blocks.

    It is `Dense()` by default. Both are compared there.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_mask, noop_mask

    if not isinstance(block_mask, BlockMask) or block_mask.kv_indices.ndim != 4:
        raise InvalidInput(f"block_mask must be a BlockMask by batch and heads, got a {type(block_mask).__name__}")
    (qb, kb), within = _checked(block_mask.BLOCK_SIZE, within)
    (q_len, k_len), both = block_mask.seq_lengths, [_table(block_mask, prefix) for prefix in ("", "full_")]
    if within != Dense() or (block_mask.mask_mod is not noop_mask and both[0].any()):
        given = create_mask(block_mask.mask_mod, both[0].shape[0], both[0].shape[1], q_len, k_len, str(both[0].device))
        named = within.multiplicity(q_len, k_len, device=given.device) > 0
        some, whole = (x.repeat_interleave(qb, 2).repeat_interleave(kb, 3)[..., :q_len, :k_len] for x in both)
        if ((given != named) & some | ~named & whole).any():
            raise InvalidInput(f"within must be what mask_mod of block_mask computes inside blocks, got {within}")
    return Blocks(both[0] | both[1], (qb, kb), within)


def to_block_mask(blocks: Blocks, q_len: int, k_len: int | None = None, heads: int | None = None) -> Any:
    """FlexAttention's BlockMask, for eager calls too. `heads` are those of q, where tables are those of k."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(blocks, Blocks):
        raise InvalidInput(f"blocks must be Blocks, got {blocks!r}")
    q_len, k_len = integer("q_len", q_len, 1), integer("k_len", q_len if k_len is None else k_len, 1)
    blocks.check(q_len, k_len)
    ((qb, kb), within), counts = _checked(blocks.size, blocks.within), blocks.block_counts(k_len)
    heads = integer("heads", counts.shape[1] if heads is None else heads, 1)
    if bool((counts > 1).any()) or heads % counts.shape[1]:
        raise InvalidInput(f"blocks must have each block once, tables that divide {heads} heads, got {blocks!r}")
    seen = _blocks_seen(within, (qb, kb), q_len, k_len).to(counts.device)
    table = ((counts > 0) & seen).repeat_interleave(heads // counts.shape[1], 1)
    inside, ahead = multiplicity_function(within, q_len, k_len, 1), k_len - q_len if within.axes else 0

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = table[b * (table.shape[0] > 1), h * (table.shape[1] > 1), i // qb, j // kb]
        return found if inside is None else found & inside(h, i + ahead, j)

    full = table & (inside is None)  # shorter blocks are partial there
    full[..., q_len // qb :, :] = full[..., k_len // kb :] = False
    lists = [(x.sum(-1).int(), (~x).int().argsort(stable=True).int()) for x in (table & ~full, full)]
    return BlockMask.from_kv_blocks(*lists[0], *lists[1], (qb, kb), mask, seq_lengths=(q_len, k_len))


def of_bsr(indptr: Tensor, indices: Tensor, size: Size, within: Pattern | None = None) -> Blocks:
    """The pattern of a matrix in block rows: FlashInfer's, scipy's, PyTorch's `crow_indices` and `col_indices`.

    Args:
        indptr, indices: int32 or int64, [q blocks + 1] and [entries]: where each row's key blocks start; these.
        size, within: as of `Blocks`.
    """
    for name, x in (("indptr", indptr), ("indices", indices)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or x.ndim != 1:
            raise InvalidInput(f"{name} must be an int32 or int64 tensor with one axis, got {x!r}")
    starts, entries = indptr.tolist(), len(indices)
    if starts != sorted(starts) or starts[:1] + starts[-1:] != [0, entries] or indptr.device != indices.device:
        raise InvalidInput(f"indptr must rise from 0 to the {entries} entries, on {indices.device}, got {indptr}")
    at = indptr[:-1, None] + torch.arange(max([1, *indptr.diff().tolist()]), device=indptr.device)
    lists = pad(indices, (0, 1))[at.clamp(max=entries)].masked_fill(at >= indptr[1:, None], -1)
    return Blocks(lists[None, None], size, within)


def recall(q: Tensor, k: Tensor, pattern: Pattern, of: Pattern | None = None, scale: float | None = None) -> Tensor:
    """The share of `of`'s softmax on keys that `pattern` shows, the mean over queries: float64 [batch, heads].

    Args:
        q, k, scale: as of `attend`. All q_len * k_len scores are computed, in float64.
        of: by default `within` of Blocks, else `Dense()`. A query that sees nothing in it has lost nothing.

    Source: Jiang et al. 2024, MInference: attention recall.
    """
    pattern, of = pattern or Dense(), of or (pattern.within if isinstance(pattern, Blocks) else Dense())
    problem, _ = (Problem.of(q, k, k, each, scale=scale) for each in (pattern, of))
    q, k = q.detach().double(), k.detach().double().repeat_interleave(problem.heads // problem.kv_heads, 2)
    sizes, found = (problem.q_len, problem.k_len, problem.heads), q.new_zeros(problem.batch, problem.heads)
    step = 2**23 // (found.numel() * problem.k_len) or 1  # 64 MiB of scores
    for rows in torch.split(torch.arange(problem.q_len, device=q.device), step):
        kept, counts = (each.multiplicity(*sizes, q_pos=rows) for each in (pattern, of))
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows] * problem.scale, k) + counts.double().log()
        found += (scores.softmax(-1) * (kept > 0)).sum(-1).where(counts.sum(-1) > 0, 1.0).sum(-1)
    return found / problem.q_len


def _checked(size: Size, within: Pattern | None) -> tuple[tuple[int, int], Pattern]:
    """The size as a pair, and a pattern that is one for all heads. Raises InvalidInput, as Blocks does."""
    found = Blocks(torch.zeros(1, 1, 1, 1, dtype=torch.bool), size, within)
    if found.within.branches:
        raise InvalidInput(f"within must show the same keys to all heads, each once, got {within}")
    return found.size, found.within


def _block_means(x: Tensor, size: int) -> Tensor:
    """[batch, heads, blocks, head_dim] of [batch, len, heads, head_dim], in float32 or wider."""
    wide = x.detach().to(sum_dtype(x.dtype)).permute(0, 2, 3, 1).flatten(1, 2)
    return torch.unflatten(avg_pool1d(wide, size, ceil_mode=True), 1, x.shape[2:]).mT


@lru_cache(maxsize=16)
def _blocks_seen(within: Pattern, size: tuple[int, int], q_len: int, k_len: int) -> Tensor:
    """Bool [q blocks, k blocks] on the CPU: whether a query of the one sees a key of the other."""

    def find() -> Tensor:
        rows = [within.seen(queries, q_len, k_len, ()) for queries in torch.split(torch.arange(q_len), size[0])]
        return torch.stack([pad(row, (0, -k_len % size[1])).view(-1, size[1]).any(1) for row in rows])

    return make_plain(find)


def _table(block_mask: Any, prefix: str) -> Tensor:
    """Bool [batch, heads, q blocks, k blocks]: the partial blocks, or the full ones."""
    count, listed = (getattr(block_mask, f"{prefix}kv_{name}") for name in ("num_blocks", "indices"))
    if listed is None:
        return torch.zeros_like(_table(block_mask, ""))
    there = torch.arange(listed.shape[-1], device=listed.device) < count[..., None]
    lists = Blocks(listed.where(there, -1), block_mask.BLOCK_SIZE)
    lists.check(*block_mask.seq_lengths)
    return lists.block_counts(block_mask.seq_lengths[1]) > 0
