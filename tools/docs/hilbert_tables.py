"""Tables of the speed-ups of token orders, from tools/results/."""

from __future__ import annotations

from typing import Any

from attn_dispatch.tuning.intervals import MARGIN
from tools.docs.results import machine
from tools.lib.tables import table

ORDERED = ("tiles", "native", "flex")


def hilbert(found: Any, misses: Any, curves: Any) -> str:
    """All tables of the page."""
    about = (
        "By `python -m tools.bench.hilbert`: float32, 4 heads of 64, milliseconds in natural / in Hilbert order, and "
        "the gain (the median of paired ratios, not the ratio of the medians, with its 95 % interval; one that holds "
        "1, or one pair, shows none). The last column: operations per second that the pattern needs, "
        f"over those of dense attention. {machine(found)}."
    )
    plot = "![Times in natural and in Hilbert order, and their ratio, against tokens](../../tools/results/hilbert.svg)"
    return "\n\n".join((about, plot, grids(found), sizes(found), sequences(found), cache(misses), curve(curves)))


def grids(found: Any) -> str:
    last = "`native` in Hilbert order: useful rate / dense's"
    head = ("neighbourhood", *(f"`{name}`" for name in ORDERED), "`sdpa_mask`", last)
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in (*found["plane"], *found["volume"], *found["training"]):
        times, backward = one["times"], ", forward + backward" if one["backward"] else ""
        cells = [both(times, name, one["gain"].get(name)) for name in ORDERED]
        mask = times.get("sdpa_mask natural")
        share = one["useful_share_of_dense"].get("native hilbert")
        rows.append((
            f"{one['pattern'].removeprefix('Neighborhood')}{backward}", *cells,
            "-" if mask is None else f"{mask['median_ms']:,.0f}", "-" if share is None else f"{share:.2f}",
        ))  # fmt: skip
    return table(rows)


def sizes(found: Any) -> str:
    parts = [
        f"{one['gain_by_tile']['64']['median']:.1f}x at {one['tokens']:,} tokens "
        f"({one['gain_best']:.1f}x between the best tile sizes of each order)"
        for one in found["tiles"]
    ]
    copies = found["permutation"][0]
    return (
        "The gain of an order depends on the tile size: with tiles of 64 queries and 64 keys, as in block-sparse "
        f"kernels, `tiles` gains {'; '.join(parts)}. `native` skips single keys, which helps rows of a grid most. "
        "Neither copies q, k or v into order; copying them, and out back, would take "
        f"{copies['times']['copies']['median_ms']:.0f} ms at {copies['tokens']:,} tokens."
    )


def both(times: Any, name: str, gain: Any) -> str:
    natural, hilbert = times.get(f"{name} natural"), times.get(f"{name} hilbert")
    if natural is None or hilbert is None:
        return "-"
    once = min(natural["rounds"], hilbert["rounds"]) < 2
    known = "" if gain is None else "one pair" if once else f"{gain['low']:.2f} to {gain['high']:.2f}"
    ratio = "" if gain is None else f": {gain['median']:.2f}x ({known})"
    return f"{natural['median_ms']:,.1f} / {hilbert['median_ms']:,.1f}{ratio}"


def sequences(found: Any) -> str:
    """Sequences of one dimension."""
    gains = [one["gain"] for one in found["sequence"]]
    wins = sum(gain["low"] > 1 + MARGIN for gain in gains)
    least, most = min(gain["median"] for gain in gains), max(gain["median"] for gain in gains)
    tokens = sorted({one["tokens"] for one in found["sequence"]})
    return (
        "Sequences without a grid, folded into a square for the curve: dense, segments and dilations at "
        f"{tokens[0]:,} to {tokens[-1]:,} tokens, forward and with backward. Hilbert order pays in {wins} of "
        f"{len(gains)} (`tiles`: gains of {least:.2f} to {most:.2f}): it is not a candidate there unless forced."
    )


def cache(misses: Any) -> str:
    head = ("tokens, 13 x 13", "keys listed by a tile of 64", "first-level misses", "second-level misses")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in misses["rows"]:
        cells = [
            f"{one['natural'][name]:,.0f} / {one['hilbert'][name]:,.0f}: {one['fewer'][name]:.0%} fewer"
            for name in ("keys_per_tile", "l1_misses", "l2_misses")
        ]
        rows.append((f"{one['tokens']:,}", *cells))
    about = (
        "The reason: reads of `native`, natural / Hilbert order, one head, forward, by valgrind's cache simulation "
        f"({misses['l1_bytes'] >> 10} KiB and {misses['l2_bytes'] >> 20} MiB), by `python -m tools.bench.cache_misses`."
    )
    return f"{about}\n\n{table(rows)}"


def curve(curves: Any) -> str:
    ours = [f"{'x'.join(map(str, one['grid']))} {one['ours']['median_ns']:.0f}" for one in curves["grids"]]
    peers = [
        f"`{name}` {one[name]['median_ns']:,.0f} at {'x'.join(map(str, one['grid']))}"
        for one in curves["grids"][:2]
        for name in curves["packages"]
        if name in one
    ]
    text = f"The curve, nanoseconds per point on one core, by `python -m tools.bench.hilbert_curve`: {', '.join(ours)}"
    return f"{text}; {', '.join(peers)}." if peers else f"{text}."
