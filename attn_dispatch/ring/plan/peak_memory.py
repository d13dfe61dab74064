"""Predicts the peak memory of a rank in one call, from counts of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from attn_dispatch.kernels.hidden import may_hide
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles.estimates import call_bytes
from attn_dispatch.ring.engine import ulysses
from attn_dispatch.ring.engine.by_position import TILE
from attn_dispatch.ring.engine.exchange import Sizes
from attn_dispatch.ring.engine.parts import aligned, branches_of, solver
from attn_dispatch.ring.engine.passes import PartSize, backward_peak, forward_peak
from attn_dispatch.ring.engine.steps import GRAD_SLOTS, Transfer, buffer_rows, transfers
from attn_dispatch.ring.plan.bytes_sent import CountedProblem
from attn_dispatch.ring.rows.chunking import block_rows, line_of, segments
from attn_dispatch.ring.rows.needs import kv_classes
from attn_dispatch.spec.orders import ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Band

PLACE = 8  #: bytes of a position
BOUND = 4  #: bytes of a bound in a tile table


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The memory of one rank.

    Args:
        input_bytes: q, k and v.
        buffer_bytes: buffers for messages, reused by the next call.
        table_bytes: lists of the rows to send and receive, and tile tables; reused by the next call.
        peak_bytes: the largest sum at any time, these included.
        setup_bytes: host memory that only the first call needs, to compute the lists and tables.
    """

    input_bytes: int
    buffer_bytes: int
    table_bytes: int
    peak_bytes: int
    setup_bytes: int


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of a problem whose rows have been counted."""

    counted: CountedProblem
    number: int

    @property
    def problem(self) -> Problem:
        return self.counted.problem

    @property
    def tokens(self) -> int:
        return self.counted.layout.lengths[self.number]

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.problem, self.tokens)

    def rows(self, transfer: Transfer) -> tuple[int, int]:
        """Rows received and sent in a step of a transfer: mean pieces, rounded up; `Rows.piece` may have more."""
        rows, rank = self.counted.counts.rows, self.number
        return (
            sum(-(-rows[rank][sender] // transfer.pieces) for sender in transfer.senders(rank)),
            sum(-(-rows[receiver][rank] // transfer.pieces) for receiver in transfer.receivers(rank)),
        )

    @property
    def block(self) -> int:
        """Most rows of a part."""
        return min(self.tokens, block_rows(self.problem, self.counted.layout))


def _zeroed(rank: _Rank) -> int:
    """Bytes of copies in which hidden rows are zeros: of k and v, and of q and the gradient of out."""
    problem = rank.problem
    keys = rank.sizes.kv * (problem.masked or may_hide(problem))
    return keys + rank.sizes.q * problem.has_seq_lens * (2 if problem.needs_grad else 1)


def peak_memory_of(counted: CountedProblem, exchange: str, rank: int) -> PeakMemory:
    """The memory of one rank's call. Backends count as their `workspace_bytes` for the largest part."""
    this, problem = _Rank(counted, rank), counted.problem
    inputs = this.sizes.q + this.sizes.kv
    if exchange == ULYSSES:
        tokens, heads = counted.layout.tokens, problem.kv_heads // counted.layout.ranks
        sub = _sub(problem, problem.pattern, tokens, tokens, heads)
        peak = ulysses.peak(this.sizes, Sizes.of(sub, tokens), _workspace(sub), problem.needs_grad)
        return PeakMemory(inputs, 0, PLACE * this.tokens, inputs + peak, 0)
    by_transfer = [(each, this.rows(each)) for each in transfers(problem, counted.layout, exchange)]
    steps = [rows for each, rows in by_transfer for _ in range(each.pieces)]
    tables = _index_bytes(this, steps) + _table_bytes(this, steps)
    slots = buffer_rows(steps)
    buffers = sum(rows for slot, rows in slots.items() if slot not in GRAD_SLOTS) * counted.row_bytes
    # Rows received from several ranks are concatenated.
    concatenated = max((rows for each, (rows, _) in by_transfer if len(each.distances) > 1), default=0)
    most = max((rows for rows, _ in steps), default=0)
    own, far = list(_own_parts(this)), list(_far_parts(this, most)) if most else []
    alive = forward_peak(this.sizes, own, far)
    if problem.needs_grad:
        alive = max(alive, backward_peak(this.sizes, own, far, most * counted.grad_row_bytes))
        buffers += sum(slots[slot] for slot in GRAD_SLOTS) * counted.grad_row_bytes  # also in later forward passes
    peak = inputs + tables + alive + buffers + concatenated * counted.row_bytes + _zeroed(this)
    return PeakMemory(inputs, buffers, tables, peak, _setup_bytes(this))


# --- parts ------------------------------------------------------------------------------------------------------------


def _own_parts(rank: _Rank) -> Iterator[PartSize]:
    """The parts on the rank's own keys."""
    pattern, problem = rank.problem.pattern, rank.problem
    chunks = rank.counted.layout.chunks[rank.number]
    if isinstance(pattern, Neighborhood):
        sub = _sub(problem, pattern, rank.tokens, rank.tokens, problem.kv_heads)
        yield PartSize(1.0, 1.0, _tiled_workspace(sub))
        return
    for band in line_of(pattern, rank.counted.layout.tokens) or ():
        rows = keys = min(max(map(len, chunks)), rank.block)
        left, right = None if band.low is None else -band.low, None if band.high is None else max(band.high, 0)
        if left is not None and right is not None:
            keys = min(max(map(len, chunks)), rows + left + right)
        yield _consecutive(rank, Window(left, right), rows, keys)
    if isinstance(pattern, Dilated):
        apart = _by_position(pattern, chunks)
        for branch in apart:
            yield _by_rows(rank, branch, *[sum(_selected(branch, len(run)) for run in chunks)] * 2)
        cuts = [cut for branch in branches_of(pattern) if branch not in apart for cut in branch.branches]
        if not cuts:
            return
        lengths, rates = zip(*cuts)
        pattern = replace(pattern, segment_lengths=lengths, dilation_rates=rates)
        rows = max(len(part) for run in chunks for part in segments(pattern, run, rank.block))
        yield _consecutive(rank, pattern, rows, rows)


