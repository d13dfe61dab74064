"""Models whose masks are made of data, images and prefixes that see both ways: by intervals of keys, no fallback."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Ranges
from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations import mask_runs
from tests.support.pairwise import thinned
from tests.support.small_transformers import (
    CACHE,
    GENERATING,
    LENGTH,
    PADDINGS,
    SHARED,
    SIZES,
    WINDOWED,
    Case,
    assert_close,
    assert_same_tokens,
    decoder,
    made,
    padded,
    static_cache,
    tokens,
    using,
)

from attn_dispatch.integrations import transformers as integration  # isort: skip - it imports transformers

pytestmark = pytest.mark.usefixtures("no_trials")

IMAGE = 98  #: the id of a token that stands for a part of an image
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION |= {"image_size": 8, "patch_size": 4, "vision_use_head": False, "model_type": "siglip_vision_model"}
GEMMA = {"image_token_index": IMAGE, "vision_config": VISION}
#: Config, model, sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        "Gemma3ForConditionalGeneration",
        {**GEMMA, "text_config": {**SIZES, **WINDOWED, "query_pre_attn_scalar": 8}, "mm_tokens_per_image": 4},
    ),
    "paligemma": (
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        {**GEMMA, "text_config": {**SIZES, "model_type": "gemma"}, "projection_dim": 32, "hidden_size": 32},
    ),
    "gemma4": (
        "Gemma4",
        "Gemma4ForConditionalGeneration",
        {"text_config": {**SIZES, **SHARED, "use_bidirectional_attention": "vision"}, "image_token_id": IMAGE},
    ),
    "hrm_text": ("HrmText", "HrmTextForCausalLM", {**SIZES, "num_hidden_layers": 1, "H_cycles": 1, "L_cycles": 1}),
}
EXPERTS = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 16, "global_head_dim": 8}
EXPERTS |= {"num_global_key_value_heads": 2}
EYES: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
}
EYES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
CANVAS = {**SIZES, **WINDOWED, **EXPERTS, "use_bidirectional_attention": "vision"}
IMAGES = [(8, 12), (14, 18)], [(2, 6), (8, 12)]  #: first and end of each, by row: none is padding
PREFIXES = [(0, 14)], [(0, 9)]  #: tokens that see each other both ways
NEW = 7  #: tokens, more than a window


def marked(spans: Any) -> Tensor:
    """1 [2, length] for tokens in spans of their row."""
    found = torch.zeros(2, LENGTH, dtype=torch.int64)
    for row, (first, end) in ((row, span) for row, each in enumerate(spans) for span in each):
        found[row, first:end] = 1
    return found


def inputs_of(name: str, padding: str) -> dict[str, Any]:
    """Ids, padding, which tokens see both ways, and the images."""
    ids, mask = tokens(), padded(padding)
    given = {"attention_mask": mask}
    if name == "hrm_text":
        return {"input_ids": ids, **given, "token_type_ids": marked(PREFIXES)}
    if name == "gemma4":
        return {"input_ids": ids, **given, "mm_token_type_ids": marked(IMAGES)}
    places = marked(IMAGES if name == "gemma3" else ([(7, 11)], [(0, 4)]))
    types = places if name == "gemma3" else (1 - marked(PREFIXES)) * (1 if mask is None else mask)  # padding has 0
    pixels = torch.randn(int(places.sum()) // 4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    ids = ids.masked_fill(places.bool(), IMAGE)
    return {"input_ids": ids, **given, "token_type_ids": types, "pixel_values": pixels}


def case_of(name: str, padding: str) -> Case:
    inputs = inputs_of(name, padding)
    kept = None if inputs["attention_mask"] is None else inputs["attention_mask"].bool()
    return Case(made(*MODELS[name]), inputs | {"use_cache": False}, lambda found: found.logits, kept)


def layers_of_data(name: str) -> tuple[int, ...]:
    """How many they may be: newer versions of transformers leave Gemma 4's layers of all tokens causal."""
    return (2, 4) if name == "gemma4" else (2,)


def of_data(asked: list[str]) -> list[str]:
    return [pattern for pattern in asked if pattern.startswith("Ranges")]


