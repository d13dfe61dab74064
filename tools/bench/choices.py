"""attend()'s choices against every backend: 100 problems of real models, tuned by first calls with an empty cache
folder on an idle machine and beside busy loops; then all candidates that can run each are checked, and timed
interleaved.

python -m tools.bench.choices

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attn_dispatch import attend, explain
from attn_dispatch.kernels.registry import LAST_RESORT
from attn_dispatch.machine.load import cores, is_calm
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.text import one_line
from attn_dispatch.tuning.candidates import Candidate, Request, first_call_ms
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import ending_on_failure, time_in_rounds
from tools.lib.common import alone, parser, timing, write
from tools.lib.models import Planned, planned
from tools.lib.tables import Table

TAKES = "20 min"
JUDGES, SECONDS = 2, 2.5  #: processes that time all problems; of rounds for a problem
AGREE = 1.1  #: ratios of a choice to the fastest; where two judges' differ by more, a third one decides
QUICK_SECONDS, QUICK_EVERY = 0.5, 7
QUICK = f"one problem in {QUICK_EVERY}, judged in one process"
NEAR = (1.05, 1.2)  #: ratios to the fastest within which choices are counted
IDLE, LOADED = "idle", "loaded"
HOPELESS = 3.0  #: ratio to the fastest by two samples, from which a candidate is not timed further
FEWEST_ROUNDS, MOST_ROUNDS = 5, 300  #: of `judgement`
SEED = 1  #: of its tensors; trials draw others
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(10_000))"

Times = Mapping[str, float]  #: median milliseconds by candidate, BACKEND@ORDER


# --- first calls ------------------------------------------------------------------------------------------------------


def runs_of(family: str, which: Sequence[int], wait_s: float, loops: int) -> dict[str, list[dict[str, Any]]]:
    """What first calls chose: idle; beside busy loops, if any; and in the next, idle process after that.

    Waits up to `wait_s` seconds for other programs to leave the cores.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        wait_until_calm(wait_s)
        found[IDLE] = tuned(folder, family, which)
    if not loops:
        return found
    with tempfile.TemporaryDirectory() as folder:
        with busy_loops(loops):
            found[LOADED] = tuned(folder, family, which)
        wait_until_calm(wait_s)
        found[f"{LOADED}, then {IDLE}"] = tuned(folder, family, which)
    return found


def tuned(folder: str, family: str, which: Sequence[int]) -> list[dict[str, Any]]:
    """What the first calls of a new process with this cache folder chose."""
    variables = {"ATTN_DISPATCH_CACHE_DIR": folder, "ATTN_DISPATCH_TRIAL_SECONDS": "inf"}
    return alone(first_calls, family, which, **variables)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep this many other processes running, each on one core."""
    command = [sys.executable, "-c", BUSY.format(parent=os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def wait_until_calm(most_s: float) -> None:
    """Wait until other programs have left the cores for some seconds."""
    end = time.monotonic() + most_s
    while not is_calm() and time.monotonic() < end:
        time.sleep(1.0)


def first_calls(family: str, which: Sequence[int]) -> list[dict[str, Any]]:
    """What the first calls of these problems chose in this process."""
    every = planned()[family]
    return [first_call(every[number]) for number in which]


def first_call(one: Planned) -> dict[str, Any]:
    example = one.example()
    masks = dict[str, Any](example.masks)
    given = example.q, example.k, example.v, example.problem.pattern.bound(masks.pop("pattern_data", None))
    out: Any = attend(*given, **masks)
    if one.backward:
        out.sum().backward()
    found = explain(*given, **masks)
    choice = {"backend": found.choice, "order": found.order, "source": found.source}
    return {**choice, "provisional": bool(found.provisional)}


# --- judges -----------------------------------------------------------------------------------------------------------


def judgements(
    family: str, which: Sequence[int], names: Sequence[Collection[str]], seconds: float
) -> list[dict[str, Any]]:
    """`judgement` of each of these problems, with the names that are timed in any case."""
    every = planned()[family]
    return [judgement(every[number], each, seconds) for number, each in zip(which, names)]


def judgement(one: Planned, names: Collection[str], seconds: float) -> dict[str, Any]:
    """The times of all candidates (BACKEND@ORDER) that can run this problem, interleaved: none of them is retired,
    but those that two samples show to be over `HOPELESS` times slower.

    Args:
        names: candidates that are timed in any case.
        seconds: of rounds; more where that is short of `FEWEST_ROUNDS`.
    """
    example = one.example(SEED)
    found = {f"{each.name}@{each.order}": each for each in Request.of(example.problem).candidates}
    refused = {name: each.row.reason for name, each in found.items() if each.row is not None}
    able = {name: each for name, each in found.items() if name not in refused}
    left_out = sorted(name for name, each in able.items() if first_call_ms(each, example.problem) and name not in names)
    first_ms, wrong = checked(example, {name: each for name, each in able.items() if name not in left_out})
    calls = {name: example.call(*able[name].backend_and_order) for name in first_ms}
    near_ms = sum(each for each in first_ms.values() if each <= HOPELESS * min(first_ms.values()))
    turns = time_in_rounds(
        calls,
        budget_s=max(seconds, FEWEST_ROUNDS * near_ms / 1e3),
        min_rounds=MOST_ROUNDS,
        max_rounds=MOST_ROUNDS,
        hopeless=HOPELESS,
        first_ms=first_ms,
    )
    wrong |= {name: one_line(error) for name, error in turns.failures.items()}
    times = {name: timing(each) for name, each in turns.timings.items()}
    return {
        "title": str(example.problem),
        "times": times,
        "disturbed": turns.load.disturbed,
        "refused": refused,
        "left_out": left_out,
        "wrong": wrong,
    }


def checked(example: Example, able: Mapping[str, Candidate]) -> tuple[dict[str, float], dict[str, str]]:
    """The first calls in milliseconds of candidates that agree with float64; what is wrong with the others."""
    gate, first_ms = Oracle.of(example), dict[str, float]()
    wrong, errors = dict[str, str](), dict[str, Exception]()
    for name, each in able.items():
        with ending_on_failure(name, errors):
            start = time.perf_counter()
            found = gate.run(*each.backend_and_order)
            took_ms = (time.perf_counter() - start) * 1e3
            if failures := gate.check(found).failures:
                wrong[name] = "; ".join(failures)
            else:
                first_ms[name] = took_ms
    return first_ms, wrong | {name: one_line(error) for name, error in errors.items()}


# --- figures ----------------------------------------------------------------------------------------------------------


def over_fastest(judges: Sequence[Times], name: str) -> float:
    """A candidate's time over that of the fastest in the same process: the median of all processes."""
    return statistics.median(each[name] / min(each.values()) for each in judges)


