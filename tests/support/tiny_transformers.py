"""A tiny model of each family of the installed transformers, from its registry and the names of config fields.

What a model is called with is tried: the first of a few sets of inputs that its own attention takes.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tests.support.small_transformers import LENGTH, padded, transformers

MOST_PARAMETERS = 16_000_000
WIDTH, HEADS, VOCABULARY = 64, 4, 128
IMAGE, PATCH = 32, 8


def narrow(n: int) -> int:
    return min(n, WIDTH)


#: What a whole number becomes, by the end of its field's name: the first that fits.
SIZES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"context_size|latent_query_num", lambda n: min(n, 8)),
    (r"max_position\w*", lambda n: min(max(n, 32), 64)),
    (r"n_group|topk_group|num_expert_group\w*", lambda n: 1),
    (r"\w*(experts_per_tok\w*|top_?k\w*|num_selected_experts)|moe_k", lambda n: min(n, 2)),
    (r"(first_k_dense_replace|n_shared_experts|num_shared_experts)", lambda n: min(n, 1)),
    (r"\w*experts", lambda n: min(n, 4)),
    (r"mamba_(n|num)_heads", lambda n: 2 * HEADS),
    (r"(num_|n_)?(\w+_)?(key_value|kv)_heads?", lambda n: 2),
    (r"linear_num_key_heads", lambda n: 2),
    (r"\w*(num|n|attention)_(\w+_)?heads?|num_heads?|heads", lambda n: 2 if n == 3 else min(n, HEADS)),
    (r"qk_head_dim", lambda n: 32),
    (r"rotary_dim|rope_dim", lambda n: 8),
    (r"\w*(head_dim|head_size|d_kv|d_head|kv_channels|key_dim|value_dim|attention_key_value_channels)", lambda n: 16),
    (r"\w*(d_state|state_size|ssm_state_size)", lambda n: min(n, 16)),
    (r"\w*(lora_rank|_rank|lora_r)", lambda n: min(n, 16)),
    (r"(num_|n_|\w+_)?(hidden_|encoder_|decoder_)?(layers|layer|depth|blocks)", lambda n: min(n, 2)),
    (r"(attn_layer_period|full_attention_interval|expert_layer_period|global_attn_every_n_layers)", lambda n: 2),
    (r"attn_layer_offset", lambda n: 1),
    (r"\w*(intermediate|ffn|ff|feedforward|mlp|inner)_?(hidden_)?(size|dim|dims)|d_ff|n_inner", narrow),
    (r"\w*(hidden|embed\w*|model|projection|emb|output|width|latent\w*|attn)_?(size|dim|width|channels)?", narrow),
    (r"(d_model|n_embd|dim|width|d_embed|d_latents|\w*bottleneck_(size|features)|conv_pos_embed\w*)", narrow),
    (r"vocab_size", lambda n: VOCABULARY),
    (r"\w*vocab\w*", lambda n: min(n, VOCABULARY)),
    (r"depths", lambda n: min(n, 2)),
    (r"(upsample|adapter|depthwise)_\w+|ext_pw_out_channel|projector_\w+_dim|decoder_in_channels", narrow),
    (r"(codebook|descriptor_decoder|vision_output)_dim|downsample_channels|\w*hidden_dimension", narrow),
    (r"base_channels|num_pos_feats|encoder_in_channels", lambda n: min(n, 32)),
    (r"num_filters", lambda n: min(n, 4)),
    (r"\w*(max_position\w*|positions|max_seq\w*|max_\w*length|context_length|block_size)", lambda n: min(n, 64)),
    (r"\w*image_size", lambda n: IMAGE),
    (r"\w*patch_size", lambda n: min(n, PATCH)),
    (r"\w*window_size", lambda n: 2 if n <= 16 else 32),
    (r"\w*(sliding_window|local_attention|attention_window|window)", lambda n: min(n, 6)),
    (r"\w*chunk_size", lambda n: min(n, 8)),
    (r"\w*(queries|query_tokens|num_latents|num_labels|codebook_size)", lambda n: min(n, 8)),
)
#: What is None becomes, where a family cannot be made of that.
NONE = {"head_dim": 16, "num_experts_per_tok": 2, "vocab_size": VOCABULARY, "image_token_index": 100}
NONE |= {"prediction_length": 4, "context_length": 16, "n_routed_experts": 4, "n_shared_experts": 1}
#: What no rule finds, by the type of a config.
FIELDS = """
    attn_config: rope_theta=10000.0 clip_qkv=8.0 blt_global_transformer: hidden_size=128 num_attention_heads=8
    num_key_value_heads=8 blt_local_decoder: hidden_size_global=128 bros: dim_bbox_sinusoid_emb_2d=16
    dim_bbox_sinusoid_emb_1d=2 dim_bbox_projection=16 chameleon: vocabulary_map={"<image>":100} clap_audio_model:
    hidden_size=128 clvp_encoder: num_attention_heads=2 cohere_compass_text:
    rope_parameters={"full_attention":None} dac: encoder_hidden_size=8 hidden_size=128 deepseek_ocr2_text:
    mlp_layer_types=["dense","sparse"] depth_pro: intermediate_hook_ids=[1,0] diffusion_gemma_text: num_experts=4
    top_k_experts=2 moe_intermediate_size=64 dots3_note_text:
    layer_types=["indexed_attention","indexed_attention"]
    rope_parameters={"indexed_attention":{"rope_type":"default","rope_theta":10000.0,"partial_rotary_factor":1.0}}
    emu3: vocabulary_map={"<image>":100,"<|extra_200|>":101} ernie4_5_vl_moe_text:
    rope_parameters={"mrope_section":[2,2,4]} esm: pad_token_id=1 mask_token_id=2 falcon_h1: mamba_d_head=16
    mamba_d_ssm=128 gemma3n_text: num_kv_shared_layers=2 num_hidden_layers=4
    layer_types=["sliding_attention","full_attention","sliding_attention","full_attention"]
    intermediate_size=[64,64,64,64] activation_sparsity_pattern=[0.95,0.95,0.0,0.0] hiera: embed_dim=16
    layoutlmv3: coordinate_size=10 shape_size=12 input_size=32 lfm2_moe: layer_types=["conv","full_attention"]
    lilt: hidden_size=96 llama4_vision_model: intermediate_size=256 lw_detr: projector_scale_factors=[1.0]
    num_feature_levels=1 projector_in_channels=[64] mamba2: num_heads=8 markuplm:
    max_xpath_tag_unit_embeddings=256 max_xpath_subs_unit_embeddings=1024 mistral4:
    rope_parameters={"partial_rotary_factor":1.0} mllama_vision_model: intermediate_layers_indices=[0,1]
    molmo2_vision: num_position_embeddings=16 moonshine: encoder_num_key_value_heads=4
    decoder_num_key_value_heads=4 moonshine_streaming: num_key_value_heads=4 oneformer: task_seq_len=20
    pix2struct_text_model: initializer_range=0.02 qwen3_asr_encoder: n_window=50 n_window_infer=800
    max_source_positions=50 qwen3_omni_moe_audio_encoder: n_window=50 n_window_infer=800 max_source_positions=50
    qwen3_omni_moe_talker_text: shared_expert_intermediate_size=64 qwen4_exp_text: indexer_n_heads=2
    indexer_kv_heads=1 indexer_head_dim=16 indexer_budget=8 indexer_compress_ratio=4 reformer:
    axial_pos_embds=False rt_detr_resnet: hidden_sizes=[32,32,32,32] embedding_size=32 sam2_hiera_det_model:
    hidden_size=8 window_size_per_stage=[8,4,2,1] embed_dim_per_stage=[8,16,32,64] blocks_per_stage=[1,1,2,1]
    global_attention_blocks=[3] num_attention_heads_per_stage=[1,1,2,4] sam2_prompt_encoder: patch_size=16
    sam2_vision_model: backbone_channel_list=[64,32,16,8] backbone_feature_sizes=[[8,8],[4,4],[2,2]]
    sam3_vision_model: backbone_feature_sizes=[[16,16],[8,8],[4,4]] sam_hq_prompt_encoder: image_embedding_size=4
    sam_prompt_encoder: image_embedding_size=4 seggpt: image_size=[64,32] sew: num_feat_extract_layers=13 sew-d:
    num_feat_extract_layers=13 shieldgemma2: yes_token_index=5 no_token_index=6 step3p5: sliding_window=6 swin:
    image_size=64 t5gemma2_decoder: dropout_rate=0.0 t5gemma2_text: dropout_rate=0.0 xclip_vision_model:
    num_frames=2 xmod: default_language="en_XX" zamba: attention_hidden_size=128 attention_head_dim=32
    layers_block_type=["linear_attention","hybrid","linear_attention","hybrid"] num_hidden_layers=4 zamba2:
    n_mamba_heads=8 mamba_headdim=16 attention_hidden_size=128 attention_head_dim=32 hybrid_layer_ids=[1]
