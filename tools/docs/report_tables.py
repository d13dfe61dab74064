"""Tables of tools/results/reports.json for docs/ and the terminal. Experiments that were not run are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.lib.tables import table

Rows = list[tuple[str, ...]]
Section = tuple[str, Rows]  #: a sentence or two, and a table, its head first

TILES = ("tiles natural", "tiles hilbert")
ORDER_HEAD = ("`tiles`, natural / Hilbert order, ms", "gain by Hilbert order", "fastest, ms", "its tokens/s")


def markdown(found: Any, misses: Any) -> str:
    """The page."""
    parts = [about(found)]
    for text, rows in sections(found):
        parts.append(f"{text}\n\n{table([rows[0], ('---',) * len(rows[0]), *rows[1:]])}")
    if "003" in found:
        parts.append(simulated(misses))
    return "\n\n".join(parts)


def plain(found: Any) -> str:
    """Aligned columns."""
    parts = []
    for text, rows in sections(found):
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
        parts.append("\n".join((text, *lines)).replace("`", ""))
    return "\n\n".join(parts)


def about(found: Any) -> str:
    cpu, name = found["hardware"]["cpu"], found["provenance"]["name"]
    smaller = "" if found["shrink"] == 1 else f" Lengths, segments and grids are divided by {found['shrink']} here."
    return (
        "Reports of July 2025, numbered 000 to 004, on Hilbert + dilated attention on a GTX 1080 preceded this "
        "project. Their single-device experiments were run again by `python -m tools.bench.reports` on "
        f"{name}, {cpu['threads']} threads: another kind of machine, "
        "so that gains can be compared with the reported ones, times cannot. float32, batch 1, "
        f"{found['heads']} heads of {found['head_dim']} unless stated otherwise. With Hilbert order means the same "
        "function of the same tokens, by the same backend; the fastest is that of `tiles`, `native` and `sdpa`. Every "
        "result was checked against float64 on sampled rows, and both orders against each other on all rows. "
        "Gains are paired, with 95 % intervals; with fewer than 6 pairs the interval is the range."
        f"{smaller}"
    )


def sections(found: Any) -> Iterator[Section]:
    for name, made in MADE.items():
        if name in found:
            yield from made(found[name])


# --- experiments ------------------------------------------------------------------------------------------------------


def forward_and_backward(found: Any) -> Iterator[Section]:
    rows: Rows = [("tokens", "pass", "reported, without / with", *ORDER_HEAD)]
    for one in found["orders"]:
        kind = "forward + backward" if one["backward"] else "forward"
        rows.append((f"{one['tokens']:,}", kind, reported_ms(one["reported"]), *ordered(one)))
    pattern = found["orders"][0]["pattern"]
    yield (
        f"000. The pattern is not stated there; here {pattern}. Backward, as reported, may be without forward.",
        rows,
    )


def longest(found: Any) -> Iterator[Section]:
    rows: Rows = [
        ("pattern", "tokens", "reported tokens/s", "memory", "tokens/s here", "peak memory", "q, k, v and out")
    ]
    for one in found["longest"]:
        then = one["reported"]
        memory = f"{then['gb']:.1f} GB" if "gb" in then else "-"
        here = (f"{one['tokens_per_s']:,.0f}", gb(one["peak_bytes"]), gb(one["qkv_out_bytes"]))
        rows.append((one["pattern"], f"{one['tokens']:,}", f"{then['tokens_per_s']:,}", memory, *here))
    yield f"001. The longest sequences there, forward, `{found['longest'][0]['backend']}`.", rows
    yield f"001. Dilation 1 and 2. {gains(found)}", by_kind(found["orders"])


def manual(found: Any) -> Iterator[Section]:
    head = ("tokens", "segment", "warm / a mask, warm", "first call / a mask's first", "first call / a mask, warm")
    rows: Rows = [(*head, "warm / the fastest, warm", "the fastest")]
    for tokens, segment in sorted({(one["tokens"], one["segment"]) for one in found["rows"]}):
        some = [one for one in found["rows"] if (one["tokens"], one["segment"]) == (tokens, segment)]
        cells = (
            [spread(one["manual_over"]["sdpa_mask"]) for one in some],
            [f"{one['first_manual_over']['sdpa_mask']:.1f}" for one in some],
            [f"{one['first_manual_over_warm']['sdpa_mask']:.1f}" for one in some],
            [spread(one["manual_over"][one["best"]]) for one in some],
            [f"`{one['best']}`" for one in some],
        )
        rows.append((f"{tokens:,}", f"{segment:,}", *("; ".join(cell) for cell in cells)))
    rates = ", ".join(str(rate) for rate in sorted({one["rate"] for one in found["rows"]}))
    yield (
        "002. How many times as long the plain formula (`manual`) takes, batch 2, as PyTorch's attention with a mask "
        f"(`sdpa_mask`) and as the fastest, for rates {rates}. First calls are those of a fresh process, `manual` "
        "first; the first call with a mask builds it, later ones do not. "
        f"Reported: {found['reported_ratio']}, from one cold call."
    ), rows  # fmt: skip


def memory_and_lines(found: Any) -> Iterator[Section]:
    yield f"003. {measured(found)}", memory(found, "expected")
    rows: Rows = [("pattern", "tokens", "key tiles, natural / Hilbert", "cache lines of K and V, natural / Hilbert")]
    for one in found["lines"]:
        name = f"{one['kind']}: {one['pattern']}" if "kind" in one else one["pattern"]
        rows.append((name, f"{one['tokens']:,}", *(both(one, what) for what in ("key_tiles", "cache_lines"))))
    yield (
        "003. The keys of one head that a tile of 64 queries reads, in tiles of 64 and in lines of 64 bytes: counted, "
        "not timed. Expected there: 25 to 40 % fewer lines in Hilbert order. A sequence is folded into a square."
    ), rows  # fmt: skip


def throughput(found: Any) -> Iterator[Section]:
    yield f"004. {gains(found)}", by_kind(found["orders"])
    yield f"004. {measured(found)}", memory(found, "reported")


MADE = {
    "000": forward_and_backward,
    "001": longest,
    "002": manual,
    "003": memory_and_lines,
    "004": throughput,
}


# --- cells ------------------------------------------------------------------------------------------------------------


def by_kind(orders: Any) -> Rows:
    rows: Rows = [("tokens", "pattern", *ORDER_HEAD)]
    return rows + [(f"{one['tokens']:,}", f"{one['kind']}: {one['pattern']}", *ordered(one)) for one in orders]


def ordered(one: Any) -> tuple[str, ...]:
    times, best = one["times"], one["best"]
    natural, hilbert = (times[label]["median_ms"] for label in TILES)
    fastest = f"`{best.split()[0]}`, {short(times[best]['median_ms'])}"
    return f"{short(natural)} / {short(hilbert)}", gain(one), fastest, f"{one['tokens_per_s'][best]:,.0f}"


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def gain(one: Any) -> str:
    pairs = one["times"][TILES[1]]["rounds"]
    return f"{one['gain']['median']:.2f}x ({one['gain']['low']:.2f} to {one['gain']['high']:.2f}, {pairs} pairs)"


def reported_ms(then: Any) -> str:
    if "out_of_memory" in then:
        return "out of memory"
    ratio = then["without_ms"] / then["with_ms"]
    return f"{then['without_ms']} / {then['with_ms']} ms: {ratio:.2f}x"


def gains(found: Any) -> str:
    listed = ", ".join(f"{ratio:.2f}" for ratio in found["reported_gains"])
    return (
        f"Gains by Hilbert order as reported, in the order given there, which need not be that of the rows: {listed}."
    )


def measured(found: Any) -> str:
    one = found["memory"][0]
    return f"Memory of one forward pass, {one['pattern']}, `{one['backend']}`."


def memory(found: Any, how: str) -> Rows:
    rows: Rows = [("tokens", f"{how} there", "peak here", "q, k, v and out")]
    for one in found["memory"]:
        cells = (f"{one['reported_gb']:.2f} GB", gb(one["peak_bytes"]), gb(one["qkv_out_bytes"]))
        rows.append((f"{one['tokens']:,}", *cells))
    return rows


def gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def spread(ratio: Any) -> str:
    return f"{ratio['median']:.1f} ({ratio['low']:.1f} to {ratio['high']:.1f})"


def both(one: Any, what: str) -> str:
    fewer, cells = one["fewer"][what], [short(one[order][what]) for order in ("natural", "hilbert")]
    change = "as many" if fewer == 0 else f"{fewer:.0%} fewer" if fewer > 0 else f"{-fewer:.0%} more"
    return f"{' / '.join(cells)}: {change}"


def simulated(misses: Any) -> str:
    """Simulated cache misses on grids."""
    parts = [
        f"{one['tokens']:,} tokens {one['fewer']['l1_misses']:.0%} and {one['fewer']['l2_misses']:.0%}"
        for one in misses["rows"]
    ]
    return (
        "Simulated misses of the first and the second level on grids, `native`, by "
        f"`python -m tools.bench.cache_misses`, fewer in Hilbert order by: {'; '.join(parts)}."
    )
