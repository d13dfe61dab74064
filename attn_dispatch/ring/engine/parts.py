"""A rank's work, split into parts: attention problems of some rows of q over some rows of k, for one device.

On runs of consecutive positions, a dense, windowed or dilated pattern is again such a pattern, and the fastest kernel
computes it. Other parts are computed from the position of each row: in tiles, or by tables of single keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels import dense, registry
from attn_dispatch.kernels.autograd import Passes
from attn_dispatch.kernels.native import run as native
from attn_dispatch.kernels.native.data_tables import ByRow, interval_tables
from attn_dispatch.kernels.native.tables import neighbour_tables_at
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles import run as tiles
from attn_dispatch.kernels.tiles.tables import tables_at
from attn_dispatch.ring.rows.chunking import block_rows, blocks, line_of, segments
from attn_dispatch.ring.rows.data import Held
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.needs import kv_classes, shares_segment
from attn_dispatch.spec.orders import HILBERT, permutation, places, serves, token_order_of
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern
from attn_dispatch.spec.problem import CONTIGUOUS, Problem
from attn_dispatch.spec.reach import Band

TILE = 64  #: rows of a tile

#: Builds the kernel call of a problem; the tensor is a mask of its keys.
Solve = Callable[[Problem, Tensor | None], Passes]

#: Backends for parts, the preferred first: their backward pass takes the out and lse over all keys (`partial`, see
#: `contract`). Not measured; on CUDA, PyTorch's kernels come first where one call is the whole part, else a fused one.
SOLVERS = {"cpu": ("native", "sdpa", "tiles"), "cuda": ("flash", "triton", "sdpa", "tiles")}
DENSE_SOLVERS = {"cpu": SOLVERS["cpu"], "cuda": ("flash", "sdpa", "triton", "tiles")}
OTHER_SOLVERS = ("tiles",)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Rows of k and v that are in memory together: of some key heads, at these positions.

    Args:
        on_device: the positions on the device of k and v, for problems with masks.
    """

    heads: range
    positions: Tensor
    on_device: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, heads: range, positions: Tensor) -> Source:
        return cls(heads, positions, positions.to(problem.device) if problem.masked else None)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some rows and heads of q over some rows of a source.

    Args:
        rows: of q, in this rank's shard.
        heads: of q.
        source: its index; `keys` and `kv` are rows and heads of it.
        problem: the attention problem of the part alone.
        solve: builds the kernel call of the problem.
    """

    rows: slice | Tensor
    heads: slice
    source: int
    keys: slice | Tensor
    problem: Problem
    solve: Solve
    kv: slice = field(default_factory=lambda: slice(None))

    def call(self, seen: Tensor | None) -> Passes:
        """The kernel call. `seen`: bool [batch, rows of the source], keys that masks leave visible; None: all."""
        return self.solve(self.problem, None if seen is None else seen[:, self.keys])

    @property
    def pairs(self) -> int:
        """Approximate number of query-key pairs of all heads: half of the product if causal."""
        causal = getattr(self.problem.pattern, "is_causal", False)
        return self.problem.q_len * self.problem.k_len * self.problem.heads // (2 if causal is True else 1)

    def keys_of(self, x: Tensor) -> Tensor:
        """The part's rows and heads of k or v of the source."""
        return x[:, :, self.kv][:, self.keys]

    def add_keys(self, total: Tensor, grad: Tensor) -> None:
        """Add a gradient of `keys_of`."""
        total[:, :, self.kv][:, self.keys] += grad

    def of(self, x: Tensor) -> Tensor:
        """The part's rows and heads of [batch, tokens, heads, ...]."""
        heads = x[:, :, self.heads]
        return heads[:, self.rows] if isinstance(self.rows, slice) else heads.index_select(1, self.rows)


def parts_of(problem: Problem, layout: Layout, rank: int, sources: Sequence[Source], own: bool) -> tuple[Part, ...]:
    """The parts of a rank's queries over the keys of some sources.

    Args:
        problem: the whole sequence's.
        own: whether the only source is the rank's own shard.
    """
    return tuple(_parts(_Shard(problem, layout, rank, own), sources))


