"""attend()'s choices against every backend: 100 problems of real models, tuned by first calls with an empty cache
folder on an idle machine and beside busy loops; then all candidates that can run each are checked, and timed
interleaved.

python -m tools.bench.choices

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from attn_dispatch.kernels.registry import LAST_RESORT
from attn_dispatch.spec.orders import NATURAL
from tools.lib import choices
from tools.lib.common import parser, write
from tools.lib.models import planned
from tools.lib.tables import Table

TAKES = "20 min"
JUDGES, SECONDS = 2, 2.5  #: processes that time all problems; of rounds for a problem
AGREE = 1.1  #: ratios of a choice to the fastest; where two judges' differ by more, a third one decides
QUICK_SECONDS, QUICK_EVERY = 0.5, 9
NEAR = (1.05, 1.2)  #: ratios to the fastest within which choices are counted
IDLE, LOADED = "idle", "loaded"

Times = Mapping[str, float]  #: median milliseconds by candidate, BACKEND@ORDER


def over_fastest(judges: Sequence[Times], name: str) -> float:
    """A candidate's time over that of the fastest in the same process: the median of all processes."""
    return statistics.median(each[name] / min(each.values()) for each in judges)


def summary(ratios: Sequence[float]) -> dict[str, Any]:
    """Geometric mean, the largest, and how many are near 1."""
    return {
        "problems": len(ratios),
        "geometric_mean": statistics.geometric_mean(ratios),
        "worst": max(ratios),
        "within": {f"{near:g}": sum(ratio <= near for ratio in ratios) for near in NEAR},
    }


def fixed(problems: Sequence[Sequence[Times]], name: str) -> dict[str, Any] | None:
    """What a user loses who always takes this backend, in natural order; None of one that runs no problem.

    On the problems that it runs; and on all, where the last resort runs what it does not.
    """
    own, last_resort = f"{name}@{NATURAL}", f"{LAST_RESORT}@{NATURAL}"
    runs = [over_fastest(judges, own) for judges in problems if all(own in each for each in judges)]
    if not runs:
        return None
    every = [
        over_fastest(judges, own if all(own in each for each in judges) else last_resort)
        for judges in problems
        if all(own in each or last_resort in each for each in judges)
    ]
    return {"runs": summary(runs), "does_not_run": len(problems) - len(runs), "with_last_resort": summary(every)}


