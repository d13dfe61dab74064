"""The tables of tools/results/peers.json: a section for each problem, a row for each peer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attn_dispatch.text import gib, milliseconds
from tools.docs.results import load, machine
from tools.lib.peer_cells import HOPELESS, PROFILED_S
from tools.lib.tables import table

HEAD = (
    "tokens", "dtype", "pass", "peer", "time, and 95 % interval", "time / attend()'s", "error", "memory", "first call",
)  # fmt: skip


def peers() -> str:
    """The page."""
    return markdown(load("peers"))


def markdown(found: Any) -> str:
    names = dict.fromkeys(row["name"] for row in found["rows"])
    sections = (section(name, [row for row in found["rows"] if row["name"] == name]) for name in names)
    return "\n\n".join((about(found), asked(found), *sections))


def about(found: Any) -> str:
    """The machine, what the columns mean, and whether this was the whole run."""
    disturbed = sum(bool(row.get("disturbed")) for row in found["rows"])
    is_part = found["short"] or found["only"]
    part = " **A part of the cells, to show what is printed: the whole run is still to come.**" if is_part else ""
    load_text = "" if found["calm_before"] else " Other programs were running when it began."
    if disturbed:
        load_text += f" While {disturbed} of the rows were measured, other programs took the cores."
    return (
        f"{machine(found)}; batch 1, heads of {found['head_dim']}.{part}{load_text}\n\n"
        "Peers of a cell are timed in the same interleaved rounds, in a process of its own; with fewer than 6 rounds "
        "the interval is the range, and one round has none. The time over attend()'s is the median of the ratios in "
        "each round. The error is that of out: the largest absolute difference from the formula in float64, on rows "
        "drawn; where a peer has a function of its own, the largest difference from its own result in float64, "
        "relative to the largest value of that, marked own. Gradients are held to the formula within a derived "
        "tolerance. Memory is what a call allocates beyond its inputs at its peak; masks are made before, but "
        "PyTorch's CPU kernel turns boolean ones (windows, neighbourhoods) into numbers in every call. The first "
        f"call includes compilation; attend()'s came after its measurement, by `profile` in {PROFILED_S:g} s at most. "
        f"A peer over {HOPELESS:g} times slower than the fastest is timed once. NATTEN, torchscale and "
        "dilated-attention-pytorch are made for GPUs: here their kernels are replaced, and nothing follows about GPUs."
    )


def asked(found: Any) -> str:
    """What each peer is, once."""
    seen = {row["peer"]: row["about"] for row in found["rows"]}
    rows: list[tuple[str, ...]] = [("peer", "version", "what is called"), ("---",) * 3]
    return table([*rows, *((name, found["versions"][name], what) for name, what in seen.items())])


def section(name: str, rows: list[Any]) -> str:
    patterns = dict.fromkeys(row["pattern"] for row in rows)
    lines = [HEAD, ("---",) * len(HEAD), *(cells(row) for row in rows if "time" in row)]
    differing = dict.fromkeys((row["peer"], row["differs"]) for row in rows if row["differs"])
    others = [f"- {peer} computes another function: it {what}." for peer, what in differing]
    parts = (f"## {name}", f"{'; '.join(patterns)}; {rows[0]['heads']} heads.", table(lines))
    notes = "\n".join((*others, *refusals(rows)))
    return "\n\n".join((*parts, notes) if notes else parts)


def cells(row: Any) -> tuple[str, ...]:
    time = row["time"]
    peer = f"attend(): `{row['choice']}`" if "choice" in row else row["peer"]
    if row.get("choice") and (row["source"] != "measured" or row["provisional"]):
        peer += f" ({row['provisional'] or row['source']})"
    over = row.get("over_attend")
    ratio = f"{over['median']:.2f}" if over else "-"
    interval = "1 round"
    if time["rounds"] > 1:
        interval = f"{milliseconds(time['low_ms'])} to {milliseconds(time['high_ms'])}, {time['rounds']} rounds"
        ratio += f" ({over['low']:.2f} to {over['high']:.2f})" if over else ""
    took = f"{milliseconds(time['median_ms'])} ({interval})"
    memory = "unknown" if row["peak_bytes"] is None else gib(row["peak_bytes"])
    first = milliseconds(row["first_ms"])
    return (f"{row['tokens']:,}", row["dtype"], passes(row), peer, took, ratio, error(row), memory, first)


def passes(row: Any) -> str:
    return "forward + backward" if row["backward"] else "forward"


def error(row: Any) -> str:
    if row["differs"]:
        return f"{row['error']:.1e}, own"
    return f"{row['error']:.1e}" + "".join(f"; WRONG: {each}" for each in row["wrong"])


def refusals(rows: list[Any]) -> Iterator[str]:
    """A line for each peer and reason without a time, with the cells it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "time" not in row:
            cell = f"{row['tokens']:,} {row['dtype']} {passes(row)}"
            found.setdefault((row["peer"], row["reason"]), []).append(cell)
    for (peer, reason), where in found.items():
        yield f"- {peer} has no time ({'; '.join(where)}): {reason.rstrip('.')}."