@dataclass(frozen=True, slots=True)
class _Shard:
    """The shard of a rank's queries, and whether the keys are of the same shard."""

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
        """Most rows of a part."""
        return block_rows(self.problem, self.layout)

    @property
    def group(self) -> int:
        return self.problem.heads // self.problem.kv_heads

    def runs(self) -> Iterator[tuple[range, slice]]:
        """Each run of positions, with its rows in the shard."""
        start = 0
        for chunk in self.chunks:
            yield chunk, slice(start, start + len(chunk))
            start += len(chunk)

    @property
    def natural(self) -> Tensor | None:
        """The position in natural order of each stored token; None if tokens are stored in natural order."""
        pattern = self.problem.pattern
        return permutation(token_order_of(pattern), pattern.natural, self.problem.q_len)

    def by_natural(self, positions: Tensor) -> Tensor:
        """Positions of stored tokens in natural order."""
        return positions if self.natural is None else self.natural[positions]

    @property
    def all_rows(self) -> slice:
        return slice(0, sum(map(len, self.chunks)))

    def heads(self, kv: range) -> slice:
        """The query heads that read those key heads."""
        if kv.step == 1:
            return slice(kv.start * self.group, kv.stop * self.group)
        return slice(kv.start, kv.stop, kv.step)  # no key head has several query heads, see needs.kv_classes

    def sub(self, pattern: Pattern, rows: int, keys: int, kv: range) -> Problem:
        """The problem of some rows and heads."""
        sizes: dict[str, Any] = {"q_len": rows, "k_len": keys, "heads": len(kv) * self.group, "kv_heads": len(kv)}
        masks: dict[str, Any] = {"has_seq_lens": False, "has_key_mask": self.problem.masked}
        part = replace(self.problem, pattern=pattern, **sizes, **masks)
        return replace(part, return_lse=True, strides=CONTIGUOUS, ranks=1)


def _parts(shard: _Shard, sources: Sequence[Source]) -> Iterator[Part]:
    pattern = shard.problem.pattern
    for number, source in enumerate(sources):
        bands = line_of(pattern, shard.problem.q_len)
        if bands is not None:
            yield from _windows(shard, bands, number, source)
        elif isinstance(pattern.natural, Dilated):
            yield from _dilated(shard, pattern.natural, number, source)
        else:
            yield from _by_position(shard, pattern, number, source, shard.all_rows)


# --- runs of the sequence -------------------------------------------------------------------------------------


def _windows(shard: _Shard, bands: tuple[Band, ...], number: int, source: Source) -> Iterator[Part]:
    """Dense and windowed: each run of queries over each run of keys, cut down to rows that see or are seen."""
    for run, place in shard.runs():
        for band, (keys, key_place) in product(bands, _runs(source.positions)):
            for queries, seen, window in blocks(band, run, keys, shard.block):
                rows = _moved(queries, place.start - run.start)
                columns = _moved(seen, key_place.start - keys.start)
                plain = window.simplify(len(queries), len(seen), shard.problem.heads)
                problem = shard.sub(plain, len(queries), len(seen), source.heads)
                yield Part(rows, shard.heads(source.heads), number, columns, problem, solver(problem).partial)


def _runs(positions: Tensor) -> Iterator[tuple[range, slice]]:
    """Runs of consecutive positions, with their rows."""
    breaks = (positions.diff() != 1).nonzero().flatten().add_(1).tolist()
    for start, stop in zip([0, *breaks], [*breaks, len(positions)]):
        first = int(positions[start])
        yield range(first, first + stop - start), slice(start, stop)


def _moved(run: range, by: int) -> slice:
    return slice(run.start + by, run.stop + by)


# --- dilated --------------------------------------------------------------------------------------------------


def _dilated(shard: _Shard, pattern: Dilated, number: int, source: Source) -> Iterator[Part]:
    """Branches that segment the rank's own runs as if each began at position 0 go to a kernel; the rest by position."""
    branches, own = branches_of(pattern), shard.own and shard.natural is None
    whole = [branch for branch in branches if own and all(aligned(branch, run) for run in shard.chunks)]
    if whole:
        lengths, rates = zip(*(cut for branch in whole for cut in branch.branches))
        yield from _segments(shard, replace(pattern, segment_lengths=lengths, dilation_rates=rates), number, source)
    for branch in branches:
        if branch not in whole:
            yield from _by_position(shard, branch, number, source, shard.all_rows)


