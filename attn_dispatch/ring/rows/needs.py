"""Which keys a rank's queries see: the rows that it must have, and no others.

Query i sees key j where j lies, on every axis of the pattern, between bounds that depend on i's place on that axis
alone. The keys that a set of queries sees are then found axis by axis, without looking at pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import progressions
from attn_dispatch.spec.orders import permutation
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.reordered import kept_in

Offsets = tuple[int | None, ...]  #: of one query head, by branch
Kind = frozenset[Offsets]  #: of the query heads that read one key head


def kv_classes(pattern: Pattern, heads: int, kv_heads: int) -> tuple[tuple[range, Kind], ...]:
    """The key heads whose queries see the same keys, with the offsets of those queries; one class where all do."""
    pattern, group = pattern.natural, heads // kv_heads
    if not isinstance(pattern, Dilated):
        return ((range(kv_heads), frozenset({()})),)
    found: dict[Kind, list[int]] = {}
    for kv in range(kv_heads):
        kind = frozenset(
            tuple(pattern.head_offset(b, head, heads) for b in range(len(pattern.branches)))
            for head in range(kv * group, (kv + 1) * group)
        )
        found.setdefault(kind, []).append(kv)
    runs = ((run, kind) for kind, members in found.items() for run in progressions(members))
    # Query heads must be a slice too: those of key heads that are apart are one only where no key head is shared.
    return tuple((each, kind) for run, kind in runs for each in (_one_by_one(run) if group > 1 else (run,)))


def seen_by(pattern: Pattern, length: int, chunks: tuple[range, ...], kind: Kind) -> Tensor:
    """Bool [length]: the keys that some query of these chunks sees, in the order in which tokens are kept.

    Args:
        chunks: runs of places where queries lie.
        kind: offsets of the query heads to go by.
    """
    at = permutation(kept_in(pattern), pattern.natural, length)
    queries = torch.zeros(length, dtype=torch.bool)
    for chunk in chunks:
        queries[chunk.start : chunk.stop] = True
    if at is not None:
        queries = torch.zeros_like(queries).index_put_((at,), queries)
    keys = torch.zeros_like(queries)
    for offsets in kind:
        keys |= _seen(pattern.natural, queries, offsets)
    return keys if at is None else keys[at]


def may_meet(pattern: Dilated, length: int, heads: int, which: range, some: Tensor, others: Tensor) -> Tensor:
    """Who of some tokens sees one of the others or is seen by it, and, if causal, who would but for that: bool.

    Args:
        length: of the whole sequence, in tokens.
        heads: of all; `which` are the query heads to go by.
        some, others: int64, their positions.
    """
    found = torch.zeros(len(some), dtype=torch.bool)
    for offsets in {tuple(pattern.head_offset(b, head, heads) for b in range(len(pattern.branches))) for head in which}:
        for (segment, rate), offset in zip(pattern.branches, offsets):
            if offset is None:
                continue
            segment = min(segment, length)
            met = torch.zeros(-(-length // segment), dtype=torch.bool)
            met[others[others % segment % rate == offset] // segment] = True
            found |= met[some // segment] & (some % segment % rate == offset)
    return found


def _seen(pattern: Pattern, queries: Tensor, offsets: Offsets) -> Tensor:
    length = len(queries)
    if isinstance(pattern, Dense):
        pattern = Window(None, 0 if pattern.is_causal else None)
    if isinstance(pattern, Window):
        at = queries.nonzero().flatten()
        first = torch.zeros_like(at) if pattern.left is None else (at - pattern.left).clamp(min=0)
        last = torch.full_like(at, length - 1) if pattern.right is None else (at + pattern.right).clamp(max=length - 1)
        return _covered(first, last, length)
    if isinstance(pattern, Dilated):
        found = torch.zeros_like(queries)
        for (segment, rate), offset in zip(pattern.branches, offsets):
            if offset is not None:
                found |= _segments(queries, min(segment, length), rate, offset, pattern.is_causal)
        return found
    if isinstance(pattern, Neighborhood):
        return _neighbors(pattern, queries)
    raise TypeError(f"no rows for {pattern!r}")


def _covered(first: Tensor, last: Tensor, length: int) -> Tensor:
    """Bool [length]: what lies in any of these intervals, both ends included."""
    edges = torch.zeros(length + 1, dtype=torch.int64)
    one = torch.ones_like(first)
    edges.index_add_(0, first, one).index_add_(0, last + 1, -one)
    return edges[:-1].cumsum(0) > 0


def _segments(queries: Tensor, segment: int, rate: int, offset: int, is_causal: bool) -> Tensor:
    position = torch.arange(len(queries))
    chosen = position % segment % rate == offset
    at = (queries & chosen).nonzero().flatten()
    start = at // segment * segment
    last = at if is_causal else (start + segment - 1).clamp(max=len(queries) - 1)
    return _covered(start, last, len(queries)) & chosen


def _neighbors(pattern: Neighborhood, queries: Tensor) -> Tensor:
    """Axis by axis: a window on one axis does not depend on the place on another."""
    found = queries.view(pattern.grid)
    for axis, step in enumerate(pattern.dilation):
        low, high = pattern.axes[axis].bounds()
        lines = found.movedim(axis, -1).int()
        seen = torch.zeros(lines.shape, dtype=torch.bool)
        for start in range(min(step, pattern.grid[axis])):
            members = lines[..., start::step]
            count = members.shape[-1]
            edges = torch.zeros(*members.shape[:-1], count + 1, dtype=torch.int32)
            edges.index_add_(-1, low[start::step].clamp(min=0), members)
            edges.index_add_(-1, high[start::step].clamp(max=count - 1) + 1, -members)
            seen[..., start::step] = edges[..., :-1].cumsum(-1) > 0
        found = seen.movedim(-1, axis)
    return found.reshape(-1)


def _one_by_one(run: range) -> tuple[range, ...]:
    return (run,) if run.step == 1 else tuple(range(member, member + 1) for member in run)
