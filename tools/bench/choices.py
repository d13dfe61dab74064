"""attend()'s choices against every backend: 100 problems of real models, tuned by first calls with an empty cache
folder on an idle machine and beside busy loops; then all candidates that can run each are checked, and timed
interleaved.

python -m tools.bench.choices

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from attn_dispatch.kernels.registry import LAST_RESORT
from attn_dispatch.spec.orders import NATURAL
from tools.lib import choices
from tools.lib.common import parser, write
from tools.lib.models import planned

TAKES = "20 min"
JUDGES, SECONDS = 2, 2.5  #: processes: times may differ by a tenth from one to the next; of rounds for a problem
QUICK_SECONDS, QUICK_EVERY = 0.5, 9
NEAR = (1.05, 1.2)  #: ratios to the fastest within which choices are counted
WRONG = 1.25  #: ratio from which the times that a choice was made by are written too
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
    return {
        "runs": summary(runs),
        "does_not_run": len(problems) - len(runs),
        "with_last_resort": summary(every),
    }


def figures(problems: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The choices of each run, and each fixed backend, against the fastest candidate of every problem.

    Raises:
        RuntimeError: a chosen candidate could not be timed, or its result was wrong.
    """
    times = [_medians(each["judges"]) for each in problems]
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


def runs_of(which: Sequence[int], wait_s: float) -> dict[str, list[dict[str, Any]]]:
    """What first calls chose: idle; beside a busy loop for each core; and in the next, idle process after that.

    Waits up to `wait_s` seconds for other programs to leave the cores.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        choices.wait_until_calm(wait_s)
        found[IDLE] = choices.tuned(folder, which)
    with tempfile.TemporaryDirectory() as folder:
        with choices.busy_loops(choices.cores()):
            found[LOADED] = choices.tuned(folder, which)
        choices.wait_until_calm(wait_s)
        found[f"{LOADED}, then {IDLE}"] = choices.tuned(folder, which)
    return found


def main() -> None:
    arguments = parser(__doc__, "choices.json")
    arguments.add_argument("--quick", action="store_true", help=f"one problem in {QUICK_EVERY}, judged in one process")
    arguments.add_argument("--every", type=int, metavar="N", help="one problem in N")
    arguments.add_argument("--compiled", action="store_true", help="time what is compiled for each problem too (flex)")
    given = arguments.parse_args()
    every = planned()
    which = list(range(0, len(every), given.every or (QUICK_EVERY if given.quick else 1)))
    wait_s = 0.0 if given.quick else 60.0
    runs = runs_of(which, wait_s)
    print("tuned", flush=True)
    names = {
        number: {"@".join(found[index]["choice"]) for found in runs.values()} for index, number in enumerate(which)
    }
    judges = []
    for _ in range(1 if given.quick else JUDGES):
        choices.wait_until_calm(wait_s)
        judges.append(choices.judged(names, QUICK_SECONDS if given.quick else SECONDS, given.compiled))
    problems = [
        {
            "model": every[number].model,
            "title": judges[0][str(number)]["title"],
            "choices": {
                run: _choice(found[index], [judge[str(number)]["times"] for judge in judges])
                for run, found in runs.items()
            },
            **{name: judges[0][str(number)][name] for name in ("refused", "left_out", "wrong")},
            "disturbed": [judge[str(number)]["disturbed"] for judge in judges],
            "judges": [judge[str(number)]["times"] for judge in judges],
        }
        for index, number in enumerate(which)
    ]
    found = figures(problems)
    for name, each in found["runs"].items():
        near = ", ".join(f"{count} within {ratio}" for ratio, count in each["within"].items())
        print(f"{name:18} {each['geometric_mean']:.3f}, worst {each['worst']:.2f}; of {each['problems']}: {near}")
    for name, each in found["backends"].items():
        print(f"{name:18} {each['with_last_resort']['geometric_mean']:.3f}, does not run {each['does_not_run']}")
    write(given.output, {"quick": given.quick, "loops": choices.cores(), **found, "problems": problems})


def _medians(judges: Sequence[Mapping[str, Any]]) -> list[Times]:
    return [{name: one["median_ms"] for name, one in judge.items()} for judge in judges]


def _choice(found: Mapping[str, Any], judges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    backend, order = found["choice"]
    choice = {"backend": backend, "order": order, "source": found["source"], "provisional": bool(found["provisional"])}
    wrong = over_fastest(_medians(judges), chosen(choice)) > WRONG
    return {**choice, **({"load": found["load"], "rows": found["rows"]} if wrong else {})}


if __name__ == "__main__":
    main()
