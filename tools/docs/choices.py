"""Tables of choices against every backend and beside the running calls, and of what first calls cost."""

from __future__ import annotations

from typing import Any

from attn_dispatch.kernels.registry import LAST_RESORT
from tools.docs.results import load, machine
from tools.lib.models import planned
from tools.lib.tables import table

#: How choices.json names a run, and what it is.
RUNS = {
    "idle": "by first calls, idle",
    "loaded": "by first calls, beside {loops} busy loops",
    "loaded, then idle": "and after a second process, idle",
}


def choices() -> str:
    """The tables, with the machine of each."""
    return "\n\n".join(
        (
            *("## Against every backend", _chosen(load("choices"))),
            *("## First calls", _first(load("first_call"))),
            *("## Beside the running calls", _online(load("online"))),
        )
    )


def _chosen(found: Any) -> str:
    problems = found["problems"]
    judges = len(problems[0]["judges"])
    compiled = sum(bool(each["left_out"]) for each in problems)
    most = max(each.problem().q_len for each in planned())
    about = (
        f"By `python -m tools.bench.choices{' --quick' * found['quick']}`: {len(problems)} of the "
        f"{len(planned())} problems in `tools/lib/models.py`, with the shapes of published models, some cut in heads, "
        f"windows or tokens as they say (no more than {most:,} queries), tuned by first calls with an empty cache "
        "folder. Then all candidates that can run a problem are checked against float64 and timed, interleaved, "
        f"without busy loops, in {judges} process{'es' * (judges > 1)} that knew no choice; those over three times "
        "slower by two samples are not timed further. Ratios are to the fastest candidate in the same process, which "
        f"is the fastest by chance too. {machine(found)}; load of the minute before, by what was measured then: "
        f"{found['load_before']:.1f}."
    )
    if compiled:
        about += (
            f" Not timed: backends compiled for each problem (`flex`, for seconds), on the {compiled} problems "
            "that they accept; `--compiled` times them."
        )
    disturbed = sum(map(any, (each["disturbed"] for each in problems)))
    if disturbed:
        about += (
            f" Other programs took the cores while {disturbed} of the problems were timed: these figures are to be "
            "measured again."
        )
    near = _near(found)
    head = ("tuned", "geometric mean", "worst", *(f"within {each}" for each in near), "provisional")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for name, one in found["runs"].items():
        open_ones = sum(bool(each["choices"][name]["provisional"]) for each in problems)
        cells = *_figures(one), *_counts(one, near), f"{open_ones} of {one['problems']}"
        rows.append((RUNS[name].format(loops=found["loops"]), *cells))
    return "\n\n".join((_learned(found), about, table(rows), _fixed(found)))


def _learned(found: Any) -> str:
    """What the tables say, in a sentence or two."""
    idle, best, near = found["runs"]["idle"], found["single_best"], _near(found)[0]
    alone = found["backends"][best]["with_last_resort"]
    worst = found["problems"][max(range(len(idle["ratios"])), key=idle["ratios"].__getitem__)]
    return (
        f"On this machine first calls choose a backend within {float(near) - 1:.0%} of the fastest for "
        f"{_count(idle, near)} problems; always `{best}` is so for {_count(alone, near)}. Their geometric means are "
        f"{idle['geometric_mean']:.2f} and {alone['geometric_mean']:.2f}, their worst {idle['worst']:.2f} "
        f"({worst['model']}: {' '.join(worst['title'].split())}) and {alone['worst']:.2f}."
    )


def _near(found: Any) -> list[str]:
    """The ratios to the fastest that choices are counted within."""
    return list(found["runs"]["idle"]["within"])


def _count(one: Any, near: str) -> str:
    return f"{one['within'][near]} of {one['problems']}"


def _counts(one: Any, near: list[str]) -> tuple[str, ...]:
    return tuple(_count(one, each) for each in near)


def _fixed(found: Any) -> str:
    """What users of a single backend lose."""
    about = (
        "The same for a user who always takes one backend, in natural order: on the problems that it runs, and on all, "
        f"where `{LAST_RESORT}` runs what it does not. The best of them by the latter is `{found['single_best']}`."
    )
    near = _near(found)
    head = (
        *("backend", "does not run", "geometric mean", "worst", "of all problems", "worst of all"),
        *(f"within {each}" for each in near),
    )
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for name, one in sorted(found["backends"].items(), key=lambda each: each[1]["with_last_resort"]["geometric_mean"]):
        figures = *_figures(one["runs"]), *_figures(one["with_last_resort"])
        rows.append((f"`{name}`", f"{one['does_not_run']}", *figures, *_counts(one["with_last_resort"], near)))
    return f"{about}\n\n{table(rows)}"


def _figures(one: Any) -> tuple[str, str]:
    return f"{one['geometric_mean']:.2f}", f"{one['worst']:.2f}"


def _first(found: Any) -> str:
    missed = ", missed here" * (found["processes"]["empty cache"]["median_s"] > found["later_s"])
    about = (
        "By `python -m tools.bench.first_call`: CPU seconds of the first call of each of "
        f"{len(found['processes']['empty cache']['problems'])} problems, less those of {found['own_calls']} later "
        f"calls of it. What the design asks for: at most {found['first_s']:g} s for the "
        f"first problem of a process, {found['later_s']:g} s for later ones (median){missed}. Below 0: less than the "
        f"later calls that are taken off. {machine(found)}."
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
        "lengths: seconds in mode `off`, in mode `online` with nothing stored, and with the decisions of `profile`. "
        "Trials: share of the loop's time; the setting is 5 %. Worst call: past 1.5 usual calls in mode `off` + 20 ms, "
        "median of three processes (`off`: one process); in parentheses those of mode `off` and of known decisions, "
        "which no trial interrupts: they show the machine's own pauses. Decisions: how many, of those compared, are "
        "within 2 % of `profile`'s at the loop's end, and the worst: loops of seconds earn little "
        f"time for trials, and until a trial has ended the guess stays. {machine(found)}."
    )
    head = ("loop", "`off`", "`online`", "known decisions", "trials", "worst call", "decisions", "worst")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for name in ("training", "serving"):
        one = found[name]
        near = sum(ratio <= 1.02 for ratio in one["ratios"])
        times = (f"{one['settings'][key]['total_s']:.2f} s" for key in ("off", "online", "known"))
        worst = "{online:+.0f} ms ({off:+.0f}, {known:+.0f})".format(**one["worst_beyond_ms"])
        decided = f"{near} of {len(one['ratios'])}"
        rows.append((name, *times, f"{one['overhead']:.1%}", worst, decided, f"{max(one['ratios']):.2f}"))
    return f"{about}\n\n{table(rows)}"