"""
OWN: dict[str, dict[str, Any]] = {
    kind: {name: literal_eval(x) for name, x in re.findall(r"(\w+)=(\S+)", fields)}
    for kind, fields in re.findall(r"(\S+):((?:\s+\w+=\S+)+)", FIELDS)
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
IDS = re.compile(r"\w*token(_id|_index|_ids|_idx)?")


def kinds() -> list[str]:
    """The type of every config, those of parts of models too."""
    return list(transformers.CONFIG_MAPPING.keys())


def config_class(kind: str) -> Any:
    return transformers.CONFIG_MAPPING[kind]


def model_class(config_class: type) -> Any:
    """The model of a config without a head, or with one where there is no other; None: there is none."""
    auto = transformers.models.auto.modeling_auto
    every = [x for name, x in sorted(vars(auto).items()) if name.startswith("MODEL") and hasattr(x, "_model_mapping")]
    found = [x[config_class] for x in (auto.MODEL_MAPPING, *every) if config_class in x]
    if found := [x[0] if isinstance(x, tuple) else x for x in found]:
        return min(found, key=lambda x: x.config_class is not config_class)
    file = import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    found = [x for x in vars(file).values() if isinstance(x, type) and getattr(x, "config_class", None) is config_class]
    found = [x for x in found if "PreTrained" not in x.__name__]
    return min(found, key=lambda x: not x.__name__.endswith("Model"), default=None)


def tiny(config: Any) -> Any:
    """Make a config small, its parts too."""
    ids = iter(range(VOCABULARY - 28, VOCABULARY))
    _shrink(config, ids)
    return config


def _shrink(config: Any, ids: Iterator[int]) -> None:
    fields = {name: x for name, x in vars(config).items() if not name.startswith("_")}
    layers = next((x for name, x in fields.items() if name in LAYERS), 0)
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    stages = fields.get("stage_names")
    count = max(2, len(dict.fromkeys(kinds))) if kinds else min(layers, 4) if stages else 2
    for name, x in fields.items():
        if name in (config.sub_configs or ()) and hasattr(x, "sub_configs"):
            _shrink(x, ids)
            continue
        if stages and name in LAYERS:
            new: Any = min(x, 4)
        elif kinds and name in LAYERS:
            new = count
        elif x is kinds and kinds:
            new = (list(dict.fromkeys(kinds)) * 2)[:count]
        elif name == "num_key_value_heads" and x in (fields.get("num_attention_heads"), fields.get("n_head")):
            new = HEADS
        else:
            new = _small(name, x, ids, layers, count)
        if new is not x:
            setattr(config, name, new)
    if stages and layers > 4:
        config.stage_names, n = stages[:5], min(len(config._out_features or ()), 4)
        config._out_features, config._out_indices = stages[5 - n : 5], list(range(5 - n, 5))
    for name, x in OWN.get(config.model_type or config.base_config_key, {}).items():
        old = getattr(config, name, None)
        setattr(config, name, {**old, **x} if isinstance(old, dict) else x)


def _small(name: str, x: Any, ids: Iterator[int], layers: int, count: int) -> Any:
    if isinstance(x, bool) or x is None:
        return NONE.get(name) if x is None else x
    if IDS.fullmatch(name) and not name.startswith(("num_", "max_")):
        if isinstance(x, int):
            return next(ids) if x >= VOCABULARY - 28 else x
        return [next(ids) for _ in x] if isinstance(x, list) and all(isinstance(n, int) for n in x) else x
    if isinstance(x, int):
        return next((small(x) for pattern, small in SIZES if re.fullmatch(pattern, name)), x)
    if isinstance(x, list | tuple):
        if len(x) == layers > count:
            x = type(x)(x[:count])
        return type(x)(_small(name, each, ids, 0, count) for each in x)
    if isinstance(x, dict):
        half = int(8 * (x.get("partial_rotary_factor") or 1))
        more = {"mrope_section": [half // 2, half // 4, half // 4]} if "rope_theta" in x else {}
        factors = {key: x[key][:8] for key in ("short_factor", "long_factor") if key in x}
        return {**x, **more, **factors}
    return x


def made(model: Any, config_class: Any, implementation: str | None = None) -> Any:
    """A tiny model of random weights, made with an attention implementation.

    Raises:
        ValueError: it is not tiny.
    """
    if implementation is not None:
        torch.manual_seed(0)
        return model._from_config(tiny(config_class()), attn_implementation=implementation).eval()
    with torch.device("meta"):
        large = model(tiny(config_class()))
    if (n := sum(x.numel() for x in large.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{n:,} parameters")
    torch.manual_seed(0)
    return model(tiny(config_class())).eval()


# --- inputs -----------------------------------------------------------------------------------------------------------


def _field(config: Any, *names: str, default: int) -> int:
    """Of a config or of one of its parts."""
    for each in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for name in names:
            x = getattr(each, name, None)
            x = x[-1] if isinstance(x, list | tuple) and x else x
            if isinstance(x, int):
                return x
    return default


#: The number of features of sound.
BINS = "num_mel_bins n_mels input_feat_per_channel feature_size input_size feature_projection_input_dim"
#: Names of what has axes [2, 16, WIDTH].
OF_WIDTH = "encoder_hidden_states vision_pos_encoding text_features query_embeds decoder_queries prompt_features"


def candidates(model: Any, padding: str) -> Iterator[dict[str, Any]]:
    """What a model may be called with: text, images, sound, or several of them."""
    taken, config = signature(model.forward).parameters, model.config
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    ids = torch.randint(3, VOCABULARY - 30, (2, LENGTH), generator=random)
    text: dict[str, Any] = {"input_ids": ids, "attention_mask": padded(padding)}
    if "bbox" in taken:
        text["bbox"] = torch.arange(4).expand(2, LENGTH, -1)
    target = {"decoder_input_ids": ids.flip(1)}
    size, patch = _field(config, "image_size", default=IMAGE), _field(config, "patch_size", default=PATCH)
    channels = _field(config, "num_channels", "in_channels", "in_chans", default=3)
    pixels = {"pixel_values": normal(2, channels, size, size)}
    bins = _field(config, *BINS.split(), "input_feat_size", default=80)
    frames = 2 * _field(config, "max_source_positions", default=64)
    images, image = _field(config, "num_frames", default=4), _field(config, "image_token_index", default=100)
    grid = {"grid_thw": torch.tensor([[1, 4, 4]])}
    temporal = _field(config, "temporal_patch_size", "patch_temporal", default=1)
    flat, picture = channels * temporal * patch * patch, (channels, size, size)
    video = (images, *picture)
    patches = torch.cat([torch.ones(2, 16, 2), normal(2, 16, WIDTH)], 2)
    axes: dict[str, list[tuple[int, ...]]] = {
        "pixel_values": [(2, *picture), (2, *video), (2, 2, *picture), (2, 16, channels * patch * patch)],
        "pixel_values_videos": [(2, *video)],
        "input_features": [(2, 1, frames, bins), (2, bins, frames), (2, frames, bins), (bins, frames)],
        "input_values": [(2, 3200), (2, 1, 3200), (2, frames, bins), (2, 64, bins)],
        "inputs_embeds": [(2, LENGTH, _field(config, "hidden_size", default=WIDTH))],
        "hidden_states": [(2, LENGTH, WIDTH), (2, frames, bins), (2, *picture)],
        "past_values": [(2, length := _field(config, "context_length", default=64)), (2, length, 1), (2, 23)],
        "vision_features": [(2, 16, WIDTH)],
    }
    axes["pixel_values"] += [(2, 1, *picture), (2, 1, 4, *picture), (1, channels, patch, patch * 16)]
    axes["input_features"] += [(2, frames, 4 * bins), (2, bins, 8 * LENGTH)]
    alone = [{name: normal(*shape)} for name, shapes in axes.items() for shape in shapes]
    sets: list[dict[str, Any]] = [text | pixels, text, text | target]
    sets += [{name: normal(16, flat), **grid} for name in ("hidden_states", "pixel_values")]
    sets += [{"pixel_values": normal(16, flat), "image_grid_thw": grid["grid_thw"]}]
    sets += [one | more for more in ({}, target, text) for one in alone]
    sets += [
        text | target | {"bbox": torch.rand(2, LENGTH, 4, generator=random)},
        *({"pixel_values": normal(*first, channels, patch, patch), **grid} for first in ((16,), (1, 16))),
        {"input_values": normal(2, LENGTH, WIDTH), "decoder_input_values": normal(2, LENGTH, WIDTH)},
        *({"flattened_patches": patches, **more} for more in ({}, target)),
        {"vision_features": [normal(2, WIDTH, 4, 4)]},
        text | pixels | {"input_ids": torch.cat([ids.new_full((2, 8), image), ids[:, 8:]], 1)},
        {"states": normal(2, LENGTH, _field(config, "state_dim", default=17)), "attention_mask": padded(padding)},
        {"context": normal(2, LENGTH, WIDTH), "attention_mask": padded(padding)},
        {"input_ids": ids[..., None].expand(-1, -1, channels)},
        text | {"decoder_input_ids": ids.repeat(4, 1)},
        {},
    ]
    shapes = dict.fromkeys(OF_WIDTH.split(), (2, 16, WIDTH)) | {
        "image": (2, *picture), "prompt_pixel_values": (2, *picture), "prompt_masks": (2, *picture),
        "past_time_features": (2, 23, 0), "future_time_features": (2, 23, 0), "audio_mel": (2, frames, bins),
        "visual_feats": (2, 8, _field(config, "visual_feat_dim", default=WIDTH)), "visual_pos": (2, 8, 4),
        "inputs": (2, LENGTH, _field(config, "d_model", default=WIDTH)), "image_features": (2, 16, 2 * WIDTH),
        "actions": (2, LENGTH, _field(config, "act_dim", default=4)), "rewards": (2, LENGTH, 1),
        "returns_to_go": (2, LENGTH, 1), "latents": (2, WIDTH, 16), "patch_embeds": (2, WIDTH, 4, 4),
    }  # fmt: skip
    ones = {
        "input_features_mask": (2, frames), "aspect_ratio_ids": (2, 1), "aspect_ratio_mask": (2, 1, 4),
        "image_attention_mask": (2, LENGTH, 1), "past_observed_mask": (2, 23), "mask": (2, frames), "freq": (2, 1),
    }  # fmt: skip
    named: dict[str, Any] = {name: normal(*shape) for name, shape in shapes.items()}
    named |= {name: torch.ones(shape, dtype=torch.int64) for name, shape in ones.items()}
    named |= {
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[16], [8]])).long(),
        "spatial_shapes": torch.tensor([[4, 4], [2, 4]]),
        "qformer_input_ids": ids, "task_inputs": ids, "num_patches": 8, "merge_sizes": torch.tensor([2]),
        "feature_lens": torch.tensor([frames]), "target_sizes": grid["grid_thw"][:, 1:],
        "image_embeds_position_mask": (torch.arange(LENGTH) < 8).expand(2, -1),
        "past_values_padding": torch.zeros(2, 64), "audio_mel_mask": torch.zeros(2, frames, dtype=torch.bool),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1),
        "timesteps": torch.arange(LENGTH).expand(2, -1), "pooled_patches_idx": torch.arange(16).reshape(4, 4),
        "vision_pos_embeds": [normal(2, WIDTH, 4, 4)],
        "backbone_features": [normal(2, WIDTH, n, n) for n in (16, 8, 4)],
    }  # fmt: skip
    known, off = ({name: x for name, x in named.items() if name in taken}), {"use_cache"} & taken.keys()
    needed = {name for name, x in taken.items() if x.default is x.empty and x.kind == x.POSITIONAL_OR_KEYWORD}
    masked = _masked if "attention_mask" in taken else lambda *_: ()
    for more in ({}, known, {name: x for name, x in known.items() if name in needed}) if known else ({},):
        for each in (x for one in sets for x in (*masked(one, padding), one)):
            given = {name: x for name, x in (more | each).items() if name in taken}
            if needed <= given.keys() and (more or given.keys() >= each.keys() - {"attention_mask"}):
                yield given | dict.fromkeys(off, False)


def _masked(inputs: dict[str, Any], padding: str) -> Iterator[dict[str, Any]]:
    """Sound, half of one row of which is padding, by frames or by samples."""
    for x in (inputs.get("input_features"), inputs.get("input_values")):
        if x is not None and padding == "right":
            for length in dict.fromkeys(n for n in x.shape[1:] if n > 1):
                mask = torch.ones(2, length, dtype=torch.int64)
                mask[1, length // 2 :] = 0
                yield {**inputs, "attention_mask": mask}


def is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def pairs(found: Any, expected: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The floating-point tensors of two results of a model, side by side, but those that the first one has not."""
    if is_real(found):
        yield found, expected
    elif isinstance(found, dict):
        assert expected.keys() >= found.keys()
        for name, x in found.items():
            yield from pairs(x, expected[name])
    elif isinstance(found, list | tuple):
        for x, y in zip(found, expected, strict=True):
            yield from pairs(x, y)


def kept(x: Tensor, mask: Tensor | None) -> Tensor:
    """Without what was computed of padding, where an output's first axes are those of the mask."""
    return x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x
