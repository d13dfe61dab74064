"""Tables of tools/results/ring.json and ring_reports.json. Parts that were not run are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.lib.tables import table

Rows = list[tuple[str, ...]]
Section = tuple[str, Rows]  #: a sentence or two, and a table, its head first


def markdown(found: Any, reports: Any = None) -> str:
    """The page."""
    parts = [ABOUT]
    for name, made in MADE.items():
        if name in found:
            parts += [_section(*one) for one in made(found[name]["found"])]
    if reports is not None:
        parts.append(_section(*again(reports)))
    return "\n\n".join(parts)


ABOUT = (
    "By `python -m tools.bench.ring`: ranks are processes of one machine without a GPU, connected by gloo; what two "
    "cores cannot show is counted. 8 heads of 64 unless stated otherwise."
)


def _section(text: str, rows: Rows) -> str:
    return f"{text}\n\n{table([rows[0], ('---',) * len(rows[0]), *rows[1:]])}" if rows else text


# --- counted ----------------------------------------------------------------------------------------------------------


def traffic(found: Any) -> Iterator[Section]:
    rows: Rows = [
        (
            "pattern, 1,048,576 tokens",
            "ranks",
            "shipped",
            "needed",
            "shipped / needed",
            "of a dense ring's",
            "received by a rank",
        )
    ]
    for one in found:
        ratio = "nothing needed" if one["shipped_over_needed"] is None else f"{one['shipped_over_needed']:.2f}"
        sizes = (megabytes(one["shipped_bytes"]), megabytes(one["needed_bytes"]))
        share, most = f"{one['share_of_dense_ring']:.2%}", megabytes(one["most_received_bytes"])
        rows.append((one["pattern"], str(one["ranks"]), *sizes, ratio, share, f"at most {most}"))
    yield (
        "Bytes of k and v that a forward pass ships between all ranks, fp16 or bf16, by the library's own lists for "
        "every rank; needed are the rows that some query sees, computed independently. Counted, not run."
    ), rows  # fmt: skip


def shipped(found: Any) -> Iterator[Section]:
    ratios = [ratio for one in found for ratio in one["ratio"].values() if ratio is not None]
    ranks = ", ".join(str(each) for each in sorted({one["ranks"] for one in found}))
    nothing = sum(not any(one["needed"].values()) and not any(one["shipped"].values()) for one in found)
    yield (
        f"Bytes that {ranks} real ranks sent, forward and backward, over those the pattern's multiplicity needs, pair "
        f"by pair, at {found[0]['tokens']:,} tokens, dense and dilated, contiguous and zigzag, `ring` and `gather`: "
        f"{min(ratios):.4f} to {max(ratios):.4f} in {len(found)} runs, {nothing} of which need and send nothing."
    ), []  # fmt: skip


def balance(found: Any) -> Iterator[Section]:
    rows: Rows = [("causal, 1,048,576 tokens", "ranks", "contiguous", "zigzag")]
    rows += [(one["pattern"], str(one["ranks"]), *(f"{one[k]:.3f}" for k in ("contiguous", "zigzag"))) for one in found]
    yield "Work of the rank with the most over the mean, in query-key pairs, counted.", rows


def faults(found: Any) -> Iterator[Section]:
    rows: Rows = [("fault", "injected", "results of the other ranks", "the victim")]
    for kind, what in FAULTS.items():
        if kind in found["by_kind"]:
            answers = found["answers"][kind]
            rows.append(
                (what, str(found["by_kind"][kind]), *(_answers(answers, side) for side in ("others", "victim")))
            )
    yield (
        f"{found['faults']} faults injected into {found['ranks']} ranks, on random ranks at random moments, from fixed "
        f"seeds; the group's time-out is {found['timeout_s']:.0f} s, and {found['grace_s']:.0f} s of grace are given. "
        f"Hangs: {found['hangs']}. Wrong results: {found['wrong']}. Other unexpected results: "
        f"{len(found['unexpected']) - found['hangs'] - found['wrong']}. After {found['right_afterwards']} faults the "
        "group continued, and its next call was right."
    ), rows  # fmt: skip


FAULTS = {
    "kill": "kill -9",
    "stop": "SIGSTOP past the time-out",
    "pause": "SIGSTOP for 0.5 s",
    "mismatch": "other arguments",
    "memory": "out of memory in a part",
    "exception": "exception in a part",
    "trial": "out of memory in a trial",
}


def _answers(answers: Any, side: str) -> str:
    mine = {what.removeprefix(f"{side}: "): count for what, count in answers.items() if what.startswith(side)}
    return ", ".join(f"{what.removeprefix('raised ')} {count}" for what, count in sorted(mine.items()))


# --- measured ---------------------------------------------------------------------------------------------------------


def memory(found: Any) -> Iterator[Section]:
    rows: Rows = [
        ("pattern", "tokens", "pass", "ranks", "peak of a rank", "its q, k, v and out", "peak / with half the ranks")
    ]
    for one in found:
        kind = "forward + backward" if one["backward"] else "forward"
        share = f"{one['of_half_as_many_ranks']:.2f}" if "of_half_as_many_ranks" in one else "-"
        sizes = (megabytes(one["peak_bytes"]), megabytes(one["qkv_out_bytes"]), share)
        how = str(one["ranks"]) if one["exchange"] is None else f"{one['ranks']}, `{one['exchange']}`"
        rows.append((f"{one['pattern']}, {one['heads']} heads", f"{one['tokens']:,}", kind, how, *sizes))
    yield (
        "Peak memory of a rank, q, k and v of its shard included, float32; one rank is `native` without a mesh. "
        "`gather` takes all rows that a rank needs of others at once, and with more ranks these do not get fewer."
    ), rows  # fmt: skip


def speed(found: Any) -> Iterator[Section]:
    rows: Rows = [("dense causal, float32", "1 rank, 2 threads", "2 ranks, 1 thread each", "2 ranks / 1 rank")]
    for one in found:
        kind = "forward + backward" if one["backward"] else "forward"
        times = (f"{one[name]['median_ms']:,.0f} ms" for name in ("one_rank_two_threads", "two_ranks_one_thread"))
        about = f"{one['tokens']:,} tokens, {one['heads']} heads, {kind}"
        rows.append((about, *times, interval(one["ratio"])))
    yield "Two ranks, zigzag, against one process on the same two cores, in turns.", rows


def overlap(found: Any) -> Iterator[Section]:
    if "skipped" in found:
        yield f"Overlap was not measured: {found['skipped']}.", []
        return
    rows: Rows = [
        ("ranks", "pass", "link", "computing alone", "exchange alone", "both", "share of the exchange hidden")
    ]
    for each in found["passes"]:
        for one in each["links"]:
            kind, hidden = "forward + backward" if each["backward"] else "forward", one["hidden"]
            times = (f"{one[name]['median_ms']:,.0f} ms" for name in ("computing", "exchange", "whole"))
            share = f"{hidden['median']:.2f} ({hidden['least']:.2f} to {hidden['most']:.2f})"
            rows.append((str(each["ranks"]), kind, f"{one['megabytes_per_s']:,.0f} MB/s", *times, share))
    yield (
        f"The exchange behind computing, dense, {found['tokens']:,} tokens, float32, on {found['link']}; in "
        "parentheses the range. More than 1 is noise, and ranks beyond the cores compute while others wait."
    ), rows  # fmt: skip


def long(found: Any) -> Iterator[Section]:
    rows: Rows = [
        (
            "pattern, bfloat16",
            "tokens",
            "forward",
            "first call",
            "tokens/s",
            "peak of a rank",
            "its q, k, v and out",
            "sent",
        )
    ]
    for one in found:
        times = (f"{one['seconds']:,.0f} s", f"{one['first_seconds']:,.0f} s", f"{one['tokens_per_s']:,.0f}")
        sizes = (megabytes(one[name]) for name in ("peak_bytes", "qkv_out_bytes", "shipped_bytes"))
        rows.append((one["pattern"], f"{one['tokens']:,}", *times, *sizes))
    rows_of_heads = " and ".join(str(one["check"]["rows_of_heads"]) for one in found)
    yield (
        f"Over {found[0]['ranks']} ranks of one thread on this machine's cores, each once; {rows_of_heads} sampled "
        "rows agree with float64."
    ), rows  # fmt: skip


MADE = {
    "traffic": traffic,
    "shipped": shipped,
    "balance": balance,
    "memory": memory,
    "speed": speed,
    "overlap": overlap,
    "long": long,
    "faults": faults,
}


def again(found: Any) -> Section:
    """The early reports' torchrun experiments."""
    rows: Rows = [("tokens", "ranks", "order", "forward", "tokens/s", "peak of a rank", "q, k, v and out", "sent")]
    for one in found["runs"]:
        sizes = (megabytes(one[name]) for name in ("peak_bytes", "qkv_out_bytes", "shipped_bytes"))
        times = (f"{one['seconds']:.2f} s", f"{one['tokens_per_s']:,.0f}")
        rows.append((f"{one['tokens']:,}", str(one["ranks"]), f"{one['kept_in']} order", *times, *sizes))
    return (
        "The experiments over several devices of [the early reports](reports.md), which preceded this project (003): "
        f"{found['pattern']}, float32, batch 1, each by one command, `torchrun --standalone --nproc_per_node=2 -m "
        "tools.bench.ring_reports --tokens 32768 --hilbert`, all by `python -m tools.bench.ring_reports`. There GPUs, "
        "here processes of one CPU over gloo. In Hilbert order means that the sequence is permuted before it is "
        "sharded. Each ran once: there is no interval. Results agree with float64 on sampled rows."
    ), rows  # fmt: skip


# --- cells ------------------------------------------------------------------------------------------------------------


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def interval(ratio: Any) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
