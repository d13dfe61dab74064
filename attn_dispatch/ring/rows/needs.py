"""The keys that a rank's queries see: the rows that it needs, and no others.

Query i sees key j if j lies, on every axis of the pattern, between bounds that depend on i's coordinate on that axis
alone. The keys of a set of queries are therefore found axis by axis, without testing pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch.kernels.heads import heads_by_kind, progressions
from attn_dispatch.spec.orders import permutation, token_order_of
from attn_dispatch.spec.pattern import Dilated, Pattern
from attn_dispatch.spec.reach import Offsets

Kind = frozenset[Offsets]  #: of the query heads that read one key head


def kv_classes(pattern: Pattern, heads: int, kv_heads: int) -> tuple[tuple[range, Kind], ...]:
    """Classes of key heads whose queries see the same keys, with the offsets of their query heads."""
    group, found = heads // kv_heads, dict[Kind, list[int]]()
    for offsets, members in heads_by_kind(pattern, heads, group).items():
        found.setdefault(frozenset(offsets), []).extend(members)
    runs = ((run, kind) for kind, members in found.items() for run in progressions(sorted(members)))
    if group == 1:
        return tuple(runs)
    # Query heads must be a slice too. Those of a strided run of key heads are one only if each has one query head.
    apart = (([run] if run.step == 1 else [range(n, n + 1) for n in run], kind) for run, kind in runs)
    return tuple((each, kind) for some, kind in apart for each in some)


def seen_by(pattern: Pattern, length: int, chunks: tuple[range, ...], kind: Kind) -> Tensor:
    """Bool [length]: the keys that any query of these chunks sees, in the order in which tokens are stored.

    Args:
        chunks: runs of rows, those of the queries.
        kind: offsets of the query heads.
    """
    at = permutation(token_order_of(pattern), pattern.natural, length)
    queries = torch.zeros(length, dtype=torch.bool)
    for chunk in chunks:
        queries[chunk.start : chunk.stop] = True
    if at is not None:
        queries = torch.zeros_like(queries).index_put_((at,), queries)
    keys, positions = torch.zeros_like(queries), queries.nonzero().flatten()
    for offsets in kind:
        keys |= pattern.natural.seen(positions, length, length, offsets)
    return keys if at is None else keys[at]


def shares_segment(pattern: Dilated, length: int, heads: int, which: range, some: Tensor, others: Tensor) -> Tensor:
    """Bool [len(some)]: whether a token shares a selected segment with any of `others` in some branch.

    Args:
        length: tokens of the whole sequence.
        heads: number of query heads; `which` are those to consider.
        some, others: int64, positions.
    """
    found = torch.zeros(len(some), dtype=torch.bool)
    for offsets in {pattern.head_offsets(head, heads) for head in which}:
        for band in pattern.bands(length, length, offsets):
            segment = band.segment or length
            hit = torch.zeros(-(-length // segment), dtype=torch.bool)
            hit[others[band.selected(others)] // segment] = True
            found |= hit[some // segment] & band.selected(some)
    return found
