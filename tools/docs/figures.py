"""Tables of tools/results/ for docs/results/figures.md: LongNet, kernels, robustness and the overhead of a call."""

from __future__ import annotations

from typing import Any

from attn_dispatch.tuning.intervals import ONE_LOOK, fewest
from tools.docs.native_tables import native
from tools.docs.results import load, machine
from tools.lib.tables import table


def interval(ratio: Any) -> str:
    return f"{ratio['median']:.1f} ({ratio['low']:.1f} to {ratio['high']:.1f})"


def masked(longnet: Any) -> str:
    head = (
        "problem, 8,192 tokens",
        "with a mask",
        "`sdpa`",
        "`native`",
        "mask / `sdpa`",
        "mask / `native`",
        "rate of `sdpa`, `native` / dense's",
    )
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in longnet["masked"]:
        causal = ", causal" if "causal" in one["pattern"] else ""
        kind = "forward + backward" if one["backward"] else "forward"
        times = [f"{one[name]['median_ms']:,.0f} ms" for name in ("torch_with_mask", "sdpa", "native")]
        ratios = [interval(one[f"torch_with_mask_over_{name}"]) for name in ("sdpa", "native")]
        rate = ", ".join(f"{one[f'{name}_gflops'] / one['dense_gflops']:.2f}" for name in ("sdpa", "native"))
        rows.append((f"{one['dtype']}{causal}, {kind}", *times, *ratios, rate))
    return table(rows)


def rivals(found: Any) -> str:
    head = ("8,192 tokens, forward", "fastest here", "`sdpa_mask` takes", "FlexAttention compiled takes")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in found["rivals"]:
        over, best = one["over_best"], one["best"]
        fastest = f"`{best}`, {one['times'][best]['median_ms']:,.0f} ms"
        rows.append(
            (f"{one['pattern']}, {one['dtype']}", fastest, *(f"{over[name]:.1f}x" for name in ("sdpa_mask", "flex")))
        )
    return table(rows)


def ragged(found: Any) -> str:
    head = ("time per operation, uneven over even", "dtype", "`sdpa`", "`native`")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in found["ragged"]:
        shares = [f"{one['per_operation'][name]:.2f}" for name in ("sdpa", "native")]
        rows.append((f"{one['odd']} over {one['even']}", one["dtype"], *shares))
    return table(rows)


def plain(found: Any) -> str:
    """The range of manual's time over that of each kernel."""
    parts = []
    for name in ("sdpa", "native"):
        ratios = [one["manual_over"][name]["median"] for one in found["plain"]]
        parts.append(f"{min(ratios):.1f} to {max(ratios):.1f} times `{name}`'s")
    return (
        "The plain formula (`manual`), batch 2, 8 heads of 64, 256 to 4,096 tokens, segments of 128 to 2,048, rates 1 "
        f"to 4, float32, warm, takes {' and '.join(parts)} time."
    )


def others(longnet: Any, dispatch: Any, routes: Any) -> str:
    counted = routes["counters"]
    rows = [("figure", "measured", "command"), ("---", "---", "---")]
    for long in longnet["long"]:
        speed = f"{long['tokens_per_s']:,.0f} tokens/s, peak {long['peak_above_qkv_out']:.1%} above q, k, v and out"
        about = f"forward, {long['tokens']:,} tokens, {long['dtype']}, `{long['backend']}`"
        rows.append((about, speed, "`python -m tools.bench.longnet`"))
    settled = f"{counted['loaded']} of {routes['problems']} routed from disk, {counted['measured']} measured again"
    about = f"{routes['problems']} problems, 1,024 to 32,768 tokens, in a second process"
    rows.append((about, settled, "`python -m tools.bench.routes`"))
    again = "`python -m tools.bench.dispatch`"
    sdpa, hits = "F.scaled_dot_product_attention", list[tuple[str, Any]]()
    for name, of_axes in dispatch["one_token"].items():
        hits.append((f"by `{name}`, one token; {sdpa} with transposes", of_axes["tokens first"]))
        hits.append((f'the same with layout="bhnd"; {sdpa} alone', of_axes["heads first"]))
    hits += [
        ("the operator of graphs, one token; `attend()`", dispatch["one_token_operator"]),
        ("a backend that does nothing, dense; its own call", dispatch["dense_nothing"]),
        ("the same, dilated by the shorthands; its own call", dispatch["dilated_nothing"]),
    ]
    for about, hit in hits:
        interval = f"{hit['low_us']:+.1f} to {hit['high_us']:+.1f}"
        both = f"{hit['direct_us'] + hit['added_us']:.1f} us; {hit['direct_us']:.1f} us"
        rows.append((f"`attend()` on a hit: {about}", f"{both}: {hit['added_us']:+.1f} ({interval})", again))
    warm = dispatch["warm_first_ms"]
    added = f"{warm['added_ms']:.1f} ms ({warm['low_ms']:.1f} to {warm['high_ms']:.1f}) to {warm['direct_ms']:.1f} ms"
    rows.append(
        ("overhead of a process's first `attend()`, its decision on disk, over the first direct call", added, again)
    )
    imported = f"{dispatch['import_attend_after_torch_ms']:.0f} ms"
    rows.append(("`from attn_dispatch import attend`, after torch", imported, again))
    return table(rows)


