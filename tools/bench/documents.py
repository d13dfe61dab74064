"""Packed documents of many lengths: one call, and a call for each document.

    python -m tools.bench.documents [--quick]

Each call of a row has another order of its documents, as each step of a training has. The limit is the pairs of tokens
that the documents have, at the rate of `native` on the longest of them alone, in the same rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import attend
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.shapes import pair_count
from tools.lib.common import in_turns, parser, ratio, share_of, timing, write
from tools.lib.peer_calls import heads_first, trained
from tools.lib.tables import Table, direction, interval, ms

HEADS, HEAD_DIM, TOKENS, QUICK_TOKENS = 8, 64, 16384, 2048
LEAST = 16  #: tokens of a document; lengths are log-uniform from here to `LONGEST`
LONGEST = (128, 2048)
PATTERNS: tuple[Pattern, ...] = (
    Dense(is_causal=True),
    Window(255, 0),
    Dilated((64, 256, 1024), (1, 2, 4), is_causal=True),
)
DTYPES = (torch.float32, torch.bfloat16)
ORDERS = 100  #: of the documents; more than lists that the kernel remembers
CELL_S, ROUNDS, MOST_ROUNDS = 6.0, 5, 100


def lengths_of(tokens: int, longest: int) -> list[int]:
    """Lengths that add up to `tokens`."""
    generator, found = torch.Generator().manual_seed(0), list[int]()
    while sum(found) < tokens:
        drawn = float(torch.rand(1, generator=generator)) * math.log(longest / LEAST)
        found.append(min(tokens - sum(found), int(LEAST * math.exp(drawn))))
    return found


def in_longest(pattern: Pattern, lengths: Sequence[int]) -> float:
    """The pairs of all documents over those of the longest one."""
    longest = max(lengths)
    pairs = sum(pair_count(pattern.simplify(each, each, HEADS), each, each, HEADS) for each in lengths)
    return pairs / pair_count(pattern.simplify(longest, longest, HEADS), longest, longest, HEADS)


def calls(pattern: Pattern, lengths: list[int], dtype: torch.dtype, needs_grad: bool) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(tokens: int) -> list[Tensor]:
        shape = (1, tokens, HEADS, HEAD_DIM)
        return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(needs_grad) for _ in range(3)]

    packed: Any
    single: Any
    packed, single = drawn(sum(lengths)), drawn(max(lengths))
    shuffled = [torch.tensor(lengths)[torch.randperm(len(lengths), generator=generator)] for _ in range(ORDERS)]
    rows = itertools.cycle([torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)]) for each in shuffled])

    def of_each(run: Callable[..., Tensor]) -> Tensor:
        """A call for each document of the packed tensors."""
        return torch.cat([run(*each) for each in zip(*(torch.split(x, lengths, 1) for x in packed))], 1)

    found: dict[str, Callable[[], Any]] = {
        "packed": lambda: attend(packed[0], packed[1], packed[2], pattern, cu_seqlens=next(rows), backend="native"),
        "each": lambda: of_each(partial(attend, pattern=pattern, backend="native")),
        "one": lambda: attend(single[0], single[1], single[2], pattern, backend="native"),
    }
    if pattern == Dense(is_causal=True):
        found["sdpa"] = lambda: of_each(heads_first(partial(scaled_dot_product_attention, is_causal=True)))
    if not needs_grad:
        return found
    return {name: trained(call, single if name == "one" else packed) for name, call in found.items()}


def measured(pattern: Pattern, longest: int, dtype: torch.dtype, needs_grad: bool, tokens: int) -> dict[str, Any]:
    """One row of the table."""
    lengths = lengths_of(tokens, longest)
    found = in_turns(calls(pattern, lengths, dtype, needs_grad), ROUNDS, MOST_ROUNDS, budget_s=CELL_S, margin=0.0)
    limit = share_of(in_longest(pattern, lengths), found["one"])
    return {
        "pattern": str(pattern),
        "documents": len(lengths),
        "tokens": tokens,
        "longest": longest,
        "dtype": str(dtype).removeprefix("torch."),
        "backward": needs_grad,
        **{name: timing(each) for name, each in found.items() if name != "one"},
        "limit_ms": limit.median_ms,
        "over_limit": ratio(found["packed"], limit),
        **{f"{name}_over_packed": ratio(found[name], found["packed"]) for name in ("each", "sdpa") if name in found},
    }


def tables(found: Any) -> Iterator[Table]:
    rows = []
    for one in found["rows"]:
        if not one["backward"] and "sdpa_over_packed" not in one:
            continue  # in the file alone
        sizes = f"{one['documents']}", f"{one['longest']:,}"
        ratios = (interval(one.get(name)) for name in ("over_limit", "each_over_packed", "sdpa_over_packed"))
        rows.append((f"{one['pattern']}, {direction(one)}", *sizes, one["dtype"], ms(one["packed"], 1), *ratios))
    slower = sum(one["each_over_packed"]["median"] < 1 for one in found["rows"])
    head = ("pattern", "documents", "up to", "dtype", "one call", "one call / limit")
    yield Table(
        (*head, "a call each / one call", "`F.sdpa` each / one call"),
        rows,
        f"Rows of {found['rows'][0]['tokens']:,} tokens, {HEADS} heads of {HEAD_DIM}, documents of log-uniform "
        "lengths. The limit: the documents' pairs at the rate of `native` on the longest one, in the same rounds. "
        f"95 % intervals. One call is slower than a call for each document in {slower} of {len(found['rows'])} rows, "
        "which are all in the file.",
    )


def main() -> None:
    given = parser(__doc__, "documents.json", quick="few tokens, to see that it works").parse_args()
    tokens = QUICK_TOKENS if given.quick else TOKENS
    every = itertools.product(PATTERNS, LONGEST, DTYPES, (False, True))
    write(given, {"rows": [measured(*each, tokens) for each in every]}, tables)


if __name__ == "__main__":
    main()
