"""The pairs of tiles of `tiles`, as kernels read them: all classes of heads in one, by query tile and by key tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.heads import head_classes
from attn_dispatch.kernels.tiles.estimates import axes_of, pairs_at_most
from attn_dispatch.kernels.tiles.tables import FULL, MASK_BYTES, TileTable, plainly, tables_of
from attn_dispatch.spec.problem import Problem

KEPT = 16  #: lists of problems: those of the layers of a model
SPAN, PAIR = 3, 2  #: entries of a tile, and of a pair
NEVER = (1, 0, 0)  #: first, last and at of a branch that nothing is seen in
ALWAYS = (0, 0, 0)  #: and of an axis that leaves everything in


@dataclass(frozen=True, slots=True)
class Side:
    """Tiles of queries or of keys, and what each meets.

    Args:
        spans: int32 [tables, tiles, SPAN]; where the pairs of a tile start, where those begin in which every query
            sees every key once, and where they end.
        pairs: int32 [pairs, PAIR]; the tile on the other side, and which of the masks.
    """

    spans: Tensor
    pairs: Tensor


@dataclass(frozen=True, slots=True)
class TileLists:
    """Tables of one problem, on its device.

    Args:
        q_pos, k_pos: int32 [tiles * tile], as in a table.
        kind_of: int32 [heads], which table is a head's.
        queries: what query tiles meet. keys: what key tiles do; None where no gradient is needed.
        masks: uint8 [masks, tile, tile], how many times each query sees each key. None where they would be too many.
        reach: int32 [tables, branches, axes, query places twice and key places], what they are worked out from where
            there are none: `first`, `last` and `at` of each branch.
    """

    q_pos: Tensor
    k_pos: Tensor
    kind_of: Tensor
    queries: Side
    keys: Side | None
    masks: Tensor | None
    reach: Tensor | None


@lru_cache(maxsize=KEPT)
def lists_of(problem: Problem, order: str, tile: int) -> TileLists:
    tables = tables_of(replace(problem, device=torch.device("cpu")), order, tile)
    return plainly(_lists, tables, problem)


def lists_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of what `lists_of` keeps on the problem's device, without listing."""
    tables = len(head_classes(problem.pattern, problem.heads))
    tiles = -(-problem.q_len // tile) + -(-problem.k_len // tile)
    pairs = tables * pairs_at_most(problem, order, tile)
    masks = min(pairs * tile**2, MASK_BYTES * tables)
    reach = 4 * tables * axes_of(problem) * 2 * tiles * tile
    return masks + reach + 4 * (2 * PAIR * pairs + tables * SPAN * tiles + tiles * tile + problem.heads)


def _lists(tables: Sequence[TileTable], problem: Problem) -> TileLists:
    device, table = problem.device, tables[0]
    kind_of = torch.empty(problem.heads, dtype=torch.int32)
    for kind, each in enumerate(tables):
        kind_of[each.heads.start : each.heads.stop : each.heads.step] = kind
    kept = [each.masks for each in tables if each.masks is not None]
    whole = len(kept) == len(tables)
    rows, columns = [each.queries() for each in tables], [each.keys for each in tables]
    which = _numbered(tables)
    keys = _side(columns, rows, which, len(table.k_pos), device) if problem.needs_grad else None
    return TileLists(
        q_pos=table.q_pos.flatten().int().to(device),
        k_pos=table.k_pos.flatten().int().to(device),
        kind_of=kind_of.to(device),
        queries=_side(rows, columns, which, len(table.q_pos), device),
        keys=keys,
        masks=torch.cat([kept[0], *(masks[1:] for masks in kept[1:])]).to(device) if whole else None,
        reach=None if whole else _reach(tables).to(device),
    )


def _numbered(tables: Sequence[TileTable]) -> list[Tensor]:
    """The mask of each pair, counted through all tables; they share the first, which is FULL."""
    found, before = [], 0
    for table in tables:
        found.append(torch.where(table.mask == FULL, FULL, table.mask + before))
        before += 0 if table.masks is None else len(table.masks) - 1
    return found


def _side(
    rows: Sequence[Tensor], columns: Sequence[Tensor], masks: Sequence[Tensor], tiles: int, device: torch.device
) -> Side:
    spans, pairs, before = [], [], 0
    for row, column, mask in zip(rows, columns, masks):
        key = 2 * row + (mask == FULL)
        order = key.argsort(stable=True)
        ends = pad(torch.bincount(key, minlength=2 * tiles).cumsum(0), (1, 0)) + before
        spans.append(torch.stack([ends[:-1:2], ends[1::2], ends[2::2]], dim=1))
        pairs.append(torch.stack([column[order], mask[order]], dim=1))
        before += len(row)
    return Side(torch.stack(spans).int().to(device), torch.cat(pairs).int().contiguous().to(device))


def _reach(tables: Sequence[TileTable]) -> Tensor:
    """Of every branch in every table, those that are missing seeing nothing."""
    branches = max(len(table.branches) for table in tables)
    axes = max(len(branch.at) for table in tables for branch in table.branches)
    places = tables[0].q_pos.numel(), tables[0].q_pos.numel(), tables[0].k_pos.numel()
    empty, rest = (torch.cat([torch.full((n,), x) for n, x in zip(places, by)]) for by in (NEVER, ALWAYS))
    found = empty.int().repeat(len(tables), branches, axes, 1)
    for kind, table in enumerate(tables):
        for number, branch in enumerate(table.branches):
            found[kind, number] = rest
            parts = [x.flatten(1) for x in (branch.first, branch.last, branch.at)]
            found[kind, number, : len(branch.at)] = torch.cat(parts, dim=1)
    return found
