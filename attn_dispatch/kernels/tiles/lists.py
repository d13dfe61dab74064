"""The tile pairs of `tables` as Triton kernels read them: all classes of heads together, by query and by key tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.kernels.device_cache import DeviceCache
from attn_dispatch.kernels.heads import head_classes
from attn_dispatch.kernels.tiles.estimates import most_axes, most_pairs
from attn_dispatch.kernels.tiles.tables import FULL, MASK_BYTES, TileTable, tables_of
from attn_dispatch.spec.problem import Problem

SPAN, PAIR = 3, 2  #: entries of a span, and of a pair
NEVER = (1, 0, 0)  #: first, last and at of a branch without visible keys
ALWAYS = (0, 0, 0)  #: first, last and at of an axis that hides no key


@dataclass(frozen=True, slots=True)
class PairLists:
    """The pairs of each query tile, or of each key tile.

    Args:
        spans: int32 [tables, tiles, SPAN]; a tile's first pair, its first FULL pair, and the end of its pairs.
        pairs: int32 [pairs, PAIR]; the tile on the other side, and the index of the mask.
    """

    spans: Tensor
    pairs: Tensor


@dataclass(frozen=True, slots=True)
class TileLists:
    """The tile pairs of one problem, on its device.

    Args:
        q_pos, k_pos: int32 [tiles * tile], as in `TileTable`.
        kind_of: int32 [heads], the table of each head.
        queries: the pairs of query tiles. keys: the pairs of key tiles; None where no gradient is needed.
        masks: uint8 [masks, tile, tile], how many times each query sees each key. None: too many, see `reach`.
        reach: int32 [tables, branches, axes, 2 * query places + key places], `first`, `last` and `at` of each branch,
            from which kernels compute the masks. None where `masks` holds them.
    """

    q_pos: Tensor
    k_pos: Tensor
    kind_of: Tensor
    queries: PairLists
    keys: PairLists | None
    masks: Tensor | None
    reach: Tensor | None


def forget_lists(problem: Problem) -> None:
    """Free the lists of one problem, and the tables that they were made from."""
    tile_lists_of.forget(problem)
    tables_of.forget(_on_cpu(problem))


def _on_cpu(problem: Problem) -> Problem:
    return replace(problem, device=torch.device("cpu"))


def tile_lists_bytes(problem: Problem, order: str, tile: int) -> int:
    """Upper bound of the bytes of `tile_lists_of` on the problem's device, without building the lists."""
    tables = len(head_classes(problem.pattern, problem.heads))
    tiles = -(-problem.q_len // tile) + -(-problem.k_len // tile)
    pairs = tables * most_pairs(problem, order, tile)
    masks = min(pairs * tile**2, MASK_BYTES * tables)
    reach = 4 * tables * most_axes(problem) * 2 * tiles * tile
    return masks + reach + 4 * (2 * PAIR * pairs + tables * SPAN * tiles + tiles * tile + problem.heads)


def _lists(problem: Problem, order: str, tile: int) -> TileLists:
    tables = tables_of(_on_cpu(problem), order, tile)
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


tile_lists_of = DeviceCache(_lists)


def _numbered(tables: Sequence[TileTable]) -> list[Tensor]:
    """The mask index of each pair in the concatenated masks; all tables share the first mask, FULL."""
    found, before = [], 0
    for table in tables:
        found.append(torch.where(table.mask == FULL, FULL, table.mask + before))
        before += 0 if table.masks is None else len(table.masks) - 1
    return found


def _side(
    rows: Sequence[Tensor], columns: Sequence[Tensor], masks: Sequence[Tensor], tiles: int, device: torch.device
) -> PairLists:
    spans, pairs, before = [], [], 0
    for row, column, mask in zip(rows, columns, masks):
        key = 2 * row + (mask == FULL)
        order = key.argsort(stable=True)
        ends = pad(torch.bincount(key, minlength=2 * tiles).cumsum(0), (1, 0)) + before
        spans.append(torch.stack([ends[:-1:2], ends[1::2], ends[2::2]], dim=1))
        pairs.append(torch.stack([column[order], mask[order]], dim=1))
        before += len(row)
    return PairLists(torch.stack(spans).int().to(device), torch.cat(pairs).int().contiguous().to(device))


def _reach(tables: Sequence[TileTable]) -> Tensor:
    """`TileLists.reach`; tables with fewer branches are padded with branches without visible keys."""
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
