"""The problems of a family of `models`, tuned by first calls in a process of its own, next to busy loops; and the times
of every candidate.

    python -m tools.lib.choices FAMILY NUMBER ...
    python -m tools.lib.choices FAMILY --judge '{"names": {NUMBER: ["native@natural", ...], ...}, "seconds": 3}'

Prints one line of JSON: what each problem's first call took and chose, or the times of all that can run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attn_dispatch import attend, explain
from attn_dispatch.machine import load
from attn_dispatch.spec.data import Form
from attn_dispatch.tuning.candidates import Candidate, Request, first_call_ms
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.oracle import Oracle
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.lib.common import timing
from tools.lib.models import Planned, planned

HOPELESS = 3.0  #: ratio to the fastest by two samples, from which a candidate is not timed further
FEWEST_ROUNDS, MOST_ROUNDS = 5, 300  #: of `judgement`
SEED = 1  #: of its tensors; trials draw others
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(10_000))"


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


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def tuned(folder: str, family: str, which: Sequence[int], **variables: str) -> list[dict[str, Any]]:
    """What the first calls of these problems took and chose, in a new process with this cache folder."""
    command = [sys.executable, "-m", "tools.lib.choices", family, *map(str, which)]
    surroundings = {**os.environ, "ATTN_DISPATCH_CACHE_DIR": folder, "ATTN_DISPATCH_TRIAL_SECONDS": "inf", **variables}
    found: list[dict[str, Any]] = _last_line(command, surroundings)
    return found


def judged(family: str, names: Mapping[int, Collection[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """`judgement` of each of these problems, by number, in a new process."""
    given = {"names": {number: sorted(each) for number, each in names.items()}, "seconds": seconds}
    command = [sys.executable, "-m", "tools.lib.choices", family, "--judge", json.dumps(given)]
    found: dict[str, dict[str, Any]] = _last_line(command, dict(os.environ))
    return found


def _last_line(command: list[str], variables: dict[str, str]) -> Any:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def wait_until_calm(most_s: float = 60.0) -> None:
    """Wait until other programs have left the cores for some seconds."""
    end = time.monotonic() + most_s
    while not load.is_calm() and time.monotonic() < end:
        time.sleep(1.0)


def first_call(one: Planned) -> dict[str, Any]:
    """CPU and wall seconds of the first call, and of a later one; the choice."""
    call = arguments(one.example())
    first = _timed(one, *call)
    later = min((_timed(one, *call) for _ in range(3)), key=lambda each: each["cpu_s"])
    found = explain(*call[0], **call[1])
    return {
        "title": found.problem,
        "first": first,
        "later": later,
        "choice": [found.choice, found.order],
        "source": found.source,
        "provisional": found.provisional,
    }


def arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of attend(): a pattern holds its tensors."""
    masks, pattern = dict[str, Any](example.masks), example.problem.pattern
    if isinstance(pattern, Form):
        return (example.q, example.k, example.v, pattern.bound(masks.pop("pattern_data"))), masks
    return (example.q, example.k, example.v, pattern), masks


def _timed(one: Planned, given: tuple[Any, ...], masks: dict[str, Any]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    out = attend(*given, **masks)
    if one.backward:
        out.sum().backward()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


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
    wrong |= {name: str(error) for name, error in turns.failures.items()}
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
    gate = Oracle.of(example)
    first_ms: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for name, each in able.items():
        start = time.perf_counter()
        try:
            found = gate.run(*each.backend_and_order)
        except Exception as error:  # noqa: BLE001 - a backend may fail in any way, which is a result here
            wrong[name] = f"{type(error).__name__}: {error}"
            continue
        took_ms = (time.perf_counter() - start) * 1e3
        failures = gate.check(found).failures
        if failures:
            wrong[name] = "; ".join(failures)
        else:
            first_ms[name] = took_ms
    return first_ms, wrong


if __name__ == "__main__":
    every = planned()[sys.argv[1]]
    if sys.argv[2] == "--judge":
        given = json.loads(sys.argv[3])
        names: dict[str, list[str]] = given["names"]
        print(json.dumps({n: judgement(every[int(n)], each, given["seconds"]) for n, each in names.items()}))
    else:
        print(json.dumps([first_call(every[int(number)]) for number in sys.argv[2:]]))
