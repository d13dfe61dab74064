"""24 problems of 0.05 to 300 ms, tuned by first calls in a process of its own, next to busy loops; and how far each
choice is from the best.

    python -m tools.lib.choices NUMBER ...
    python -m tools.lib.choices --judge '{NUMBER: ["native@natural", ...], ...}'

Prints one line of JSON: what each problem's first call took and chose, or the times of these candidates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch import attend, explain, profile
from attn_dispatch.kernels import registry
from attn_dispatch.machine import load
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning import guard
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.rounds import time_in_rounds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Shape = tuple[int, int, int, int]
SHAPES: tuple[tuple[Pattern, Shape], ...] = (
    (Dense(), (1, 64, 4, 32)),
    (Dense(is_causal=True), (4, 128, 4, 64)),
    (Dense(), (1, 512, 8, 64)),
    (Dense(is_causal=True), (1, 2048, 8, 64)),
    (Window(63, 0), (1, 1024, 4, 64)),
    (Window(255, 0), (1, 8192, 4, 64)),
    (Dilated((256, 512), (1, 2)), (1, 1024, 4, 64)),
    (Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True), (1, 4096, 8, 64)),
    (Neighborhood((16, 16), (5, 5)), (1, 256, 4, 32)),
    (Neighborhood((32, 32), (13, 13)), (1, 1024, 8, 64)),
    (Neighborhood((64, 64), (7, 7)), (1, 4096, 4, 64)),
    (Dense(), (1, 3000, 4, 128)),
)
JUDGES = 3  #: processes: times may differ by a tenth from one to the next, of one candidate more than of another
JUDGED_S, JUDGED_ROUNDS = 1.5, 7
PROFILED_S = 8.0
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(10_000))"


class Planned(NamedTuple):
    """A problem to tune: attend's arguments without tensors."""

    pattern: Pattern
    shape: Shape
    dtype: torch.dtype
    backward: bool

    def problem(self) -> Problem:
        return problem_of(self.shape, self.pattern, self.dtype, torch.device("cpu"), backward=self.backward)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(self.shape, generator=generator).to(self.dtype) for _ in range(3))
        return (q.requires_grad_(self.backward), k.requires_grad_(self.backward), v.requires_grad_(self.backward))


def planned() -> list[Planned]:
    """Every shape in both directions, over three dtypes."""
    return [
        Planned(pattern, shape, DTYPES[(number + backward) % 3], backward)
        for number, (pattern, shape) in enumerate(SHAPES)
        for backward in (False, True)
    ]


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


def tuned(folder: str, which: Sequence[int], **variables: str) -> list[dict[str, Any]]:
    """What the first calls of these problems took and chose, in a new process with this cache folder."""
    command = [sys.executable, "-m", "tools.lib.choices", *map(str, which)]
    surroundings = {**os.environ, "ATTN_DISPATCH_CACHE_DIR": folder, "ATTN_DISPATCH_TRIAL_SECONDS": "inf", **variables}
    found: list[dict[str, Any]] = _last_line(command, surroundings)
    return found


def judged(chosen: Mapping[int, Sequence[str]]) -> list[dict[str, dict[str, float]]]:
    """Median milliseconds by problem and candidate, in each of `JUDGES` processes: of interleaved calls, forward
    and backward where there is one.
    """
    command = [sys.executable, "-m", "tools.lib.choices", "--judge", json.dumps(chosen)]
    return [_last_line(command, dict(os.environ)) for _ in range(JUDGES)]


def _last_line(command: list[str], variables: dict[str, str]) -> Any:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def wait_until_calm(most_s: float = 60.0) -> None:
    """Wait until other programs have left the cores for some seconds."""
    end = time.monotonic() + most_s
    while not load.is_calm() and time.monotonic() < end:
        time.sleep(1.0)


def first_call(one: Planned) -> dict[str, Any]:
    """CPU and wall seconds of the first call, and of a later one; the choice, and the rows by candidate.

    With $PROFILE, `profile` measures the problem before that.
    """
    tensors = one.tensors()
    if os.environ.get("PROFILE"):
        profile([one.problem()], budget_s=PROFILED_S, progress=False)
    first = _timed(one, tensors)
    later = min((_timed(one, tensors) for _ in range(3)), key=lambda each: each["cpu_s"])
    found = explain(*tensors, one.pattern)
    rows = {f"{row.backend}@{row.order}": [row.status, row.median_ms, row.reason] for row in found.candidates}
    return {
        "title": found.problem,
        "first": first,
        "later": later,
        "choice": [found.choice, found.order],
        "source": found.source,
        "provisional": found.provisional,
        "load": found.load,
        "rows": rows,
    }


def _timed(one: Planned, tensors: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    out = attend(*tensors, one.pattern)
    if one.backward:
        out.sum().backward()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def times_of(one: Planned, names: Sequence[str]) -> dict[str, float]:
    """Median milliseconds of these candidates (BACKEND@ORDER), interleaved."""
    example = make(one.problem())
    guard.end_idle_threads()
    calls = {name: example.call(registry.load(name.split("@")[0]), name.split("@")[1]) for name in names}
    found = time_in_rounds(
        calls, budget_s=JUDGED_S, min_rounds=JUDGED_ROUNDS, max_rounds=40 * JUDGED_ROUNDS, hopeless=None, margin=0.0
    )
    return {name: found.timings[name].median_ms for name in names}


if __name__ == "__main__":
    every = planned()
    if sys.argv[1] == "--judge":
        print(
            json.dumps(
                {number: times_of(every[int(number)], names) for number, names in json.loads(sys.argv[2]).items()}
            )
        )
    else:
        print(json.dumps([first_call(every[int(number)]) for number in sys.argv[1:]]))
