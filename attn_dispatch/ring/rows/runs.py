"""The key rows that runs of queries see, by arithmetic on runs of positions: counting needs no entry per token, so
that half a billion tokens over many ranks are counted in seconds.

A run of queries sees a few arithmetic progressions of keys. Between two positions where a progression begins or
ends, a key is seen if it has the residue of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from attn_dispatch.ring.rows.needs import Kind, seen_by
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.reach import Band

if TYPE_CHECKING:
    from torch import Tensor
Class = tuple[int, int]  #: step and residue: the positions p with p % step == residue
Classes = frozenset[Class]


class _Run(NamedTuple):
    """The positions in [start, stop) with `position % step == residue`."""

    start: int
    stop: int
    step: int = 1
    residue: int = 0


def _seen(pattern: Pattern, tokens: int, chunk: range, kind: Kind) -> Iterator[_Run]:
    """Progressions of keys that queries of a run see outside the run."""
    for offsets in kind:
        for band in pattern.bands(tokens, tokens, offsets) or ():
            for start, part in _ends(band, chunk):
                run = band.run(part, tokens)
                if run and (band.rate == 1 or _cut(range(start + band.offset, part.stop, band.rate), part)):
                    yield _Run(run.start, run.stop, band.rate, (start + band.offset) % band.rate)


def _ends(band: Band, chunk: range) -> Iterator[tuple[int, range]]:
    """The first and the last segment of a run of positions: its start, and the part of the run in it."""
    length = band.segment or chunk.stop
    for number in {chunk.start // length, (chunk.stop - 1) // length}:
        start = number * length
        yield start, range(max(start, chunk.start), min(start + length, chunk.stop))


class Span(NamedTuple):
    """The positions in [start, stop) with the residue of one of `classes`."""

    start: int
    stop: int
    classes: Classes

    def count(self, chunk: range) -> int:
        """Number of selected positions in a run."""
        start, stop = max(self.start, chunk.start), min(self.stop, chunk.stop)
        if start >= stop:
            return 0
        period = _period(self.classes)
        whole, rest = divmod(stop - start, period)
        return (whole and whole * _count(self.classes, 0, period)) + _count(self.classes, start % period, rest)

    def positions(self, chunk: range) -> Tensor:
        """Those in a run, int64, ascending."""
        start = max(self.start, chunk.start)
        return _positions(self.classes, start, max(0, min(self.stop, chunk.stop) - start))


class Listed(NamedTuple):
    """The positions at which a mask of all tokens is true."""

    mask: Tensor

    def count(self, chunk: range) -> int:
        return int(self.mask[chunk.start : chunk.stop].sum())

    def positions(self, chunk: range) -> Tensor:
        return self.mask[chunk.start : chunk.stop].nonzero().flatten() + chunk.start


def seen_rows(
    pattern: Pattern, tokens: int, chunks: tuple[range, ...], kind: Kind
) -> Sequence[Span] | Sequence[Listed]:
    """The keys that queries of these runs see outside them: by arithmetic where the pattern has bands, since masks
    of all tokens are slow for many ranks.
    """
    if pattern.bands(tokens, tokens, ()) is None:
        return [Listed(seen_by(pattern, tokens, chunks, kind))]
    # Split where a progression begins or ends: in between, only residues matter.
    runs = {run for chunk in chunks for run in _seen(pattern, tokens, chunk, kind)}
    edges = sorted({edge for run in runs for edge in run[:2]})
    found = []
    for start, stop in pairwise(edges):
        classes = frozenset((run.step, run.residue) for run in runs if run.start <= start and stop <= run.stop)
        found += [Span(start, stop, classes)] if classes else []
    return found


@lru_cache(maxsize=2**16)
def _count(classes: Classes, start: int, length: int) -> int:
    return len(_positions(classes, start, length))


@lru_cache(maxsize=2**16)
def _period(classes: Classes) -> int:
    return math.lcm(*(step for step, _ in classes))


def _positions(classes: Classes, start: int, length: int) -> Tensor:
    """The selected positions, int64, ascending."""
    import torch

    if len(classes) == 1:
        ((step, residue),) = classes
        first = start + (residue - start) % step
        return torch.arange(first, max(first, start + length), step)
    taken = torch.zeros(length, dtype=torch.bool)
    for step, residue in classes:
        taken[(residue - start) % step :: step] = True
    return taken.nonzero().flatten().add_(start)


def _cut(run: range, within: range) -> range:
    """The part of a progression inside a run of positions."""
    skipped = max(0, -(-(within.start - run.start) // run.step))
    return range(run.start + skipped * run.step, min(run.stop, within.stop), run.step)