def trust(found: Any) -> str:
    close, naive, grey = found["choice"]["close"], found["choice"]["close_naive"], found["choice"]["grey_zone"]
    killed, mutated = found["store"]["killed"], found["store"]["mutated"]
    rows = [("check", "result"), ("---", "---")]
    about = f"{found['choice']['retunings']} re-tunings of 5 candidates 0.5 % apart, 3 % noise"
    flips = f"{close['independent_flips']:.1%} other winners, none more than {close['worst']:.1%} off the best"
    rows.append((about, f"{flips} (least mean of 5 runs: {naive['independent_flips']:.0%} other winners)"))
    proven = ", ".join(f"{gain} faster {share:.0%}" for gain, share in grey["noise 3%, calls of 1 ms"].items())
    rows.append(("how often a faster challenger is proven faster, 3 % noise, calls of 1 ms", proven))
    for one in found["learned"]["planted"]:
        about = f"choices for unmeasured sizes, synthetic cost surfaces with crossovers, {one['per_octave']} per octave"
        rows.append((about, regrets(one["unseen"]) + "; leave-one-out " + regrets(one["leave_one_out"])))
    rows.append(("the same, leave-one-out on measurements of this machine", regrets(found["learned"]["real"]["total"])))
    about = f"{killed['processes']} processes, {killed['decisions']:,} decisions, {killed['kills']} kills"
    rows.append((about, f"{killed['lost']} lost, {killed['parse_errors']} unreadable"))
    about = f"{mutated['mutations']:,} damaged and forged decision files"
    rows.append((about, f"{mutated['crashes']} crashes, {mutated['wrong_accepted']} wrong ones accepted"))
    storm = found["storm"]
    about = f"{storm['problems']:,} problems in sequence, each called once"
    rows.append((about, f"{storm['measured']} measured, {storm['learned']:,} learned, in {storm['seconds']:.0f} s"))
    inspect = found["inspect"]
    about = f"`attn-dispatch inspect` over {inspect['decisions']:,} decisions; `inspect --help`"
    rows.append((about, f"{inspect['inspect_s']:.1f} s; {inspect['help_s']:.2f} s"))
    return table(rows)


def regrets(one: Any) -> str:
    """How much slower than the best."""
    return f"{one['mean']:.1%} slower than the best on average, 95 % within {one['p95']:.1%}"


def decode(found: Any) -> str:
    """Few queries at the end of long keys, over the time of reading K and V."""
    about = (
        "By `python -m tools.bench.decode`: 32 query heads and 8 key heads of 128, in [batch, len, heads, head_dim]. "
        "The estimate is reading K and V (the rows that the new queries see) once, at "
        f"{found['share']:g} of the rate at which copying them moves bytes in the same rounds, read and written; "
        "`native` over it with 95 % intervals, where there were enough rounds for one; below 1, reading was faster "
        "than that share. `sdpa` is the backend that calls PyTorch's function. "
        f"{len(found['left_out'])} cells did not fit the memory. {machine(found)}."
    )
    head = ("pattern", "batch", "keys", "new", "dtype", "`native`", "over the estimate", "`sdpa`")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in found["rows"]:
        over = "{median:.2f} ({low:.2f} to {high:.2f})".format(**one["over_limit"])
        if one["native"]["rounds"] < fewest(ONE_LOOK):
            over = f"{one['over_limit']['median']:.2f}"  # too few rounds for an interval
        sdpa = f"{one['sdpa']['median_ms']:,.1f} ms" if "sdpa" in one else "-"
        sizes = f"{one['batch']}", f"{one['keys']:,}", f"{one['new']}"
        rows.append((one["pattern"], *sizes, one["dtype"], f"{one['native']['median_ms']:,.1f} ms", over, sdpa))
    return f"{about}\n\n{table(rows)}"


