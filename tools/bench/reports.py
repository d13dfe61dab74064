"""The early reports on Hilbert + dilated attention on a GTX 1080 (July 2025): single-device experiments, repeated.

    python -m tools.bench.reports [000 001 002 003 004]
    python -m tools.bench.reports --shrink 16     with lengths, segments and grids that much smaller: a quick look

float32, 8 heads of 64, batch 1 unless stated. With Hilbert order means the same function of the same
tokens by the same backend, and every result is checked before it is timed. The figures reported then stand beside ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from attn_dispatch.kernels import registry
from attn_dispatch.kernels.tiles.tables import tables_of
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern
from tools.bench.hilbert import SEQUENCES
from tools.bench.kernels import REPORT
from tools.bench.longnet import PATTERN, long_alone
from tools.docs.report_tables import plain
from tools.lib.cold import alone
from tools.lib.common import parser, write
from tools.lib.paired import HEAD_DIM, HEADS, compared, lines, problem_of

Rows = list[dict[str, Any]]

#: Milliseconds of experiment 000, by tokens and direction. 16,384 tokens ran out of memory.
REPORTED_MS = {(8192, False): (83, 72), (8192, True): (243, 171), (16384, False): None, (16384, True): None}
LONGEST = (
    ((2048, 4096, 8192), 425_984, {"tokens_per_s": 15_728, "gb": 4.2}),
    ((8192, 16384, 32768), 294_912, {"tokens_per_s": 3_663}),
)
#: Reported speed-ups, in the order given there.
GAINS = {"001": (1.01, 0.82, 1.19, 1.24), "004": (1.09, 1.56, 1.12, 2.66, 1.03, 0.97)}
SINGLE, DILATED = "single segment", "dilation 2"
KINDS = (SINGLE, "multi-segment", DILATED, "multi-dilation")
MEMORY = {"003": {32768: 0.5, 65536: 1.0, 131_072: 2.0, 262_144: 4.0}, "004": {8192: 0.08, 16384: 0.92, 32768: 1.08}}
COUNTED = (8192, 16384)  #: tokens
SIDES, WINDOW = (64, 128), 13  #: tokens, of grids


def shrunk(pattern: Pattern, shrink: int) -> Pattern:
    """Segments divided by a factor."""
    assert isinstance(pattern, Dilated)
    return Dilated(tuple(length // shrink for length in pattern.segment_lengths), pattern.dilation_rates)


def of_kind(kind: str, tokens: int, shrink: int) -> dict[str, Any]:
    pattern, length = shrunk(SEQUENCES[kind](tokens), shrink), tokens // shrink
    return {"kind": kind, **compared(pattern, length)}


def forward_and_backward(shrink: int) -> dict[str, Any]:
    """000: 8,192 and 16,384 tokens. The pattern is not stated there."""
    found = []
    for (tokens, backward), reported in REPORTED_MS.items():
        entry = compared(shrunk(PATTERN, shrink), tokens // shrink, backward)
        then = {"out_of_memory": True} if reported is None else dict(zip(("without_ms", "with_ms"), reported))
        found.append({**entry, "reported": then})
    return {"orders": found}


def longest(shrink: int) -> dict[str, Any]:
    """001: the longest sequences, and dilation 1 and 2."""
    far = [
        {**long_alone(n // shrink, "float32", fused(), tuple(w // shrink for w in segments)), "reported": reported}
        for segments, n, reported in LONGEST
    ]
    print(far, flush=True)
    orders = [of_kind(kind, tokens, shrink) for tokens in (16384, 32768) for kind in (SINGLE, DILATED)]
    return {"longest": far, "orders": orders, "reported_gains": GAINS["001"]}


def manual(shrink: int) -> dict[str, Any]:
    """002: the plain formula against PyTorch's attention with a mask, and against the fastest."""
    shapes = [(tokens // shrink, segment // shrink, rate) for tokens, segment, rate in REPORT]
    return {"rows": [alone(*shape) for shape in shapes], "reported_ratio": 39.4}


def memory_and_lines(shrink: int) -> dict[str, Any]:
    """003: peak memory; key tiles and cache lines, counted."""
    side = max(1, round(shrink**0.5))
    grids = [Neighborhood((n // side, n // side), (WINDOW,)) for n in SIDES]
    counted = [lines(pattern, pattern.grid[0] ** 2) for pattern in grids]
    counted += [
        {"kind": kind, **lines(shrunk(SEQUENCES[kind](tokens), shrink), tokens // shrink)}
        for kind in KINDS
        for tokens in COUNTED
    ]
    return {"memory": memory("003", shrink), "lines": counted}


def throughput(shrink: int) -> dict[str, Any]:
    """004: tokens per second, and memory."""
    orders = [of_kind(kind, tokens, shrink) for tokens in (8192, 16384, 32768) for kind in KINDS]
    return {"orders": orders, "memory": memory("004", shrink), "reported_gains": GAINS["004"]}


def memory(experiment: str, shrink: int) -> Rows:
    return [{**taken(tokens, shrink), "reported_gb": gb} for tokens, gb in MEMORY[experiment].items()]


@cache
def taken(tokens: int, shrink: int) -> dict[str, Any]:
    segments = tuple(length // shrink for length in PATTERN.segment_lengths)
    found: dict[str, Any] = long_alone(tokens // shrink, "float32", fused(), segments)
    print(found, flush=True)
    return found


def fused() -> str:
    """The faster of the backends without a mask, by `python -m tools.bench.kernels`; it needs a compiler."""
    refused = registry.load("native").refusals(problem_of(PATTERN, 8192))
    return "sdpa" if refused else "native"


EXPERIMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "000": forward_and_backward,
    "001": longest,
    "002": manual,
    "003": memory_and_lines,
    "004": throughput,
}


def main() -> None:
    arguments = parser(__doc__, "reports.json")
    arguments.add_argument("experiments", nargs="*", default=list(EXPERIMENTS), metavar="experiment")
    arguments.add_argument("--shrink", type=int, default=1, help="divide lengths by this, 1 to 32")
    options = arguments.parse_args()
    unknown = set(options.experiments) - set(EXPERIMENTS)
    if unknown:
        arguments.error(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {', '.join(sorted(unknown))}")
    if not 1 <= options.shrink <= 32:
        arguments.error(f"--shrink must be 1 to 32, got {options.shrink}")
    torch.manual_seed(0)
    found = {"heads": HEADS, "head_dim": HEAD_DIM, "shrink": options.shrink}
    for name in sorted(set(options.experiments)):
        found[name] = EXPERIMENTS[name](options.shrink)
        tables_of.cache_clear()
    print(plain(found))
    write(options.output, found, whole=set(options.experiments) == set(EXPERIMENTS) and options.shrink == 1)


if __name__ == "__main__":
    main()
