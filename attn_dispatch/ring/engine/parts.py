"""A rank's share of the work, cut into attention problems that one device solves: some rows of q over some rows of k.

Where rows are runs of a sequence, a dense, windowed or dilated pattern on them is again one, and the fastest kernel
takes it. Whatever else there is goes by tiles (`tiles.tables_at`), by the position of each single row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.autograd import Passes
from attn_dispatch.ring.engine.by_position import TILE, Solve, listing_of
from attn_dispatch.ring.rows.chunking import block_rows, blocks, line_of, segments
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.needs import kv_classes, may_meet
from attn_dispatch.spec.orders import permutation
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band
from attn_dispatch.spec.reordered import token_order_of

#: Who solves a problem on one device, the preferred first: those that take the out and lse of all keys in a backward
#: pass (`partial`, see `contract`).
SOLVERS = {"cpu": ("native", "sdpa", "tiles"), "cuda": ("flash", "triton", "sdpa", "tiles")}


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Rows of k and v that are there at once: of some key heads, at these positions."""

    heads: range
    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some rows and heads of q over some rows of a source.

    Args:
        rows: of this rank's shard.
        heads: of q.
        source: which one; `keys` are its rows, and `kv` its heads.
        problem: what is computed, as on one device.
        solve: from the problem and a mask of its keys, or None, to its passes.
    """

    rows: slice | Tensor
    heads: slice
    source: int
    keys: slice | Tensor
    problem: Problem
    solve: Solve
    kv: slice = field(default_factory=lambda: slice(None))

    def call(self, seen: Tensor | None) -> Passes:
        """The passes. `seen` bool [batch, rows of the source]: keys that masks leave; None: all of them."""
        return self.solve(self.problem, None if seen is None else seen[:, self.keys])

    @property
    def pairs(self) -> int:
        """Of rows of q and k, all heads, about: causal ones are half."""
        causal = getattr(self.problem.pattern, "is_causal", False)
        return self.problem.q_len * self.problem.k_len * self.problem.heads // (2 if causal is True else 1)

    def keys_of(self, x: Tensor) -> Tensor:
        """Its rows and heads of k or v of the source."""
        return x[:, :, self.kv][:, self.keys]

    def add_keys(self, total: Tensor, grad: Tensor) -> None:
        """Add a gradient of `keys_of`."""
        total[:, :, self.kv][:, self.keys] += grad

    def of(self, x: Tensor) -> Tensor:
        """Its rows and heads of [batch, tokens, heads, ...]."""
        mine = x[:, :, self.heads]
        return mine[:, self.rows] if isinstance(self.rows, slice) else mine.index_select(1, self.rows)


def parts_of(problem: Problem, layout: Layout, rank: int, sources: Sequence[Source], own: bool) -> tuple[Part, ...]:
    """What a rank's queries make of some sources.

    Args:
        problem: the whole sequence's.
        own: the one source is the rank's own shard.
    """
    return tuple(_parts(_Share(problem, layout, rank, own), sources))


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's queries, and whether the keys are of the same shard."""

    problem: Problem
    layout: Layout
    rank: int
    own: bool

    @property
    def chunks(self) -> tuple[range, ...]:
        """The runs of positions of the shard."""
        return self.layout.chunks[self.rank]

    @property
    def block(self) -> int:
        """Rows that are worked on together, at most."""
        return block_rows(self.problem, self.layout)

    @property
    def group(self) -> int:
        return self.problem.heads // self.problem.kv_heads

    def runs(self) -> Iterator[tuple[range, slice]]:
        """Each run of positions, and where it lies in the shard."""
        start = 0
        for chunk in self.chunks:
            yield chunk, slice(start, start + len(chunk))
            start += len(chunk)

    @property
    def kept(self) -> Tensor | None:
        """The position in natural order of each place where tokens are kept; None where that is the place."""
        pattern = self.problem.pattern
        return permutation(token_order_of(pattern), pattern.natural, self.problem.q_len)

    @property
    def all_rows(self) -> slice:
        return slice(0, sum(map(len, self.chunks)))

    def heads(self, kv: range) -> slice:
        """The query heads that read those key heads."""
        if kv.step == 1:
            return slice(kv.start * self.group, kv.stop * self.group)
        return slice(kv.start, kv.stop, kv.step)  # none is shared, see needs.kv_classes

    def sub(self, pattern: Pattern, rows: int, keys: int, kv: range) -> Problem:
        """The problem of some rows and heads."""
        heads = len(kv) * self.group
        return replace(
            self.problem,
            pattern=pattern,
            q_len=rows,
            k_len=keys,
            heads=heads,
            kv_heads=len(kv),
            return_lse=True,
            has_seq_lens=False,
            has_key_mask=self.problem.masked,
            strides=("bnhd", "bnhd", "bnhd"),
            ranks=1,
        )


