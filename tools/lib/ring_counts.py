"""Bytes sent and work per rank: counted, and compared with independent counts.

No times. Bytes sent are the library's own counts (`traffic_of` of every rank, or the bytes that real processes sent);
the bytes needed are computed here from the pattern's definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch import Sharded, attend
from attn_dispatch.ring.link import link_of
from attn_dispatch.ring.rows import needs
from attn_dispatch.ring.rows import traffic as ring_traffic
from attn_dispatch.ring.rows.layout import KINDS, Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern
from tools.lib.ranks import Tokens, together

HEADS, HEAD_DIM = 8, 64
TOKENS = 2**20
LONGNET = Dilated((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
WIDE = Dilated((2048, 16384, 131_072, 1_048_576), (1, 4, 16, 64))
SHRINK = 256  #: factor by which problems of real ranks are smaller
ROW_BYTES = 2 * HEAD_DIM * 2  #: of k and v of one head, in fp16 or bf16


# --- what is needed ---------------------------------------------------------------------------------------------------


def needed(pattern: Dilated, tokens: int, run: range) -> Tensor:
    """Bool [heads, tokens]: the keys that queries of a run see, segment by segment."""
    seen = torch.zeros(HEADS, tokens, dtype=torch.bool)
    for head in range(HEADS):
        for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates):
            for start in range(run.start // length * length, run.stop, length):
                first = start + head % rate
                last = min(start + length, tokens)
                ahead = max(0, -(-(run.start - first) // rate))
                if first + ahead * rate < min(last, run.stop):
                    seen[head, first:last:rate] = True
    return seen


def needed_by_pairs(pattern: Pattern, tokens: int, at: Tensor) -> Tensor:
    """The same from the multiplicity of every pair, for queries at any positions."""
    found = torch.zeros(HEADS, tokens, dtype=torch.bool)
    for some in torch.split(at, 512):
        found |= (pattern.multiplicity(tokens, heads=HEADS, q_pos=some) > 0).any(1)
    return found


def rows_needed(seen: Tensor, own: Tensor) -> int:
    """The number of seen rows that are not this rank's own."""
    return int(seen.sum()) - int(seen[:, own].sum())


# --- counted ----------------------------------------------------------------------------------------------------------


