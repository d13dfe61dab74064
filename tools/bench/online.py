"""What mode `online` costs: a training loop and a serving loop, in mode `off`, in mode `online` with an empty cache
folder, and with the decisions of `profile`; the worst single call, and how far the decisions are from `profile`'s. The
worst call is the median of those of three processes, for one that the machine itself stalls is in one of them.

    python -m tools.bench.online [--quick]

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from attn_dispatch import attend, explain, profile
from attn_dispatch.decisions import online
from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Dense, Dilated
from tools.lib.choices import judgement, wait_until_calm
from tools.lib.common import parser, write
from tools.lib.models import Planned
from tools.lib.tables import Table

STEPS, QUICK_STEPS = 2000, 150  #: of training
PASSES, QUICK_PASSES = 100, 3  #: over the lengths
LENGTHS = 500
JUDGED, QUICK_JUDGED = 12, 2  #: lengths whose decision is compared with that of `profile`
PROFILED_S, JUDGED_S = 4.0, 1.5  #: of each problem
TRAINED = (
    Planned(Dense(is_causal=True), (1, 256, 4, 64), torch.float32, True),
    Planned(Dilated((128, 256, 512), (1, 2, 4), is_causal=True), (1, 512, 4, 64), torch.float32, True),
)
SETTINGS = ("off", "online", "known")
RUNS, QUICK_RUNS = 3, 1  #: processes, each with an empty folder: a machine's stalls hit one of them, slices all
LOOPS = ("training", "serving")
MOST_CALLS, MOST_MORE_MS, MOST_RATIO = 1.5, 20.0, 1.02  #: what is hoped for


def served(quick: bool) -> list[Planned]:
    """A request each: 500 lengths, some of them again and again."""
    drawn = random.Random(0)
    lengths = [drawn.randrange(32, 1057, 8) for _ in range(LENGTHS)]
    requests = [Planned(Dense(is_causal=True), (1, each, 4, 64), torch.float32, False) for each in lengths]
    return requests * (QUICK_PASSES if quick else PASSES)


def calls(loop: str, quick: bool) -> Iterator[Planned]:
    if loop == "serving":
        yield from served(quick)
    else:
        yield from TRAINED * (QUICK_STEPS if quick else STEPS)


def run(loop: str, quick: bool) -> dict[str, Any]:
    """Milliseconds of every call by problem, the whole loop's seconds, and what was decided."""
    kinds = list(dict.fromkeys(calls(loop, quick)))
    tensors = {one: one.tensors() for one in kinds}
    times: dict[Planned, list[float]] = {one: [] for one in kinds}
    start = time.perf_counter()
    for one in calls(loop, quick):
        before = time.perf_counter()
        out = attend(*tensors[one], one.pattern)
        if one.backward:
            out.backward(torch.ones_like(out))
        times[one].append((time.perf_counter() - before) * 1e3)
    total_s = time.perf_counter() - start
    found = {one: explain(*tensors[one], one.pattern) for one in kinds}
    return {
        "total_s": total_s,
        "trials_s": online._account.spent_s,
        "problems": [
            {
                "title": found[one].problem,
                "choice": [found[one].choice, found[one].order],
                "median_ms": statistics.median(times[one]),
                "worst_ms": max(times[one][1:], default=0.0),
            }
            for one in kinds
        ],
    }


def in_process(loop: str, mode: str, folder: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.bench.online", "--loop", loop, *["--quick"] * quick]
    surroundings = {**os.environ, "ATTN_DISPATCH_CACHE_DIR": folder, "ATTN_DISPATCH_MODE": mode}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=surroundings)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def beyond_ms(off: dict[str, Any], found: dict[str, Any]) -> float:
    """Milliseconds of a loop's worst call past what is hoped for, by the usual calls of mode `off`."""
    pairs = zip(off["problems"], found["problems"], strict=True)
    return max(float(each["worst_ms"] - (MOST_CALLS * usual["median_ms"] + MOST_MORE_MS)) for usual, each in pairs)


def compared(loop: str, quick: bool) -> dict[str, Any]:
    """One loop in all settings, with the decisions of `profile` for comparison."""
    kinds = list(dict.fromkeys(calls(loop, quick)))
    found: dict[str, Any] = {}
    beyond: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as known:
        os.environ["ATTN_DISPATCH_CACHE_DIR"] = known
        judges = kinds[: QUICK_JUDGED if quick else JUDGED]
        explanations = profile([one.problem() for one in judges], budget_s=PROFILED_S * len(judges), progress=False)
        for setting in SETTINGS:
            mode = "predict" if setting == "known" else setting
            runs = []
            for number in range(1 if setting == "off" else QUICK_RUNS if quick else RUNS):
                wait_until_calm(0.0 if quick else 60.0)
                folder = known if setting == "known" else f"{empty}/{number}"
                runs.append(in_process(loop, mode, folder, quick))
            found[setting] = sorted(runs, key=lambda run: run["total_s"])[len(runs) // 2]
            beyond[setting] = [beyond_ms(found["off"], run) for run in runs]
    rows = []
    for one, best, reached in zip(judges, explanations, found["online"]["problems"], strict=False):
        names = ["@".join(reached["choice"]), f"{best.choice}@{best.order}"]
        times = judgement(one, names, JUDGED_S)["times"]
        ratio = times[names[0]]["median_ms"] / times[names[1]]["median_ms"]
        rows.append({**reached, "profiled": names[1], "ratio": ratio})
    return {
        "overhead": found["online"]["trials_s"] / found["online"]["total_s"],
        "worst_beyond_ms": {setting: statistics.median(each) for setting, each in beyond.items()},
        "ratios": [row["ratio"] for row in rows],
        "judged": rows,
        "settings": found,
    }


def tables(found: Any) -> Iterator[Table]:
    rows: list[tuple[str, ...]] = []
    for name in LOOPS:
        one = found[name]
        times = (f"{one['settings'][key]['total_s']:.2f} s" for key in SETTINGS)
        worst = "{online:+.0f} ms ({off:+.0f}, {known:+.0f})".format(**one["worst_beyond_ms"])
        near = f"{sum(ratio <= MOST_RATIO for ratio in one['ratios'])} of {len(one['ratios'])}"
        rows.append((name, *times, f"{one['overhead']:.1%}", worst, near, f"{max(one['ratios']):.2f}"))
    yield Table(
        ("loop", "`off`", "`online`", "known decisions", "trials", "worst call", "decisions", "worst"),
        rows,
        "A loop's seconds in mode `off`, in mode `online` with nothing stored, and with `profile`'s decisions. "
        f"Trials: share of the loop's time. Worst call: past {MOST_CALLS:g} usual calls of mode `off` + "
        f"{MOST_MORE_MS:g} ms; in parentheses without trials, which shows the machine's own pauses. Decisions: "
        f"how many are within {MOST_RATIO - 1:.0%} of `profile`'s at the loop's end, and the worst.",
    )


def main() -> None:
    options = parser(__doc__, "online.json")
    options.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    options.add_argument("--loop", choices=LOOPS, help="run one loop in this process")
    given = options.parse_args()
    if given.loop:
        print(json.dumps(run(given.loop, given.quick)))
        return
    native = registry.load("native")
    if not native.refusals(TRAINED[0].problem()) and native.prepare is not None:
        native.prepare()
    write(given.output, {"quick": given.quick, **{loop: compared(loop, given.quick) for loop in LOOPS}}, tables)


if __name__ == "__main__":
    main()