def _parts(share: _Share, sources: Sequence[Source]) -> Iterator[Part]:
    pattern = share.problem.pattern
    for number, source in enumerate(sources):
        bands = line_of(pattern, share.problem.q_len)
        if bands is not None:
            yield from _windows(share, bands, number, source)
        elif isinstance(pattern.natural, Dilated):
            yield from _dilated(share, pattern.natural, number, source)
        else:
            yield from _by_position(share, pattern, number, source, share.all_rows)


# --- runs of the sequence ---------------------------------------------------------------------------------------------


def _windows(share: _Share, bands: tuple[Band, ...], number: int, source: Source) -> Iterator[Part]:
    """Dense and windowed: each run of queries over each run of keys, without what no query or key of them meets."""
    most, found = share.block, list[tuple[slice, slice, Pattern]]()
    for run, place in share.runs():
        for band, (keys, key_place) in product(bands, _runs(source.positions)):
            for queries, keys_met, window in blocks(band, run, keys, most):
                rows = _moved(queries, place.start - run.start)
                columns = _moved(keys_met, key_place.start - keys.start)
                found.append((rows, columns, window.simplify(len(queries), len(keys_met), share.problem.heads)))
    for rows, columns, plain in _joined(found, most):
        problem = share.sub(plain, rows.stop - rows.start, columns.stop - columns.start, source.heads)
        yield Part(rows, share.heads(source.heads), number, columns, problem, solver(problem).partial)


def _joined(found: list[tuple[slice, slice, Pattern]], most: int) -> list[tuple[slice, slice, Pattern]]:
    """Dense parts side by side, in rows or in columns, as one of at most so many."""
    done: list[tuple[slice, slice, Pattern]] = []
    for rows, columns, pattern in found:
        if done and pattern == Dense() == done[-1][2]:
            before, their, _ = done[-1]
            if columns == their and rows.start == before.stop and rows.stop - before.start <= most:
                done[-1] = (slice(before.start, rows.stop), columns, pattern)
                continue
            if rows == before and columns.start == their.stop and columns.stop - their.start <= most:
                done[-1] = (rows, slice(their.start, columns.stop), pattern)
                continue
        done.append((rows, columns, pattern))
    return done


def _runs(positions: Tensor) -> Iterator[tuple[range, slice]]:
    """Neighbouring positions, and the rows where they are."""
    breaks = (positions.diff() != 1).nonzero().flatten().add_(1).tolist()
    for start, stop in zip([0, *breaks], [*breaks, len(positions)]):
        first = int(positions[start])
        yield range(first, first + stop - start), slice(start, stop)


def _moved(run: range, by: int) -> slice:
    return slice(run.start + by, run.stop + by)


# --- dilated ----------------------------------------------------------------------------------------------------------


def _dilated(share: _Share, pattern: Dilated, number: int, source: Source) -> Iterator[Part]:
    """At once what cuts the rank's own runs as if each began at 0, the rest by position."""
    branches = branches_of(pattern)
    runs = share.own and share.kept is None
    fine = [runs and all(aligned(branch, run) for run in share.chunks) for branch in branches]
    some = [branch for branch, at_once in zip(branches, fine) if at_once]
    if some:
        lengths, rates = zip(*(cut for branch in some for cut in branch.branches))
        yield from _segments(share, replace(pattern, segment_lengths=lengths, dilation_rates=rates), number, source)
    for branch, at_once in zip(branches, fine):
        if not at_once:
            yield from _by_position(share, branch, number, source, share.all_rows)


def branches_of(pattern: Dilated) -> list[Dilated]:
    """What can be worked out one after the other: each has rows of its own, the fewer the higher its rate."""
    if pattern.heads == "split":  # which head is in which branch goes by all of them
        return [pattern]
    return [replace(pattern, segment_lengths=(length,), dilation_rates=(rate,)) for length, rate in pattern.branches]


