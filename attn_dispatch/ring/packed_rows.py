"""Packed rows over ranks: each rank computes its queries; of documents that a border of shards cuts it gets the keys.

Documents within a shard stay there. The keys of the others, as far as queries beyond the border see them, are gathered
on all ranks, and their gradients are summed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch.decisions.call import Rewritten
from attn_dispatch.errors import InvalidInput
from attn_dispatch.ring.link import Link, Runs, agree, errors_sent, gathered
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import tokens_of
from attn_dispatch.ring.sharded_problem import NAME, equal_on_ranks, local_problem
from attn_dispatch.ring.shards import spread_of
from attn_dispatch.spec.orders import GATHER
from attn_dispatch.spec.pattern import Dilated, Pattern, Window
from attn_dispatch.spec.problem import Call, Problem, choose_pattern

Lengths = Callable[[int, int], list[list[int]]]


class Piece(NamedTuple):
    """Queries `start` to `stop` of one document, and the keys `first` to `end` that they see, by position.

    `pattern` is that of the queries at the end of the keys; None where the piece is computed as a document.
    """

    start: int
    stop: int
    first: int
    end: int
    pattern: Pattern | None


def rows_over_mesh(call: Call, lengths_of: Lengths) -> Rewritten:
    """A call for each run of this rank's documents, and for each part of one that a border of shards cuts.

    Args:
        lengths_of: the lengths of each row's documents, from the batch size and the tokens of the whole sequence.

    Raises:
        InvalidInput: an argument is wrong, or cannot be given here. GroupMismatch: ranks pass different arguments.
    """
    link, spread = spread_of(call.mesh)
    rows = _Rows(call, link, spread.kind, lengths_of)
    return Rewritten(rows.calls(), rows.joined, rows.explained)


class _Rows:
    """Packed rows on this rank: the calls that they consist of, for which keys of the other ranks are gathered."""

    def __init__(self, call: Call, link: Link, kind: str, lengths_of: Lengths) -> None:
        self.call, self.link, self.kind, self.lengths_of = call, link, kind, lengths_of
        self.counts: list[int] = []  # of the calls of each row of the batch, or of all where they are alike
        self.gathered: tuple[Tensor, Tensor, Tensor | None] | None = None

    def calls(self) -> Iterator[Call]:
        """A collective, from the first call on."""
        with errors_sent(self.link):
            problem, pattern = _problem(self.call)
        equal = equal_on_ranks(problem, pattern, self.kind)
        equal |= {name: _digest(getattr(self.call, name)) for name in ("documents", "cu_seqlens")}
        equal["gradients"] = [x.requires_grad for x in self.call.qkv]
        shards = Layout(agree(self.link, equal, problem.q_len, 0).lengths, self.kind)
        yield from self._calls(shards, problem.batch, pattern, _Beyond.keys)

    def explained(self) -> Iterator[Call]:
        """The calls if all shards are as long as this one, of keys that are not gathered: their values are not read."""
        problem, pattern = _problem(self.call)
        shards = Layout((problem.q_len,) * self.link.size, self.kind)
        return self._calls(shards, problem.batch, pattern, _Beyond.like)

    def _calls(self, shards: Layout, batch: int, pattern: Pattern, gather: Callable[..., Any]) -> Iterator[Call]:
        lengths = self.lengths_of(batch, shards.tokens)
        borders = [list(accumulate(row, initial=0)) for row in lengths]
        q, k, v = self.call.tokens_first
        every = [[[pieces(pattern, run, row) for run in runs] for runs in shards.chunks] for row in borders]
        beyond = _Beyond.of(self.link, shards, chain.from_iterable(chain.from_iterable(chain.from_iterable(every))))
        keys = gathered = k, v, self.call.key_mask
        if len(beyond.positions):
            gathered = self.gathered = gather(beyond, *keys)
        plain = self.call.with_pattern(pattern, mesh=None, layout="bnhd", documents=None, cu_seqlens=None, backend=None)
        plain = plain._replace(order=None)
        alike = all(row == borders[0] for row in borders)
        for number, ranks in enumerate(every[:1] if alike else every):
            row = slice(None) if alike else slice(number, number + 1)
            own, others = ([None if x is None else x[row] for x in three] for three in (keys, gathered))
            calls = list(_of_row(plain._replace(q=q[row]), own, others, ranks[self.link.rank], beyond))
            self.counts.append(len(calls))
            yield from calls

    def joined(self, results: list[Any]) -> Any:
        with_lse, left = self.call.return_lse, iter(results)
        rows = [list(islice(left, count)) for count in self.counts]
        out: Any = torch.cat([torch.cat([each[0] if with_lse else each for each in row], 1) for row in rows])
        lse = torch.cat([torch.cat([lse for _, lse in row], 2) for row in rows]) if with_lse else None
        if self.gathered is not None and self.gathered[0].requires_grad:
            # Every rank takes part in the sum of gradients, whatever its queries see: by a sum of nothing, 0.
            nothing = self.gathered[0][:, :0].sum() + self.gathered[1][:, :0].sum()
            out, lse = (None if x is None else x + nothing.to(x.dtype) for x in (out, lse))
        return self.call.returned(out, lse)


def _of_row(
    plain: Call, own: list[Any], gathered: list[Any], ranges: Iterable[Iterable[Piece]], beyond: _Beyond
) -> Iterator[Call]:
    """The calls for this rank's queries, of rows with the same documents. Neighbouring whole ones are one call."""
    at = 0
    for is_whole, group in groupby(chain.from_iterable(ranges), lambda piece: piece.pattern is None):
        for some in [list(group)] if is_whole else [[piece] for piece in group]:
            here = slice(at, at + sum(piece.stop - piece.start for piece in some))
            at = here.stop
            changes: dict[str, Any] = {}
            if is_whole:
                lengths = torch.tensor([piece.stop - piece.start for piece in some])
                ids = torch.repeat_interleave(torch.arange(len(some)), lengths)
                keys, place, changes["documents"] = own, here, ids.expand(len(plain.q), -1)
            else:
                keys, place, changes["pattern"] = gathered, beyond.places(some[0]), some[0].pattern
            for name, x in zip(("k", "v", "key_mask"), keys):
                changes[name] = None if x is None else x[:, place]
            yield plain._replace(q=plain.q[:, here], **changes)


