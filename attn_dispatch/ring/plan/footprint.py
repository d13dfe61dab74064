"""The memory that a rank takes in one call, by counts alone: what it holds, and the most that is alive at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from attn_dispatch.kernels.hidden import unseen
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles import run as tile_math
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.engine.by_position import TILE
from attn_dispatch.ring.engine.exchange import Sizes
from attn_dispatch.ring.engine.parts import aligned, branches_of, solver
from attn_dispatch.ring.engine.passes import PartSize, backward_peak, forward_peak
from attn_dispatch.ring.engine.steps import GRAD_SLOTS, Transfer, buffer_rows, transfers
from attn_dispatch.ring.plan.bytes_sent import Load
from attn_dispatch.ring.rows.chunking import block_rows, line_of, segments
from attn_dispatch.ring.rows.needs import kv_classes
from attn_dispatch.spec.orders import ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band

PLACE = 8  #: bytes of a position
BOUND = 4  #: bytes of a bound in a tile's table


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one rank takes.

    Args:
        input_bytes: q, k and v.
        buffer_bytes: rows and gradients on their way; kept for the next call.
        table_bytes: which rows go where, and which tiles meet; kept for the next call.
        peak_bytes: the most at once, with all of these.
        setup_bytes: what the first call takes besides to find out which rows go where, in the host's memory.
    """

    input_bytes: int
    buffer_bytes: int
    table_bytes: int
    peak_bytes: int
    setup_bytes: int


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of a problem whose rows have been counted."""

    load: Load
    rank: int

    @property
    def problem(self) -> Problem:
        return self.load.problem

    @property
    def tokens(self) -> int:
        return self.load.layout.lengths[self.rank]

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.problem, self.tokens)

    def rows(self, transfer: Transfer) -> tuple[int, int]:
        """Rows received and sent in one step of a transfer; of a piece the mean, rounded up (see `Rows.piece`)."""
        rows, rank = self.load.counts.rows, self.rank
        return (
            sum(-(-rows[rank][sender] // transfer.pieces) for sender in transfer.senders(rank)),
            sum(-(-rows[receiver][rank] // transfer.pieces) for receiver in transfer.receivers(rank)),
        )

    @property
    def block(self) -> int:
        """Rows of a run that are worked on together."""
        return min(self.tokens, block_rows(self.problem, self.load.layout))


def _zeroed(mine: _Rank) -> int:
    """Copies with zeros in what no query sees: of k and v, and of q and the gradient of out."""
    problem = mine.problem
    keys = mine.sizes.kv * (problem.masked or unseen(problem) is not None)
    return keys + mine.sizes.q * problem.has_seq_lens * (2 if problem.needs_grad else 1)


def footprint_of(load: Load, exchange: str, rank: int) -> Footprint:
    """Of one rank's call. A backend's own share is what it says itself (`workspace_bytes`), for the largest part."""
    mine, problem = _Rank(load, rank), load.problem
    inputs = mine.sizes.q + mine.sizes.kv
    if exchange == ULYSSES:
        tokens, heads = load.layout.tokens, problem.kv_heads // load.layout.ranks
        sub = _sub(problem, problem.pattern, tokens, tokens, heads)
        peak = ulysses.peak(mine.sizes, Sizes.of(sub, tokens), _workspace(sub), problem.needs_grad)
        return Footprint(inputs, 0, PLACE * mine.tokens, inputs + peak, 0)
    by_transfer = [(each, mine.rows(each)) for each in transfers(problem, load.layout, exchange)]
    steps = [rows for each, rows in by_transfer for _ in range(each.pieces)]
    tables = _index_bytes(mine, steps) + _table_bytes(mine, steps)
    slots = buffer_rows(steps)
    buffers = sum(rows for slot, rows in slots.items() if slot not in GRAD_SLOTS) * load.row_bytes
    # Rows of several ranks are put together.
    joined = max((rows for each, (rows, _) in by_transfer if len(each.distances) > 1), default=0) * load.row_bytes
    most = max((rows for rows, _ in steps), default=0)
    own, far = list(_own_parts(mine)), list(_far_parts(mine, most)) if most else []
    alive = forward_peak(mine.sizes, own, far)
    if problem.needs_grad:
        alive = max(alive, backward_peak(mine.sizes, own, far, most * load.grad_row_bytes))
        buffers += sum(slots[slot] for slot in GRAD_SLOTS) * load.grad_row_bytes  # all of them from the second call on
    peak = inputs + tables + alive + buffers + joined + _zeroed(mine)
    return Footprint(inputs, buffers, tables, peak, _setup_bytes(mine))


# --- a backend's share ------------------------------------------------------------------------------------------------


def _own_parts(mine: _Rank) -> Iterator[PartSize]:
    """Of the rank's own queries and keys."""
    pattern, problem = mine.problem.pattern, mine.problem
    chunks = mine.load.layout.chunks[mine.rank]
    if isinstance(pattern, Neighborhood):
        sub = _sub(problem, pattern, mine.tokens, mine.tokens, problem.kv_heads)
        yield PartSize(1.0, 1.0, _tiled_workspace(sub))
        return
    for band in line_of(pattern, mine.load.layout.tokens) or ():
        rows = keys = min(max(map(len, chunks)), mine.block)
        left, right = None if band.low is None else -band.low, None if band.high is None else max(band.high, 0)
        if left is not None and right is not None:
            keys = min(max(map(len, chunks)), rows + left + right)
        yield _whole(mine, Window(left, right), rows, keys)
    if isinstance(pattern, Dilated):
        apart = _by_position(pattern, chunks)
        for branch in apart:
            yield _listed(mine, branch, *[sum(_selected(branch, len(run)) for run in chunks)] * 2)
        cuts = [cut for branch in branches_of(pattern) if branch not in apart for cut in branch.branches]
        if not cuts:
            return
        lengths, rates = zip(*cuts)
        pattern = replace(pattern, segment_lengths=lengths, dilation_rates=rates)
        rows = max(len(part) for run in chunks for part in segments(pattern, run, mine.block))
        yield _whole(mine, pattern, rows, rows)


