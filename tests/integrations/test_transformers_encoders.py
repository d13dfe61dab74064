"""transformers' encoders, and encoders with decoders, by attend(): against its own attention, on random weights."""

from __future__ import annotations

import pytest

from tests.support.small_transformers import OTHERS, PADDINGS, other_case, skip_if_ignored, using

pytestmark = pytest.mark.usefixtures("short_trials")

#: Attention layers: of an encoder, a decoder and across, two each; CLIP has two encoders.
ASKED = {"bert": 2, "modernbert": 2, "embedding_gemma": 2, "vit": 2, "clip": 4, "bart": 6, "whisper": 6, "t5": 6}
MASKED = [name for name in OTHERS if name != "vit"]
DECODES = ("clip", "whisper")  #: their masked rows are causal: nothing is left after right padding to show it


@pytest.mark.parametrize(
    ("name", "padding"), [("vit", "none"), *((name, padding) for name in MASKED for padding in PADDINGS)]
)
def test_equals_transformers(name: str, padding: str, asked: list[str]) -> None:
    skip_if_ignored(name)
    other_case(name, padding).assert_equal()
    assert len(asked) == ASKED[name]


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, padding) for name in MASKED for padding in ("left", "right") if padding == "left" or name not in DECODES],
)
def test_a_dropped_key_mask_is_seen(name: str, padding: str, without_key_masks: None) -> None:
    skip_if_ignored(name)
    with pytest.raises(AssertionError):
        other_case(name, padding).assert_equal()


@pytest.mark.parametrize("name", ["modernbert", "embedding_gemma"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_a_wider_window_is_seen(name: str, padding: str, wider_windows: None) -> None:
    with pytest.raises(AssertionError):
        other_case(name, padding).assert_equal()


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