def _problem(call: Call) -> tuple[Problem, Pattern]:
    """The problem of this rank's tokens, with no pattern, and the pattern. Raises InvalidInput."""
    pattern = choose_pattern(call)
    if pattern.bands(1, 1, ()) is None or (isinstance(pattern, Dilated) and not pattern.is_causal):
        raise InvalidInput(f"documents over a mesh take Dense, Window and causal Dilated patterns, not {pattern}")
    if call.dropout_p:
        raise InvalidInput(f"documents over a mesh take no dropout, got {call.dropout_p:g}")
    for name, known in (("backend", NAME), ("order", GATHER)):
        if (got := getattr(call, name)) not in (None, known):
            raise InvalidInput(f"{name} must be None or {known!r} with documents over a mesh, got {got!r}")
    return local_problem(call), pattern


def pieces(pattern: Pattern, run: range, borders: Sequence[int]) -> list[Piece]:
    """The parts of documents in a run of queries, in order; documents start and end at `borders`."""
    found = []
    band = None if isinstance(pattern, Dilated) else next(iter(pattern.bands(1, 1, ()) or ()))
    low, high = (None, 0) if band is None else (band.low, band.high)
    for start, end in pairwise(borders):
        first, stop = max(start, run.start), min(end, run.stop)
        if first >= stop:
            continue
        if first == start and (stop == end or (high is not None and high <= 0)):
            found.append(Piece(first, stop, first, stop, None))
            continue
        last = end if high is None else max(stop, min(end, stop + high))
        own = pattern
        if isinstance(pattern, Window):
            ahead = last - stop  # keys after the last query
            left = None if pattern.left is None else pattern.left + ahead
            own = Window(left, None if pattern.right is None else pattern.right - ahead, pattern.sinks)
            if low is not None and not pattern.sinks:
                start = max(start, min(first, first + low))
        found.append(Piece(first, stop, start, last, own))
    return found


@dataclass(frozen=True, eq=False)
class _Beyond:
    """The keys that queries of other shards, or of other runs, see.

    Args:
        positions: int64 [keys], rising.
        local: for this rank int64, which of its tokens these are.
        runs: by rank, which of the keys are its tokens.
    """

    link: Link
    positions: Tensor
    local: Tensor
    runs: Runs

    @classmethod
    def of(cls, link: Link, shards: Layout, every: Iterable[Piece]) -> _Beyond:
        wanted = torch.zeros(shards.tokens, dtype=torch.bool)
        for piece in every:
            if piece.pattern is not None:
                wanted[piece.first : piece.end] = True
        before = torch.nn.functional.pad(wanted.cumsum(0), (1, 0))
        runs = tuple(tuple(range(int(before[x.start]), int(before[x.stop])) for x in own) for own in shards.chunks)
        local = tokens_of(wanted, shards, link.rank, 0).nonzero().flatten()
        return cls(link, wanted.nonzero().flatten(), local, runs)

    def places(self, piece: Piece) -> slice:
        """Where the keys of a piece stand among these."""
        first = int(torch.searchsorted(self.positions, piece.first))
        return slice(first, first + piece.end - piece.first)

    def keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """These tokens of k, v and the mask [batch, keys, ...]; gradients go to the ranks that hold them."""

        def everywhere(x: Tensor) -> Tensor:
            return gathered(x, self.link, self.runs, 1, sums=True)

        local = self.local.to(k.device)
        both = everywhere(torch.cat([x.index_select(1, local) for x in (k, v)], -1))
        mask = None if key_mask is None else everywhere(key_mask.index_select(1, local).to(torch.uint8)).bool()
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :], mask

    def like(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tensors as `keys` returns, without values or communication."""
        k, v = (x.new_empty(1).expand(len(x), len(self.positions), *x.shape[2:]) for x in (k, v))
        return k, v, None if key_mask is None else key_mask.new_ones(len(key_mask), len(self.positions))


def _digest(ids: Any) -> Any:
    """What must be equal on all ranks of `documents` or `cu_seqlens`."""
    if not isinstance(ids, Tensor):
        return repr(ids)
    plain = ids.cpu().contiguous()
    return list(plain.shape), zlib.crc32(bytes(plain.view(torch.uint8).flatten().tolist())) if plain.numel() else 0
