"""The tables that attention.cpp reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TILE = 64  #: queries per tile, T in attention.cpp


@dataclass(frozen=True, slots=True)
class NativeTables:
    """Tables for attention.cpp, int64 except where noted.

    Args:
        tiles: [tiles, 5]: first query, step, count, first run, number of runs. With step 0 the first query is an index
            into `order`, and the runs are listed.
        runs: [runs, 5]: first key, step, count, and the bounds `lo <= key - query <= hi` of visible keys. A listed run
            has: first index into `listed`, step 0, count, and the lanes [lo, hi) that see any of its keys.
        first_tile: [classes + 1]: the first tile of each class of heads.
        head_class: [heads]: the class of each head.
        order: int32 [q_len], the row of each query in tile order; None where tiles have steps.
        listed: int32, rows of keys; None where tiles have steps.
        lanes: int64, per listed key a bit for each query of the tile that sees it; None where tiles have steps.
        run_lanes: [runs], a bit for each lane of the tile that sees a run's keys; None where all do within its bounds.
            Lanes are queries, by heads that share keys: those of a query are neighbours.
    """

    tiles: Tensor
    runs: Tensor
    first_tile: Tensor
    head_class: Tensor
    order: Tensor | None = None
    listed: Tensor | None = None
    lanes: Tensor | None = None
    run_lanes: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        tables = (getattr(self, name) for name in self.__dataclass_fields__)
        return sum(0 if x is None else x.nbytes for x in tables)
