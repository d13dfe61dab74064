"""Models whose masks are made of data, images that see both ways and prefixes, by intervals of keys, without fallback."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from tests.support.pairwise import thinned
from tests.support.small_transformers import (
    LENGTH,
    PADDINGS,
    SIZES,
    WINDOWED,
    Case,
    assert_close,
    decoder,
    made,
    padded,
    static_cache,
    tokens,
    using,
)

from attn_dispatch.integrations import transformers as integration  # isort: skip - it imports transformers

pytestmark = pytest.mark.usefixtures("short_trials")

IMAGE = 98  #: the id of a token that stands for a part of an image
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION |= {"image_size": 8, "patch_size": 4, "vision_use_head": False, "model_type": "siglip_vision_model"}
TEXT = {name: size for name, size in SIZES.items() if name != "pad_token_id"} | {"pad_token_id": 0}
GEMMA = {"image_token_index": IMAGE, "vision_config": VISION}
EXPERTS = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 16}
#: Config, model, sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        "Gemma3ForConditionalGeneration",
        {**GEMMA, "text_config": {**TEXT, **WINDOWED, "query_pre_attn_scalar": 8}, "mm_tokens_per_image": 4},
    ),
    "paligemma": (
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        {**GEMMA, "text_config": {**TEXT, "model_type": "gemma"}, "projection_dim": 32, "hidden_size": 32},
    ),
    "hrm_text": ("HrmText", "HrmTextForCausalLM", {**TEXT, "num_hidden_layers": 1, "H_cycles": 1, "L_cycles": 1}),
    "diffusion_gemma": (
        "DiffusionGemma",
        "DiffusionGemmaForBlockDiffusion",
        {
            "text_config": {**TEXT, **WINDOWED, **EXPERTS, "use_bidirectional_attention": "vision"},
            "canvas_length": 6,
        },
    ),
}
#: What the layers of text ask for.
SPANS, PREFIX = "Ranges(1 per query, by row", "Ranges(1 per query, by row"
IMAGES = [(8, 12), (14, 18)], [(2, 6), (8, 12)]  #: first and end of each, by row: none is padding
PREFIXES = 14, 9  #: tokens that see each other both ways, by row; padding on the left is among them


def marked(spans: Any) -> Tensor:
    """1 [2, length] for tokens in spans of their row."""
    found = torch.zeros(2, LENGTH, dtype=torch.int64)
    for row, (first, end) in ((row, span) for row, each in enumerate(spans) for span in each):
        found[row, first:end] = 1
    return found


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def inputs_of(name: str, padding: str) -> dict[str, Any]:
    """Ids, padding, which tokens see both ways, and the images."""
    ids, mask = tokens(), padded(padding)
    given: dict[str, Any] = {"attention_mask": mask}
    if name == "gemma3":
        types = marked(IMAGES)
        given |= {"token_type_ids": types, "pixel_values": images(4)}
        ids = ids.masked_fill(types.bool(), IMAGE)
    elif name == "diffusion_gemma":
        given["mm_token_type_ids"] = marked(IMAGES)
        given["decoder_input_ids"] = tokens(6, seed=2)
    else:
        prefix = marked([[(0, PREFIXES[0])], [(0, PREFIXES[1])]]) * (1 if mask is None else mask)
        given["token_type_ids"] = prefix if name == "hrm_text" else 1 - prefix
        if name == "paligemma":
            ids = ids.masked_fill(marked([[(7, 11)], [(0, 4)]]).bool(), IMAGE)
            given["token_type_ids"] *= 1 if mask is None else mask  # 0 for padding, as its processor has it
            given["pixel_values"] = images(2)
    return {"input_ids": ids, **given}


def canvas_and_prompt(found: Any) -> Tensor:
    return torch.cat([found.logits.flatten(), found.encoder_last_hidden_state.flatten()])


def case_of(name: str, padding: str) -> Case:
    inputs = inputs_of(name, padding)
    kept = None if inputs["attention_mask"] is None else inputs["attention_mask"].bool()
    model = made(*MODELS[name])
    if name == "diffusion_gemma":
        return Case(model, inputs, canvas_and_prompt, None)
    return Case(model, inputs | {"use_cache": False}, lambda found: found.logits, kept)


@thinned(("name", "padding"), product(MODELS, PADDINGS), 3)
def test_equals_sdpa(name: str, padding: str, asked: list[str]) -> None:
    case_of(name, padding).assert_equal()
    print(name, padding, asked)
