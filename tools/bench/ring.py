"""A sequence over many ranks, processes of this machine connected by gloo: memory and time.

python -m tools.bench.ring [memory speed exchanges] [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch import Sharded, attend, explain
from attn_dispatch.ring.rows.layout import ZIGZAG, Layout, deal
from attn_dispatch.spec.orders import GATHER, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern
from attn_dispatch.tuning.intervals import Timing
from tools.bench.longnet import known_peak
from tools.lib.common import parser, ratio, timing, write
from tools.lib.ranks import together
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
EXCHANGED, EXCHANGED_TOKENS = (RING, GATHER, ULYSSES), (512, 4096)
ALONE = "alone"  #: a process of two threads


def drawn(layout: Layout, heads: int, rank: int) -> list[Tensor]:
    """The q, k and v of a rank, in float32, from its own seed: no rank needs the whole sequence."""
    shape, generator = (1, layout.lengths[rank], heads, HEAD_DIM), torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


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
            # Otherwise glibc retains a varying amount of what was freed, which counts as resident memory.
            with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**18)):
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
    os.environ["ATTN_DISPATCH_MODE"] = "off"  # the exchange is chosen without measurements
    rank, several = dist.get_rank(), layout.ranks > 1
    where = {"mesh": "world"} if several else {"backend": "native"}
    small = Layout(deal(64 * layout.ranks, layout.ranks))
    _called(drawn(small, heads, rank), Dense(), where, backward)  # loads what is loaded only once

    def call() -> str | None:
        q, k, v = drawn(layout, heads, rank)
        _called((q, k, v), pattern, where, backward)
        return str(explain(q, k, v, pattern, mesh="world").order) if several else None

    exchange, peak = known_peak(call)
    return peak, exchange


# --- times ------------------------------------------------------------------------------------------------------------


def speed(rounds: int, shrink: int = 1) -> list[dict[str, Any]]:
    """Two ranks of one thread against one process of two, dense causal, interleaved."""
    tokens, found = SPEED_TOKENS // shrink, []
    for backward in (False, True):
        times = timed((RING, ALONE), tokens, SPEED_HEADS, rounds, backward)
        entry = {
            "tokens": tokens, "heads": SPEED_HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "shards": ZIGZAG,
            "backward": backward, "one_rank_two_threads": timing(times[ALONE]),
            "two_ranks_one_thread": timing(times[RING]), "ratio": ratio(times[RING], times[ALONE]),
        }  # fmt: skip
        found.append(entry)
    return found


def exchanges(rounds: int, shrink: int = 1) -> list[dict[str, Any]]:
    """Every exchange between two ranks of one thread, dense causal, zigzag, in turns."""
    found = []
    for tokens, backward in product([each // shrink for each in EXCHANGED_TOKENS], (False, True)):
        times = timed(EXCHANGED, tokens, HEADS, rounds, backward)
        each = {name: timing(one) for name, one in times.items()}
        found.append({"tokens": tokens, "backward": backward, **each, "ratio": ratio(times[ULYSSES], times[RING])})
    return found


def timed(ways: Sequence[str], tokens: int, heads: int, rounds: int, backward: bool) -> dict[str, Timing]:
    """Times of dense causal calls over two ranks by each exchange, or by a third rank `ALONE`, in turns."""
    of_ranks, found = together(_turns, 2 + (ALONE in ways), ways, tokens, heads, rounds, backward), {}
    for way in ways:
        first_ms, *ms = (max(each) for each in zip(*(one[way] for one in of_ranks if one[way])))
        found[way] = Timing(tuple(ms), first_ms)
    return found


def _turns(ways: Sequence[str], tokens: int, heads: int, rounds: int, backward: bool) -> dict[str, list[float]]:
    """Milliseconds of this process's calls, the first of which is a warm-up."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    alone = rank == 2
    torch.set_num_threads(2 if alone else 1)
    layout = Layout((tokens,)) if alone else Layout(deal(tokens, 2), ZIGZAG)
    tensors = drawn(layout, heads, 0 if alone else rank)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _, way in product(range(rounds + 1), ways):
        where: dict[str, Any] = {"backend": "native"} if alone else {"order": way, "mesh": Sharded(pair, ZIGZAG)}
        dist.barrier()
        if alone == (way == ALONE):
            start = time.perf_counter()
            _called(tensors, Dense(is_causal=True), where, backward)
            found[way].append((time.perf_counter() - start) * 1e3)
    dist.barrier()
    return found


# --- all --------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {  # by rounds and shrink
    "memory": lambda rounds, shrink: memory(shrink),
    "speed": speed,
    "exchanges": exchanges,
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


def main() -> None:
    options = parser(__doc__, "ring.json", quick="short sequences, and few rounds")
    options.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    given = options.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        options.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    rounds, shrink = (2, 8) if given.quick else (5, 1)
    found = {name: PARTS[name](rounds, shrink) for name in given.parts}
    write(given, found, tables, whole=set(found) == set(PARTS))


if __name__ == "__main__":
    main()
