"""Warm up LongNet's pattern over many lengths by the command, then route every one of them in a second process.

    python -m tools.bench.routes

The second process calls attend() on each problem, backward included, and counts. It must measure nothing but what the
first one left provisional, as it does where other programs took the cores meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from attn_dispatch import Dilated, attend, counters, explain
from attn_dispatch.spec.pattern import Pattern
from tools.lib.common import parser, write

SEGMENTS, RATES = (2048, 4096, 8192), (1, 2, 4)
DTYPES = ("float32", "bfloat16")


def profile_command(longest: int) -> list[str]:
    commas = [",".join(map(str, values)) for values in (SEGMENTS, RATES)]
    options = [
        "--shape",
        "1,1024,8,64",
        "--lengths",
        f"1024:{longest}",
        "--segments",
        commas[0],
        "--dilations",
        commas[1],
    ]
    kinds = ["--causal", "both", "--backward", "both", "--dtype", ",".join(DTYPES), "--device", "cpu", "--json"]
    return [sys.executable, "-m", "attn_dispatch", "profile", *options, *kinds]


def route_all(longest: int) -> dict[str, Any]:
    """The second process: explain() of each problem, and the counters after calling attend() on all."""
    rows = []
    for dtype in DTYPES:
        for length in lengths(longest):
            for causal in (False, True):
                for backward in (False, True):
                    rows.append(route(Dilated(SEGMENTS, RATES, causal), length, getattr(torch, dtype), backward))
    return {
        "problems": len(rows),
        "sources": sorted({row["source"] for row in rows}),
        "counters": counters(),
        "routes": rows,
    }


def route(pattern: Pattern, length: int, dtype: torch.dtype, backward: bool) -> dict[str, Any]:
    q, k, v = (torch.randn(1, length, 8, 64, dtype=dtype, requires_grad=backward) for _ in range(3))
    explanation = explain(q, k, v, pattern)
    measured = counters()["measured"]
    start = time.perf_counter()
    out = attend(q, k, v, pattern)
    if backward:
        out.backward(torch.ones_like(out))
    chosen = next(one for one in explanation.candidates if one.status == "chosen")
    return {
        "problem": explanation.problem,
        "choice": explanation.choice,
        "source": explanation.source,
        "provisional": explanation.provisional,
        "measured_again": counters()["measured"] > measured,
        "median_ms": chosen.median_ms,
        "this_call_ms": (time.perf_counter() - start) * 1e3,
        "others": {one.backend: one.median_ms or one.reason for one in explanation.candidates if one is not chosen},
    }


def lengths(longest: int) -> list[int]:
    found = [1024]
    while found[-1] * 2 <= longest:
        found.append(found[-1] * 2)
    return found


def main() -> None:
    options = parser(__doc__, "routes.json")
    options.add_argument("--longest", type=int, default=32768)
    options.add_argument("--route", action="store_true", help="run as the second process")
    arguments = options.parse_args()
    if arguments.route:
        print(json.dumps(route_all(arguments.longest)))
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ATTN_DISPATCH_CACHE_DIR": folder}
        start = time.perf_counter()
        subprocess.run(profile_command(arguments.longest), check=True, env=environment, stdout=subprocess.DEVNULL)
        profiled = time.perf_counter() - start
        files = len(list(Path(folder).rglob("*.json")))
        second = [sys.executable, "-m", "tools.bench.routes", "--route", "--longest", str(arguments.longest)]
        found = json.loads(subprocess.run(second, check=True, env=environment, capture_output=True, text=True).stdout)
    print({name: value for name, value in found.items() if name != "routes"})
    again = {row["problem"]: row["provisional"] for row in found["routes"] if row["measured_again"]}
    print("measured again:", again)
    settled = found["counters"]["loaded"] == files - len(again) and all(again.values())
    if found["sources"] != ["measured"] or found["counters"]["measured"] != len(again) or not settled:
        sys.exit("the second process did not route every settled problem by its stored decision")
    write(arguments.output, {"profile_seconds": profiled, "files": files, **found})


if __name__ == "__main__":
    main()
