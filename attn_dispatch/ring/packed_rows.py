"""Packed rows over ranks: each rank computes its queries; of documents that a border of shards cuts it gets the keys.

Documents within a shard stay there. The keys of the others, as far as queries beyond the border see them, are gathered
on all ranks, and their gradients are summed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_dispatch.errors import AttnDispatchError, InvalidInput
from attn_dispatch.kernels.numerics import sum_dtype
from attn_dispatch.ring.link import Link, agree
from attn_dispatch.ring.over_mesh import alone, scaled_only, spread_over
from attn_dispatch.ring.rows.layout import Layout
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.ring.trial import NAME
from attn_dispatch.spec.orders import GATHER
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.problem import SHORTHANDS, Problem, choose_pattern


class Piece(NamedTuple):
    """Queries `start` to `stop` of one document, and the keys `first` to `end` that they see, by position.

    `pattern` is that of the queries at the end of the keys; None where the piece is computed as a document.
    """

    start: int
    stop: int
    first: int
    end: int
    pattern: Pattern | None


def attend_packed(
    attend: Callable[..., Any],
    lengths_of: Callable[[Any, Any, int, int], list[list[int]]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    documents: Any,
    cu_seqlens: Any,
    arguments: dict[str, Any],
) -> Any:
    """`attend` for packed rows whose tokens are sharded over `mesh`; a collective.

    Args:
        lengths_of: the lengths of each row's documents, from `documents` and `cu_seqlens`, which are of the whole
            sequence, the batch size and the tokens of the whole sequence.

    Raises:
        InvalidInput: an argument is wrong, or cannot be given here. GroupMismatch: ranks pass different arguments.
    """
    link, spread = spread_over(arguments["mesh"])
    if link.size == 1:
        backend, order = alone(arguments["backend"], arguments["order"])
        here = {**arguments, "mesh": None, "backend": backend, "order": order}
        return attend(q, k, v, layout=layout, documents=documents, cu_seqlens=cu_seqlens, **here)
    try:
        pattern = _checked(arguments)
        key_mask, common = arguments["key_mask"], {name: arguments[name] for name in ("scale", "return_lse")}
        problem = Problem.of(q, k, v, layout=layout, key_mask=key_mask, **common)
        if problem.q_len != problem.k_len:
            raise InvalidInput(f"over a mesh q and k must have one length, got {problem.q_len} and {problem.k_len}")
    except AttnDispatchError as error:
        agree(link, {}, 0, 0, error)  # sends the error to the other ranks and raises it
        raise
    equal = {**problem.to_dict(), "pattern": pattern.to_dict(), "shards": spread.kind}
    equal |= {
        "documents": _digest(documents),
        "cu_seqlens": _digest(cu_seqlens),
        "gradients": [x.requires_grad for x in (q, k, v)],
    }
    for name in ("q_len", "k_len", "strides"):
        del equal[name]
    shards = Layout(agree(link, equal, problem.q_len, 0).lengths, spread.kind)
    lengths = lengths_of(documents, cu_seqlens, problem.batch, shards.tokens)
    borders = [list(accumulate(row, initial=0)) for row in lengths]
    if layout == "bhnd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    every = [[[pieces(pattern, run, row) for run in runs] for runs in shards.chunks] for row in borders]
    beyond = _Beyond.of(link, shards, chain.from_iterable(chain.from_iterable(chain.from_iterable(every))))
    keys = k, v, key_mask
    gathered = beyond.keys(k, v, key_mask) if len(beyond.positions) else keys
    alike = all(row == borders[0] for row in borders)
    results = []
    for number, ranks in enumerate(every[:1] if alike else every):
        row, parts = slice(None) if alike else slice(number, number + 1), chain.from_iterable(ranks[link.rank])
        own, others = ([None if x is None else x[row] for x in three] for three in (keys, gathered))
        results.append(_of_row(attend, pattern, q[row], own, others, parts, beyond, common))
    out = torch.cat([out for out, _ in results])
    found = [out.transpose(1, 2) if layout == "bhnd" else out]
    found += [torch.cat([lse for _, lse in results])] if common["return_lse"] else []
    if gathered is not keys and gathered[0].requires_grad:
        # Every rank takes part in the sum of gradients, whatever its queries see.
        found = [_Tied.apply(x, *gathered[:2]) for x in found]  # type: ignore[no-untyped-call]
    return tuple(found) if common["return_lse"] else found[0]


def _of_row(
    attend: Callable[..., Any],
    pattern: Pattern,
    q: Tensor,
    own: list[Any],
    gathered: list[Any],
    parts: Iterable[Piece],
    beyond: _Beyond,
    common: dict[str, Any],
) -> tuple[Tensor, Any]:
    """out and lse of this rank's queries, of rows with the same documents. Neighbouring whole ones are one call."""
    results: list[tuple[Tensor, Any]] = []
    at = 0
    for is_whole, group in groupby(parts, lambda piece: piece.pattern is None):
        for some in [list(group)] if is_whole else [[piece] for piece in group]:
            here = slice(at, at + sum(piece.stop - piece.start for piece in some))
            at = here.stop
            if is_whole:
                lengths = torch.tensor([piece.stop - piece.start for piece in some])
                ids = torch.repeat_interleave(torch.arange(len(some)), lengths).expand(len(q), -1)
                k, v, mask = (None if x is None else x[:, here] for x in own)
                more = {"pattern": pattern, "documents": ids}
            else:
                keys = beyond.places(some[0])
                k, v, mask = (None if x is None else x[:, keys] for x in gathered)
                more = {"pattern": some[0].pattern}
            found = attend(q[:, here], k, v, key_mask=mask, **more, **common)
            results.append(found if common["return_lse"] else (found, None))
    out = torch.cat([out for out, _ in results], 1)
    return out, torch.cat([lse for _, lse in results], 2) if common["return_lse"] else None


