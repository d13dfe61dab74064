"""How far learned choices are from the best, on made-up surfaces with flips, and how sure they claim to be."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from attn_dispatch.learning.predict import Evidence, predict
from attn_dispatch.learning.regret import GroupRegret, HeldOutChoice, leave_one_out, total
from tests.support.made_up import measured, problem_at, surface, times_at

OCTAVES = (6, 15)  #: of the lengths: 64 to 32,768 tokens
BATCHES = (1, 4, 16)
UNSEEN_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
CONFIDENCES = (0.0, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)


def regrets(seeds: Iterable[int], unseen: int) -> dict[str, Any]:
    """Five backends, each the best over some lengths, measured with 3 % noise."""
    left_out: list[GroupRegret] = []
    choices: list[HeldOutChoice] = []
    for seed in seeds:
        backends = surface(seed)
        problems = [problem_at(2**octave, batch) for octave in range(OCTAVES[0], OCTAVES[1] + 1) for batch in BATCHES]
        decisions = measured(backends, problems, seed)
        left_out += leave_one_out(decisions)
        evidence, chance = Evidence(decisions), random.Random(seed)
        for _ in range(unseen):
            problem = problem_at(round(2 ** chance.uniform(*OCTAVES)), chance.choice(UNSEEN_BATCHES))
            choices.append(held_out_choice(problem, evidence, times_at(backends, problem)))
    whole = GroupRegret("", "", "unseen", tuple(choices), 0)
    return {
        "leave_one_out": total(left_out).to_dict(),
        "unseen": whole.to_dict(),
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
