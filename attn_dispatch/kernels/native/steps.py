"""From a pattern to tiles: queries in steps that share their keys, and the runs of keys that they see.

Dilated branches differ in which queries they select, but queries a common multiple of all rates apart, inside one
segment of every branch, are selected by the same ones. Tiles made of such queries never waste a lane, and take all
their branches in one softmax.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.kernels.native.neighbours import neighbour_bytes, neighbour_tiles
from attn_dispatch.kernels.native.tables import TILE, Tiles
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band, Offsets
from attn_dispatch.spec.reordered import Reordered

PERIOD_LIMIT = 64  #: tokens after which the rates of a dilated pattern repeat together; past it tiles are mostly empty
ROW = 5  #: numbers in a row of a table
OPEN = 2**40  #: no bound: farther than any two positions


def period(pattern: Pattern) -> int:
    """Tokens after which all dilation rates have come round."""
    return math.lcm(*pattern.dilation_rates) if isinstance(pattern, Dilated) else 1


def grid_of(pattern: Pattern) -> tuple[Neighborhood | None, str]:
    """The neighbourhood that a pattern is, and the order that its tokens are kept in."""
    if isinstance(pattern, Reordered) and isinstance(pattern.pattern, Neighborhood):
        return pattern.pattern, pattern.order
    return (pattern if isinstance(pattern, Neighborhood) else None), NATURAL


def table_bytes(problem: Problem, order: str = NATURAL) -> int:
    """Upper bound of the bytes that `tiles_of` takes, and of what it takes to make them, without making them."""
    pattern, item = problem.pattern, ROW * 8
    grid, kept = grid_of(pattern)
    if grid is not None:
        return neighbour_bytes(grid, problem.q_len, order if kept == NATURAL else kept)
    if not isinstance(pattern, Dilated):
        return 3 * item * -(-problem.q_len // TILE) * (1 + len(_bands(problem)))
    intervals = min(problem.q_len, sum(-(-problem.q_len // w) for w, _ in pattern.branches))
    rows = min(problem.q_len, intervals * period(pattern))
    tiles, runs = problem.q_len // TILE + rows, rows * len(pattern.branches)
    return 3 * item * (tiles + runs) * len(heads_by_kind(pattern, problem.heads))


@lru_cache(maxsize=64)
def tiles_of(problem: Problem, order: str = NATURAL) -> Tiles:
    """The tiles of a pattern; those of a neighbourhood in any order of tokens, the others' in the natural one."""
    # Default devices, fake tensors and function transforms belong to a thread: in a fresh one tables are plain.
    with ThreadPoolExecutor(max_workers=1) as fresh:
        return fresh.submit(_tiles, problem, order).result()


def _tiles(problem: Problem, order: str) -> Tiles:
    pattern = problem.pattern
    grid, kept = grid_of(pattern)
    if grid is not None:
        return neighbour_tiles(grid, problem.q_len, problem.heads, order if kept == NATURAL else kept, kept)
    if isinstance(pattern, Dilated):
        return _dilated(pattern, problem)
    first = torch.arange(0, problem.q_len, TILE)
    count = (problem.q_len - first).clamp(max=TILE)
    one, number, bands = torch.ones_like(first), torch.arange(len(first)), _bands(problem)
    runs = []
    for band in bands:
        lo = -OPEN if band.low is None else band.low
        hi = OPEN if band.high is None else band.high
        stop = problem.k_len if band.stop is None else min(band.stop, problem.k_len)
        begin, end = (first + lo).clamp(0, stop), (first + count + hi).clamp(0, stop)
        runs.append(torch.stack([begin, one, (end - begin).clamp(min=0), one * lo, one * hi], dim=1))
    tiles = torch.stack([first, one, count, number * len(bands), one * len(bands)], dim=1)
    by_tile = torch.stack(runs, dim=1).flatten(0, 1)
    return Tiles(tiles, by_tile, torch.tensor([0, len(first)]), torch.zeros(problem.heads, dtype=torch.int64))


def _bands(problem: Problem) -> tuple[Band, ...]:
    """Of a pattern without segments."""
    bands = problem.pattern.bands(problem.q_len, problem.k_len, ())
    assert bands
    return bands


def _dilated(pattern: Dilated, problem: Problem) -> Tiles:
    head_class = torch.zeros(problem.heads, dtype=torch.int64)
    tiles: list[Tensor] = []
    runs: list[Tensor] = []
    first_tile = [0]
    for number, ((offsets,), members) in enumerate(heads_by_kind(pattern, problem.heads).items()):
        head_class[members] = number
        some_tiles, some_runs = _class_tiles(pattern, offsets, problem.q_len)
        some_tiles[:, 3] += sum(len(before) for before in runs)
        tiles.append(some_tiles)
        runs.append(some_runs)
        first_tile.append(first_tile[-1] + len(some_tiles))
    return Tiles(torch.cat(tiles), torch.cat(runs), torch.tensor(first_tile), head_class)


def _class_tiles(pattern: Dilated, offsets: Offsets, tokens: int) -> tuple[Tensor, Tensor]:
    """The tiles and runs of the heads with these offsets."""
    step = period(pattern)
    starts = torch.unique(torch.cat([torch.arange(0, tokens, w) for w, _ in pattern.branches]))
    ends = torch.cat([starts[1:], torch.tensor([tokens])])
    # One row per interval between segment borders and residue in it.
    residues = min(step, int((ends - starts).max()))
    first = (starts[:, None] + torch.arange(residues)).flatten()
    end = ends.repeat_interleave(residues)
    first, end = first[first < end], end[first < end]
    found = []
    for (w, r), offset in zip(pattern.branches, offsets):
        begin = first // w * w
        length = (begin + w).clamp(max=tokens) - begin
        if offset is None:
            selected = torch.zeros_like(first, dtype=torch.bool)
            offset = 0
        else:
            selected = (first - begin) % r == offset
        found.append((selected, begin + offset, (length - offset + r - 1) // r, r))
    selected = torch.stack([one for one, _, _, _ in found], dim=1)
    keys = torch.stack([torch.stack([k, torch.full_like(k, r), n], dim=1) for _, k, n, r in found], dim=1)
    runs = keys[selected]
    hi = 0 if pattern.is_causal else OPEN
    runs = torch.cat([runs, torch.tensor([[-OPEN, hi]]).expand(len(runs), 2)], dim=1)
    number = selected.sum(dim=1)
    first_run = number.cumsum(0) - number
    return _cut(first, (end - first + step - 1) // step, step, first_run, number), runs


def _cut(first: Tensor, count: Tensor, step: int, first_run: Tensor, runs: Tensor) -> Tensor:
    """Rows of queries cut into tiles."""
    pieces = (count + TILE - 1) // TILE
    row = torch.repeat_interleave(torch.arange(len(first)), pieces)
    before = (torch.arange(len(row)) - (pieces.cumsum(0) - pieces)[row]) * TILE
    size = (count[row] - before).clamp(max=TILE)
    return torch.stack([first[row] + before * step, torch.full_like(row, step), size, first_run[row], runs[row]], dim=1)
