"""What attend() adds on a hit to calling the backend directly, and what importing the package costs.

python -m tools.bench_dispatch
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import Dense, Problem, attend, register, registry
from attn_dispatch.contract import Refusal
from attn_dispatch.measure import median_interval
from tools.common import parser, write

CALLS, ROUNDS = 2000, 31
SHAPE = (1, 16, 2, 16)


class Nothing:
    """A backend that does nothing, so that nothing but attend() is timed."""

    name = "nothing"

    def version(self) -> str:
        return "1"

    def refusals(self, problem: Problem) -> list[Refusal]:
        return []

    def workspace_bytes(self, problem: Problem) -> int:
        return 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **tensors: Tensor) -> Tensor:
        return q


def overhead(name: str, **arguments: Any) -> dict[str, float]:
    """Microseconds that attend() adds: paired runs in turns, each the mean of many calls."""
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    problem = Problem.of(q, k, v, **arguments)
    attend(q, k, v, backend=name, **arguments)
    run = registry.load(name).run
    with_attend = timeit.Timer(lambda: attend(q, k, v, backend=name, **arguments))
    direct = timeit.Timer(lambda: run(q, k, v, problem))
    added, alone = [], []
    for _ in range(ROUNDS):
        alone.append(direct.timeit(CALLS) / CALLS * 1e6)
        added.append(with_attend.timeit(CALLS) / CALLS * 1e6 - alone[-1])
    interval = median_interval(added)
    return {
        "added_us": statistics.median(added),
        "low_us": interval.low,
        "high_us": interval.high,
        "direct_us": statistics.median(alone),
    }


def import_ms(statement: str, rounds: int = 15) -> Callable[[], float]:
    code = f"import torch, time; t = time.perf_counter(); {statement}; print((time.perf_counter() - t) * 1e3)"

    def run() -> float:
        seen = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            for _ in range(rounds)
        ]
        return statistics.median(float(one.stdout) for one in seen)

    return run


def main() -> None:
    arguments = parser(__doc__, "dispatch.json").parse_args()
    os.environ["ATTN_DISPATCH_CACHE_DIR"] = tempfile.mkdtemp()
    register(Nothing())
    figures = {
        "shape": SHAPE,
        "dense_sdpa": overhead("sdpa", pattern=Dense()),
        "dense_nothing": overhead("nothing", pattern=Dense()),
        "dilated_nothing": overhead("nothing", segment_lengths=(8, 16), dilation_rates=(1, 2), is_causal=True),
        "import_after_torch_ms": import_ms("import attn_dispatch")(),
        "import_attend_after_torch_ms": import_ms("from attn_dispatch import attend")(),
    }
    print(figures)
    write(arguments.output, figures)


if __name__ == "__main__":
    main()
