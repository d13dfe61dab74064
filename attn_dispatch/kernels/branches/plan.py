"""Splits a pattern into dense sub-problems on strided views of q, k and v.

A *piece* is a dense attention between some rows and heads of q and of k, v. Dilation needs no gather: offsets count
from the start of each segment, so that a strided slice selects a branch's rows even where r does not divide w, and
unflattening the length axis into segments is always a view. A *block* is a span of tokens that attends to itself only.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import heads_by_offset, kv_heads_of
from attn_dispatch.spec.pattern import Dense, Dilated
from attn_dispatch.spec.problem import Problem

BLOCK_BYTES = 32 * 2**20  #: of float32 partial sums per block on a CPU, so that merging reads caches
CUDA_BLOCK_BYTES = 2**30  #: enough rows to fill a large GPU


# Named tuples: the first call of a process loads this module; a frozen dataclass takes 8 times as long to define.
class StridedRows(NamedTuple):
    """Every `step`-th token from `offset` on in each of `segments` segments of `length` tokens."""

    start: int
    segments: int
    length: int
    offset: int = 0
    step: int = 1

    @property
    def rows(self) -> int:
        """Rows selected in each segment."""
        return -(-(self.length - self.offset) // self.step)

    def of(self, x: Tensor) -> Tensor:
        """The rows of x [batch, len, ...] as a view [batch, segments, count, ...]."""
        span = x[:, self.start : self.start + self.segments * self.length]
        return torch.unflatten(span, 1, (self.segments, self.length))[:, :, self.offset :: self.step]


class Piece(NamedTuple):
    """One dense sub-problem; its rows count from the start of its block.

    `kv_heads` is a slice where the kernel's grouping maps heads correctly, else one index per query head.
    `fresh_q`, `fresh_k`: no earlier piece wrote these rows: store instead of merging or adding.
    """

    q: StridedRows
    k: StridedRows
    heads: slice
    kv_heads: slice | tuple[int, ...]
    is_causal: bool
    fresh_q: bool
    fresh_k: bool
    bias: int | None = None


class Block(NamedTuple):
    """A span of tokens and its pieces. `covers_q`, `covers_k`: the pieces write every row and head of it."""

    q: slice
    k: slice
    pieces: tuple[Piece, ...]
    covers_q: bool
    covers_k: bool


class BranchPlan(NamedTuple):
    """The blocks of a problem, the batch rows computed at once, and the piece that is the whole problem, if one is."""

    blocks: tuple[Block, ...]
    batch_step: int
    single: Piece | None

    @classmethod
    def of(cls, blocks: tuple[Block, ...], batch_step: int) -> BranchPlan:
        block = blocks[0]
        one = len(blocks) == 1 and len(block.pieces) == 1 and block.covers_q and block.covers_k
        single = one and block.pieces[0].q.segments == 1 and block.pieces[0].bias is None
        return cls(blocks, batch_step, block.pieces[0] if single else None)

    @property
    def pairs(self) -> int:
        """Query-key pairs per batch row that the kernels compute: a causal square counts half."""
        total = 0
        for block in self.blocks:
            for piece in block.pieces:
                heads = len(range(*piece.heads.indices(piece.heads.stop)))
                square = piece.q.segments * piece.q.rows * piece.k.rows * heads
                total += square // 2 if piece.is_causal else square
        return total


@lru_cache(maxsize=4096)
def plan_of(problem: Problem, grouped: bool) -> BranchPlan | None:
    """The dense sub-problems of a pattern; None for patterns other than Dense and Dilated.

    Args:
        grouped: whether the kernel takes fewer key and value heads than query heads.
    """
    pattern = problem.pattern
    if isinstance(pattern, Dense):
        return BranchPlan.of((_dense_block(problem, pattern, grouped),), problem.batch)
    if isinstance(pattern, Dilated):
        return _dilated_plan(problem, pattern, grouped)
    return None


def _dense_block(problem: Problem, pattern: Dense, grouped: bool) -> Block:
    q_len, k_len = problem.q_len, problem.k_len
    heads = slice(0, problem.heads, 1)
    kv = kv_heads_of(range(problem.heads), problem, grouped)
    exact = isinstance(kv, slice)
    whole_q, whole_k = StridedRows(0, 1, q_len), StridedRows(0, 1, k_len)
    ahead = k_len - q_len
    if not pattern.is_causal or ahead == 0:
        pieces: tuple[Piece, ...] = (Piece(whole_q, whole_k, heads, kv, pattern.is_causal, True, exact),)
    elif ahead > 0:
        # Every query sees the first `ahead` keys; the rest is a causal square.
        before = Piece(whole_q, StridedRows(0, 1, ahead), heads, kv, False, True, exact)
        square = Piece(whole_q, StridedRows(ahead, 1, q_len), heads, kv, True, False, exact)
        pieces = (before, square)
    else:
        # The first queries come before the first key: they see none.
        pieces = (Piece(StridedRows(-ahead, 1, k_len), whole_k, heads, kv, True, True, exact),)
    covers_q = not (pattern.is_causal and ahead < 0)
    return Block(slice(0, q_len), slice(0, k_len), pieces, covers_q, exact)


def _dilated_plan(problem: Problem, pattern: Dilated, grouped: bool) -> BranchPlan:
    if problem.q_len < problem.k_len:
        pieces = _dilated_pieces(problem, pattern, problem.k_len, grouped, problem.k_len - problem.q_len)
        return BranchPlan.of((Block(slice(0, problem.q_len), slice(0, problem.k_len), *pieces),), problem.batch)
    length, batch_step = _span(problem, pattern)
    full, rest = divmod(problem.q_len, length)
    shared = _dilated_pieces(problem, pattern, length, grouped)
    parts = [(slice(i * length, (i + 1) * length), shared) for i in range(full)]
    if rest:
        parts.append((slice(full * length, problem.q_len), _dilated_pieces(problem, pattern, rest, grouped)))
    blocks = tuple(Block(span, span, *pieces) for span, pieces in parts)
    return BranchPlan.of(blocks, batch_step)


def _span(problem: Problem, pattern: Dilated) -> tuple[int, int]:
    """Tokens per block, a multiple of every segment length, and batch rows per block."""
    limit = BLOCK_BYTES if problem.device.type == "cpu" else CUDA_BLOCK_BYTES
    token = problem.heads * problem.head_dim * 4
    unit = math.lcm(*pattern.segment_lengths)
    if problem.q_len * token <= limit:
        return problem.q_len, max(1, min(problem.batch, limit // (problem.q_len * token)))
    if unit >= problem.q_len:
        return problem.q_len, 1
    return unit * max(1, limit // (unit * token)), 1


def _segments_from(first: int, segment: int, length: int) -> list[tuple[int, int, int]]:
    """The segments that hold a token from `first` on, as runs (start, segments, tokens of each): the first may begin
    before that token and the last be shorter.
    """
    begin = first // segment * segment
    whole = -(-first // segment) * segment
    full, rest = divmod(max(0, length - whole), segment)
    parts = [(begin, begin < whole, min(segment, length - begin)), (whole, full, segment)]
    parts.append((whole + full * segment, rest > 0, rest))
    return [(start, int(count), size) for start, count, size in parts if count]


def _rows_of(
    start: int, segments: int, size: int, offset: int, rate: int, ahead: int, is_causal: bool
) -> list[tuple[StridedRows, StridedRows, bool]]:
    """Queries, keys and whether they are a causal square, of a run of segments; queries count from token `ahead`."""
    if offset >= size:
        return []
    if start >= ahead:
        rows = StridedRows(start, segments, size, offset, rate)
        return [(rows._replace(start=start - ahead), rows, is_causal)]
    # The segment in which the queries begin: `before` of its selected tokens are keys only.
    before = max(0, -(-(ahead - start - offset) // rate))
    first = start + offset + before * rate
    if first >= start + size:
        return []
    left = start + size - first
    queries, rest = StridedRows(first - ahead, 1, left, 0, rate), StridedRows(first, 1, left, 0, rate)
    if not is_causal:
        return [(queries, StridedRows(start, 1, size, offset, rate), False)]
    earlier = (queries, StridedRows(start, 1, first - start, offset, rate), False)
    return [*([earlier] if before > 0 else []), (queries, rest, True)]


def _dilated_pieces(
    problem: Problem, pattern: Dilated, length: int, grouped: bool, ahead: int = 0
) -> tuple[tuple[Piece, ...], bool, bool]:
    """The pieces of `length` tokens, and what they cover; queries are the tokens from `ahead` on."""
    order = sorted(range(len(pattern.branches)), key=lambda b: pattern.dilation_rates[b])
    covers = pattern.heads == "all" and pattern.dilation_rates[order[0]] == 1
    plain = problem.heads == problem.kv_heads and not ahead
    pieces: list[Piece] = []
    for b in order:
        segment, rate = min(pattern.segment_lengths[b], length), pattern.dilation_rates[b]
        for offset, heads in heads_by_offset(pattern, b, problem.heads).items():
            kv, chosen = kv_heads_of(heads, problem, grouped), slice(heads.start, heads.stop, heads.step)
            for start, segments, size in _segments_from(ahead, segment, length):
                found = _rows_of(start, segments, size, offset, rate, ahead, pattern.is_causal)
                for number, (q, k, is_causal) in enumerate(found):
                    fresh = b == order[0] and number == 0
                    pieces.append(Piece(q, k, chosen, kv, is_causal, fresh, fresh and plain))
    return tuple(pieces), covers, covers and plain
