"""What a call of attend() on a hit adds to PyTorch's own function, on one token, and to the call of a backend; what it
adds to the first call in a process whose decision is on disk; and what importing the package costs.

python -m tools.bench.dispatch
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from attn_dispatch import Dense, Problem, attend, register
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.kernels import registry
from attn_dispatch.spec.problem import Call
from attn_dispatch.tuning.intervals import median_interval
from tools.lib.common import parser, write
from tools.lib.tables import Table

CALLS, ROUNDS = 200, 201
PROCESSES, QUICK_PROCESSES = 15, 6
SHAPE = (1, 16, 2, 16)
ONE_TOKEN = (1, 1, 1, 64)
SDPA = "sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)"
SDPA_HEADS_FIRST = "sdpa(q, k, v)"


#: A backend that does nothing, so that only attend() is timed.
NOTHING = SimpleNamespace(
    name="nothing",
    version=lambda: "1",
    refusals=lambda problem: [],
    workspace_bytes=lambda problem: 0,
    run=lambda q, k, v, problem, **tensors: q,
)


def overhead(
    name: str, call: str, direct: str = "run(q, k, v, problem)", shape: Sequence[int] = SHAPE, **arguments: Any
) -> dict[str, float]:
    """Microseconds that a call adds to a direct one: interleaved pairs of runs, each the mean of many calls.

    Args:
        call: the call, as one would write it, of what is in `arguments` and q, k, v and `name`.
    """
    q, k, v = (torch.randn(shape) for _ in range(3))
    problem = Problem.of(q, k, v, **arguments)
    there = {"attend": attend, "run": registry.load(name).run, "q": q, "k": k, "v": v, "name": name, **arguments}
    there |= {"problem": problem, "sdpa": torch.nn.functional.scaled_dot_product_attention}
    there |= {"operator": operators.attend_by_operator, "Call": Call}
    with_attend, direct_call = (partial(_mean_us, timeit.Timer(each, globals=there)) for each in (call, direct))
    with_attend()
    return added(with_attend, direct_call, ROUNDS, "us")


def _mean_us(timer: timeit.Timer) -> float:
    return timer.timeit(CALLS) / CALLS * 1e6


def added(call: Callable[[], float], direct: Callable[[], float], pairs: int, unit: str) -> dict[str, float]:
    """What a call takes more than a direct one, with its interval, and what that takes: medians of paired times."""
    alone, more = [], []
    for _ in range(pairs):
        alone.append(direct())
        more.append(call() - alone[-1])
    interval = median_interval(more)
    found = {"added": statistics.median(more), "low": interval.low, "high": interval.high}
    return {f"{name}_{unit}": each for name, each in {**found, "direct": statistics.median(alone)}.items()}


# Garbage is collected before timing: a collection takes as long as all else together, and would otherwise fall into one
# run or the other.
READY = """
import gc, time, torch
from attn_dispatch import Dense, Problem, attend, counters, explain, profile
from attn_dispatch.kernels import registry
q, k, v = (torch.randn({shape}) for _ in range(3))
gc.collect()
"""
FIRST = "start = time.perf_counter(); {call}; print((time.perf_counter() - start) * 1e3)"
BY_ATTEND = FIRST.format(call="attend(q, k, v, Dense())") + "; assert counters()['loaded'] == 1"
DIRECT = "problem = Problem.of(q, k, v, Dense()); gc.collect(); " + FIRST.format(
    call="registry.load({choice!r}).run(q, k, v, problem)"
)
# In a call's budget the decision might be provisional, and a later process would measure it again.
DECIDE = "profile([Problem.of(q, k, v, Dense())], budget_s=10, progress=False); print(explain(q, k, v, Dense()).choice)"


def warm_first(pairs: int) -> dict[str, Any]:
    """Milliseconds that attend() adds to the first call in a new process that has loaded torch and this package, where
    the decision is on disk: pairs of processes, one with each call. Both load the backend's module.
    """
    choice = fresh(DECIDE).strip()
    call, direct = (lambda code=code: float(fresh(code)) for code in (BY_ATTEND, DIRECT.format(choice=choice)))
    return {"choice": choice, **added(call, direct, pairs, "ms")}


def fresh(code: str) -> str:
    """The output of a new process."""
    return python(READY.format(shape=SHAPE) + code)


@cache
def compiled() -> str:
    """A folder for compiled modules, as in an installation, independent of this process's settings."""
    return tempfile.mkdtemp()


