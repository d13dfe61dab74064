"""Every family of the installed transformers of which a tiny model can be made: as its own attention, or listed."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from tests.support import tiny_transformers as tiny
from tests.support.small_transformers import LENGTH, tokens, transformers

from attn_dispatch.integrations import transformers as integration  # isort: skip - it imports transformers
from attn_dispatch.integrations.attention_interface import parts_of  # isort: skip

pytestmark = [pytest.mark.usefixtures("no_trials"), pytest.mark.filterwarnings("ignore")]

TRIED = "5.24.0"  #: the version that the lists are of: what is new in others is skipped where it cannot be made
#: What every run takes: decoders, an encoder, both, latent attention, mixtures, images, sound, text with images.
SAMPLE = "llama gemma3_text gpt_oss deepseek_v3 qwen3_moe bert t5 vit swin whisper wav2vec2 clip lasr_encoder qwen2_vl"
#: By what the message says of them.
REFUSED = {
    "would ignore attn_implementation": """
        autoformer big_bird blip blip_text_model blip_vision_model bloom bridgetower_vision_model bros canine
        clap_audio_model clvp clvp_decoder clvp_encoder convbert cpmant data2vec-vision deberta deberta-v2
        deepseek_ocr2_sam_vision_model donut-swin falcon fastspeech2_conformer
        fastspeech2_conformer_with_hifigan flaubert flava flava_image_model flava_multimodal_model
        flava_text_model fsmt funnel gemma3n_audio gemma4_audio glpn got_ocr2_vision gpt_neo gpt_neox_japanese
        granite_speech_encoder granite_speech_plus_encoder groupvit groupvit_text_model groupvit_vision_model
        hiera ibert imagegpt led lilt longformer luke lxmert maskformer-swin megatron-bert mgp-str mobilevit
        mpnet mpt mra mvp nystromformer openai-gpt patchtsmixer perceiver prophetnet pvt_v2 reformer rembert
        roformer rwkv sam_hq_vision_model sam_vision_model seggpt sew-d slanet slanext_vision speecht5
        squeezebert superglue swiftformer swin2sr swinv2 tapas timesformer trocr unlimited_ocr_sam_vision_model
        vilt visual_bert vitdet vits wavlm wavtokenizer xglm xlm xlnet yoso
    """,
    "attn_dispatch has no (indices|sinks)": """
        axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa inkling2
        inkling2_loop inkling2_loop_text inkling2_text mistral_large4 mistral_large4_text
    """,
    "the model adds its mask to scores": "bigbird_pegasus hy_v4 hy_v4_vl hy_v4_vl_text informer",
    "makes a mask of its own": "doge",
    "is causal and got no mask": "bridgetower",
    "the layer has .* queries, keys and values: use": "deepseek_v4",
}
#: Their own eager attention differs from their sdpa, for want of a mask or in rows of padding.
AS_SDPA = """
    blt_global_transformer diffusion_gemma grounding-dino mm-grounding-dino nemotron3_5_asr nemotron_asr_streaming
    nemotron_asr_streaming_encoder shieldgemma2
