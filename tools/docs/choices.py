"""Tables of choices made beside other programs or the running calls, and of what first calls cost."""

from __future__ import annotations

from typing import Any

from tools.docs.results import load, machine
from tools.lib.tables import table

#: How load.json and first_call.json name a run, and what it is.
RUNS = {
    "0": "idle",
    "0 then calm": "idle, and after a second process",
    "1": "beside 1 busy loop",
    "1 then calm": "beside 1, then a process on the idle machine",
    "2": "beside 2 busy loops",
    "2 then calm": "beside 2, then a process on the idle machine",
    "4": "beside 4 busy loops",
    "4 then calm": "beside 4, then a process on the idle machine",
    "profile": "`profile`, 8 s for each problem",
}


def choices() -> str:
    """The tables, with the machine of each."""
    return "\n\n".join(
        (
            *("## Beside other programs", _loaded(load("load"))),
            *("## First calls", _first(load("first_call"))),
            *("## Beside the running calls", _online(load("online"))),
        )
    )


def _loaded(found: Any) -> str:
    about = (
        f"By `python -m tools.bench.load`: {len(found['problems'])} problems of 0.05 to 500 ms, three dtypes, both "
        "directions, tuned by first calls in a process of its own, then judged on the idle machine by interleaved runs "
        "of all candidates that were chosen, in each of three processes. Off: more than a tenth slower than the best "
        "of these, by the median of the three; and in all of them, since two candidates may differ by a tenth from "
        f"one process to the next, whatever was measured before. {machine(found)}."
    )
    rows: list[tuple[str, ...]] = [("tuned", "off", "in all three", "geometric mean", "worst"), ("---",) * 5]
    for name, one in found["runs"].items():
        off = f"{one['off']} of {one['problems']}"
        figures = f"{one['off_in_all']}", f"{one['geometric_mean']:.2f}", f"{one['worst']:.2f}"
        rows.append((RUNS[name], off, *figures))
    return f"{about}\n\n{table(rows)}"


def _first(found: Any) -> str:
    about = (
        "By `python -m tools.bench.first_call`: CPU seconds of the first call of each of the same problems, less those "
        f"of {found['own_calls']} later calls of it. What the design asks for: at most {found['first_s']:g} s for the "
        f"first problem of a process, {found['later_s']:g} s for later ones (median). {machine(found)}."
    )
    head = ("process", "first problem", "later ones, median", "largest", "provisional")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for name, one in found["processes"].items():
        seconds = (f"{one[key]:.2f} s" for key in ("first_s", "median_s", "largest_s"))
        rows.append((name, *seconds, f"{one['provisional']} of {len(one['problems'])}"))
    return f"{about}\n\n{table(rows)}"


def _online(found: Any) -> str:
    about = (
        "By `python -m tools.bench.online`: a training loop of two problems, and a serving loop of requests of many "
        "lengths, in mode `online` with nothing stored, in mode `off`, and with the decisions of `profile`. Trials: "
        "share of the loop's time; the setting is 5 %. Worst call: past 1.5 usual calls in mode `off` + 20 ms, median "
        "of three processes; in parentheses those of mode `off` and of known decisions, which no trial interrupts: "
        "they show the machine's own pauses. Decisions: how many, of those compared, are within 2 % of `profile`'s at "
        "the loop's end, and the worst: loops of seconds earn little "
        f"time for trials, and until a trial has ended the guess stays. {machine(found)}."
    )
    head = ("loop", "trials", "time, over mode `off`", "over known decisions", "worst call", "decisions", "worst")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for name in ("training", "serving"):
        one = found[name]
        near = sum(ratio <= 1.02 for ratio in one["ratios"])
        times = (f"{one[key]:.3f}" for key in ("relative_to_off", "relative_to_known"))
        worst = "{online:+.0f} ms ({off:+.0f}, {known:+.0f})".format(**one["worst_beyond_ms"])
        decided = f"{near} of {len(one['ratios'])}"
        rows.append((name, f"{one['overhead']:.1%}", *times, worst, decided, f"{max(one['ratios']):.2f}"))
    return f"{about}\n\n{table(rows)}"