def documents(found: Any) -> str:
    """Packed documents in one call, over calls for each and over the rate on one document."""
    about = (
        "By `python -m tools.bench.documents`: rows of 8 heads of 64 and documents of log-uniform lengths. The limit "
        "is the documents' pairs at the rate of `native` on the longest document alone, in the same rounds; 95 % "
        f"intervals. One call takes longer than a call for each document in "
        f"{sum(one['each_over_packed']['median'] < 1 for one in found['rows'])} of {len(found['rows'])} rows. "
        f"{machine(found)}."
    )
    head = (
        *("pattern", "documents", "up to", "dtype", "one call", "one call / limit"),
        *("a call each / one call", "`F.sdpa` each / one call"),
    )
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in found["rows"]:
        kind = one["pattern"] + (", forward + backward" if one["backward"] else "")
        sizes = f"{one['documents']} in {one['tokens']:,} tokens", f"{one['longest']:,}"
        cells = [
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"
            for ratio in (one["over_limit"], one["each_over_packed"], one.get("sdpa_over_packed"))
        ]
        rows.append((kind, *sizes, one["dtype"], f"{one['packed']['median_ms']:,.1f} ms", *cells))
    return f"{about}\n\n{table(rows)}"


def prebuilt(found: Any) -> str:
    """Times of a wheel's libraries over those of the one compiled for the processor."""
    names = list(found["rows"][0]["over_here"])
    about = (
        "By `python -m tools.bench.prebuilt`: time of `native` by each library of a wheel, over its time when "
        f"{found['compiler']} compiles it for the very processor; batch 1, {found['tokens']:,} tokens, 8 heads of 64, "
        f"paired, 95 % intervals. {machine(found)}."
    )
    head = ("pattern", "compiled for this processor", *(f"`{name}`" for name in names))
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in found["rows"]:
        kind = f"{one['pattern']}, {one['dtype']}" + (", forward + backward" if one["backward"] else "")
        ratios = [
            f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" for each in one["over_here"].values()
        ]
        rows.append((kind, f"{one['times']['here']['median_ms']:,.0f} ms", *ratios))
    return f"{about}\n\n{table(rows)}"


def figures() -> str:
    """The page, with a heading for each subject."""
    longnet, found, dispatch = load("longnet"), load("kernels"), load("dispatch")
    first = longnet["masked"][0]
    ratio, cost = first["dense_over_sdpa_flops"], first["torch_with_mask"]["median_ms"] / first["dense"]["median_ms"]
    about = (
        f"{longnet['pattern']}, batch 1, 8 heads of 64, by `python -m tools.bench.longnet`: medians of interleaved "
        "runs with 95 % intervals, of under six rounds (with backward) their range. Dense attention does "
        f"{ratio:.1f} times the arithmetic (a mask saves none of it: "
        f"{2 * ratio:.1f} times against causal), and takes {cost:.2f} times as long with a mask as without. Leaving "
        f"out what no query sees thus explains ratios up to {ratio * cost:.1f}, causal {2 * ratio * cost:.1f}; the "
        "rest is the kernel's own rate, in the last column."
    )
    simulated = "By `python -m tools.bench.trust`; winners and synthetic cost surfaces on a simulated clock."
    parts = (
        f"{machine(longnet)}. Figures of a GPU are on [a page of their own](gpu.md).",
        "## LongNet against a mask",
        about,
        masked(longnet),
        "## Rates of the native kernel, and the processor's limits",
        native(load("native")),
        "## The kernels against a mask, and on uneven shapes",
        "By `python -m tools.bench.kernels`, in one run each.",
        rivals(found),
        ragged(found),
        plain(found),
        "## Decoding with a cache of keys",
        decode(load("decode")),
        "## Packed documents",
        documents(load("documents")),
        "## Robustness of choices and of the store",
        simulated,
        trust(load("trust")),
        "## Long sequences, and the overhead of a call",
        others(longnet, dispatch, load("routes")),
        "## The compiled libraries of a wheel",
        prebuilt(load("prebuilt")),
    )
    return "\n\n".join(parts)
