"""The memory that a rank takes in one call, by counts alone: what it holds, and the most that is alive at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from attn_dispatch import tile_math
from attn_dispatch.branches import sum_dtype
from attn_dispatch.order import GATHER, LOCAL, ULYSSES
from attn_dispatch.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.problem import Problem
from attn_dispatch.ring.blocks import block_rows, pieces, segments, window_of
from attn_dispatch.ring.freight import Load
from attn_dispatch.ring.listing import TILE
from attn_dispatch.ring.needs import kv_classes
from attn_dispatch.ring.parts import aligned, solver

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
    """A rank's share in bytes; `wide` those of the dtype that sums are kept in."""

    load: Load
    rank: int

    @property
    def problem(self) -> Problem:
        return self.load.problem

    @property
    def tokens(self) -> int:
        return self.load.layout.lengths[self.rank]

    @property
    def q(self) -> int:
        return self.tokens * self.load.token_bytes(self.problem.heads)

    @property
    def kv(self) -> int:
        return 2 * self.tokens * self.load.token_bytes(self.problem.kv_heads)

    @property
    def lse(self) -> int:
        return self.tokens * self.load.lse_bytes

    @property
    def wider(self) -> int:
        return sum_dtype(self.problem.dtype).itemsize // self.problem.dtype.itemsize

    def steps(self, exchange: str) -> list[tuple[int, int]]:
        """Rows received and sent, step by step."""
        rows, ranks = self.load.counts.rows, self.load.layout.ranks
        if exchange == GATHER:
            return [(self.load.counts.received(self.rank), self.load.counts.sent(self.rank))]
        if exchange == LOCAL:
            return []
        count = pieces(self.problem, self.load.layout)
        return [
            (-(-rows[self.rank][self.rank - step] // count), -(-rows[(self.rank + step) % ranks][self.rank] // count))
            for step in range(1, ranks)
            for _ in range(count)
        ]

    @property
    def block(self) -> int:
        """Rows of a run that are worked on together."""
        return min(self.tokens, block_rows(self.problem, self.load.layout))


def footprint_of(load: Load, exchange: str, rank: int) -> Footprint:
    """Of one rank's call. A backend's own share is what it says itself (`workspace_bytes`), for the largest part."""
    mine = _Rank(load, rank)
    if exchange == ULYSSES:
        inputs = mine.q + mine.kv
        return Footprint(inputs, 0, PLACE * mine.tokens, inputs + _by_heads(mine), 0)
    steps = mine.steps(exchange)
    tables = _index_bytes(mine, steps) + _table_bytes(mine, steps)
    buffers, again = _buffers(load, steps)
    joined = steps[0][0] * load.row_bytes if exchange == GATHER and load.layout.ranks > 2 else 0
    most = max((rows for rows, _ in steps), default=0)
    alive = _forward(mine, most)
    if load.problem.needs_grad:
        alive = max(alive, _backward(mine, most))
        buffers += again  # all of them from the second call on
    peak = alive + buffers + joined
    return Footprint(mine.q + mine.kv, buffers, tables, mine.q + mine.kv + tables + peak, _setup_bytes(mine))


def _buffers(load: Load, steps: list[tuple[int, int]]) -> tuple[int, int]:
    """Rows arrive in two by turns and leave from one; gradients come home and leave (backward)."""
    received, sent = zip(*steps) if steps else ((), ())
    arriving = max(received[::2], default=0) + max(received[1::2], default=0)
    most = max(received, default=0), max(sent, default=0)
    return (arriving + most[1]) * load.row_bytes, sum(most) * load.grad_row_bytes


def _forward(mine: _Rank, rows: int) -> int:
    """Sums, and what one part adds to them; `rows` of the largest step."""
    wide = mine.q * mine.wider
    spread = mine.q + wide if mine.wider > 1 else mine.q  # a part's out, also widened
    rows_own, _, workspace = _own_part(mine)
    own = int((spread + 2 * mine.lse) * rows_own) + workspace
    if rows_own < 1:
        own += wide + mine.lse  # several parts: sums are there from the start
    far = wide + mine.lse
    if rows:
        share, workspace = _far_part(mine, rows)
        far += int((spread + 3 * mine.lse) * share) + workspace
    end = wide + 2 * mine.lse + (mine.q if mine.wider > 1 else 0)
    return max(own, far, end)


def _backward(mine: _Rank, rows: int) -> int:
    """out, its gradient, lse twice and the sums of gradients, and what one part adds to them."""
    sums = (mine.q + mine.kv) * mine.wider
    held = 2 * mine.q + 2 * mine.lse + sums
    queries, keys, workspace = _own_part(mine)
    own = int(mine.q * queries + mine.kv * keys) + workspace
    far = 0
    if rows:
        share, workspace = _far_part(mine, rows)
        members = _members(mine.problem) / mine.problem.kv_heads
        far = rows * mine.load.grad_row_bytes + int(mine.q * share + rows * mine.load.row_bytes * members) + workspace
    end = mine.q + mine.kv if mine.wider > 1 else 0
    return held + max(own, far, end)


def _by_heads(mine: _Rank) -> int:
    """Beyond q, k and v: those of whole sequences of some heads, what is made of them, and copies on the way."""
    load, problem, ranks = mine.load, mine.problem, mine.load.layout.ranks
    tokens = load.layout.tokens
    q, kv = (tokens * load.token_bytes(heads) // ranks for heads in (problem.heads, 2 * problem.kv_heads))
    lse = tokens * load.lse_bytes // ranks
    sub = _sub(problem, problem.pattern, tokens, tokens, problem.kv_heads // ranks)
    workspace = _workspace(sub)
    arriving = q + kv + max(q + mine.q - kv, kv // 2 + mine.kv // 2)
    working = q + kv + q + 2 * lse + workspace
    leaving = (q + kv if problem.needs_grad else 0) + 3 * q + 2 * mine.q + lse
    forward = max(arriving, working, leaving)
    if not problem.needs_grad:
        return forward
    # q, k, v, out and lse of the heads are kept; then out, its gradient and those of q, k and v.
    kept = q + kv + q + 2 * lse + 2 * mine.q
    sent_back = 2 * mine.q + q + kv + 3 * q + mine.q  # what was kept has been dropped by then
    return max(forward, kept + 3 * q, kept + q + q + kv + workspace, sent_back)


# --- a backend's share ------------------------------------------------------------------------------------------------


def _own_part(mine: _Rank) -> tuple[float, float, int]:
    """Of the largest part of the rank's own work: its share of queries and of keys, and the workspace."""
    pattern, problem = mine.problem.pattern, mine.problem
    chunks = mine.load.layout.chunks[mine.rank]
    if _by_position(pattern, chunks):
        return 1.0, 1.0, _tiled_workspace(_sub(problem, pattern, mine.tokens, mine.tokens, problem.kv_heads))
    rows = keys = max(map(len, chunks))
    if isinstance(pattern, Dilated):
        rows = keys = max(len(part) for run in chunks for part in segments(pattern, run, mine.block))
    elif isinstance(pattern, Dense | Window):
        rows = keys = min(rows, mine.block)
        window = window_of(pattern)
        if window.left is not None and window.right is not None:
            keys = min(max(map(len, chunks)), rows + window.left + window.right)
    part = _sub(problem, pattern.simplify(rows, keys, problem.heads), rows, keys, problem.kv_heads)
    return rows / mine.tokens, keys / mine.tokens, _workspace(part)


def _by_position(pattern: Pattern, chunks: tuple[range, ...]) -> bool:
    """Whether a rank's own queries and keys are worked on by position."""
    if isinstance(pattern, Dilated):
        return not all(aligned(pattern, run) for run in chunks)
    return isinstance(pattern, Neighborhood)


def _far_part(mine: _Rank, rows: int) -> tuple[float, int]:
    """Of some rows from elsewhere: what share of the heads one part has, and the workspace."""
    problem, members = mine.problem, _members(mine.problem)
    keys = min(-(-rows // problem.kv_heads), mine.load.layout.tokens)
    if isinstance(problem.pattern, Dilated | Neighborhood):
        queries = max(1, sum(reach(problem.pattern, chunk) for chunk in mine.load.layout.chunks[mine.rank]))
        part = _sub(problem, problem.pattern, queries, keys, members)
        return members / problem.kv_heads * queries / mine.tokens, _tiled_workspace(part)
    queries = max(1, *map(partial(reach, problem.pattern), mine.load.layout.chunks[mine.rank]))
    queries, keys = min(queries, mine.block), min(keys, mine.block)
    part = _sub(problem, Dense(), queries, keys, problem.kv_heads)
    return queries / mine.tokens, _workspace(part)


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
    if isinstance(pattern, Window):
        return min(len(chunk), sum(len(chunk) if side is None else side for side in (pattern.left, pattern.right)))
    if not isinstance(pattern, Dilated):
        return len(chunk)
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
    axes = sum(_axes(pattern))
    if not axes:
        return 0
    chunks = mine.load.layout.chunks[mine.rank]
    queries = sum(reach(pattern, chunk) for chunk in chunks)
    classes = mine.problem.kv_heads // members
    total = sum(BOUND * axes * (2 * queries * classes + received // members) for received, _ in steps if received)
    if _by_position(pattern, chunks):
        total += BOUND * axes * 3 * mine.tokens * classes
    return total


def _axes(pattern: Pattern) -> Iterator[int]:
    if isinstance(pattern, Dilated):
        yield from (1 if rate == 1 else 2 for rate in pattern.dilation_rates)
    elif isinstance(pattern, Neighborhood):
        yield from (1 if step == 1 else 2 for step in pattern.dilation)


def _setup_bytes(mine: _Rank) -> int:
    """Positions of the rank's rows and, where they go by position, which of them meet and what bounds each (see
    `needs.may_meet`, `tiles.tables_at`); of a grid masks and bounds with an entry for every token of the sequence.
    """
    pattern, load = mine.problem.pattern, mine.load
    chunks, received = load.layout.chunks[mine.rank], load.counts.received(mine.rank)
    own = 3 * PLACE * (mine.tokens + received)
    far = received + load.counts.sent(mine.rank) > 0
    if not _by_position(pattern, chunks) and not (far and list(_axes(pattern))):
        return own
    if isinstance(pattern, Neighborhood):
        return own + load.layout.tokens * PLACE * (7 + 5 * len(list(_axes(pattern))))
    queries = mine.tokens if _by_position(pattern, chunks) else sum(reach(pattern, chunk) for chunk in chunks)
    rows = queries + received // _members(mine.problem)
    return own + PLACE * (4 * mine.tokens + (7 + 5 * max(_axes(pattern))) * rows)