def _checked(arguments: dict[str, Any]) -> Pattern:
    """The pattern of a call. Raises InvalidInput: an argument cannot be given with documents over ranks."""
    scaled_only(arguments)
    pattern = choose_pattern(arguments["pattern"], *(arguments[name] for name in SHORTHANDS))
    if not isinstance(pattern, Dense | Window) and not (isinstance(pattern, Dilated) and pattern.is_causal):
        raise InvalidInput(f"documents over a mesh take Dense, Window and causal Dilated patterns, not {pattern}")
    for name in ("first_head", "all_heads"):
        if arguments[name] is not None:
            raise InvalidInput(f"over a mesh every rank holds all heads: {name} must be None, got {arguments[name]!r}")
    if arguments["dropout_p"]:
        raise InvalidInput(f"documents over a mesh take no dropout, got {arguments['dropout_p']:g}")
    for name, known in (("backend", NAME), ("order", GATHER)):
        if arguments[name] not in (None, known):
            raise InvalidInput(f"{name} must be None or {known!r} with documents over a mesh, got {arguments[name]!r}")
    return pattern


def pieces(pattern: Pattern, run: range, borders: Sequence[int]) -> list[Piece]:
    """The parts of documents in a run of queries, in order; documents start and end at `borders`."""
    found = []
    right = pattern.right if isinstance(pattern, Window) else 0 if getattr(pattern, "is_causal", False) else None
    for start, end in pairwise(borders):
        first, stop = max(start, run.start), min(end, run.stop)
        if first >= stop:
            continue
        if first == start and (stop == end or (right is not None and right <= 0)):
            found.append(Piece(first, stop, first, stop, None))
            continue
        last = end if right is None else max(stop, min(end, stop + right))
        own: Pattern = pattern
        if isinstance(pattern, Window):
            ahead = last - stop  # keys after the last query
            left = None if pattern.left is None else pattern.left + ahead
            own = Window(left, None if right is None else right - ahead, pattern.sinks)
            if pattern.left is not None and not pattern.sinks:
                start = max(start, min(first, first - pattern.left))
        found.append(Piece(first, stop, start, last, own))
    return found


@dataclass(frozen=True, eq=False)
class _Beyond:
    """The keys that queries of other shards, or of other runs, see.

    Args:
        positions: int64 [keys], rising.
        local: for this rank int64, which of its tokens these are.
        targets: by rank int64, which of the keys are its tokens.
    """

    link: Link
    positions: Tensor
    local: Tensor
    targets: list[Tensor]

    @classmethod
    def of(cls, link: Link, shards: Layout, every: Iterable[Piece]) -> _Beyond:
        wanted = torch.zeros(shards.tokens, dtype=torch.bool)
        for piece in every:
            if piece.pattern is not None:
                wanted[piece.first : piece.end] = True
        place = wanted.cumsum(0) - 1
        held = [positions_of(shards, rank) for rank in range(link.size)]
        local = wanted[held[link.rank]].nonzero().flatten()
        return cls(link, wanted.nonzero().flatten(), local, [place[each[wanted[each]]] for each in held])

    def places(self, piece: Piece) -> slice:
        """Where the keys of a piece stand among these."""
        first = int(torch.searchsorted(self.positions, piece.first))
        return slice(first, first + piece.end - piece.first)

    def keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """These tokens of k, v and the mask [batch, keys, ...]; gradients go to the ranks that hold them."""
        both = self._gathered(torch.cat([x.index_select(1, self.local.to(x.device)) for x in (k, v)], -1))
        mask = None if key_mask is None else self._gathered(key_mask[:, self.local.to(k.device)].to(torch.uint8)).bool()
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :], mask

    def _gathered(self, x: Tensor) -> Tensor:
        found: Tensor = _Everywhere.apply(x.movedim(1, -1), self)  # type: ignore[no-untyped-call]
        return found.movedim(-1, 1)


class _Everywhere(torch.autograd.Function):
    """x [..., tokens] of every rank as [..., keys], by the targets of a `_Beyond`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beyond: _Beyond) -> Tensor:
        ctx.beyond = beyond
        lengths = tuple(len(each) for each in beyond.targets)
        whole = x.new_empty(*x.shape[:-1], sum(lengths))
        for part, target in zip(beyond.link.all_gather_ragged(x.contiguous(), lengths), beyond.targets):
            whole[..., target.to(x.device)] = part
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        link, targets = ctx.beyond.link, ctx.beyond.targets
        total = link.all_reduce(grad.to(sum_dtype(grad.dtype)))
        return total[..., targets[link.rank].to(grad.device)].to(grad.dtype), None


class _Tied(torch.autograd.Function):
    """out, whose backward pass also reaches the gathered keys and values, with zeros."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *gathered: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in gathered]
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.like)


def _digest(ids: Any) -> Any:
    """What must be equal on all ranks of `documents` or `cu_seqlens`."""
    if not isinstance(ids, Tensor):
        return repr(ids)
    plain = ids.cpu().contiguous()
    return list(plain.shape), zlib.crc32(bytes(plain.view(torch.uint8).flatten().tolist())) if plain.numel() else 0
