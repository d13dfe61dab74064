"""Row groups: rows in arithmetic progression that the same branches select, with the columns of each branch.

Rows of a group, and columns of a *run*, are arithmetic progressions of positions: a kernel gathers nothing, and holds
no row that its branches do not select. Bounds relative to a row (causality, windows) are left to the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.spec.reach import Band

OPEN = 2**40  #: stands for no bound; larger than any distance of positions


class RowGroups(NamedTuple):
    """Groups of rows with the same runs.

    Args:
        rows: int64 [groups, 3]; start, step and count.
        runs: int64 [runs, 4], group by group; start, step and count of the columns, and the number of the band.
        run_counts: int64 [groups].
    """

    rows: Tensor
    runs: Tensor
    run_counts: Tensor

    def tiles(self, block: int, first_run: int = 0) -> Tensor:
        """Tiles of at most `block` rows: int64 [tiles, 5]; start, step, count, first run, end of the runs.

        Args:
            first_run: the number of the first run.
        """
        start, step, count = self.rows.unbind(-1)
        end_run = first_run + self.run_counts.cumsum(0)
        pieces = -(-count // block)
        group = torch.arange(len(pieces)).repeat_interleave(pieces)
        before = (torch.arange(len(group)) - (pieces.cumsum(0) - pieces)[group]) * block
        size = (count[group] - before).clamp(max=block)
        runs = (end_run - self.run_counts)[group], end_run[group]
        return torch.stack([start[group] + before * step[group], step[group], size, *runs], dim=1)


def tiled(kinds: Iterable[RowGroups], block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles and runs of kinds of heads, one after the other, and where the tiles of each begin and end."""
    tiles, runs, edges = list[Tensor](), list[Tensor](), [0]
    for groups in kinds:
        tiles.append(groups.tiles(block, sum(map(len, runs))))
        runs.append(groups.runs)
        edges.append(edges[-1] + len(tiles[-1]))
    return torch.cat(tiles), torch.cat(runs), torch.tensor(edges)


def row_groups(
    bands: Sequence[Band], borders: Tensor, first_row: int = 0, first_column: int = 0, rows_are_keys: bool = False
) -> RowGroups:
    """The row groups of sequences that begin and end at `borders`; rows and columns are the tokens from given ones on.

    Keys are tokens from 0 on; where queries are more, the first of them are tokens before.

    Between two consecutive segment borders of any bands, a row's residues decide which bands select it. Each such
    interval is split, by one prime factor of one rate at a time, until a band selects all rows of a part or none. The
    groups are sorted by their first row; some may have no run.
    """
    cuts = [(band.segment or OPEN, min(band.rate, band.segment or OPEN), band.offset) for band in bands]
    found = [_segment_starts(borders, w) for w in {w for w, _, _ in cuts}]
    begin = borders[:1].clamp(min=first_row)
    stops = [band.stop for band in bands if rows_are_keys and band.stop is not None and band.stop < borders[-1]]
    starts = torch.unique(torch.cat([begin, torch.tensor(stops, dtype=torch.int64), *found]))
    starts = starts[starts >= begin]
    ends = torch.cat([starts[1:], borders[-1:]])
    # Rows from `start` in steps of `step`, below `end`; `origin` is where their interval starts.
    parts = torch.stack([starts, torch.ones_like(starts), ends, starts], dim=1)
    for w, r, offset in sorted(set(cuts)):
        modulus = 1
        for prime in _prime_factors(r) if offset < r else ():  # an offset past a short segment selects nothing
            modulus *= prime
            parts = _refine(parts, _segment(parts[:, 3], borders, w)[0] + offset, modulus, prime)
    start, step, end, origin = parts[parts[:, 0].argsort()].unbind(-1)
    runs = []
    for number, (band, (w, r, offset)) in enumerate(zip(bands, cuts)):
        segment, stop = _segment(origin, borders, w)
        selected = (start - segment) % r == offset
        if band.stop is not None and rows_are_keys:
            selected &= start < band.stop
        elif band.stop is not None:
            stop = stop.minimum(segment.clamp(min=0) + band.stop)
        first = segment + offset
        first = first + -(-(first_column - first).clamp(min=0) // r) * r
        count = torch.where(selected, -(-(stop - first) // r), 0).clamp(min=0)
        one = torch.ones_like(start)
        runs.append(torch.stack([first - first_column, one * r, count, one * number], dim=1))
    by_group = torch.stack(runs, dim=1) if runs else torch.zeros(len(start), 0, 4, dtype=torch.int64)
    nonempty = by_group[..., 2] > 0
    rows = torch.stack([start - first_row, step, -(-(end - start) // step)], dim=1)
    return RowGroups(rows, by_group[nonempty], nonempty.sum(1))


def most_row_groups(bands: Sequence[Band], rows: int) -> int:
    """Upper bound of the row groups of one sequence, without building them."""
    cuts = {(band.segment, min(band.rate, band.segment)) for band in bands if band.segment is not None}
    intervals = 1 + sum(-(-rows // w) + 1 for w in {w for w, _ in cuts}) + sum(band.stop is not None for band in bands)
    return min(rows, intervals * math.lcm(*(r for _, r in cuts)))


def _segment_starts(borders: Tensor, length: int) -> Tensor:
    """Where segments of this length start, in sequences that begin and end at `borders`."""
    segments = -(-borders.diff() // length)
    sequence = torch.repeat_interleave(torch.arange(len(segments)), segments)
    return borders[sequence] + (torch.arange(len(sequence)) - (segments.cumsum(0) - segments)[sequence]) * length


def _segment(position: Tensor, borders: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first token of the segment of each position, and the one after its last."""
    sequence = torch.searchsorted(borders, position.contiguous(), right=True)
    base = borders[sequence - 1]
    start = base + (position - base) // length * length
    return start, borders[sequence].minimum(start + length)


def _refine(parts: Tensor, target: Tensor, modulus: int, prime: int) -> Tensor:
    """Split parts, by residues of `modulus`, of which only the rows alike to `target` may be selected."""
    start, step, end, origin = parts.unbind(-1)
    common = torch.gcd(step, torch.full_like(step, modulus))
    count = -(-(end - start) // step)
    mixed = ((start - target) % common == 0) & (step % modulus != 0) & (count > 1)
    pieces = torch.where(mixed, count.clamp(max=prime), 1)
    part = torch.arange(len(pieces)).repeat_interleave(pieces)
    index = torch.arange(len(part)) - (pieces.cumsum(0) - pieces)[part]
    finer = torch.where(mixed, step * prime, step)
    return torch.stack([start[part] + index * step[part], finer[part], end[part], origin[part]], dim=1)


def _prime_factors(number: int) -> list[int]:
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return [*found, number] if number > 1 else found