def python(code: str) -> str:
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    surroundings["PYTHONPYCACHEPREFIX"] = compiled()
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=surroundings).stdout


def import_ms(statement: str, rounds: int) -> float:
    code = f"import torch, time; t = time.perf_counter(); {statement}; print((time.perf_counter() - t) * 1e3)"
    python(code)
    return statistics.median(float(python(code)) for _ in range(rounds))


def tables(found: Any) -> Iterator[Table]:
    sdpa, hits = "F.scaled_dot_product_attention", list[tuple[str, Any]]()
    for name, each in found["one_token"].items():
        hits.append((f"by `{name}`, one token; {sdpa} with transposes", each["tokens first"]))
        hits.append((f'by `{name}`, layout="bhnd"; {sdpa} alone', each["heads first"]))
    hits += [
        ("the operator of graphs, one token; `attend()`", found["one_token_operator"]),
        ("a backend that does nothing, dense; its own call", found["dense_nothing"]),
        ("the same, dilated by the shorthands; its own call", found["dilated_nothing"]),
    ]
    rows = [
        (about, f"{hit['direct_us'] + hit['added_us']:.1f} us; {hit['direct_us']:.1f} us", f"{hit['added_us']:+.1f} us")
        for about, hit in hits
    ]
    warm, imported = found["warm_first_ms"], found["import_attend_after_torch_ms"]
    yield Table(
        ("`attend()` with a decision; beside", "a call", "added"),
        rows,
        f"A process's first call, its decision on disk, takes {warm['added_ms']:.1f} ms ({warm['low_ms']:.1f} to "
        f"{warm['high_ms']:.1f}) more than the first direct call, {warm['direct_ms']:.1f} ms. "
        f"`from attn_dispatch import attend`, after torch, takes {imported:.0f} ms.",
    )


def main() -> None:
    given = parser(__doc__, "dispatch.json", quick="fewer processes").parse_args()
    processes = QUICK_PROCESSES if given.quick else PROCESSES
    os.environ["ATTN_DISPATCH_CACHE_DIR"] = tempfile.mkdtemp()
    register(NOTHING)
    dense, heads_first = (f"attend(q, k, v, pattern, backend=name{more})" for more in ("", ", layout='bhnd'"))
    dilated = (
        "attend(q, k, v, segment_lengths=segment_lengths, dilation_rates=dilation_rates, is_causal=is_causal,"
        " backend=name)"
    )
    branches: dict[str, Any] = {"segment_lengths": (8, 16), "dilation_rates": (1, 2), "is_causal": True}
    figures = {
        "shape": SHAPE,
        "one_token": {
            name: {
                "tokens first": overhead(name, dense, SDPA, ONE_TOKEN, pattern=Dense()),
                "heads first": overhead(name, heads_first, SDPA_HEADS_FIRST, ONE_TOKEN, pattern=Dense()),
            }
            for name in ("native", "sdpa")
        },
        "one_token_operator": overhead(
            "sdpa", "operator(Call(q, k, v, pattern, backend=name))", dense, ONE_TOKEN, pattern=Dense()
        ),
        "dense_nothing": overhead("nothing", dense, pattern=Dense()),
        "dilated_nothing": overhead("nothing", dilated, **branches),
        "warm_first_ms": warm_first(processes),
        "import_attend_after_torch_ms": import_ms("from attn_dispatch import attend", processes),
    }
    write(given, figures, tables)


if __name__ == "__main__":
    main()