def counted(pattern: Dilated, ranks: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Bytes of a forward pass, over all ranks and at the rank that receives most."""
    layout = Layout(deal(tokens, ranks))
    received, sent = [], []
    # One process counts for every rank: what each rank's queries see is cached.
    with mock.patch.object(ring_traffic, "seen_by", lru_cache(None)(needs.seen_by)):
        for rank in range(ranks):
            traffic = ring_traffic.traffic_of(pattern, layout, HEADS, HEADS, rank)
            received.append(sum(rows.count for each in traffic.receives.values() for rows in each))
            sent.append(sum(rows.count for each in traffic.sends.values() for rows in each))
    ring_traffic.traffic_of.cache_clear()
    wanted = [
        rows_needed(needed(pattern, tokens, run), positions_of(layout, rank))
        for rank, (run,) in enumerate(layout.chunks)
    ]
    if received != wanted or sum(sent) != sum(received):
        raise RuntimeError(f"{pattern} over {ranks} ranks: rows received {received}, sent {sent}, needed {wanted}")
    dense = HEADS * (tokens - tokens // ranks)
    return {
        "pattern": str(pattern),
        "tokens": tokens,
        "ranks": ranks,
        "shipped_bytes": sum(sent) * ROW_BYTES,
        "needed_bytes": sum(wanted) * ROW_BYTES,
        "most_received_bytes": max(received) * ROW_BYTES,
        "dense_received_bytes": dense * ROW_BYTES,
        "shipped_over_needed": sum(sent) / max(1, sum(wanted)) if sum(wanted) else None,
        "share_of_dense_ring": sum(sent) / (dense * ranks),
    }


def traffic() -> list[dict[str, Any]]:
    return list(_each(counted(pattern, ranks) for pattern in (LONGNET, WIDE) for ranks in (8, 64)))


# --- real ranks -------------------------------------------------------------------------------------------------------


def shrunk(pattern: Dilated) -> Dilated:
    return Dilated(tuple(length // SHRINK for length in pattern.segment_lengths), pattern.dilation_rates)


Sending = tuple[Pattern, Layout, str]


def shipped(ranks: int) -> Iterator[dict[str, Any]]:
    """Bytes that real ranks sent, forward and backward, and those that the definition needs."""
    tokens = TOKENS // SHRINK
    cases: list[tuple[Sending, int]] = []
    for pattern in (shrunk(LONGNET), shrunk(WIDE), Dense(), Dense(is_causal=True)):
        for kind in KINDS:
            layout = Layout(deal(tokens, ranks), kind)
            places = [positions_of(layout, rank) for rank in range(ranks)]
            rows = sum(rows_needed(needed_by_pairs(pattern, tokens, at), at) for at in places)
            cases += [((pattern, layout, how), rows) for how in (("ring", "gather") if rows else ("local",))]
    by_rank = together(_sent, ranks, [case for case, _ in cases])
    for ((sent_pattern, layout, exchange), rows), sent in zip(cases, zip(*by_rank)):
        # The backward pass sends the rows again, and their gradients back in float32.
        wanted = {"forward_bytes": rows * ROW_BYTES, "backward_bytes": rows * 3 * ROW_BYTES}
        total = {name: sum(each[name] for each in sent) for name in wanted}
        entry = {"pattern": str(sent_pattern), "tokens": tokens, "ranks": ranks, "shards": layout.kind}
        ratio = {name: total[name] / wanted[name] if wanted[name] else None for name in wanted}
        yield {**entry, "exchange": exchange, "shipped": total, "needed": wanted, "ratio": ratio}


def _sent(cases: list[Sending]) -> list[dict[str, int]]:
    """Bytes that this rank sent in each case."""
    rank, transport, found = dist.get_rank(), link_of("world").transport, []
    for pattern, layout, exchange in cases:
        q, k, v = (x.requires_grad_() for x in Tokens(layout, HEADS, HEAD_DIM, torch.bfloat16).shard(rank))
        transport.bytes_sent = 0
        out = attend(q, k, v, pattern, order=exchange, mesh=Sharded("world", layout.kind))
        forward, transport.bytes_sent = transport.bytes_sent, 0
        out.sum().backward()
        found.append({"forward_bytes": forward, "backward_bytes": transport.bytes_sent})
    return found


def all_shipped() -> list[dict[str, Any]]:
    return list(_each(entry for ranks in (2, 4) for entry in shipped(ranks)))


# --- balance ----------------------------------------------------------------------------------------------------------


def pairs(pattern: Pattern, tokens: int) -> Tensor:
    """int64 [tokens]: keys that each query of a causal pattern sees, over all heads, with multiplicity."""
    at = torch.arange(tokens)
    if isinstance(pattern, Dense):
        return HEADS * (at + 1)
    assert isinstance(pattern, Dilated)
    found = torch.zeros(tokens, dtype=torch.int64)
    for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates):
        inside = at % min(length, tokens)
        for head in range(HEADS):
            chosen = inside % rate == head % rate
            found += torch.where(chosen, inside // rate + 1, 0)
    return found


def balance() -> list[dict[str, Any]]:
    """Pairs of the rank with the most over the mean, causal."""
    found = []
    for pattern in (Dense(is_causal=True), causal(LONGNET), causal(WIDE)):
        work = pairs(pattern, TOKENS)
        for ranks in (2, 4, 8, 64):
            entry: dict[str, Any] = {"pattern": str(pattern), "tokens": TOKENS, "ranks": ranks}
            for kind in KINDS:
                layout = Layout(deal(TOKENS, ranks), kind)
                each = [int(work[positions_of(layout, rank)].sum()) for rank in range(ranks)]
                entry[kind] = max(each) / (sum(each) / ranks)
            found.append(entry)
    return list(_each(iter(found)))


def causal(pattern: Dilated) -> Dilated:
    return Dilated(pattern.segment_lengths, pattern.dilation_rates, is_causal=True)


def _each(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in found:
        print(entry, flush=True)
        yield entry