def aligned(pattern: Dilated, run: range) -> bool:
    """Whether the pattern cuts this run of positions as it would cut one that begins at 0."""
    return all(
        run.start % segment == 0
        or (run.start // segment == (run.stop - 1) // segment and run.start % segment % rate == 0)
        for segment, rate in pattern.branches
    )


def _segments(share: _Share, pattern: Dilated, number: int, source: Source) -> Iterator[Part]:
    """Each run with itself at once; two runs with one another by position."""
    for whole, whole_place in share.runs():
        for run in segments(pattern, whole, share.block):
            length, place = len(run), _moved(run, whole_place.start - whole.start)
            # A segment that holds the whole run is as long as it.
            longer = tuple(s if run.start % s == 0 else max(s, length) for s in pattern.segment_lengths)
            again = replace(pattern, segment_lengths=longer).simplify(length, length, share.problem.heads)
            problem = share.sub(again, length, length, source.heads)
            yield Part(place, share.heads(source.heads), number, place, problem, solver(problem).partial)
    for _, place in share.runs():
        for other, keys in share.runs():
            if keys != place:
                only = Source(source.heads, torch.arange(other.start, other.stop))
                for branch in branches_of(pattern):
                    yield from _by_position(share, branch, number, only, place, keys)


# --- by position ------------------------------------------------------------------------------------------------------


def _by_position(
    share: _Share, pattern: Pattern, number: int, source: Source, rows: slice, keys: slice | None = None
) -> Iterator[Part]:
    """By tiles of rows, those alone that may meet any of the other side; nothing where none does.

    Key heads whose queries see other rows go one after the other, each with its own rows.
    """
    for members, _ in kv_classes(pattern, share.problem.heads, share.problem.kv_heads) if share.own else ():
        yield from _of_heads(share, pattern, number, Source(members, source.positions), rows, keys)
    if not share.own:
        yield from _of_heads(share, pattern, number, source, rows, keys)


def _of_heads(
    share: _Share, pattern: Pattern, number: int, source: Source, rows: slice, keys: slice | None
) -> Iterator[Part]:
    problem, heads = share.problem, share.heads(source.heads)
    which = range(problem.heads)[heads]
    keys = slice(0, len(source.positions)) if keys is None else keys
    queries = torch.cat([torch.arange(run.start, run.stop) for run in share.chunks])[rows]
    places, columns, positions = _numbers(rows), _numbers(keys), source.positions
    if isinstance(pattern, Dilated):  # in natural order: what is together in a segment is then together in tiles
        if share.kept is not None:
            queries, positions = share.kept[queries], share.kept[positions]
        some = may_meet(pattern, problem.q_len, problem.heads, which, queries, positions)
        queries, places = _sorted(queries[some], places[some])
        some = may_meet(pattern, problem.q_len, problem.heads, which, positions, queries)
        positions, columns = _sorted(positions[some], columns[some])
    if not len(queries):
        return
    listing = listing_of(problem, pattern, which, positions)
    arranged = listing.arranged(queries)
    queries, places = queries[arranged], places[arranged]
    meets, solve = listing.tables(queries)
    if not meets.any():
        return
    if not meets.all():
        some = meets.repeat_interleave(TILE)[: len(queries)]
        queries, places = queries[some], places[some]
        _, solve = listing.tables(queries)
    mine, theirs = (
        whole if torch.equal(some, _numbers(whole)) else some.to(problem.device)
        for whole, some in ((rows, places), (keys, columns))
    )
    asked = share.sub(pattern, len(queries), len(positions), source.heads)
    # Of the rank's own rows there are all heads; from others come those of one class.
    kv = slice(source.heads.start, source.heads.stop, source.heads.step) if share.own else slice(None)
    yield Part(mine, heads, number, theirs, asked, solve, kv)


def _sorted(positions: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    positions, order = positions.sort()
    return positions, places[order]


def _numbers(run: slice) -> Tensor:
    return torch.arange(run.start, run.stop)


def solver(problem: Problem) -> Any:
    """The preferred backend that solves it, with `partial`.

    Raises:
        LookupError: nobody can.
    """
    for name in SOLVERS.get(problem.device.type, ()):
        backend: Any = registry.load(name)
        if not backend.refusals(problem):
            return backend
    raise LookupError(f"nothing computes {problem} with rows on other ranks")
