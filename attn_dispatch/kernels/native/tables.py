"""The tables that attention.cpp goes by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TILE = 64  #: queries of a tile, as in attention.cpp


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tables for attention.cpp, int64 unless said otherwise.

    Args:
        tiles: [tiles, 5]: first query, step, count, first run, runs. Where the step is 0, the first query counts places
            in `order`, and the runs are listed.
        runs: [runs, 5]: first key, step, count, and the bounds `lo <= key - query <= hi` of what a query sees. Of a
            listed run: first entry in `listed`, 0 or -1, count, and the lanes that see any of it, from `lo` to `hi`;
            all of them see all of it where the step is 0, else `lanes` says who sees what.
        first_tile: [classes + 1]: where each class of heads starts in `tiles`.
        head_class: [heads].
        order: int32 [q_len], the position at each place; None where tiles have steps.
        listed: int32, positions of keys; None likewise.
        lanes: for each of those, a bit for each query of the tile that sees it.
    """

    tiles: Tensor
    runs: Tensor
    first_tile: Tensor
    head_class: Tensor
    order: Tensor | None = None
    listed: Tensor | None = None
    lanes: Tensor | None = None
