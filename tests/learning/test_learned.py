"""Choices predicted from neighbours: crossovers, eligible candidates, confidence and regret."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from attn_dispatch.learning.predict import MAX_NEIGHBOURS, UNKNOWN_FACTOR, Evidence, EvidencePoint, Prediction, predict
from attn_dispatch.learning.regret import GroupRegret, HeldOutChoice, leave_one_out, total
from attn_dispatch.store.decision import Decision
from tests.support.made_up import PROBLEM, Name, decision, measured, problem_at, surface, times_at

A, B, C = (("a", "natural"), ("b", "natural"), ("c", "natural"))
CROSS = 1000  #: tokens at which a and b take the same time
LENGTHS = tuple(round(2 ** (step / 2)) for step in range(12, 29))
OCTAVES = (6, 15)  #: of the lengths: 64 to 32,768 tokens
BATCHES = (1, 4, 16)
UNSEEN_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
CONFIDENCES = (0.0, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)


def times(length: int) -> dict[Name, float]:
    """Milliseconds; b has more overhead and grows more slowly: it is faster past CROSS."""
    return {A: (length / CROSS) ** 2, B: 0.6 + 0.4 * length / CROSS}


def crossing(*lengths: int) -> list[Decision]:
    return [decision(problem_at(length), times(length)) for length in lengths]


def choice(length: int, evidence: list[Decision], able: tuple[Name, ...] = (A, B), **more: Any) -> Prediction:
    found = predict(problem_at(length), evidence, able, **more)
    assert found is not None
    return found


# --- crossovers -------------------------------------------------------------------------------------------------------


def test_a_crossover_is_where_the_ratio_is_one() -> None:
    evidence = crossing(*LENGTHS)
    for length in (500, 700, 900, 970):
        assert choice(length, evidence).backend == "a"
    for length in (1030, 1100, 1500, 2000):
        assert choice(length, evidence).backend == "b"


def test_confidence_falls_toward_the_crossover_and_away_from_the_evidence() -> None:
    evidence = crossing(*LENGTHS)
    near, far = choice(1020, evidence), choice(4000, evidence)
    assert near.confidence < far.confidence
    alone = [choice(1024 << step, crossing(256)).confidence for step in range(12)]
    assert alone == sorted(alone, reverse=True)
    assert alone[0] > 0.9
    assert alone[-1] < 0.7


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
            group = GroupRegret("", "", "", tuple(some), 0).to_dict()
            hit = group["hits"] / len(some)
            found.append({"from": low, "count": len(some), "claimed": group["confidence"], "hit": hit})
    return found


def test_confidence_is_calibrated() -> None:
    """On synthetic surfaces the share of right choices matches the claimed confidence at every level."""
    found = regrets(range(6), unseen=50)
    for part in ("leave_one_out", "unseen"):
        figures = found[part]
        assert figures["mean"] <= 0.03
        assert figures["p95"] <= 0.10
        assert figures["alone"] == 0
    for level in found["calibration"]:
        spread = math.sqrt(max(level["claimed"] * (1 - level["claimed"]), 0.01) / level["count"])
        assert level["hit"] > level["claimed"] - 3 * spread


# --- densities of masks made of data ----------------------------------------------------------------------------------


def at_density(density: int | None, times: dict[Name, float] | None = None) -> Any:
    """A problem; with times of it, the decision. The last resort computes all pairs, the other one what is seen."""
    form = {"kind": "BlocksForm", "size": [64, 64], "density": density, "imbalance": None if density is None else 0}
    problem = problem_at(1024, pattern=form)
    return problem if times is None else decision(problem, times)


def at_densities(*densities: int) -> list[Decision]:
    """The one that skips pays below a quarter."""
    return [at_density(each, {A: 1.0, B: 0.2 + 3.2 * 2 ** (each / 2)}) for each in densities]


@pytest.mark.parametrize("held_out", [-1, -3, -5, -7])
def test_a_density_between_measured_ones_is_predicted(held_out: int) -> None:
    evidence = at_densities(held_out - 1, held_out + 1)
    found = predict(at_density(held_out), evidence, (A, B))
    assert found is not None
    assert found.backend == ("b" if held_out < -4 else "a")
    assert not found.in_bucket
    assert {each.key for each in evidence} == set(found.evidence)


def test_confidence_falls_toward_the_density_where_skipping_pays_and_away_from_the_evidence() -> None:
    found = [predict(at_density(each), at_densities(0, -2, -6, -8), (A, B)) for each in (-7, -4, -7)]
    confidences = [0.0 if each is None else each.confidence for each in found]
    assert confidences[0] > 0.9 > confidences[1]
    far = [predict(at_density(each), at_densities(0), (A, B)) for each in (-1, -8, -20)]
    falling = [0.0 if each is None else each.confidence for each in far]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.8
    assert predict(at_density(None), at_densities(0, -2), (A, B)) is None


# --- eligible candidates ----------------------------------------------------------------------------------------------


def test_evidence_grows_in_another_thread_while_it_is_read() -> None:
    known = Evidence(crossing(512, 2048))
    (points,) = known.groups.values()
    late = iter(crossing(256, 4096))

    class Growing(tuple[float, ...]):
        """Coordinates that other code runs beside."""

        def __len__(self) -> int:
            for each in late:
                known.add(each)
            return super().__len__()

    for key, point in list(points.items())[:1]:
        points[key] = EvidencePoint(key, Growing(point.coordinates), point.problem, point.rows)
    found = predict(problem_at(600), known, (A, B))
    assert found is not None
    assert found.backend == "a"
    assert len(points) == 4


def test_without_evidence_there_is_no_choice() -> None:
    evidence = crossing(512, 2048)
    assert predict(problem_at(1024), [], (A, B)) is None
    assert predict(problem_at(1024), evidence, ()) is None
    assert predict(problem_at(1024), evidence, (C,)) is None
    assert predict(problem_at(1024, dtype="bfloat16"), evidence, (A, B)) is None
    assert predict(problem_at(512), evidence[:1], (A, B), exclude=evidence[0].key) is None


def test_only_able_candidates_are_chosen() -> None:
    found = choice(4096, crossing(*LENGTHS), (A,))
    assert (found.backend, found.order) == A
    assert found.ratios == {A: 1.0}


@pytest.mark.parametrize("status", ["failed", "incorrect", "quarantined", "not_measured", "unsupported", "over_memory"])
def test_only_timed_rows_are_evidence(status: str) -> None:
    evidence = [decision(problem_at(n), {A: 2.0, B: 1.0}, status={B: status}) for n in (512, 2048)]
    assert choice(1024, evidence).backend == "a"


def test_a_candidate_that_failed_nearest_is_not_chosen() -> None:
    far = decision(problem_at(256), {A: 2.0, B: 1.0})
    assert choice(2000, [far]).backend == "b"
    near = decision(problem_at(2048), {A: 2.0, B: None}, status={B: "failed"})
    assert choice(2000, [far, near]).backend == "a"
    assert choice(300, [far, near]).backend == "b"


def test_a_candidate_with_wrong_results_nearby_is_not_chosen() -> None:
    right = decision(problem_at(1024), {A: 2.0, B: 1.0})
    wrong = decision(problem_at(1088), {A: 2.0, B: None}, status={B: "incorrect"})
    assert choice(1000, [right, wrong]).backend == "a"
    assert choice(1000, [right, wrong], versions={"a": "1", "b": "1"}).backend == "a"
    # Version 2 was never found wrong.
    assert choice(1000, [right, wrong], versions={"a": "1", "b": "2"}).backend == "b"


def test_a_candidate_without_evidence_halves_the_confidence() -> None:
    evidence = crossing(*LENGTHS)
    known, newcomer = choice(4000, evidence), choice(4000, evidence, (A, B, C))
    assert newcomer.backend == known.backend
    assert UNKNOWN_FACTOR == 0.5
    assert newcomer.confidence == pytest.approx(UNKNOWN_FACTOR * known.confidence)


def test_candidates_never_timed_together() -> None:
    evidence = [decision(problem_at(512), {A: 5.0}), decision(problem_at(4096), {B: 1.0})]
    assert choice(600, evidence).backend == "a"
    assert choice(4000, evidence).backend == "b"
    assert choice(600, evidence).confidence == pytest.approx(0.5, abs=0.02)


def test_of_a_cycle_one_is_chosen() -> None:
    evidence = [
        decision(problem_at(1000), {A: 1.0, B: 2.0}),
        decision(problem_at(1001), {B: 1.0, C: 2.0}),
        decision(problem_at(1002), {C: 1.0, A: 2.0}),
    ]
    assert choice(1000, evidence, (A, B, C)).confidence < 0.5


# --- versions, buckets, evidence --------------------------------------------------------------------------------------


def test_another_version_lowers_the_confidence() -> None:
    evidence = [decision(problem_at(n), {A: 1.3, B: 1.0}) for n in LENGTHS]
    now, older = (choice(1000, evidence, versions={"a": "1", "b": b}) for b in ("1", "2"))
    assert older.backend == now.backend == "b"
    assert 0.5 < older.confidence < now.confidence
    assert choice(1000, evidence).confidence == now.confidence


@pytest.mark.parametrize("noisy", [{"rounds": 1}, {"low_ms": 0.7, "high_ms": 1.5}])
def test_a_noisy_median_lowers_the_confidence(noisy: dict[str, float]) -> None:
    def confidence(**more: float) -> float:
        found = decision(problem_at(1024), {A: 1.2, B: 1.0})
        rows = tuple(replace(row, rounds=9) for row in found.candidates)
        return choice(1024, [replace(found, candidates=(rows[0], replace(rows[1], **more)))]).confidence

    assert confidence(**noisy) < confidence()
    assert confidence(low_ms=0.99, high_ms=1.01) == confidence()


def test_in_bucket() -> None:
    evidence = crossing(1024)
    assert choice(1100, evidence).in_bucket
    assert not choice(1300, evidence).in_bucket
    assert not choice(1020, evidence).in_bucket  # very near, but in another bucket
    assert not choice(1100, evidence, versions={"a": "2", "b": "2"}).in_bucket
    found = predict(problem_at(1024, return_lse=True), evidence, (A, B))
    assert found is not None
    assert not found.in_bucket


def test_the_evidence_is_cited() -> None:
    evidence = crossing(*LENGTHS)
    keys = {each.problem["q_len"]: each.key for each in evidence}
    found = choice(1100, evidence)
    assert set(found.evidence) <= set(keys.values())
    assert len(found.evidence) <= MAX_NEIGHBOURS
    assert {found.evidence[0], found.evidence[1]} == {keys[1024], keys[1448]}


def test_a_cluster_does_not_hide_evidence_on_the_other_side() -> None:
    cluster = [decision(problem_at(n), {A: 1.0, B: 1.1}) for n in range(1000, 1100)]
    other = decision(problem_at(3000), {A: 4.0, B: 1.0})
    assert choice(1500, cluster).backend == "a"
    assert choice(1500, [*cluster, other]).backend == "b"
    assert choice(1010, [*cluster, other]).backend == "a"


def test_evidence_can_be_extended() -> None:
    evidence = Evidence(crossing(512))
    assert predict(problem_at(4096), evidence, (A, B)) == predict(problem_at(4096), crossing(512), (A, B))
    for each in crossing(4096):
        evidence.add(each)
    found = predict(problem_at(4000), evidence, (A, B))
    assert found is not None
    assert found.backend == "b"
    evidence.add(decision(problem_at(4096), {A: 1.0, B: 9.0}))  # measured again
    found = predict(problem_at(4000), evidence, (A, B))
    assert found is not None
    assert found.backend == "a"


# --- regret -----------------------------------------------------------------------------------------------------------


def test_regret_by_hand() -> None:
    decisions = [
        decision(problem_at(1000), {A: 1.0, B: 2.0}),
        decision(problem_at(1001), {A: 1.0, B: 2.0}),
        decision(problem_at(1002), {A: 1.5, B: 1.2}),
        decision(problem_at(1003), {A: 1.0}),  # nothing to choose from
        decision(problem_at(1000, dtype="bfloat16"), {A: 1.0, B: 2.0}),  # alone
        decision(problem_at(1000), {A: 9.0, B: 1.0}, silicon="cpu-other"),  # alone, too
    ]
    here, there = (
        [group.to_dict() for group in leave_one_out(decisions) if group.silicon == silicon]
        for silicon in (decisions[0].silicon, "cpu-other")
    )
    half, full = here
    assert [group["title"] for group in here] == ["bfloat16 d64 Dense() forward", "float32 d64 Dense() forward"]
    assert [half[name] for name in ("count", "alone", "mean", "p95", "worst")] == [0, 1, None, None, None]
    assert [full[name] for name in ("count", "alone", "hits", "worst_key")] == [3, 0, 2, decisions[2].key]
    assert full["mean"] == pytest.approx(0.25 / 3)
    assert full["worst"] == full["p95"] == pytest.approx(0.25)
    assert [(group["count"], group["alone"]) for group in there] == [(0, 1)]
    whole = total(leave_one_out(decisions))
    assert sorted(choice.regret for choice in whole.choices) == pytest.approx([0, 0, 0.25])
    assert whole.unpredicted == 2


def test_invalid_problems_are_skipped() -> None:
    foreign = decision({"batch": 1, "strides": ["bnhd"]}, {A: 1.0, B: 2.0})
    assert leave_one_out([foreign, foreign]) == []
    assert choice(1024, [foreign, *crossing(512)]).backend == "a"
    endless = replace(crossing(512)[0], problem={**PROBLEM, "q_len": math.inf})
    assert predict(problem_at(1024), [endless], (A, B)) is None


# --- any evidence -----------------------------------------------------------------------------------------------------

NAMES = [A, B, C, ("a", "hilbert")]
STATUSES = ["chosen", "slower", "tie", "failed", "incorrect", "quarantined", "not_measured", "over_memory", "odd"]
MEDIANS = st.none() | st.just(0.0) | st.floats(-1, 1e300) | st.floats(1e-3, 1e3)
PATTERNS: list[dict[str, Any]] = [
    PROBLEM["pattern"],
    {"kind": "Dilated", "dilation_rates": [1, 2], "segment_lengths": [64, 128], "is_causal": False},
    {"kind": "Dilated", "dilation_rates": [1, 2], "segment_lengths": [512], "is_causal": False},
    {"kind": "Dilated", "dilation_rates": [1, 2], "is_causal": False},
    {"kind": "Window", "left": None, "right": 7},
]
PROBLEMS = st.builds(
    lambda length, batch, pattern, lse: problem_at(length, batch, pattern=pattern, return_lse=lse),
    st.integers(1, 1 << 40),
    st.integers(1, 1 << 10),
    st.sampled_from(PATTERNS),
    st.booleans(),
)
BROKEN = st.sampled_from([{}, {"pattern": None}, problem_at(0), problem_at(-5), {**PROBLEM, "strides": 7}])
DECISIONS = st.builds(
    lambda problem, medians, status, version: decision(problem, medians, status=status, version=version),
    PROBLEMS,
    st.dictionaries(st.sampled_from(NAMES), MEDIANS),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(STATUSES)),
    st.sampled_from([None, "1", "2"]),
)


def foreign(problem: Mapping[str, Any]) -> Decision:
    return replace(decision(PROBLEM, {A: 1.0, B: 2.0}), problem=dict(problem), key="0" * 20)


@given(
    problem=PROBLEMS,
    evidence=st.lists(DECISIONS | st.builds(foreign, BROKEN), max_size=25),
    able=st.sets(st.sampled_from(NAMES)),
    versions=st.none() | st.fixed_dictionaries({"a": st.sampled_from(["1", "2"])}),
)
def test_with_any_evidence_the_choice_is_an_able_candidate(
    problem: dict[str, Any], evidence: list[Decision], able: set[Name], versions: dict[str, str | None] | None
) -> None:
    found = predict(problem, evidence, able, versions)
    if found is not None:
        assert (found.backend, found.order) in able
        assert 0 <= found.confidence <= 1
        assert found.ratios.keys() <= able
        assert found.ratios[found.backend, found.order] == 1.0
        assert found.evidence
        assert set(found.evidence) <= {each.key for each in evidence}
    for group in leave_one_out(evidence):
        assert all(choice.regret >= 0 for choice in group.choices)