def _consecutive(rank: _Rank, pattern: Pattern, rows: int, keys: int) -> PartSize:
    """A part of consecutive queries and keys, of all heads."""
    problem = rank.problem
    sub = _sub(problem, pattern.simplify(rows, keys, problem.heads), rows, keys, problem.kv_heads)
    return PartSize(rows / rank.tokens, keys / rank.tokens, _workspace(sub))


def _far_parts(rank: _Rank, rows: int) -> Iterator[PartSize]:
    """The parts on `rows` rows received from other ranks, all key heads counted."""
    problem, pattern = rank.problem, rank.problem.pattern
    chunks = rank.counted.layout.chunks[rank.number]
    keys = min(-(-rows // problem.kv_heads), rank.counted.layout.tokens)
    if isinstance(pattern, Dilated):
        for branch in branches_of(pattern):
            queries = sum(_selected(branch, reach(branch, run)) for run in chunks)
            if queries:
                yield _by_rows(rank, branch, queries, keys)
    elif isinstance(pattern, Neighborhood):
        sub = _sub(problem, pattern, rank.tokens, keys, problem.kv_heads)
        yield PartSize(1.0, keys / rank.tokens, _tiled_workspace(sub))
    else:
        queries = min(max(1, *(reach(pattern, run) for run in chunks)), rank.block)
        keys = min(keys, rank.block)
        sub = _sub(problem, Dense(), queries, keys, problem.kv_heads)
        yield PartSize(queries / rank.tokens, keys / rank.tokens, _workspace(sub))


def _by_rows(rank: _Rank, branch: Dilated, queries: int, keys: int) -> PartSize:
    """A part of a branch, computed by position, for the largest class of key heads."""
    members = _members(rank.problem)
    share = members / rank.problem.kv_heads / rank.tokens
    sub = _sub(rank.problem, branch, max(1, queries), max(1, keys), members)
    return PartSize(queries * share, keys * share, _tiled_workspace(sub))


def _by_position(pattern: Pattern, chunks: tuple[range, ...]) -> list[Dilated]:
    """The branches whose parts on a rank's own keys are computed by position."""
    if not isinstance(pattern, Dilated):
        return []
    return [branch for branch in branches_of(pattern) if not all(aligned(branch, run) for run in chunks)]


def _selected(branch: Dilated, length: int) -> int:
    """Most of `length` positions that some head selects."""
    return min(length, sum(-(-length // rate) for rate in branch.dilation_rates))


def _tiled_workspace(part: Problem) -> int:
    """Workspace of a part computed by position. A tile of a grid sees only keys near it; other tiles may see all."""
    if not isinstance(part.pattern, Neighborhood):
        return call_bytes(part, TILE, part.k_len)
    span, stride = TILE, 1
    pattern = part.pattern
    for axis in reversed(pattern.axes):
        span += (axis.window + axis.stride - 2) * axis.dilation * stride
        stride *= axis.size
    seen = min(part.k_len, span)
    grads = (part.k_len - seen) * 2 * part.batch * part.kv_heads * part.head_dim * sum_dtype(part.dtype).itemsize
    return call_bytes(replace(part, k_len=seen), TILE, seen) + (grads if part.needs_grad else 0)


def _members(problem: Problem) -> int:
    """Most key heads of a part computed by position."""
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
    """Most queries of a run of positions that see keys outside it: those near its ends, those in segments that extend
    beyond it, or all.
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


def _index_bytes(rank: _Rank, steps: list[tuple[int, int]]) -> int:
    """Bytes of the lists of rows sent and received: indices and positions."""
    rows = sum(received + sent for received, sent in steps) // _members(rank.problem)
    return PLACE * (rank.tokens + 3 * rows)


def _table_bytes(rank: _Rank, steps: list[tuple[int, int]]) -> int:
    """Bytes of the bounds in tile tables: two for each query and one for each key, on each axis of each branch."""
    pattern, members = rank.problem.pattern, _members(rank.problem)
    chunks, classes = rank.counted.layout.chunks[rank.number], rank.problem.kv_heads // members
    received = [each // members for each, _ in steps if each]
    if isinstance(pattern, Neighborhood):
        axes = sum(map(_axes, pattern.dilation))
        far = len(received) * 2 * rank.tokens * classes + sum(received)
        return BOUND * axes * (far + 3 * rank.tokens * classes)
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


def _setup_bytes(rank: _Rank) -> int:
    """Bytes of positions and, for parts computed by position, of masks and bounds (see `needs.shares_segment` and
    `kernels.tiles.tables.tables_at`); of a grid they have an entry for every token of the sequence.
    """
    pattern, counted = rank.problem.pattern, rank.counted
    received = counted.counts.received(rank.number)
    total = 3 * PLACE * (rank.tokens + received)
    if isinstance(pattern, Neighborhood):
        total += counted.layout.tokens * PLACE * (7 + 5 * sum(map(_axes, pattern.dilation)))
    elif isinstance(pattern, Dilated) and (received or _by_position(pattern, counted.layout.chunks[rank.number])):
        total += PLACE * 6 * rank.tokens
    return total