"""
#: Packed rows of these are not as separate ones, and what is said of it; of others nothing need be said.
MIXED = {
    "layers run over its documents": """
        bailing_hybrid bamba falcon_h1 glm5_next glm5_next_text granitemoehybrid inkling_text jamba kimi_linear
        lara_mini lfm2_moe lfm3 lfm3_vl minicpm_ocr minicpmv4_6 minicpmv4_7 minimax nemo_speechlm nemotron_h
        nemotron_h_omni olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
        qwen4_exp_text recurrent_gemma zamba zamba2 zaya
    """,
    "which compute attention themselves": "git",
    # One warns that it takes no positions; one has no attention; one embeds a token with its neighbours.
    "": "csm_depth_decoder_model fnet mobilebert",
}
#: No tiny config, or no inputs, are found by what is known here.
NOT_MADE = """
    align align_vision_model apertus1p5_vision_tokenizer bark blt_local_decoder blt_local_encoder chameleon_vqgan
    conditional_detr cvt dab-detr deformable_detr detr dinat dots3_note_audio_encoder edgetam edgetam_mask_decoder
    edgetam_prompt_encoder edgetam_video edgetam_video_mask_decoder edgetam_video_prompt_encoder
    edgetam_vision_model efficientloftr efficientnet emu3_vqgan eomt eomt_dinov3 esmfold2 fast_vlm
    fastspeech2_conformer_hifigan fun_asr_nano_encoder gemma3n gemma3n_vision gemma4_assistant
    gemma4_unified_assistant gemma4_unified_audio gemma4_unified_vision glm_image_vqmodel granite4_vision
    higgs_audio_v2_tokenizer idefics_perciever idefics_vision inkling2_vision inkling_audio inkling_mm_model
    inkling_vision instructblipvideo janus_vqgan jev layoutlmv2 layoutxlm levit lightglue llama4 mobilevitv2
    moshi_depth muse_glimmer_assistant muse_spark_audio neucodec nougat omdet-turbo pe_audio_video
    pe_audio_video_encoder pe_video pe_video_encoder perception_lm pi0 pp_chart2table_vision pp_doclayout_v2
    pp_formulanet pp_formulanet_vision pp_ocrv5_mobile_rec pp_ocrv5_server_det pp_ocrv5_server_rec
    pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec pvt qwen2_5_omni
    qwen2_5_omni_bigvgan qwen2_5_omni_dit qwen2_5_omni_token2wav qwen3_omni_moe radio rag sam2_mask_decoder
    sam2_prompt_encoder sam2_video sam2_video_mask_decoder sam2_video_prompt_encoder sam3_geometry_encoder
    sam3_lite_text_geometry_encoder sam3_tracker_mask_decoder sam3_tracker_prompt_encoder sam3_tracker_video
    sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder sam3_video sam_hq_mask_decoder
    sam_hq_prompt_encoder sam_mask_decoder sam_prompt_encoder sapiens2_head slanext speecht5_hifigan
    t5_gemma_module table-transformer timm_backbone timm_wrapper tvp upernet uvdoc
    vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vibevoice_diffusion videomt vitmatte
    voxtral_realtime_text wavtokenizer_encoder xcodec xcodec2
"""


class NotMadeError(Exception):
    """There is no tiny model, or nothing that it may be called with."""


def made(kind: str) -> tuple[Any, Any]:
    """A tiny model by transformers' choice of attention, and a function that makes it with another one."""
    try:
        config_class = tiny.config_class(kind)
        model_class = tiny.model_class(config_class)
        return tiny.made(model_class, config_class), lambda: tiny.made(model_class, config_class, integration.NAME)
    except Exception as error:
        raise NotMadeError(f"{type(error).__name__}: {error}") from error


def run(model: Any, inputs: dict[str, Any]) -> Any:
    """What a model makes of inputs; DiffusionGemma draws its first tokens, Informer its queries."""
    torch.manual_seed(0)
    return model(**inputs)


def called(model: Any) -> tuple[dict[str, Any], Any]:
    """The first inputs that a model takes, and what it makes of them."""
    reasons = []
    for inputs in tiny.candidates(model, "right"):
        try:
            found = run(model, inputs)
            if any(True for _ in tiny.pairs(found, found)):
                return inputs, found
        except Exception as error:  # noqa: BLE001 - it is not what this model takes
            reasons.append(f"{', '.join(inputs)}: {error}")
    raise NotMadeError("; ".join(reasons))


def implementations(model: Any) -> list[str]:
    return [part.config._attn_implementation for part in parts_of(model) if part.asking]


def distance(found: Any, expected: Any, mask: Tensor | None) -> float:
    """The largest difference, of the largest number where that is over 1; of weights, which are None here, none."""
    pairs = [(tiny.kept(x, mask), tiny.kept(y, mask)) for x, y in tiny.pairs(found, expected)]
    assert pairs
    apart = [((x - y).abs().where(x != y, 0), y.nan_to_num(0, 0, 0)) for x, y in pairs if y.numel()]  # both inf: 0
    return max(float(x.max()) / max(1.0, float(y.abs().max())) for x, y in apart)