def _whole(mine: _Rank, pattern: Pattern, rows: int, keys: int) -> PartSize:
    """Rows and keys that stand together, of all heads."""
    problem = mine.problem
    sub = _sub(problem, pattern.simplify(rows, keys, problem.heads), rows, keys, problem.kv_heads)
    return PartSize(rows / mine.tokens, keys / mine.tokens, _workspace(sub))


def _far_parts(mine: _Rank, rows: int) -> Iterator[PartSize]:
    """Of some rows from elsewhere, those of all key heads together."""
    problem, pattern = mine.problem, mine.problem.pattern
    chunks = mine.load.layout.chunks[mine.rank]
    keys = min(-(-rows // problem.kv_heads), mine.load.layout.tokens)
    if isinstance(pattern, Dilated):
        for branch in branches_of(pattern):
            queries = sum(_selected(branch, reach(branch, run)) for run in chunks)
            if queries:
                yield _listed(mine, branch, queries, keys)
    elif isinstance(pattern, Neighborhood):
        sub = _sub(problem, pattern, mine.tokens, keys, problem.kv_heads)
        yield PartSize(1.0, keys / mine.tokens, _tiled_workspace(sub))
    else:
        queries = min(max(1, *(reach(pattern, run) for run in chunks)), mine.block)
        keys = min(keys, mine.block)
        sub = _sub(problem, Dense(), queries, keys, problem.kv_heads)
        yield PartSize(queries / mine.tokens, keys / mine.tokens, _workspace(sub))


def _listed(mine: _Rank, branch: Dilated, queries: int, keys: int) -> PartSize:
    """Rows of a branch by position, of the key heads that have the same ones."""
    members = _members(mine.problem)
    share = members / mine.problem.kv_heads / mine.tokens
    sub = _sub(mine.problem, branch, max(1, queries), max(1, keys), members)
    return PartSize(queries * share, keys * share, _tiled_workspace(sub))


def _by_position(pattern: Pattern, chunks: tuple[range, ...]) -> list[Dilated]:
    """The branches in which a rank's own queries and keys are worked on by position."""
    if not isinstance(pattern, Dilated):
        return []
    return [branch for branch in branches_of(pattern) if not all(aligned(branch, run) for run in chunks)]


def _selected(branch: Dilated, length: int) -> int:
    """How many of so many positions some head has, at most."""
    return min(length, sum(-(-length // rate) for rate in branch.dilation_rates))


def _tiled_workspace(part: Problem) -> int:
    """By position. Keys that a tile of a grid's rows meets lie near it; elsewhere it may meet all there are."""
    if not isinstance(part.pattern, Neighborhood):
        return tile_math.workspace_bytes(part, TILE)
    span, stride = TILE, 1
    pattern = part.pattern
    for size, width, step in reversed(list(zip(pattern.grid, pattern.window, pattern.dilation))):
        span += (width - 1) * step * stride
        stride *= size
    met = min(part.k_len, span)
    grads = (part.k_len - met) * 2 * part.batch * part.kv_heads * part.head_dim * sum_dtype(part.dtype).itemsize
    return tile_math.workspace_bytes(replace(part, k_len=met), TILE) + (grads if part.needs_grad else 0)


def _members(problem: Problem) -> int:
    """The key heads that one part has, at most."""
    return max(len(members) for members, _ in kv_classes(problem.pattern, problem.heads, problem.kv_heads))


@lru_cache(maxsize=1024)
def _workspace(problem: Problem) -> int:
    return int(solver(problem).workspace_bytes(problem))


def _sub(problem: Problem, pattern: Pattern, q_len: int, k_len: int, kv_heads: int) -> Problem:
    heads = kv_heads * (problem.heads // problem.kv_heads)
    return replace(
        problem, pattern=pattern, q_len=q_len, k_len=k_len, heads=heads, kv_heads=kv_heads, return_lse=True, ranks=1,
        strides=("bnhd", "bnhd", "bnhd"),
    )  # fmt: skip


# --- tables -----------------------------------------------------------------------------------------------------------


def reach(pattern: Pattern, chunk: range) -> int:
    """How many queries of a run of positions may see keys past it: in segments that reach past it, near its ends, or
    all of them.
    """
    if not isinstance(pattern, Dilated):
        bands = line_of(pattern, chunk.stop) or (Band(),)
        sides = (side for band in bands for side in (band.low, band.high))
        return min(len(chunk), sum(len(chunk) if side is None else abs(side) for side in sides))
    early, late = 0, 0
    for length in pattern.segment_lengths:
        if chunk.start % length:
            early = max(early, length - chunk.start % length)
        late = max(late, chunk.stop % length)
    return min(len(chunk), early + late)


def _index_bytes(mine: _Rank, steps: list[tuple[int, int]]) -> int:
    """Which rows go and come: where they lie, and which tokens they are."""
    rows = sum(received + sent for received, sent in steps) // _members(mine.problem)
    return PLACE * (mine.tokens + 3 * rows)


def _table_bytes(mine: _Rank, steps: list[tuple[int, int]]) -> int:
    """Bounds of rows that go by position: a query's two and a key's one, on each axis of each branch."""
    pattern, members = mine.problem.pattern, _members(mine.problem)
    chunks, classes = mine.load.layout.chunks[mine.rank], mine.problem.kv_heads // members
    received = [each // members for each, _ in steps if each]
    if isinstance(pattern, Neighborhood):
        axes = sum(map(_axes, pattern.dilation))
        far = len(received) * 2 * mine.tokens * classes + sum(received)
        return BOUND * axes * (far + 3 * mine.tokens * classes)
    if not isinstance(pattern, Dilated):
        return 0
    total, apart = 0, _by_position(pattern, chunks)
    for branch in branches_of(pattern):
        axes = sum(map(_axes, branch.dilation_rates))
        queries = sum(_selected(branch, reach(branch, run)) for run in chunks)
        if queries:
            total += BOUND * axes * (len(received) * 2 * queries * classes + sum(received))
        if branch in apart:
            total += BOUND * axes * 3 * sum(_selected(branch, len(run)) for run in chunks) * classes
    return total


def _axes(rate: int) -> int:
    return 1 if rate == 1 else 2


def _setup_bytes(mine: _Rank) -> int:
    """Positions of the rank's rows and, where they go by position, which of them meet and what bounds each (see
    `needs.may_meet`, `tiles.tables_at`); of a grid masks and bounds with an entry for every token of the sequence.
    """
    pattern, load = mine.problem.pattern, mine.load
    received = load.counts.received(mine.rank)
    total = 3 * PLACE * (mine.tokens + received)
    if isinstance(pattern, Neighborhood):
        total += load.layout.tokens * PLACE * (7 + 5 * sum(map(_axes, pattern.dilation)))
    elif isinstance(pattern, Dilated) and (received or _by_position(pattern, load.layout.chunks[mine.rank])):
        total += PLACE * 6 * mine.tokens
    return total
