"""The memory that a rank takes in one call, by counts alone: what it holds, and the most that is alive at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from attn_dispatch.kernels.hidden import unseen_keys
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.kernels.tiles import run as tile_math
from attn_dispatch.ring.engine.by_position import TILE
from attn_dispatch.ring.engine.parts import aligned, branches_of, solver
from attn_dispatch.ring.plan.bytes_sent import Load
from attn_dispatch.ring.rows.chunking import block_rows, line_of, pieces, segments
from attn_dispatch.ring.rows.needs import kv_classes
from attn_dispatch.spec.orders import GATHER, LOCAL, ULYSSES
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are worked on together.

    Args:
        queries, keys: as shares of the rank's tokens, times the share of heads.
        workspace: the backend's own, in bytes.
    """

    queries: float
    keys: float
    workspace: int


def _zeroed(mine: _Rank) -> int:
    """Copies with zeros in what no query sees: of k and v, and of q and the gradient of out."""
    problem = mine.problem
    keys = mine.kv * (problem.masked or unseen_keys(problem) is not None)
    return keys + mine.q * problem.has_seq_lens * (2 if problem.needs_grad else 1)


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
    peak = alive + buffers + joined + _zeroed(mine)
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
    parts = list(_own_parts(mine))
    own = max(int((spread + 2 * mine.lse) * part.queries) + part.workspace for part in parts)
    if len(parts) > 1 or parts[0].queries < 1:
        own += wide + mine.lse  # several parts: sums are there from the start
    far = wide + mine.lse
    if rows:
        far += max(
            (int((spread + 3 * mine.lse) * part.queries) + part.workspace for part in _far_parts(mine, rows)), default=0
        )
    end = wide + 2 * mine.lse + (mine.q if mine.wider > 1 else 0)
    return max(own, far, end)


def _backward(mine: _Rank, rows: int) -> int:
    """out, its gradient, lse twice and the sums of gradients, and what one part adds to them."""
    sums = (mine.q + mine.kv) * mine.wider
    held = 2 * mine.q + 2 * mine.lse + sums
    own = max(int(mine.q * part.queries + mine.kv * part.keys) + part.workspace for part in _own_parts(mine))
    far = 0
    if rows:
        found = (int(mine.q * part.queries + mine.kv * part.keys) + part.workspace for part in _far_parts(mine, rows))
        far = rows * mine.load.grad_row_bytes + max(found, default=0)
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
    # One after the other: what is sent and what is received, then that in its order.
    arriving = max(q + max(q, mine.q), q + kv // 2 + kv // 2 + max(kv, mine.kv) // 2)
    working = q + kv + q + 2 * lse + workspace
    leaving = (q + kv if problem.needs_grad else 0) + q + max(q + mine.q, 2 * mine.q) + lse
    forward = max(arriving, working, leaving)
    if not problem.needs_grad:
        return forward
    # q, k, v, out and lse of the heads are kept; then out, its gradient and those of q, k and v.
    kept = q + kv + q + 2 * lse + 2 * mine.q
    sent_back = 2 * mine.q + q + kv + 3 * q + mine.q  # what was kept has been dropped by then
    return max(forward, kept + 3 * q, kept + q + q + kv + workspace, sent_back)


# --- a backend's share ------------------------------------------------------------------------------------------------


def _own_parts(mine: _Rank) -> Iterator[_Part]:
    """Of the rank's own queries and keys."""
    pattern, problem = mine.problem.pattern, mine.problem
    chunks = mine.load.layout.chunks[mine.rank]
    if isinstance(pattern, Neighborhood):
        sub = _sub(problem, pattern, mine.tokens, mine.tokens, problem.kv_heads)
        yield _Part(1.0, 1.0, _tiled_workspace(sub))
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


def _whole(mine: _Rank, pattern: Pattern, rows: int, keys: int) -> _Part:
    """Rows and keys that stand together, of all heads."""
    problem = mine.problem
    sub = _sub(problem, pattern.simplify(rows, keys, problem.heads), rows, keys, problem.kv_heads)
    return _Part(rows / mine.tokens, keys / mine.tokens, _workspace(sub))


def _far_parts(mine: _Rank, rows: int) -> Iterator[_Part]:
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
        yield _Part(1.0, keys / mine.tokens, _tiled_workspace(sub))
    else:
        queries = min(max(1, *(reach(pattern, run) for run in chunks)), mine.block)
        keys = min(keys, mine.block)
        sub = _sub(problem, Dense(), queries, keys, problem.kv_heads)
        yield _Part(queries / mine.tokens, keys / mine.tokens, _workspace(sub))


def _listed(mine: _Rank, branch: Dilated, queries: int, keys: int) -> _Part:
    """Rows of a branch by position, of the key heads that have the same ones."""
    members = _members(mine.problem)
    share = members / mine.problem.kv_heads / mine.tokens
    sub = _sub(mine.problem, branch, max(1, queries), max(1, keys), members)
    return _Part(queries * share, keys * share, _tiled_workspace(sub))


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
