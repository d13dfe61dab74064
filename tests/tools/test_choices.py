"""`python -m tools.bench.choices`: its table of problems, and its arithmetic on made-up times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_dispatch import Dense
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import adapted
from attn_dispatch.spec.data import BlocksForm
from attn_dispatch.tuning.candidates import Request
from tools.bench import choices
from tools.lib.models import MODELS, Attention, Planned, planned

# Two processes each: times of the first problem agree, those of the second do not.
FIRST = [{"sdpa@natural": 1.0, "native@natural": 2.0, "manual@natural": 8.0}] * 2
SECOND = [
    {"native@natural": 4.0, "native@hilbert": 2.0, "manual@natural": 16.0},
    {"native@natural": 3.0, "native@hilbert": 3.0, "manual@natural": 3.0},
]


def test_a_hundred_problems_each_once() -> None:
    problems = [one.problem() for one in planned()["models"]]
    assert len(problems) == len(set(problems)) == 100
    assert len({one.model for one in MODELS}) == len(MODELS)
    kinds = Counter((each.dtype, each.needs_grad) for each in problems)
    assert set(kinds) == {(dtype, grad) for dtype in (torch.float32, torch.bfloat16) for grad in (False, True)}
    assert any(each.has_seq_lens for each in problems)
    assert any(each.has_key_mask for each in problems)
    assert any(each.heads > each.kv_heads for each in problems)
    assert any(each.q_len == 1 < each.k_len for each in problems)


def test_fifty_problems_with_masks_made_of_data() -> None:
    problems = [one.problem() for one in planned()["blocks"]]
    assert len(problems) == len(set(problems)) == 50
    forms: list[Any] = [each.pattern for each in problems]
    for some in (forms, forms[:: choices.QUICK_EVERY]):
        assert {form.density for form in some} == {0, -3, -7, -10, -13}  # 100 to 1 %
    assert {getattr(form, "size", None) for form in forms} == {None, *((n, n) for n in (32, 64, 128, 256))}
    assert {form.imbalance for form in forms} == {0, 1, 2}
    kinds = Counter((each.dtype, each.needs_grad) for each in problems)
    assert set(kinds.values()) == {12, 13}


def test_a_call_of_a_form_gets_its_tensors(set_mode: Any) -> None:
    set_mode("off")
    form = BlocksForm((8, 8), "all", False, True, Dense(), -4, 0)
    one = Planned(Attention("made up", (1, 64, 2, 8), form), torch.float32, True)
    found = choices.first_call(one)
    assert found["source"] == "heuristic"
    assert choices.judgement(one, ["native@natural"], seconds=0.01)["times"].keys() >= {"native@natural"}


def test_a_single_backend_loses_where_it_does_not_run() -> None:
    found = choices.fixed([FIRST, SECOND], "sdpa")
    assert found is not None
    assert found["does_not_run"] == 1
    assert found["runs"]["worst"] == 1.0
    last_resort = (16 / 2 + 3 / 3) / 2
    assert found["with_last_resort"]["worst"] == last_resort
    assert found["with_last_resort"]["geometric_mean"] == pytest.approx(math.sqrt(last_resort))
    assert choices.fixed([FIRST, SECOND], "flash") is None


def problem(judges: list[dict[str, float]], backend: str, order: str = "natural") -> dict[str, Any]:
    choice = {"backend": backend, "order": order, "source": "measured", "provisional": False}
    times = [{name: {"median_ms": ms} for name, ms in judge.items()} for judge in judges]
    return {"title": "made up", "choices": {"idle": choice}, "wrong": {"flex@natural": "out is off"}, "judges": times}


def test_figures_of_made_up_times() -> None:
    found = choices.figures([problem(FIRST, "native"), problem(SECOND, "native", "hilbert")])
    assert found["runs"]["idle"]["ratios"] == [2.0, 1.0]
    assert found["runs"]["idle"]["geometric_mean"] == pytest.approx(math.sqrt(2))
    assert found["runs"]["idle"]["sources"] == {"measured": 2}
    assert set(found["backends"]) == {"sdpa", "native", "manual"}
    assert found["single_best"] == "native"


def test_a_judgement_times_every_candidate_that_can_run() -> None:
    model = Attention("made up", (2, 16, 2, 8), Dense(is_causal=True), kv_heads=1, mask="seq_lens")
    one = Planned(model, torch.float32, True)
    found = choices.judgement(one, [], seconds=0.01)
    assert found["wrong"] == {}
    assert {"manual@natural", "sdpa@natural"} <= set(found["times"])
    assert not set(found["times"]) & set(found["refused"])
    names = {each.split("@")[0] for kind in ("times", "refused", "left_out") for each in found[kind]}
    assert names == {each.name for each in registry.backends()}


def test_a_wrong_result_is_not_timed() -> None:
    class Wrong:
        name = "wrong"

        def run(self, q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            return torch.zeros_like(q)

    one = Planned(Attention("made up", (1, 16, 2, 8)), torch.float32, False)
    able = {f"{each.name}@{each.order}": each for each in Request.of(one.problem()).able}
    able["wrong@natural"] = replace(able["manual@natural"], backend=adapted(Wrong()))
    first_ms, found = choices.checked(one.example(), {name: able[name] for name in ("manual@natural", "wrong@natural")})
    assert set(first_ms) == {"manual@natural"}
    assert "out is off" in found["wrong@natural"]
