"""Masks made of data: `native` on tables of blocks and on spans, beside what they cost at least, and other libraries.

    python -m tools.bench.blocks [--quick]

The limit of a table is its share of the pairs at the rate of `native` on all of them, in the same rounds; that of spans
beside a causal mask is the causal mask. FlexAttention is compiled for each size of blocks, and has no backward pass on
a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import Blocks, Dense, Ranges, attend
from attn_dispatch.machine.memory import peak_bytes
from tools.lib.common import in_turns, parser, ratio, share_of, timing, write
from tools.lib.peer_calls import heads_first, trained
from tools.lib.tables import Table, direction, interval, megabytes, ms

TAKES = "5 minutes"
HEADS, HEAD_DIM, TOKENS, QUICK_TOKENS, LONG = 4, 64, 4096, 2048, 16_384
DENSITIES, DENSITY = (0.01, 0.1, 1.0), 0.1  #: of blocks of SIZE, and of the others
SIZE, OTHERS = 64, (32, 128, 256)  #: queries and keys of a block
DTYPES = (torch.float32, torch.bfloat16)
SPAN = 256  #: tokens of a span, which is followed by as many outside of one
ROUNDS = 7

Call = Callable[[], Any]


def drawn(tokens: int, dtype: torch.dtype, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM).to(dtype).requires_grad_(backward) for _ in range(3))
    return q, k, v


def table_of(tokens: int, size: int, density: float) -> Tensor:
    """Random blocks, of which each query sees its own."""
    each = tokens // size
    table = torch.rand(1, 1, each, each, generator=torch.Generator().manual_seed(0)) < density
    return table | torch.eye(each, dtype=torch.bool)


def block_mask(table: Tensor, size: int) -> BlockMask:
    """The same for FlexAttention: all blocks are full ones."""
    number = table.sum(-1, dtype=torch.int32)
    order = (~table).int().argsort(dim=-1, stable=True).int()
    none = torch.zeros_like(number), torch.zeros_like(order)
    tokens = table.shape[-1] * size
    return BlockMask.from_kv_blocks(*none, number, order, BLOCK_SIZE=size, seq_lengths=(tokens, tokens))


def table_row(density: float, size: int, dtype: torch.dtype, backward: bool, tokens: int, flex: Any) -> dict[str, Any]:
    qkv, table = drawn(tokens, dtype, backward), table_of(tokens, size, density)
    by_native, pattern = partial(attend, *qkv, backend="native"), Blocks(table, size)
    mask = table.repeat_interleave(size, 2).repeat_interleave(size, 3)
    calls: dict[str, Call] = {"blocks": lambda: by_native(pattern), "dense": lambda: by_native(Dense())}
    if flex is not None:
        calls["sdpa"] = partial(heads_first(partial(scaled_dot_product_attention, attn_mask=mask)), *qkv)
    if flex is not None and not backward:
        calls["flex"] = partial(heads_first(partial(flex, block_mask=block_mask(table, size))), *qkv)
    share = float(table.float().mean())
    return measured(calls, qkv, backward, share) | {"pattern": f"blocks of {size}", "size": size, "share": share}


def spans_row(dtype: torch.dtype, backward: bool, tokens: int) -> dict[str, Any]:
    qkv, at = drawn(tokens, dtype, backward), torch.arange(tokens)[None] // SPAN
    spans = Ranges.spans(torch.where(at % 2 == 0, at, -1))
    calls: dict[str, Call] = {
        "blocks": lambda: attend(*qkv, spans, backend="native"),
        "dense": lambda: attend(*qkv, Dense(is_causal=True), backend="native"),
    }
    return measured(calls, qkv, backward, 1.0) | {"pattern": f"spans of {SPAN}, causal", "share": 1.0}


def measured(calls: dict[str, Call], qkv: tuple[Tensor, ...], backward: bool, share: float) -> dict[str, Any]:
    """Times in turns; the limit is `share` of the time of "dense"."""
    calls = {name: trained(call, qkv) for name, call in calls.items()} if backward else calls
    started = in_turns({"first": calls["blocks"]}, 1)["first"]  # the lists are made
    found = in_turns(calls, ROUNDS)
    limit = share_of(share, found["dense"])
    _, peak = peak_bytes(calls["blocks"], torch.device("cpu"))
    return {
        "dtype": str(qkv[0].dtype).removeprefix("torch."),
        "tokens": qkv[0].shape[1],
        "backward": backward,
        **{name: timing(each) for name, each in found.items()},
        "first_ms": started.median_ms,
        "limit_ms": limit.median_ms,
        "over_limit": ratio(found["blocks"], limit),
        **{f"{name}_over_blocks": ratio(each, found["blocks"]) for name, each in found.items() if name != "blocks"},
        "peak_bytes": peak,
        "tensor_bytes": sum(x.nbytes for x in (*qkv, qkv[0])),
    }


def tables(found: Any) -> Iterator[Table]:
    rows = []
    shown = [one for one in found["rows"] if one["backward"] or (one.get("size", SIZE) == SIZE and one["share"] > 0.05)]
    for one in shown:
        ratios = (interval(one.get(f"{name}_over_blocks")) for name in ("dense", "sdpa", "flex"))
        peak = "-" if one["peak_bytes"] is None else megabytes(one["peak_bytes"])
        what = one["pattern"], direction(one), f"{one['tokens']:,}", f"{100 * one['share']:.0f} %", one["dtype"]
        rows.append((*what, ms(one["blocks"], 1), interval(one["over_limit"]), *ratios, peak))
    yield Table(
        (
            "pattern",
            "",
            "tokens",
            "seen",
            "dtype",
            "`native`",
            "over limit",
            "dense",
            "`F.sdpa` + mask",
            "FlexAttention",
            "memory",
        ),
        rows,
        f"{HEADS} heads of {HEAD_DIM}; random blocks and the diagonal ones; the file has more rows. "
        "The limit: that share of the time of `native` on all pairs, for spans the causal time. Dense and later: "
        "times as multiples of that of `native`. 95 % intervals. Memory: at most, results included, beside q, k and v "
        f"of {megabytes(found['rows'][0]['tensor_bytes'] * 3 / 4)} in float32.",
    )


def main() -> None:
    quick = "few tokens and one size of blocks, to see that it works"
    given = parser(__doc__, "blocks.json", quick=quick).parse_args()
    tokens, others = (QUICK_TOKENS, ()) if given.quick else (TOKENS, OTHERS)
    cells = [*((SIZE, each) for each in DENSITIES), *((each, DENSITY) for each in others)]
    compiled, rows = {size: torch.compile(flex_attention) for size, _ in cells}, list[dict[str, Any]]()
    for (size, density), dtype, backward in itertools.product(cells, DTYPES, (False, True)):
        rows.append(table_row(density, size, dtype, backward, tokens, compiled[size]))
    for dtype, backward in itertools.product([] if given.quick else DTYPES, (False, True)):
        rows.append(table_row(DENSITY, SIZE, dtype, backward, LONG, None))
    rows += [spans_row(dtype, backward, tokens) for dtype, backward in itertools.product(DTYPES, (False, True))]
    write(given, {"rows": rows}, tables)


if __name__ == "__main__":
    main()