@thinned(("name", "padding"), product(MODELS, PADDINGS), 3)
def test_equals_sdpa(name: str, padding: str, asked: list[str]) -> None:
    """With right padding PaliGemma's tokens see a prefix and, hidden by the key mask, padding: two runs of keys."""
    case_of(name, padding).assert_equal()
    assert len(of_data(asked)) in layers_of_data(name)


@pytest.mark.parametrize(
    ("name", "side", "by"),
    [*product(["gemma3"], [0, 1], [-1, 1]), *product(["gemma4", "paligemma", "hrm_text"], [1], [-1])],
)
def test_intervals_that_are_wrong_by_one_are_seen(
    name: str, side: int, by: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By these tests."""

    def moved(*args: Any) -> Any:
        found = mask_runs.evaluated(*args)
        assert isinstance(found, Ranges)
        ends = list(found.data)
        ends[side] = ends[side] + by
        return Ranges(*ends)

    monkeypatch.setattr(integration, "evaluated", moved)
    with pytest.raises(AssertionError):
        case_of(name, "left").assert_equal()
    assert of_data(asked)


def test_a_mask_is_read_once(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind, for all layers; not at all where one token follows."""
    read = list[tuple[int, ...]]()

    def noted(*args: Any) -> Any:
        read.append((args[3], len(args[1]), len(args[2])))
        return mask_runs.evaluated(*args)

    monkeypatch.setattr(integration, "evaluated", noted)
    kind, model_class, sizes = MODELS["gemma3"]
    text = {**sizes["text_config"], "num_hidden_layers": 4, "layer_types": WINDOWED["layer_types"] * 2}
    model = using(made(kind, model_class, {**sizes, "text_config": text}), "attn_dispatch")
    model.generate(**inputs_of("gemma3", "left"), max_new_tokens=3, min_new_tokens=3)
    assert len(of_data(asked)) == 4
    assert read == [(2, LENGTH, LENGTH)] * 2


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_asked_about_all_pairs(name: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(*_: Any) -> Any:
        raise AssertionError("asked about all pairs of queries and keys")

    monkeypatch.setattr(mask_runs, "_of_pairs", pairs)
    case_of(name, "left").run("attn_dispatch")
    assert of_data(asked)


def generated(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(3)
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    return model.generate(**inputs, **lengths, output_logits=True, return_dict_in_generate=True, **options)


@thinned(("name", "how"), product(MODELS, GENERATING), 3)
def test_generates_the_same_tokens(name: str, how: str, asked: list[str]) -> None:
    model, inputs = made(*MODELS[name]), inputs_of(name, "left")
    expected = generated(using(model, "sdpa"), inputs, **GENERATING[how])
    found = generated(using(model, "attn_dispatch"), inputs, **GENERATING[how])
    assert_same_tokens(found, expected)
    assert len(of_data(asked)) in layers_of_data(name)


@torch.no_grad()
@pytest.mark.parametrize("cached", ["dynamic", "static"])
def test_a_prompt_in_two_parts(cached: str, asked: list[str]) -> None:
    """The second has an image; its layers with windows have dropped keys."""
    model, inputs = made(*MODELS["gemma3"]), inputs_of("gemma3", "left")
    ids, mask, types = inputs["input_ids"].clamp(max=97), inputs["attention_mask"], inputs["token_type_ids"]
    parts: dict[str, list[Tensor]] = {"sdpa": [], "attn_dispatch": []}
    for name, logits in parts.items():
        cache = None if cached == "dynamic" else static_cache(model)
        for start, end in ((0, 13), (13, LENGTH)):
            part = {"input_ids": ids[:, start:end], "token_type_ids": types[:, :end], CACHE: cache}
            found = using(model, name)(**part, attention_mask=mask[:, :end], use_cache=True)
            cache = found[CACHE]
            logits.append(found.logits)
    expected, found = (torch.cat(logits, 1)[mask.bool()] for logits in parts.values())
    assert_close(found, expected)
    assert len(of_data(asked)) >= 2


def test_images_without_tokens_of_images(asked: list[str]) -> None:
    """A mask that turns out to be causal, or a window, is one."""
    inputs = inputs_of("gemma3", "none") | {"pixel_values": None, "token_type_ids": torch.zeros_like(tokens())}
    inputs["input_ids"] = tokens()
    Case(made(*MODELS["gemma3"]), inputs, lambda found: found.logits, None).assert_equal()
    assert sorted(asked) == ["Dense(causal)", "Window(left=4, right=0)"]


@torch.no_grad()
def test_block_diffusion(asked: list[str]) -> None:
    """DiffusionGemma: the prompt's images see both ways; a canvas sees all, with padding and without."""
    sizes = {"text_config": CANVAS, "vision_config": EYES, "canvas_length": 6}
    model = made("DiffusionGemma", "DiffusionGemmaForBlockDiffusion", sizes)
    encoder, ids = model.model.encoder, tokens()
    for padding in PADDINGS:
        mask, logits = padded(padding), []
        for name in ("sdpa", "attn_dispatch"):
            asked.clear()
            embeds = encoder.get_input_embeddings()(ids)
            masks = encoder.create_masks_for_generate(
                using(model, name).config, embeds, mask, None, None, mm_token_type_ids=marked(IMAGES)
            )
            canvas = None if mask is None else torch.nn.functional.pad(mask, (0, 6), value=1)
            found = model(ids, masks, decoder_input_ids=tokens(6, seed=2), decoder_attention_mask=canvas)
            logits.append(found.logits)
        assert_close(logits[1], logits[0])
        assert len(of_data(asked)) == 2
        assert asked[2:] == ["Dense()"] * 2


@torch.no_grad()
@pytest.mark.parametrize("padding", ["left", "none"])
def test_chunks_in_any_place(padding: str, asked: list[str]) -> None:
    """Llama 4: a second part of a prompt, past the chunks of rows that start at different tokens."""
    model, ids, mask = using(decoder("llama4"), "sdpa"), tokens(), padded(padding)
    whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    using(model, "attn_dispatch")
    parts, cache = list[Tensor](), None
    for start, end in ((0, 11), (11, LENGTH)):
        seen = None if mask is None else mask[:, :end]
        found = model(ids[:, start:end], attention_mask=seen, use_cache=True, **{CACHE: cache})
        parts, cache = [*parts, found.logits], found[CACHE]
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert_close(torch.cat(parts, 1)[kept], whole[kept])
    assert len(of_data(asked)) == 1


def spans(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Of 6 tokens the first four see each other."""
    ids = torch.tensor([0, 0, 0, 0, -1, -2])
    return (key <= query) | (ids[query] == ids[key])


def test_what_is_made_of_a_mask(asked: list[str]) -> None:
    """Its last queries, and the whole on another device."""
    keys = integration.mask(1, 6, 6, mask_function=spans)
    assert torch.equal(keys.pattern.data[1, 0, 0], torch.tensor([3, 3, 3, 3, 4, 5]))
    assert torch.equal(keys[:, :, -3:, :].pattern.data, keys.pattern.data[..., 3:])
    assert keys[:, :, -0:, :].pattern.data.shape == keys.pattern.data.shape
    assert keys.to("meta").pattern.device == torch.device("meta")


def test_dilated_layers_have_no_masks_of_data(asked: list[str]) -> None:
    """Only those that are causal in truth."""
    model = using(made(*MODELS["hrm_text"]), "attn_dispatch")
    model.config.attn_dispatch = {"segment_lengths": [8], "dilation_rates": [1]}
    with pytest.raises(InvalidInput, match="is none of causal"):
        model(**inputs_of("hrm_text", "none"))


@torch.no_grad()
def test_masks_of_data_in_compiled_models(fresh_compiler: None, asked: list[str]) -> None:
    """Their values are read between the graphs."""
    inputs: dict[str, Any] = {**inputs_of("hrm_text", "left"), "use_cache": False}
    model = made(*MODELS["hrm_text"])
    kept = inputs["attention_mask"].bool()
    expected = using(model, "sdpa")(**inputs).logits
    compiled: Any = torch.compile(using(model, "attn_dispatch"), backend="eager")
    found = compiled(**inputs).logits
    assert_close(found[kept], expected[kept])