def differ(judges: Sequence[Mapping[str, Any]], names: Collection[str]) -> bool:
    """Whether judges' ratios of a choice to the fastest differ by more than `AGREE`."""
    times = [medians(judge["times"]) for judge in judges]
    ratios = [[over_fastest([each], name) for each in times if name in each] for name in names]
    return any(each and max(each) > AGREE * min(each) for each in ratios)


def medians(times: Mapping[str, Mapping[str, float]]) -> Times:
    return {name: one["median_ms"] for name, one in times.items()}


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
    times = [[medians(judge) for judge in each["judges"]] for each in problems]
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


def tables(found: Any) -> Iterator[Table]:
    problems, near = found["problems"], list(found["runs"][IDLE]["within"])
    within = tuple(f"within {each}" for each in near)
    idle, best = found["runs"][IDLE], found["single_best"]
    always = found["backends"][best]["with_last_resort"]
    worst = problems[max(range(len(idle["ratios"])), key=idle["ratios"].__getitem__)]
    rows: list[tuple[str, ...]] = []
    for name, one in found["runs"].items():
        provisional = sum(each["choices"][name]["provisional"] for each in problems)
        rows.append((name, *_cells(one), *_counts(one), f"{provisional} of {one['problems']}"))
    yield Table(
        ("tuned", "geometric mean", "worst", *within, "provisional"),
        rows,
        f"First calls choose a backend within {float(near[0]) - 1:.0%} of the fastest for {_counts(idle)[0]} "
        f"problems; always `{best}` is so for {_counts(always)[0]}. The worst choice is {idle['worst']:.2f} times "
        f"the fastest ({worst['model']}), that of always `{best}` {always['worst']:.2f} times.\n\n{len(problems)} "
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
    measure(parser(__doc__, "choices.json", quick=QUICK), "models", SECONDS, tables, cores())


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
    given, every = options.parse_args(), planned()[family]
    which = list(range(0, len(every), QUICK_EVERY if given.quick else 1))
    wait_s = 0.0 if given.quick else 60.0
    runs = runs_of(family, which, wait_s, loops)
    names = [{chosen(each) for each in of_runs} for of_runs in zip(*runs.values())]
    judges = []
    for _ in range(1 if given.quick else JUDGES):
        wait_until_calm(wait_s)
        judges.append(alone(judgements, family, which, names, QUICK_SECONDS if given.quick else seconds))
    judged = [list(each) for each in zip(*judges)]
    if unclear := [index for index, each in enumerate(judged) if differ(each, names[index])]:
        wait_until_calm(wait_s)
        again = [which[index] for index in unclear], [names[index] for index in unclear]
        for index, one in zip(unclear, alone(judgements, family, *again, seconds)):
            judged[index].append(one)
    problems = [
        {
            "model": every[number].of.model,
            "choices": {run: found[index] for run, found in runs.items()},
            **{name: each[0][name] for name in ("title", "refused", "left_out", "wrong")},
            "disturbed": [judge["disturbed"] for judge in each],
            "judges": [judge["times"] for judge in each],
        }
        for index, (number, each) in enumerate(zip(which, judged))
    ]
    found = {"quick": given.quick, "loops": loops, **figures(problems), "problems": problems}
    write(given, found, show)


if __name__ == "__main__":
    main()