@torch.no_grad()
def compared(kind: str, asked: list[str]) -> None:
    """Raise AssertionError where a family differs, InvalidInput where it is refused, NotMadeError."""
    model, by_config = made(kind)
    model.set_attn_implementation("eager")
    inputs, expected = called(model)
    try:
        model.set_attn_implementation(integration.NAME)
    except InvalidInput as error:
        with pytest.raises(InvalidInput, match=re.escape(str(error).partition(" as ")[0])):
            by_config()
        raise
    assert implementations(by_config()) == implementations(model)
    found = run(model, inputs)
    assert asked or not any(part.asking for part in parts_of(model)), "attend() was not called"
    mask = inputs.get("attention_mask")
    if kind in AS_SDPA.split():
        model.set_attn_implementation("sdpa")
        expected = run(model, inputs)
    if not distance(found, expected, mask) <= 2e-6:
        exact = model.double()
        exact.set_attn_implementation("eager")
        exact = run(exact, {name: x.double() if tiny.is_real(x) else x for name, x in inputs.items()})
        assert distance(found, exact, mask) <= 2 * distance(expected, exact, mask)


def parameters() -> list[Any]:
    sample = SAMPLE.split()
    return [pytest.param(kind, marks=() if kind in sample else pytest.mark.full) for kind in tiny.kinds()]


def outcome(kind: str, asked: list[str]) -> str:
    """`right`, or why it is not made or refused."""
    try:
        compared(kind, asked)
    except NotMadeError as error:
        return f"not made: {error}"
    except InvalidInput as error:
        return f"refused: {error}"
    return "right"


@pytest.mark.parametrize("kind", parameters())
def test_equals_its_own_attention(kind: str, asked: list[str]) -> None:
    found, is_listed = outcome(kind, asked), kind in NOT_MADE.split()
    expected = next((pattern for pattern, names in REFUSED.items() if kind in names.split()), None)
    if found.startswith("not made"):
        assert is_listed or transformers.__version__ != TRIED, f"{found}: not in NOT_MADE"
        pytest.skip(found)
    assert not is_listed or transformers.__version__ != TRIED, "take it out of NOT_MADE"
    if expected is None and transformers.__version__ == TRIED:
        assert found == "right"
    elif found != "right" or transformers.__version__ == TRIED:  # others may have learnt to ask, or be new
        assert re.search(f"^refused: .*({expected or '|'.join(REFUSED)})", found), "is it still to be refused?"
        assert re.search("use attn_implementation=|replacing_sdpa", found)


def by_documents(model: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a model makes of two rows of two documents, and of these one by one."""
    taken = signature(model.forward).parameters
    ids, places = tokens(), [[torch.arange(first), torch.arange(LENGTH - first)] for first in (8, 13)]

    def made_of(ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        given = {"attention_mask": mask, "use_cache": False} if mask is not None else {}
        given = {name: x for name, x in given.items() if name in taken or "kwargs" in taken}
        found = model(input_ids=ids, position_ids=positions, **given)
        return next(x for x, _ in tiny.pairs(found, found) if x.ndim > 2 and x.shape[1] == ids.shape[1])

    rows = [zip(x.split([len(at) for at in each]), each) for x, each in zip(ids, places)]
    alone = [torch.cat([made_of(x[None], at[None]) for x, at in row], 1) for row in rows]
    return made_of(ids, torch.stack([torch.cat(each) for each in places]), mask), torch.cat(alone)


@torch.no_grad()
@pytest.mark.parametrize("kind", parameters())
def test_packed_rows_are_as_separate_ones(kind: str, warnings: Callable[[], list[str]]) -> None:
    """Beside a mask of ones, and beside a cache."""
    if kind in " ".join([NOT_MADE, *REFUSED.values()]).split():
        pytest.skip("not made, or refused")
    try:
        model_class = tiny.model_class(tiny.config_class(kind))
        assert {"input_ids", "position_ids"} <= signature(model_class.forward).parameters.keys(), "takes no positions"
        model = made(kind)[0]
        by_documents(model, None)
        model.set_attn_implementation(integration.NAME)
    except Exception as error:  # noqa: BLE001 - it is not what this model takes
        pytest.skip(f"not of text alone: {error}")
    said = next((text for text, names in MIXED.items() if kind in names.split()), None)
    for mask in (torch.ones(2, LENGTH, dtype=torch.int64), None):
        found, expected = by_documents(model, mask)
        is_as_alone = distance(found, expected, None) <= 1e-5
        assert is_as_alone == (said is None) or transformers.__version__ != TRIED
        assert is_as_alone or not said or any(said in text for text in warnings())


def test_the_lists_name_families() -> None:
    named = " ".join([SAMPLE, *REFUSED.values(), *MIXED.values(), AS_SDPA, NOT_MADE]).split()
    assert transformers.__version__ != TRIED or not set(named) - set(tiny.kinds())
