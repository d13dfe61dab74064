"""One dilated problem, batch 2, in this fresh process: every backend's first call, then interleaved warm calls.

    python -m tools.lib.cold TOKENS SEGMENT RATE

Prints one line of JSON. First calls run in the order of `NAMES`, as in a script that calls each once; their results
are checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from torch import Tensor

from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Dilated
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.lib.common import ratio, timing
from tools.lib.paired import problem_of

MASKED = "sdpa_mask"  #: PyTorch's attention with a mask, which its first call builds
NAMES = ("manual", MASKED, "sdpa", "native")
BATCH, ROUNDS = 2, 3


def measured(tokens: int, segment: int, rate: int) -> dict[str, Any]:
    """`manual` over the others: warm, and by their first calls."""
    pattern = Dilated((segment,), (rate,))
    example = make(problem_of(pattern, tokens, batch=BATCH))
    able = {name: registry.load(name) for name in NAMES}
    calls = {name: example.call(one) for name, one in able.items() if not one.refusals(example.problem)}
    first_ms, outs = {}, {}
    for name, call in calls.items():
        start = time.perf_counter()
        result = call()
        first_ms[name] = (time.perf_counter() - start) * 1e3
        outs[name] = result if isinstance(result, Tensor) else result[0]
    check = checked(example, outs)
    turns = time_in_rounds(calls, budget_s=None, min_rounds=ROUNDS, max_rounds=ROUNDS, hopeless=None, first_ms=first_ms)
    found = turns.timings
    others = [name for name in found if name != "manual"]
    return {
        "pattern": str(pattern),
        "tokens": tokens,
        "segment": segment,
        "rate": rate,
        "times": {name: timing(one) for name, one in found.items()},
        "first_ms": first_ms,
        "best": min(others, key=lambda name: found[name].median_ms),
        "manual_over": {name: ratio(found["manual"], found[name]) for name in others},
        "first_manual_over": {name: first_ms["manual"] / first_ms[name] for name in others},
        "first_manual_over_warm": {name: first_ms["manual"] / found[name].median_ms for name in others},
        "check": check,
    }


def checked(example: Example, outs: dict[str, Tensor]) -> dict[str, Any]:
    """The error of each result against float64.

    Raises:
        RuntimeError: an error exceeds its tolerance.
    """
    gate = Oracle.of(example)
    errors = {}
    for name, out in outs.items():
        verdict = gate.check({"out": out})
        if verdict.failures:
            raise RuntimeError(f"{name}, {example.problem.pattern}: {'; '.join(verdict.failures)}")
        errors[name] = verdict.error
    tolerance = gate.expected["out"].tolerance
    return {"rows": len(gate.rows), "heads": len(gate.heads), "tolerance": tolerance, "error_of_out": errors}


def alone(tokens: int, segment: int, rate: int) -> Any:
    """`measured` in a process of its own."""
    command = [sys.executable, "-m", "tools.lib.cold", *map(str, (tokens, segment, rate))]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(found, flush=True)
    return found


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:]))))
