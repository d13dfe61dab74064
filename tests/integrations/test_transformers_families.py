"""Every family of the installed transformers of which a tiny model can be made: as by its own attention, or listed."""

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
        big_bird blip blip_text_model blip_vision_model bloom canine clap_audio_model clvp_decoder convbert
        cpmant data2vec-vision deberta deberta-v2 deepseek_ocr2_sam_vision_model donut-swin falcon flaubert
        flava flava_image_model flava_multimodal_model flava_text_model fsmt funnel gemma4_audio glpn
        got_ocr2_vision gpt_neo gpt_neox_japanese groupvit groupvit_text_model groupvit_vision_model ibert
        imagegpt led longformer luke megatron-bert mgp-str mobilevit mpnet mpt mra mvp nystromformer openai-gpt
        patchtsmixer prophetnet pvt_v2 rembert roformer rwkv sam_hq_vision_model sam_vision_model slanet
        slanext_vision squeezebert swiftformer swin2sr swinv2 tapas timesformer trocr
        unlimited_ocr_sam_vision_model vilt visual_bert vitdet wavlm xglm xlm xlnet yoso
    """,
    "attn_dispatch has no (indices|sinks)": """
        axk2 deepseek_v32 glm_moe_dsa hy_v4 hy_v4_vl hy_v4_vl_text inkling2 inkling2_loop inkling2_loop_text
        inkling2_text mistral_large4 mistral_large4_text
    """,
    "the model adds its mask to scores": "bigbird_pegasus",
    "makes a mask of its own": "doge",
    "is causal and got no mask": "bridgetower",
    "the layer has .* queries, keys and values: use": "deepseek_v4",
}
#: Their own eager attention differs from their sdpa, for want of a mask or in rows of padding.
AS_SDPA = "blt_global_transformer nemotron3_5_asr nemotron_asr_streaming nemotron_asr_streaming_encoder"
#: Packed rows of these are not as separate ones, and what is said of it; of others nothing need be said.
MIXED = {
    "layers run over its documents": """
        bailing_hybrid bamba glm5_next glm5_next_text granitemoehybrid inkling_text jamba kimi_linear lara_mini lfm3
        lfm3_vl minicpm_ocr minicpmv4_6 minicpmv4_7 minimax nemo_speechlm nemotron_h nemotron_h_omni olmo_hybrid
        qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma zaya
    """,
    "which compute attention themselves": "git",
    "": "csm_depth_decoder_model fnet",  # it warns that it takes no positions; it has no attention
}
#: No tiny config, or no inputs, are found by what is known here.
NOT_MADE = """
    align align_vision_model audio-spectrogram-transformer audioflamingo3_encoder autoformer bark bit blip-2
    blip_2_qformer blt blt_local_decoder blt_local_encoder bridgetower_vision_model bros chameleon
    chameleon_vqgan chmv2 clap clvp clvp_encoder cohere_compass cohere_compass_text conditional_detr convnext
    convnextv2 csm cvt d_fine dab-detr dac dbrx decision_transformer deepseek_ocr2 deepseek_ocr2_encoder
    deepseek_ocr2_text deepseek_ocr2_vision deepseek_v2 deformable_detr deimv2 depth_anything depth_pro detr
    dia_decoder diffusion_gemma diffusion_gemma_text dinat dinov3_convnext dots1 dots3_note
    dots3_note_audio_encoder dots3_note_text dots3_note_vision_encoder edgetam edgetam_mask_decoder
    edgetam_prompt_encoder edgetam_video edgetam_video_mask_decoder edgetam_video_prompt_encoder
    edgetam_vision_model efficientloftr efficientnet emu3 emu3_vqgan encodec eomt eomt_dinov3 ernie4_5_vl_moe
    ernie4_5_vl_moe_text esm esmc esmfold2 falcon_h1 fast_vlm fastspeech2_conformer
    fastspeech2_conformer_hifigan fastspeech2_conformer_with_hifigan florence_vision focalnet
    fun_asr_nano_encoder gemma3n gemma3n_audio gemma3n_text gemma3n_vision gemma4_assistant
    gemma4_unified_assistant gemma4_unified_audio gemma4_unified_vision gemma4_vision glm_image_vqmodel
    granite4_vision granite_speech granite_speech5_ctc granite_speech5_encoder granite_speech_encoder
    granite_speech_plus granite_speech_plus_encoder grounding-dino hiera higgs_audio_v2_tokenizer
    hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text idefics idefics2_perceiver idefics_perciever
    idefics_vision informer inkling2_vision inkling_audio inkling_mm_model inkling_vision instructblip
    instructblipvideo janus janus_vqgan jev kimi_k25_vision kosmos-2 kosmos_2_5_vision_model layoutlmv2
    layoutlmv3 layoutxlm levit lfm2_moe lightglue lilt llama4_vision_model lw_detr lw_detr_vit lxmert mamba2
    markuplm mask2former maskformer maskformer-swin mimi minicpm_ocr_vision minicpmv4_6_vision
    minicpmv4_7_vision ministral mistral4 mllama_vision_model mm-grounding-dino mobilebert mobilevitv2
    molmo2_adapter molmo2_vision moonshine moonshine_streaming moshi_depth muse_glimmer_assistant
    muse_glimmer_vision muse_spark_audio muse_spark_vision musicgen musicgen_melody neucodec nougat omdet-turbo
    oneformer owlv2 owlv2_text_model owlvit owlvit_text_model paddleocr_vl_vision pe_audio pe_audio_encoder
    pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder perceiver perception_lm
    phi4_multimodal_audio pi0 pix2struct pix2struct_text_model pix2struct_vision_model
    pocket_tts_audio_tokenizer pp_chart2table_vision pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4
    pp_formulanet pp_formulanet_vision pp_ocrv5_mobile_rec pp_ocrv5_server_det pp_ocrv5_server_rec
    pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec prompt_depth_anything pvt
    qwen2_5_omni qwen2_5_omni_audio_encoder qwen2_5_omni_bigvgan qwen2_5_omni_dit qwen2_5_omni_token2wav
    qwen3_asr_encoder qwen3_omni_moe qwen3_omni_moe_audio_encoder qwen3_omni_moe_talker_text qwen4_exp
    qwen4_exp_text radio rag reformer regnet resnet rf_detr rf_detr_dinov2 rt_detr rt_detr_resnet rt_detr_v2
    sam sam2 sam2_hiera_det_model sam2_mask_decoder sam2_prompt_encoder sam2_video sam2_video_mask_decoder
    sam2_video_prompt_encoder sam2_vision_model sam3_detr_decoder sam3_detr_encoder sam3_geometry_encoder
    sam3_lite_text_detr_decoder sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder
    sam3_lite_text_mask_decoder sam3_mask_decoder sam3_tracker sam3_tracker_mask_decoder
    sam3_tracker_prompt_encoder sam3_tracker_video sam3_tracker_video_mask_decoder
    sam3_tracker_video_prompt_encoder sam3_video sam_hq sam_hq_mask_decoder sam_hq_prompt_encoder
    sam_mask_decoder sam_prompt_encoder sapiens2_head seamless_m4t seamless_m4t_v2 seggpt sew sew-d
    shieldgemma2 siglip2 siglip2_vision_model slanext speecht5 speecht5_hifigan step3p5 step3p7 superglue
    t5_gemma_module t5gemma2_decoder t5gemma2_encoder t5gemma2_text table-transformer textnet
    time_series_transformer timesfm timm_backbone timm_wrapper tipsv2_dpt tvp udop univnet unlimited_ocr_vision
    unlimited_ocr_vision_encoder upernet uvdoc vibevoice vibevoice_acoustic_tokenizer vibevoice_asr
    vibevoice_diffusion video_llama_3_vision videomt videoprism vitmatte vitpose vitpose_backbone vits
    voxtral_realtime voxtral_realtime_text wav2vec2-bert xclip xclip_vision_model xcodec xcodec2 xmod zamba
    zamba2 zoedepth mimi_decoder mimi_encoder pocket_tts_audio_tokenizer_decoder
    vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder apertus1p5
    apertus1p5_vision_tokenizer llama4 wavtokenizer wavtokenizer_encoder
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


def called(model: Any) -> tuple[dict[str, Any], Any]:
    """The first inputs that a model takes, and what it makes of them."""
    reasons = []
    for inputs in tiny.candidates(model, "right"):
        try:
            found = model(**inputs)
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
    return max(float((x - y).abs().max()) / max(1.0, float(y.abs().max())) for x, y in pairs if y.numel())


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
    found = model(**inputs)
    assert asked or not any(part.asking for part in parts_of(model)), "attend() was not called"
    mask = inputs.get("attention_mask")
    if kind in AS_SDPA.split():
        model.set_attn_implementation("sdpa")
        expected = model(**inputs)
    if distance(found, expected, mask) > 2e-6:
        exact = model.double()
        exact.set_attn_implementation("eager")
        exact = exact(**{name: x.double() if tiny.is_real(x) else x for name, x in inputs.items()})
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
