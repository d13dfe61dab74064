"""Choices made beside other programs: 24 problems are tuned by first calls while busy loops run, and judged on the idle
machine; then once more after a later process has called them on the idle machine.

python -m tools.bench.load

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from tools.lib import choices
from tools.lib.common import parser, write

LOOPS = (0, 1, 2, 4)
OFF = 0.10  #: share by which a choice may be slower than the best one before it counts as off
QUICK = (0, 3, 4, 8, 12, 13, 19, 22)  #: problems of --quick

Choices = list[dict[str, Any]]


def summary(regrets: Sequence[Sequence[float]]) -> dict[str, Any]:
    """How many choices are off, and the times over those of the best candidate: by problem, in each judging process."""
    medians = [statistics.median(each) for each in regrets]
    return {
        "off": sum(regret > 1 + OFF for regret in medians),
        "off_in_all": sum(min(each) > 1 + OFF for each in regrets),
        "problems": len(regrets),
        "geometric_mean": statistics.geometric_mean(medians),
        "worst": max(medians),
        "regrets": regrets,
    }


def chosen_by(found: Choices, index: int) -> str:
    return "@".join(found[index]["choice"])


def main() -> None:
    arguments = parser(__doc__, "load.json")
    arguments.add_argument("--quick", action="store_true", help="eight problems")
    given = arguments.parse_args()
    planned = choices.planned()
    which = list(QUICK) if given.quick else list(range(len(planned)))
    runs: dict[str, Choices] = {}
    for loops in LOOPS:
        with tempfile.TemporaryDirectory() as folder:
            with choices.busy_loops(loops):
                runs[f"{loops}"] = choices.tuned(folder, which)
            choices.wait_until_calm()
            runs[f"{loops} then calm"] = choices.tuned(folder, which)
        print(f"{loops} busy loops: tuned", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs["profile"] = choices.tuned(folder, which, PROFILE="1")
    names = [sorted({chosen_by(found, index) for found in runs.values()}) for index in range(len(which))]
    choices.wait_until_calm()
    judges = choices.judged(dict(zip(which, names)))
    times = [[judge[str(number)] for judge in judges] for number in which]
    figures = {
        name: summary(
            [[each[chosen_by(found, i)] / min(each.values()) for each in times[i]] for i in range(len(which))]
        )
        for name, found in runs.items()
    }
    problems = [
        {
            "title": runs["0"][index]["title"],
            "median_ms": {name: [each[name] for each in times[index]] for name in names[index]},
            "choices": {run: [*found[index]["choice"], found[index]["provisional"]] for run, found in runs.items()},
        }
        for index in range(len(which))
    ]
    for name, each in figures.items():
        print(
            f"{name:14} {each['off']} of {each['problems']} off, {each['off_in_all']} in all, worst {each['worst']:.2f}"
        )
    write(given.output, {"runs": figures, "problems": problems})


if __name__ == "__main__":
    main()
