"""transformers' encoders, and encoders with decoders, by attend(): against its own attention, on random weights."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.pairwise import thinned
from tests.support.small_transformers import OTHERS, PADDINGS, other_case, skip_if_ignored, using

pytestmark = pytest.mark.usefixtures("short_trials")

#: Attention layers: of an encoder, a decoder and across, two each; CLIP has two encoders.
ASKED = {"bert": 2, "modernbert": 2, "embedding_gemma": 2, "vit": 2, "clip": 4, "bart": 6, "whisper": 6, "t5": 6}
MASKED = [name for name in OTHERS if name != "vit"]


@thinned(("name", "padding"), [("vit", "none"), *product(MASKED, PADDINGS)], 3)
def test_equals_transformers(name: str, padding: str, asked: list[str]) -> None:
    skip_if_ignored(name)
    other_case(name, padding).assert_equal()
    assert len(asked) == ASKED[name]


def test_patterns_of_layers(asked: list[str]) -> None:
    for name, patterns in {
        "bert": ["Dense()"] * 2,
        "modernbert": ["Dense()", "Window(left=3, right=3)"],
        "embedding_gemma": ["Window(left=2, right=2)", "Dense()"],
        "bart": ["Dense()"] * 2 + ["Dense(causal)", "Dense()"] * 2,
        "clip": ["Dense(causal)"] * 2 + ["Dense()"] * 2,
    }.items():
        asked.clear()
        case = other_case(name, "left")
        using(case.model, "attn_dispatch")(**case.inputs)
        assert sorted(asked) == sorted(patterns)