def branches_of(pattern: Dilated) -> list[Dilated]:
    """The branches, to be computed one by one: the higher the rate of a branch, the fewer rows it selects."""
    if pattern.heads == "split":  # the branch of a head depends on the number of branches
        return [pattern]
    return [replace(pattern, segment_lengths=(length,), dilation_rates=(rate,)) for length, rate in pattern.branches]


def aligned(pattern: Dilated, run: range) -> bool:
    """Whether the pattern segments this run of positions like one that begins at position 0."""
    return all(
        run.start % segment == 0
        or (run.start // segment == (run.stop - 1) // segment and run.start % segment % rate == 0)
        for segment, rate in pattern.branches
    )


def _segments(shard: _Shard, pattern: Dilated, number: int, source: Source) -> Iterator[Part]:
    """Each run over itself by a kernel; each run over another run by position."""
    for whole, whole_place in shard.runs():
        for run in segments(pattern, whole, shard.block):
            length, place = len(run), _moved(run, whole_place.start - whole.start)
            # A segment that contains the whole run counts as long as the run.
            longer = tuple(s if run.start % s == 0 else max(s, length) for s in pattern.segment_lengths)
            again = replace(pattern, segment_lengths=longer).simplify(length, length, shard.problem.heads)
            problem = shard.sub(again, length, length, source.heads)
            yield Part(place, shard.heads(source.heads), number, place, problem, solver(problem).partial)
    for _, place in shard.runs():
        for other, keys in shard.runs():
            if keys != place:
                only = Source(source.heads, torch.arange(other.start, other.stop))
                for branch in branches_of(pattern):
                    yield from _by_position(shard, branch, number, only, place, keys)


# --- by position ----------------------------------------------------------------------------------------------


def _by_position(
    shard: _Shard, pattern: Pattern, number: int, source: Source, rows: slice, keys: slice | None = None
) -> Iterator[Part]:
    """Tiles of rows, without queries that see none of the keys and keys that no query sees; no part if none is left.

    There is a part for each class of key heads, whose queries see the same rows.
    """
    for members, _ in kv_classes(pattern, shard.problem.heads, shard.problem.kv_heads) if shard.own else ():
        yield from _of_heads(shard, pattern, number, Source(members, source.positions), rows, keys)
    if not shard.own:
        yield from _of_heads(shard, pattern, number, source, rows, keys)


def _of_heads(
    shard: _Shard, pattern: Pattern, number: int, source: Source, rows: slice, keys: slice | None
) -> Iterator[Part]:
    problem, heads, grid = shard.problem, shard.heads(source.heads), pattern.natural
    which = range(problem.heads)[heads]
    keys = slice(0, len(source.positions)) if keys is None else keys
    queries = torch.cat([torch.arange(run.start, run.stop) for run in shard.chunks])[rows]
    numbers, columns, positions = _numbers(rows), _numbers(keys), source.positions
    build: Callable[..., tuple[Tensor, Solve]] = _tile_tables
    if isinstance(pattern, Dilated):  # in natural order, so that rows of one segment lie in the same tiles
        queries, positions = shard.by_natural(queries), shard.by_natural(positions)
        some = shares_segment(pattern, problem.q_len, problem.heads, which, queries, positions)
        queries, numbers = _sorted(queries[some], numbers[some])
        some = shares_segment(pattern, problem.q_len, problem.heads, which, positions, queries)
        positions, columns = _sorted(positions[some], columns[some])
    elif isinstance(grid, Neighborhood) and not registry.load("native").refusals(replace(problem, ranks=1)):
        pattern, build = grid, _key_tables
        queries, positions = shard.by_natural(queries), shard.by_natural(positions)
        curve = permutation(HILBERT, grid, problem.q_len) if serves(HILBERT, grid) else None
        order = (queries if curve is None else places(curve)[queries]).argsort()
        queries, numbers = queries[order], numbers[order]
    elif isinstance(grid, Held):
        build, (positions, columns) = _data_tables, _sorted(positions, columns)
        kinds = {grid.head_offsets(head, problem.heads) for head in which}
        some = torch.stack([grid.see_any(queries, positions, problem.q_len, kind) for kind in kinds]).any(0)
        queries, numbers = queries[some], numbers[some]
    if not len(queries):
        return
    sees_any, solve = build(problem, pattern, which, queries, positions)
    if not sees_any.any():
        return
    if not sees_any.all():
        some = sees_any.repeat_interleave(TILE)[: len(queries)]
        queries, numbers = queries[some], numbers[some]
        _, solve = build(problem, pattern, which, queries, positions)
    q_rows, k_rows = (
        whole if torch.equal(some, _numbers(whole)) else some.to(problem.device)
        for whole, some in ((rows, numbers), (keys, columns))
    )
    plain = Dense() if isinstance(pattern, Held) else pattern  # its tensors live as long as the caller's
    sub = shard.sub(plain, len(queries), len(positions), source.heads)
    # The rank's own rows have all heads; rows of other ranks have the heads of one class.
    kv = slice(source.heads.start, source.heads.stop, source.heads.step) if shard.own else slice(None)
    yield Part(q_rows, heads, number, k_rows, sub, solve, kv)


def _key_tables(
    problem: Problem, grid: Neighborhood, which: range, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Solve]:
    """Tables of single keys, for neighbourhoods on the CPU, whose kernel reads them; else as `_tile_tables`."""
    found = neighbour_tables_at(grid, len(which), queries, keys)
    return found.tiles[:, 4] > 0, lambda part, key_mask: native.partial(part, key_mask, found)


def _data_tables(problem: Problem, pattern: Held, which: range, queries: Tensor, keys: Tensor) -> tuple[Tensor, Solve]:
    """Tables of intervals on the CPU, for patterns that hold tensors; else as `_tile_tables`. Keys ascend."""
    by_native = not registry.load("native").refusals(replace(problem, ranks=1, pattern=Dense()))
    build: Callable[..., tuple[Tensor, Solve]] = _interval_tables if by_native else _tile_tables
    sees_any, solves = zip(*(build(problem, row, which, queries, keys) for row in pattern.rows()))
    if len(solves) == 1:
        return sees_any[0], solves[0]

    def solve(part: Problem, key_mask: Tensor | None) -> Passes:
        masks = [None] * len(solves) if key_mask is None else torch.split(key_mask, 1)
        return ByRow(tuple(each(replace(part, batch=1), mask) for each, mask in zip(solves, masks)))

    return torch.stack(sees_any).any(0), solve


def _interval_tables(
    problem: Problem, pattern: Held, which: range, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Solve]:
    kinds = [pattern.head_offsets(head, problem.heads) for head in which]
    each = kinds if len(set(kinds)) > 1 else kinds[:1]
    places = [pattern.places(queries, keys, problem.q_len, kind)[:, 0] for kind in each]
    found = interval_tables(places, len(keys), len(which))
    return (found.tiles[:, 4] > 0).view(len(each), -1).any(0), lambda part, mask: native.partial(part, mask, found)


def _tile_tables(
    problem: Problem, pattern: Pattern, which: range, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Solve]:
    """bool [tiles], whether a tile of these rows of q sees any key; and what builds the kernel call."""
    dtype = sum_dtype(problem.dtype)
    found = tables_at(pattern, problem.q_len, problem.heads, which, queries, keys, TILE, dtype)
    sees_any = torch.stack([table.first.diff() > 0 for table in found]).any(0)
    if problem.device.type != "cpu":
        found = tuple(table.to(problem.device) for table in found)
    return sees_any, lambda part, key_mask: tiles.partial(part, found, dense.kernel_of(part), key_mask)


def _sorted(positions: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    positions, order = positions.sort()
    return positions, places[order]


def _numbers(run: slice) -> Tensor:
    return torch.arange(run.start, run.stop)


def solver(problem: Problem) -> Any:
    """The preferred backend in SOLVERS, or for dense parts in DENSE_SOLVERS, that supports the problem.

    Raises:
        LookupError: none does.
    """
    preferred = DENSE_SOLVERS if isinstance(problem.pattern, Dense) else SOLVERS
    for name in preferred.get(problem.device.type, OTHER_SOLVERS):
        backend: Any = registry.load(name)
        if not backend.refusals(problem):
            return backend
    raise LookupError(f"nothing computes {problem} with rows on other ranks")
