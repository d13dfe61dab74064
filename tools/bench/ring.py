"""A sequence over many ranks, processes of this machine connected by gloo: memory, time, and how even their work is.

    python -m tools.bench.ring [memory speed exchanges balance] [--rounds N] [--shrink N]

--shrink: sequences so many times shorter, for a quick look, which is not written over the results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch import Blocks, Ranges, Sharded, attend, explain
from attn_dispatch.ring.rows.data import Held
from attn_dispatch.ring.rows.layout import KINDS, ZIGZAG, Layout, deal
from attn_dispatch.ring.rows.traffic import positions_of
from attn_dispatch.spec.orders import GATHER, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern
from attn_dispatch.tuning.intervals import Timing
from tools.bench.longnet import known_peak
from tools.lib.common import parser, ratio, timing, write
from tools.lib.ranks import Tokens, freed_at_once, together
from tools.lib.tables import Table, direction, interval, megabytes, ms

TAKES = "5 min"

HEADS, HEAD_DIM = 8, 64
WIDE = Dilated((2048, 16384, 131_072, 1_048_576), (1, 4, 16, 64))
#: With heads, and the tokens of a forward pass and of both.
MEMORY: tuple[tuple[Pattern, int, tuple[int, int]], ...] = (
    (Dense(), 4, (32_768, 32_768)),
    (WIDE, HEADS, (65_536, 32_768)),
)
SPEED_TOKENS, SPEED_HEADS = 32_768, 4
BALANCED_TOKENS = 16_384
EXCHANGED, EXCHANGED_TOKENS = (RING, GATHER, ULYSSES), (512, 4096)


def once(tensors: Sequence[Tensor], pattern: Pattern, over_ranks: bool, backward: bool = False) -> Tensor:
    """One call over all ranks, with the exchange that is chosen without measurements; or on this rank alone."""
    os.environ["ATTN_DISPATCH_MODE"] = "off"
    return _called(tensors, pattern, {"mesh": "world"} if over_ranks else {"backend": "native"}, backward)


def _called(tensors: Sequence[Tensor], pattern: Pattern, where: dict[str, Any], backward: bool) -> Tensor:
    q, k, v = (x.requires_grad_(backward) for x in tensors)
    out: Tensor = attend(q, k, v, pattern, **where)
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return out.detach()


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(shrink: int = 1) -> list[dict[str, Any]]:
    """Peak bytes of each rank, for 1 to 8 ranks; and the bytes of the shard's q, k, v and out."""
    found = []
    for pattern, heads, lengths in MEMORY:
        for backward, tokens in enumerate(lengths):
            with freed_at_once():
                found += [_memory(pattern, tokens // shrink, heads, ranks, bool(backward)) for ranks in (1, 2, 4, 8)]
    return found


def _memory(pattern: Pattern, tokens: int, heads: int, ranks: int, backward: bool) -> dict[str, Any]:
    peaks, exchanges = zip(*together(_peak, ranks, pattern, Layout(deal(tokens, ranks)), heads, backward))
    shard = tokens // ranks * heads * HEAD_DIM * 4
    return {
        "pattern": str(pattern), "tokens": tokens, "heads": heads, "dtype": "float32", "ranks": ranks,
        "exchange": exchanges[0], "backward": backward, "peak_bytes": max(peaks),
        "qkv_out_bytes": 4 * shard,
    }  # fmt: skip


def _peak(pattern: Pattern, layout: Layout, heads: int, backward: bool) -> tuple[int, str | None]:
    """Peak bytes of a call, above those held before q, k and v were made."""
    rank, several = dist.get_rank(), layout.ranks > 1
    small = Tokens(Layout(deal(64 * layout.ranks, layout.ranks)), heads, HEAD_DIM, torch.float32)
    once(small.shard(rank), Dense(), several, backward)  # loads what is loaded only once
    tokens = Tokens(layout, heads, HEAD_DIM, torch.float32)

    def call() -> str | None:
        q, k, v = tokens.shard(rank)
        once((q, k, v), pattern, several, backward)
        return str(explain(q, k, v, pattern, mesh="world").order) if several else None

    exchange, peak = known_peak(call)
    return peak, exchange


# --- two ranks, or two threads ----------------------------------------------------------------------------------------


def speed(rounds: int, shrink: int = 1) -> list[dict[str, Any]]:
    """Two ranks of one thread against one process of two, dense causal, interleaved."""
    tokens = SPEED_TOKENS // shrink
    found = []
    for backward in (False, True):
        times = together(_turns, 3, tokens, rounds, backward)
        alone, ring = times[2], [max(pair) for pair in zip(times[0], times[1])]
        one, two = (Timing(tuple(samples[1:]), samples[0]) for samples in (alone, ring))
        entry = {
            "tokens": tokens, "heads": SPEED_HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "shards": ZIGZAG,
            "backward": backward, "one_rank_two_threads": timing(one), "two_ranks_one_thread": timing(two),
            "ratio": ratio(two, one),
        }  # fmt: skip
        found.append(entry)
    return found


def _turns(tokens: int, rounds: int, backward: bool) -> list[float]:
    """Milliseconds of this process's calls, the first of which is a warm-up. Rank 2 runs alone."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    alone = rank == 2
    torch.set_num_threads(2 if alone else 1)
    layout = Layout((tokens,)) if alone else Layout(deal(tokens, 2), ZIGZAG)
    tensors = Tokens(layout, SPEED_HEADS, HEAD_DIM, torch.float32).shard(0 if alone else rank)
    where: dict[str, Any] = {"backend": "native"} if alone else {"order": "ring", "mesh": Sharded(pair, ZIGZAG)}
    found = []
    for _, turn in product(range(rounds + 1), (True, False)):
        dist.barrier()
        if turn == alone:
            found.append(_call_ms(tensors, where, backward))
    dist.barrier()
    return found


def _call_ms(tensors: Sequence[Tensor], where: dict[str, Any], backward: bool) -> float:
    """Milliseconds of a dense causal call."""
    start = time.perf_counter()
    _called(tensors, Dense(is_causal=True), where, backward)
    return (time.perf_counter() - start) * 1e3


def exchanges(rounds: int, shrink: int = 1) -> list[dict[str, Any]]:
    """Every exchange between two ranks of one thread, dense causal, zigzag, in turns."""
    found = []
    for tokens, backward in product([each // shrink for each in EXCHANGED_TOKENS], (False, True)):
        of_ranks = together(_exchanges, 2, tokens, rounds, backward)
        by_name = ([max(pair) for pair in zip(*both)] for both in zip(*of_ranks))
        times = {name: Timing(tuple(ms[1:]), ms[0]) for name, ms in zip(EXCHANGED, by_name)}
        each = {name: timing(one) for name, one in times.items()}
        found.append({"tokens": tokens, "backward": backward, **each, "ratio": ratio(times[ULYSSES], times[RING])})
    return found


def _exchanges(tokens: int, rounds: int, backward: bool) -> list[list[float]]:
    """Milliseconds of this rank's calls with each exchange, the first of which is a warm-up."""
    tensors = Tokens(Layout(deal(tokens, 2), ZIGZAG), HEADS, HEAD_DIM, torch.float32).shard(dist.get_rank())
    found: list[list[float]] = [[] for _ in EXCHANGED]
    for _, (name, times) in product(range(rounds + 1), zip(EXCHANGED, found)):
        dist.barrier()
        where = {"order": name, "mesh": Sharded("world", ZIGZAG)}
        times.append(_call_ms(tensors, where, backward))
    return found


# --- masks made of data -----------------------------------------------------------------------------------------------


def balance(shrink: int = 1) -> list[dict[str, Any]]:
    """The query-key pairs that each of four ranks computes, by the intervals of keys that the ring works from."""
    tokens = BALANCED_TOKENS // shrink
    found = []
    for (name, pattern), kind in product(masks(tokens).items(), KINDS):
        pairs = together(_pairs, 4, pattern, Layout(deal(tokens, 4), kind))
        longest = max(pairs) * len(pairs) / sum(pairs)
        found.append({"pattern": name, "tokens": tokens, "shards": kind, "pairs": pairs, "longest_over_mean": longest})
    return found


def masks(tokens: int) -> dict[str, Blocks | Ranges]:
    """Tables of blocks of 64 tokens, and spans."""
    block, token = torch.arange(tokens // 64), torch.arange(tokens)
    before = block[:, None] - block
    drawn = torch.rand(before.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    seen = {
        "10 % of blocks": drawn,
        "10 % of blocks, causal": (drawn | (before == 0)) & (before >= 0),
        "near blocks": before.abs() <= 12,
        "a dense twelfth of the queries": drawn | (block[:, None] < len(block) // 12),
    }
    spans = Ranges.spans((token // 256).where(token // 256 % 2 == 0, -1)[None])
    return {name: Blocks(table[None, None], 64) for name, table in seen.items()} | {"spans, causal": spans}


def _pairs(pattern: Blocks | Ranges, layout: Layout) -> int:
    first, last = Held.of(pattern, 1, 1).intervals(positions_of(layout, dist.get_rank()), layout.tokens, ())
    return int((last - first + 1).clamp(min=0).sum())


# --- all --------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {  # by rounds and shrink
    "memory": lambda rounds, shrink: memory(shrink),
    "speed": speed,
    "exchanges": exchanges,
    "balance": lambda rounds, shrink: balance(shrink),
}


def tables(found: Any) -> Iterator[Table]:
    rows: list[tuple[str, ...]] = [
        (f"{one['pattern']}, {one['heads']} heads", f"{one['tokens']:,}", direction(one), ranks, *sizes)
        for one in found.get("memory", ())
        for sizes in [(megabytes(one["peak_bytes"]), megabytes(one["qkv_out_bytes"]))]
        for ranks in [f"{one['ranks']}, `{one['exchange']}`" if one["exchange"] else f"{one['ranks']}"]
    ]
    yield Table(
        ("pattern", "tokens", "pass", "ranks", "peak of a rank", "its q, k, v and out"),
        rows,
        f"Memory, float32, heads of {HEAD_DIM}. One rank is `native` without a mesh. `gather` takes all rows of "
        "other ranks that a rank needs at once; with more ranks these do not get fewer.",
    )
    rows = [
        (f"{one['tokens']:,} tokens, {direction(one)}", ms(one[alone]), ms(one[ring]), interval(one["ratio"]))
        for one in found.get("speed", ())
        if (alone := "one_rank_two_threads") and (ring := "two_ranks_one_thread")
    ]
    yield Table(
        (f"dense causal, {SPEED_HEADS} heads", "1 rank, 2 threads", "2 ranks, 1 thread each", "2 ranks / 1 rank"),
        rows,
        "Two ranks, zigzag, against one process on the same two cores, in turns, float32.",
    )
    rows = [
        (f"{one['tokens']:,} tokens, {direction(one)}", *(ms(one[name]) for name in EXCHANGED), interval(one["ratio"]))
        for one in found.get("exchanges", ())
    ]
    if rows:
        yield Table(
            (f"dense causal, {HEADS} heads", *(f"`{name}`" for name in EXCHANGED), "`ulysses` / `ring`"),
            rows,
            "Exchanges between two ranks, zigzag, in turns, float32.",
        )
    if even := found.get("balance"):
        rows = [
            (name, *(f"{one['longest_over_mean']:.2f}" for one in even if one["pattern"] == name))
            for name in dict.fromkeys(one["pattern"] for one in even)
        ]
        yield Table(
            ("mask made of data", *(f"`{kind}`" for kind in KINDS)),
            rows,
            f"Query-key pairs of the rank with the most / the mean of 4 ranks, {even[0]['tokens']:,} tokens.",
        )


def main() -> None:
    options = parser(__doc__, "ring.json")
    options.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--shrink", type=int, default=1)
    given = options.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        options.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    found = {name: PARTS[name](given.rounds, given.shrink) for name in given.parts}
    write(given.output, found, tables, whole=given.shrink == 1 and set(found) == set(PARTS))


if __name__ == "__main__":
    main()
