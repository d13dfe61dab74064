"""How far learned choices are from the best: on planted surfaces with flips, and on what this machine measures.

python -m tools.checks.trust_learned
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from attn_dispatch.learning.predict import Evidence, predict
from attn_dispatch.learning.regret import GroupRegret, HeldOutChoice, leave_one_out, total
from attn_dispatch.profiling import profile
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store
from tools.lib.common import parser, write
from tools.lib.planted import measured, problem_at, surface, times_at

OCTAVES = (6, 15)  #: of the planted lengths: 64 to 32,768 tokens
BATCHES = (1, 4, 16)
UNSEEN_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
CONFIDENCES = (0.0, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)

PATTERNS: tuple[Pattern, ...] = (
    Dense(),
    Dense(is_causal=True),
    Window(255, 0),
    Dilated((512, 1024, 2048), (1, 2, 4)),
)
DTYPES = (torch.float32, torch.bfloat16)
HEADS, HEAD_DIM = 4, 64
REAL_OCTAVES = (8, 12)
REAL_BUDGET_S = 110.0


def figures(quick: bool = False) -> dict[str, Any]:
    """All figures. quick: fewer surfaces, nothing measured."""
    seeds = range(2 if quick else 20)
    found: dict[str, Any] = {"planted": [planted(per_octave, seeds) for per_octave in (1, 2)]}
    found["predict"] = speed(1000 if quick else 10_000)
    return found if quick else {**found, "real": real()}


# --- planted surfaces -------------------------------------------------------------------------------------------------


def planted(per_octave: int, seeds: Iterable[int], unseen: int = 100) -> dict[str, Any]:
    """Five backends, each the best over some lengths, measured with 3 % noise."""
    left_out: list[GroupRegret] = []
    choices: list[HeldOutChoice] = []
    for seed in seeds:
        backends = surface(seed)
        problems = [problem_at(length, batch) for length in lengths(OCTAVES, per_octave) for batch in BATCHES]
        decisions = measured(backends, problems, seed)
        left_out += leave_one_out(decisions)
        evidence, chance = Evidence(decisions), random.Random(seed)
        for _ in range(unseen):
            problem = problem_at(round(2 ** chance.uniform(*OCTAVES)), chance.choice(UNSEEN_BATCHES))
            choices.append(held_out_choice(problem, evidence, times_at(backends, problem)))
    whole = GroupRegret("", "", "unseen", tuple(choices), 0)
    return {
        "per_octave": per_octave,
        "leave_one_out": summary(total(left_out)),
        "unseen": summary(whole),
        "calibration": calibration(whole.choices),
    }


def held_out_choice(problem: dict[str, Any], evidence: Evidence, times: dict[tuple[str, str], float]) -> HeldOutChoice:
    found = predict(problem, evidence, times)
    assert found is not None
    regret = times[found.backend, found.order] / min(times.values()) - 1
    return HeldOutChoice("", found.backend, found.order, regret, found.confidence)


def calibration(choices: Iterable[HeldOutChoice]) -> list[dict[str, Any]]:
    """Claimed confidence against the share of right predictions, by confidence."""
    known = list(choices)
    found = []
    for low, high in pairwise(CONFIDENCES):
        some = [each for each in known if low <= each.confidence < high]
        if some:
            group = GroupRegret("", "", "", tuple(some), 0)
            found.append({"from": low, "count": len(some), "claimed": group.confidence, "hit": group.hits / len(some)})
    return found


def speed(count: int) -> dict[str, float]:
    """Milliseconds of one prediction among this many decisions of one group, made ready once."""
    chance = random.Random(0)
    problems = [problem_at(round(2 ** chance.uniform(*OCTAVES)), chance.randint(1, 64)) for _ in range(count)]
    backends = surface(0, 8)
    decisions = measured(backends, problems, 0)
    start = time.perf_counter()
    evidence = Evidence(decisions)
    ready_ms = (time.perf_counter() - start) * 1e3
    taken = []
    for length in range(100, 120):
        start = time.perf_counter()
        predict(problem_at(length * 37, 3), evidence, list(backends))
        taken.append((time.perf_counter() - start) * 1e3)
    return {"decisions": count, "ready_ms": ready_ms, "median_ms": statistics.median(taken), "worst_ms": max(taken)}


# --- this machine -----------------------------------------------------------------------------------------------------


def real(budget_s: float = REAL_BUDGET_S) -> dict[str, Any]:
    """Measured into a separate folder, then each decision predicted from the others of its group."""
    cpu = torch.device("cpu")
    shapes = [(1, length, HEADS, HEAD_DIM) for length in lengths(REAL_OCTAVES, 2)]
    problems = [problem_of(shape, pattern, dtype, cpu) for pattern in PATTERNS for dtype in DTYPES for shape in shapes]
    with tempfile.TemporaryDirectory() as folder, cache(folder):
        profile(problems, budget_s=budget_s, progress=False)
        decisions: list[Decision] = [decision for _, decision in Store(Path(folder)).all()]
    groups = leave_one_out(decisions)
    whole = total(groups)
    return {
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "budget_s": budget_s,
        "groups": [summary(group) for group in groups],
        "total": summary(whole),
        "calibration": calibration(whole.choices),
    }


@contextmanager
def cache(folder: str) -> Iterator[None]:
    before = os.environ.get("ATTN_DISPATCH_CACHE_DIR")
    os.environ["ATTN_DISPATCH_CACHE_DIR"] = folder
    try:
        yield
    finally:
        del os.environ["ATTN_DISPATCH_CACHE_DIR"]
        if before is not None:
            os.environ["ATTN_DISPATCH_CACHE_DIR"] = before


def lengths(octaves: tuple[int, int], per_octave: int) -> list[int]:
    low, high = octaves
    return [round(2 ** (low + step / per_octave)) for step in range((high - low) * per_octave + 1)]


def summary(group: GroupRegret) -> dict[str, Any]:
    """Without the names of synthetic or discarded parts."""
    gone = ("silicon", "group", "worst_key")
    return {name: value for name, value in group.to_dict().items() if name not in gone}


def main() -> None:
    options = parser(__doc__, "learned.json")
    options.add_argument("--quick", action="store_true", help="fewer surfaces, and nothing measured")
    arguments = options.parse_args()
    found = figures(arguments.quick)
    print(found)
    write(arguments.output, found)


if __name__ == "__main__":
    main()