def figures(problems: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The choices of each run, and each fixed backend, against the fastest candidate of every problem.

    Raises:
        RuntimeError: a chosen candidate could not be timed, or its result was wrong.
    """
    times: list[list[Times]]
    times = [[_medians(judge) for judge in each["judges"]] for each in problems]
    found: dict[str, Any] = {"runs": {}, "backends": {}}
    for run in problems[0]["choices"]:
        ratios = []
        for each, judges in zip(problems, times):
            name = chosen(each["choices"][run])
            if any(name not in judge for judge in judges):
                raise RuntimeError(f"{name} was chosen for {each['title']}: {each['wrong'].get(name, 'cannot run')}")
            ratios.append(over_fastest(judges, name))
        sources = Counter(each["choices"][run]["source"] for each in problems)
        found["runs"][run] = {**summary(ratios), "sources": dict(sources), "ratios": ratios}
    for name in dict.fromkeys(name.split("@")[0] for judges in times for judge in judges for name in judge):
        one = fixed(times, name)
        if one is not None:
            found["backends"][name] = one
    found["single_best"] = min(
        found["backends"], key=lambda name: found["backends"][name]["with_last_resort"]["geometric_mean"]
    )
    return found


def chosen(choice: Mapping[str, Any]) -> str:
    return f"{choice['backend']}@{choice['order']}"


def runs_of(family: str, which: Sequence[int], wait_s: float, loops: int) -> dict[str, list[dict[str, Any]]]:
    """What first calls chose: idle; beside busy loops, if any; and in the next, idle process after that.

    Waits up to `wait_s` seconds for other programs to leave the cores.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        choices.wait_until_calm(wait_s)
        found[IDLE] = choices.tuned(folder, family, which)
    if not loops:
        return found
    with tempfile.TemporaryDirectory() as folder:
        with choices.busy_loops(loops):
            found[LOADED] = choices.tuned(folder, family, which)
        choices.wait_until_calm(wait_s)
        found[f"{LOADED}, then {IDLE}"] = choices.tuned(folder, family, which)
    return found


def tables(found: Any) -> Iterator[Table]:
    problems, near = found["problems"], list(found["runs"][IDLE]["within"])
    within = tuple(f"within {each}" for each in near)
    idle, best = found["runs"][IDLE], found["single_best"]
    alone = found["backends"][best]["with_last_resort"]
    worst = problems[max(range(len(idle["ratios"])), key=idle["ratios"].__getitem__)]
    rows: list[tuple[str, ...]] = []
    for name, one in found["runs"].items():
        provisional = sum(each["choices"][name]["provisional"] for each in problems)
        rows.append((name, *_cells(one), *_counts(one), f"{provisional} of {one['problems']}"))
    yield Table(
        ("tuned", "geometric mean", "worst", *within, "provisional"),
        rows,
        f"First calls choose a backend within {float(near[0]) - 1:.0%} of the fastest for {_counts(idle)[0]} "
        f"problems; always `{best}` is so for {_counts(alone)[0]}. The worst choice is {idle['worst']:.2f} times "
        f"the fastest ({worst['model']}), that of always `{best}` {alone['worst']:.2f} times.\n\n{len(problems)} "
        f"problems with the shapes of published models, tuned by first calls: idle, beside {found['loops']} busy "
        "loops, and in a next, idle process after that. Then all candidates are checked against float64 and "
        "timed in processes that knew no choice. Ratios are to the fastest there. `flex`, compiled for seconds, "
        f"is left out of {sum(bool(each['left_out']) for each in problems)} problems.",
    )
    by_mean = sorted(found["backends"].items(), key=lambda each: each[1]["with_last_resort"]["geometric_mean"])
    rows = [
        (f"`{name}`", f"{one['does_not_run']}", *_cells(one["runs"]), *_cells(whole), *_counts(whole))
        for name, one in by_mean
        if (whole := one["with_last_resort"])
    ]
    head = ("backend", "does not run", "geometric mean", "worst", "of all problems", "worst of all")
    yield Table((*head, *within), rows, f"Always one backend, in natural order; `{LAST_RESORT}` runs what it does not.")


def _cells(one: Any) -> tuple[str, str]:
    return f"{one['geometric_mean']:.2f}", f"{one['worst']:.2f}"


def _counts(one: Any) -> list[str]:
    return [f"{count} of {one['problems']}" for count in one["within"].values()]


def main() -> None:
    measure(parser(__doc__, "choices.json"), "models", SECONDS, tables, choices.cores())


def measure(
    options: argparse.ArgumentParser,
    family: str,
    seconds: float,
    show: Callable[[Any], Iterator[Table]],
    loops: int = 0,
) -> None:
    """Tune and judge the problems of a family, and write what was found.

    Args:
        seconds: of rounds for a problem.
        show: the tables of what was found.
        loops: busy loops beside which they are tuned too.
    """
    options.add_argument("--quick", action="store_true", help=f"one problem in {QUICK_EVERY}, judged in one process")
    given, every = options.parse_args(), planned()[family]
    which = list(range(0, len(every), QUICK_EVERY if given.quick else 1))
    wait_s = 0.0 if given.quick else 60.0
    runs = runs_of(family, which, wait_s, loops)
    names = {
        number: {"@".join(found[index]["choice"]) for found in runs.values()} for index, number in enumerate(which)
    }
    judges = []
    for _ in range(1 if given.quick else JUDGES):
        choices.wait_until_calm(wait_s)
        judges.append(choices.judged(family, names, QUICK_SECONDS if given.quick else seconds))
    unclear = {
        number: each for number, each in names.items() if _differ([judge[str(number)] for judge in judges], each)
    }
    if unclear:
        choices.wait_until_calm(wait_s)
        judges.append(choices.judged(family, unclear, seconds))
    problems = [
        {
            "model": every[number].of.model,
            "title": judges[0][str(number)]["title"],
            "choices": {run: _choice(found[index]) for run, found in runs.items()},
            **{name: judges[0][str(number)][name] for name in ("refused", "left_out", "wrong")},
            "disturbed": [judge[str(number)]["disturbed"] for judge in judges if str(number) in judge],
            "judges": [judge[str(number)]["times"] for judge in judges if str(number) in judge],
        }
        for index, number in enumerate(which)
    ]
    found = {"quick": given.quick, "loops": loops, **figures(problems), "problems": problems}
    write(given.output, found, show)


def _differ(judges: Sequence[Mapping[str, Any]], names: Collection[str]) -> bool:
    """Whether two judges' ratios of a choice to the fastest differ by more than `AGREE`."""
    times = [_medians(judge["times"]) for judge in judges]
    ratios = [[over_fastest([each], name) for each in times if name in each] for name in names]
    return any(each and max(each) > AGREE * min(each) for each in ratios)


def _medians(times: Mapping[str, Mapping[str, float]]) -> Times:
    return {name: one["median_ms"] for name, one in times.items()}


def _choice(found: Mapping[str, Any]) -> dict[str, Any]:
    backend, order = found["choice"]
    return {"backend": backend, "order": order, "source": found["source"], "provisional": bool(found["provisional"])}


if __name__ == "__main__":
    main()
